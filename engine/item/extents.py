"""Reads many byte ranges of data files: neighbours together, in large pieces, with a few threads."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ..errors import DamagedCheckpointError, ObjectNotFoundError, StorageError
from ..storage import Buffer, DataReader
from .sources import Bytes

_THREADS = 4
_EXTENT = 16 << 20  # bytes read at a time; more only where a single range is larger
_SMALL = 16 << 10  # bytes; smaller ranges take longer to handle than to read
_GAP = 64 << 10  # bytes between two wanted ranges that are cheaper to read than to skip


class Range(NamedTuple):
    """A wanted byte range of a data file.

    Attributes:
        file: The data file's path.
        offset: First byte.
        length: Number of bytes.
        array: The wanted array that it belongs to, as the caller counts them.
        chunk: The chunk's number in the array's grid.
        keep: Whether the caller keeps views of the bytes, so that they need memory of their own.
    """

    file: str
    offset: int
    length: int
    array: int
    chunk: int
    keep: bool


def read_ranges(
    files: Mapping[str, DataReader],
    ranges: Sequence[Range],
    use: Callable[[Range, Bytes], None],
    failed: Callable[[Range, Exception], None],
) -> None:
    """Reads ranges and hands each to ``use``.

    Args:
        files: Open data files by path.
        ranges: What to read, in ascending order.
        use: Called once for every range that could be read, from several threads, with the range and its bytes. The
            memory is the caller's to keep where ``range.keep`` is set; otherwise it is reused after the call.
        failed: Called instead where the bytes are not there, or cannot be read any more; other ranges are still read.

    Raises:
        StorageError: The storage refuses, or does not answer: nothing is known of the bytes.
        BaseException: Whatever ``use`` or ``failed`` raises; the first of it, after all threads have stopped.
    """
    pending = _extents(ranges)
    lock = threading.Lock()
    stop: list[BaseException] = []

    def work() -> None:
        buffer = Buffer()
        while not stop:
            with lock:
                extent = next(pending, None)
            if extent is None:
                return
            try:
                _read_extent(files, extent, buffer, use, failed)
            except BaseException as error:  # handed to the thread that waits below
                stop.append(error)

    threads = [threading.Thread(target=work, name=f"holdfast-read-{i}", daemon=True) for i in range(_THREADS - 1)]
    if sum(wanted.length for wanted in ranges) <= max(_EXTENT // 4, _SMALL * len(ranges)):
        threads = []  # little to read, or more work for the interpreter, which threads only get in the way of
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    if stop:
        raise stop[0]


def _read_extent(
    files: Mapping[str, DataReader],
    extent: Sequence[Range],
    buffer: Buffer,
    use: Callable[[Range, Bytes], None],
    failed: Callable[[Range, Exception], None],
) -> None:
    first, last = extent[0], extent[-1]
    try:
        keep = any(wanted.keep for wanted in extent)
        length = last.offset + last.length - first.offset
        data = files[first.file].read(first.offset, length, None if keep else buffer)
        if not keep:
            data.flags.writeable = False  # spares the checksums a view of each range
    except (DamagedCheckpointError, StorageError) as error:
        if not _is_damage(error):
            raise
        if len(extent) == 1:
            failed(first, error)
            return
        for wanted in extent:  # one by one, so that only those that are really damaged fail
            _read_extent(files, [wanted], buffer, use, failed)
        return
    for wanted in extent:
        start = wanted.offset - first.offset
        use(wanted, data[start : start + wanted.length])


def _is_damage(error: DamagedCheckpointError | StorageError) -> bool:
    """Tells bytes that are lost from bytes that cannot be had at the moment."""
    if isinstance(error, StorageError):
        return isinstance(error, ObjectNotFoundError) or error.errno == errno.EIO
    return True


def _extents(ranges: Sequence[Range]) -> Iterator[list[Range]]:
    """Groups sorted ranges into runs that are read in one piece."""
    group: list[Range] = []
    for wanted in ranges:
        if group:
            end = group[-1].offset + group[-1].length
            near = wanted.file == group[0].file and wanted.offset - end <= _GAP
            if not near or wanted.offset + wanted.length - group[0].offset > _EXTENT:
                yield group
                group = []
        group.append(wanted)
    if group:
        yield group
