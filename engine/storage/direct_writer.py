"""Writes bulk data files at the speed of the disk: large aligned blocks, past the page cache, from a few threads.

Each thread takes whole segments, gathers their parts in a block of its own and writes the block out. While one thread
computes parts, which holds the interpreter, the others wait for the disk, which does not.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from typing import TYPE_CHECKING

from .buffers import PAGE, BlockPool, round_up
from .bulk import Segment, check_segments
from .direct import is_direct, make_buffered, open_direct
from .statuses import os_errors

if TYPE_CHECKING:
    from collections.abc import Sequence


THREADS = 8
"""How many threads write one file, the calling one included."""

BLOCK = 4 << 20
"""Bytes that a thread gathers before it writes them."""

_blocks = BlockPool(BLOCK, THREADS)


def write_data_file(path: str, size: int, segments: Sequence[Segment]) -> None:
    """Writes one data file, replacing what is there, and makes its content durable.

    The space is allocated first, so that a full disk fails before anything is written. When anything fails, the
    unfinished file is removed. The directory is not synced.

    Args:
        path: The file.
        size: Its final length in bytes.
        segments: What to write into it; gaps read as zeros.

    Raises:
        StorageError: The system refused.
        ValueError: The segments do not fit, or the parts of one are not as long as it says.
    """
    check_segments(size, segments)
    with os_errors(path, "write"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # A reader of an earlier file of this name keeps what it has opened.
        descriptor = open_direct(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            try:
                _allocate(descriptor, round_up(size))
                _Transfer(descriptor, segments).run()
                if size % PAGE:
                    os.ftruncate(descriptor, size)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise


def _allocate(descriptor: int, size: int) -> None:
    """Reserves the space, and sets the length: writes that extend a file exclude each other."""
    # Where a file system cannot reserve space, the C library writes into every page, which direct I/O refuses at once.
    if size and is_direct(descriptor):
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
        else:
            return
    os.ftruncate(descriptor, size)


class _Transfer:
    """The segments of one file on their way through the threads."""

    def __init__(self, descriptor: int, segments: Sequence[Segment]) -> None:
        self._descriptor = descriptor
        self._segments = [segment for segment in segments if segment.size]
        self._queue = iter(self._segments)
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Writes everything; the first error of any thread is raised after all of them have stopped."""
        helpers = [
            threading.Thread(target=self._work, name=f"holdfast-write-{number}", daemon=True)
            for number in range(1, min(THREADS, len(self._segments)))
        ]
        try:
            for helper in helpers:
                helper.start()
            self._work()
        except BaseException as error:  # An interrupt, or a thread that could not be started.
            self._fail(error)
        for helper in helpers:
            while helper.ident is not None and helper.is_alive():
                try:
                    helper.join()
                except BaseException as error:
                    self._fail(error)
        if self._error is not None:
            raise self._error

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._error = self._error or error

    def _work(self) -> None:
        try:
            with _blocks.block() as block:
                while self._error is None:
                    with self._lock:
                        segment = next(self._queue, None)
                    if segment is None:
                        return
                    self._write_segment(segment, block.data)
        except BaseException as error:
            self._fail(error)

    def _write_segment(self, segment: Segment, block: memoryview) -> None:
        position, filled, remaining = segment.offset, 0, segment.size
        for part in segment.parts():
            if self._error is not None:
                return
            remaining -= part.size
            if remaining < 0:
                break
            data = part.data
            while data:
                count = min(len(block) - filled, len(data))
                # Not numpy's assignment: that would let the interpreter go for each part, and another thread that
                # computes would keep it for milliseconds each time.
                block[filled : filled + count] = data[:count]
                data = data[count:]
                filled += count
                if filled == len(block):
                    self._write_block(block, position)
                    position += filled
                    filled = 0
        if remaining:
            raise ValueError(
                f"the segment at offset {segment.offset} should have {segment.size} bytes, "
                f"but its parts have {'more' if remaining < 0 else segment.size - remaining}"
            )
        if filled:
            end = round_up(filled)
            block[filled:end] = bytes(end - filled)
            self._write_block(block[:end], position)

    def _write_block(self, block: memoryview, position: int) -> None:
        written, refused = 0, False
        while written < len(block):
            try:
                count = os.pwrite(self._descriptor, block[written:], position + written)
            except OSError as error:
                if error.errno != errno.EINVAL or refused:
                    raise
                make_buffered(self._descriptor)  # This file system takes no direct I/O after all.
                refused = True
                continue
            if count <= 0:
                raise OSError(errno.EIO, f"the system wrote {count} of {len(block) - written} bytes")
            written += count  # One that stops between two pages goes on by ordinary I/O, by way of EINVAL.
