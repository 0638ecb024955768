"""Reads many byte ranges of data files: neighbours together, in large pieces, with a few threads."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ..errors import DamagedCheckpointError, ObjectNotFoundError, StorageError
from ..storage import REQUESTS, Buffer, DataReader, several
from .chunks import Chunks
from .sources import Bytes

_THREADS = 4
_SHARE = 12  # one byte in so many of what is read may be memory that threads copy out of
_EXTENT = 16 << 20  # bytes read at a time; more only where a single range is larger
_COPIED_EXTENT = 4 << 20  # the same where all of it is copied out: the memory is used again and again
_FEW = 32  # extents; to wait for more of them one by one takes longer than to read them
_SMALL = 16 << 10  # bytes; smaller ranges take longer to handle than to read
LOCAL_GAP = 4 << 10
"""Bytes between two chunks that are cheaper to read than to skip: a page of the disk."""
REMOTE_GAP = 1 << 20
"""The same where every request goes over a network, and waits as long as this takes to come."""
_FOREIGN = 16  # one byte in so many of memory that is kept may be of others: gaps, and ranges that are copied out


class Extent(NamedTuple):
    """A run of chunks of one file that is read in one piece.

    Attributes:
        file: The file's path.
        offset: First byte.
        length: Number of bytes.
        first: The first chunk's position in the table.
        stop: The position after the last one.
        kept: Whether views of the memory are kept.
    """

    file: str
    offset: int
    length: int
    first: int
    stop: int
    kept: bool


Use = Callable[[Extent, Bytes], None]
"""Takes an extent's bytes. The memory is the taker's to keep where ``kept`` is set; otherwise it is reused."""


def read_chunks(
    files: Mapping[str, DataReader],
    chunks: Chunks,
    use: Use,
    failed: Callable[[int, Exception], None],
    *,
    remote: bool = False,
) -> int:
    """Reads chunks and hands them to ``use``.

    Args:
        files: Open data files by path.
        chunks: What to read, sorted.
        use: Called from several threads with runs of chunks and their bytes; every chunk that could be read is in one.
        failed: Called instead, with the chunk's position, where the bytes are not there, or cannot be read any more;
            other chunks are still read.
        remote: Whether files are objects of a store, where most of the time is spent waiting.

    Returns:
        How many bytes were read.

    Raises:
        StorageError: The storage refuses, or does not answer: nothing is known of the bytes.
        BaseException: Whatever ``use`` or ``failed`` raises; the first of it, after all threads have stopped.
    """
    extents = list(plan_extents(chunks, REMOTE_GAP if remote else LOCAL_GAP))
    own = threading.local()  # what a thread reads into again and again

    def read(extent: Extent) -> int:
        if not hasattr(own, "buffer"):
            own.buffer = Buffer()
        return _read_extent(files, chunks, extent, own.buffer, use, failed)

    total = int(chunks.lengths.sum())
    buffer = max((extent.length for extent in extents if not extent.kept), default=1)
    count = min(_THREADS, max(1, total // (buffer * _SHARE)))
    if len(extents) <= _FEW and total <= max(_EXTENT // 4, _SMALL * len(chunks)):
        count = 1  # little to read, or more work for the interpreter, which threads only get in the way of
    if remote:
        count = REQUESTS
    return sum(several(read, extents, count))


def _read_extent(
    files: Mapping[str, DataReader],
    chunks: Chunks,
    extent: Extent,
    buffer: Buffer,
    use: Use,
    failed: Callable[[int, Exception], None],
) -> int:
    try:
        data = files[extent.file].read(extent.offset, extent.length, None if extent.kept else buffer)
    except (DamagedCheckpointError, StorageError) as error:
        if not _is_damage(error):
            raise
        if extent.stop - extent.first == 1:
            failed(extent.first, error)
            return 0
        # One by one, so that only those that are really damaged fail.
        singles = [_extent(chunks, row, row + 1, kept=extent.kept) for row in range(extent.first, extent.stop)]
        return sum(_read_extent(files, chunks, single, buffer, use, failed) for single in singles)
    if not extent.kept:
        data.flags.writeable = False  # spares the checksums a view of each chunk
    use(extent, data)
    return extent.length


def _is_damage(error: DamagedCheckpointError | StorageError) -> bool:
    """Tells bytes that are lost from bytes that cannot be had at the moment."""
    if isinstance(error, StorageError):
        return isinstance(error, ObjectNotFoundError) or error.errno == errno.EIO
    return True


def plan_extents(chunks: Chunks, gap: int) -> Iterator[Extent]:
    """Groups sorted chunks into runs that are read in one piece.

    Memory that is kept is hardly ever shared with chunks that are copied out of it: it would stay for nothing.
    """
    current: Extent | None = None
    kept = 0  # bytes of the current extent that are kept
    for run in _runs(chunks, gap):
        own = run.length if run.kept else 0
        if current is not None:
            length = run.offset + run.length - current.offset
            near = run.file == current.file and 0 <= length - run.length - current.length <= gap
            foreign = length - kept - own
            shared = kept + own == 0 or foreign * _FOREIGN <= length
            if near and shared and length <= (_EXTENT if kept + own else _COPIED_EXTENT):
                current = Extent(run.file, current.offset, length, current.first, run.stop, kept + own > 0)
                kept += own
                continue
            yield current
        current, kept = run, own
    if current is not None:
        yield current


def _runs(chunks: Chunks, gap: int) -> Iterator[Extent]:
    """Generates runs of near chunks that are all kept or all copied."""
    if not len(chunks):
        return
    ends = chunks.offsets + chunks.lengths
    apart = (chunks.file_ids[1:] != chunks.file_ids[:-1]) | (chunks.offsets[1:] - ends[:-1] > gap)
    apart |= chunks.kept[1:] != chunks.kept[:-1]
    bounds = [0, *(np.flatnonzero(apart) + 1).tolist(), len(chunks)]
    for first, stop in pairwise(bounds):
        kept = bool(chunks.kept[first])
        size = _EXTENT if kept else _COPIED_EXTENT
        reached = np.maximum.accumulate(ends[first:stop])
        start = first
        while first < stop:
            fitting = start + int(np.searchsorted(reached, chunks.offsets[first] + size, "right"))
            last = max(first + 1, fitting)
            yield _extent(chunks, first, last, kept=kept)
            first = last


def _extent(chunks: Chunks, first: int, stop: int, *, kept: bool) -> Extent:
    offset = int(chunks.offsets[first])
    end = int((chunks.offsets[first:stop] + chunks.lengths[first:stop]).max())
    return Extent(chunks.file(first), offset, end - offset, first, stop, kept)


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
    """Reads ranges and hands each to ``use``; see :func:`read_chunks`.

    Args:
        files: Open data files by path.
        ranges: What to read, in ascending order.
        use: Called once for every range that could be read, with the range and its bytes.
        failed: Called instead where the bytes are not there, or cannot be read any more.
    """
    paths = list(files)
    ids = {path: number for number, path in enumerate(paths)}
    rows = [(ids[one.file], one.offset, one.length, one.array, one.chunk, one.keep) for one in ranges]
    columns = np.array(rows, np.int64).reshape(-1, 6).T
    chunks = Chunks(paths, columns[0], columns[1], columns[2], columns[3], columns[4], columns[5] != 0)

    def use_extent(extent: Extent, data: Bytes) -> None:
        for wanted in ranges[extent.first : extent.stop]:
            start = wanted.offset - extent.offset
            use(wanted, data[start : start + wanted.length])

    read_chunks(files, chunks, use_extent, lambda row, error: failed(ranges[row], error))
