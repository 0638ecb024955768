"""Read many chunks of data files: neighbours together, in large pieces, with a few threads."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import DamagedCheckpointError, ObjectNotFoundError, StorageError
from ..storage import REQUESTS, Buffer, DataReader, is_unreadable, parallel_map
from .digests import Bytes

Column = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ChunkTable:
    """Chunks in data files, one element of every column for each."""

    files: Sequence[str]  # paths of data files
    file_ids: Column  # index into ``files``
    offsets: Column  # first byte in the file
    lengths: Column  # number of bytes
    arrays: Column  # the wanted array of each chunk, as the caller counts them
    numbers: Column  # the chunk's number in its array's grid
    kept: NDArray[np.bool_]  # whether the caller keeps views of the bytes, which then need memory of their own
    checksums: Column  # the CRC-32C that the index has for each chunk; -1 where it has none

    def __len__(self) -> int:
        return len(self.offsets)

    def file(self, row: int) -> str:
        return self.files[int(self.file_ids[row])]

    def take(self, rows: NDArray[Any]) -> ChunkTable:
        of_files = (self.file_ids[rows], self.offsets[rows], self.lengths[rows])
        return ChunkTable(
            self.files, *of_files, self.arrays[rows], self.numbers[rows], self.kept[rows], self.checksums[rows]
        )

    def sorted(self) -> ChunkTable:
        """Return the chunks file by file, in ascending order of their offsets."""
        return self.take(np.lexsort((self.offsets, self.file_ids)))


def plausible(chunks: ChunkTable, sizes: Mapping[str, int], failed: Callable[[int, str], None]) -> ChunkTable:
    """Return the chunks that lie in their files without overlap, which bounds the bytes to read; report the others."""
    limits = np.array([sizes.get(path, -1) for path in chunks.files] or [0], np.int64)[chunks.file_ids]
    ends = chunks.offsets + chunks.lengths
    fits = ends <= limits
    overlaps = (chunks.file_ids[1:] == chunks.file_ids[:-1]) & (chunks.offsets[1:] < ends[:-1])
    if fits.all() and not overlaps.any():
        return chunks
    good = []
    file, reached = -1, 0
    for row in np.flatnonzero(limits >= 0).tolist():
        if chunks.file_ids[row] != file:
            file, reached = int(chunks.file_ids[row]), 0
        if chunks.offsets[row] < reached:
            failed(row, "a chunk overlaps another one")
            continue
        reached = int(ends[row])
        if fits[row]:
            good.append(row)
        else:
            size = int(limits[row])
            failed(row, f"it is truncated or the index is wrong: a chunk ends at byte {reached} of {size}")
    return chunks.take(np.array(good, np.int64))


_THREADS = 4
_BUFFERS = 12  # buffers that threads copy out of take at most a twelfth of the bytes read
_EXTENT = 16 << 20  # bytes read at a time; more only if a single chunk is larger
COPIED_EXTENT_BYTES = 4 << 20  # the same if all of it is copied out: its memory is reused
_FEW = 32  # extents; with more, one thread would spend more time waiting than reading
_SMALL = 16 << 10  # bytes; smaller chunks take longer to handle than to read
LOCAL_GAP = 4 << 10  # bytes between two chunks that are cheaper to read than to skip: a page of the disk
REMOTE_GAP = 1 << 20  # the same over a network, where a request waits as long as this many bytes take to arrive
FOREIGN = 16  # at most a sixteenth of kept memory is unused: gaps, and chunks that are copied out


class Extent(NamedTuple):
    """A run of chunks of one file that is read in one piece."""

    file: str
    offset: int
    length: int
    first: int  # its rows in the table of chunks
    stop: int
    kept: bool  # whether views of the memory are kept


# Takes an extent's bytes. It may keep the memory if ``kept`` is set; otherwise the memory is reused.
Use = Callable[[Extent, Bytes], None]


class Places(NamedTuple):
    """Where chunks go that can be received without a copy, by their rows in the table."""

    find: Callable[[int], Bytes | None]  # returns the memory for the beginning of a chunk, if there is any
    filled: Callable[[int, Bytes, Bytes], None]  # takes that memory, which is filled, and the rest of the chunk


def read_chunks(
    files: Mapping[str, DataReader],
    chunks: ChunkTable,
    use: Use,
    failed: Callable[[int, Exception], None],
    *,
    remote: bool = False,
    places: Places | None = None,
) -> int:
    """Read chunks and hand them to ``use``, or receive them in ``places``; return the number of bytes read."""
    extents = list(plan_extents(chunks, REMOTE_GAP if remote else LOCAL_GAP))
    read = partial(_read_extent, files, chunks, use, failed, places, threading.local())
    total = int(chunks.lengths.sum())
    buffer = max((extent.length for extent in extents if not extent.kept), default=1)
    count = min(_THREADS, max(1, total // (buffer * _BUFFERS)))
    if len(extents) <= _FEW and total <= max(_EXTENT // 4, _SMALL * len(chunks)):
        count = 1  # for a little data, or for many tiny chunks, threads only slow down the interpreter
    if remote:
        count = REQUESTS
        extents = _spread(extents)
    return sum(parallel_map(read, extents, count, name="holdfast-read"))


def _read_extent(
    files: Mapping[str, DataReader],
    chunks: ChunkTable,
    use: Use,
    failed: Callable[[int, Exception], None],
    places: Places | None,
    own: threading.local,  # has the buffer that a thread reads into again and again
    extent: Extent,
) -> int:
    try:
        if places is not None and _receive(files, extent, places):
            return extent.length
        if not hasattr(own, "buffer"):
            own.buffer = Buffer()
        data = files[extent.file].read(extent.offset, extent.length, None if extent.kept else own.buffer)
    except (DamagedCheckpointError, StorageError) as error:
        if isinstance(error, StorageError) and not (isinstance(error, ObjectNotFoundError) or is_unreadable(error)):
            raise  # the bytes are unavailable at the moment, and not lost
        if extent.stop - extent.first == 1:
            failed(extent.first, error)
            return 0
        # One by one, so that only the damaged chunks fail.
        singles = [_extent(chunks, row, row + 1, kept=extent.kept) for row in range(extent.first, extent.stop)]
        return sum(_read_extent(files, chunks, use, failed, places, own, single) for single in singles)
    if not extent.kept:
        data.flags.writeable = False  # spares the checksums a view of each chunk
    use(extent, data)
    return extent.length


def _receive(files: Mapping[str, DataReader], extent: Extent, places: Places) -> bool:
    """Receive an extent of one chunk in its place; return whether that went well."""
    values = places.find(extent.first) if extent.stop - extent.first == 1 and not extent.kept else None
    if values is None:
        return False
    rest = np.empty(extent.length - values.size, np.uint8)
    if not files[extent.file].read_into(extent.offset, [values, rest]):
        return False
    places.filled(extent.first, values, rest)
    return True


def _spread(extents: Sequence[Extent]) -> list[Extent]:
    """Order extents so that those read at a time are of different files: a service may serve one file slowly."""
    ranks: Counter[str] = Counter()
    order = []
    for extent in extents:
        order.append(ranks[extent.file])
        ranks[extent.file] += 1
    return [extent for _, extent in sorted(zip(order, extents, strict=True), key=lambda pair: pair[0])]


def plan_extents(chunks: ChunkTable, gap: int) -> Iterator[Extent]:
    """Group sorted chunks into runs that are read in one piece; kept memory has few bytes that would be unused."""
    current: Extent | None = None
    kept = 0  # bytes of the current extent that are kept
    for run in _runs(chunks, gap):
        own = run.length if run.kept else 0
        if current is not None:
            length = run.offset + run.length - current.offset
            near = run.file == current.file and 0 <= length - run.length - current.length <= gap
            foreign = length - kept - own
            shared = kept + own == 0 or foreign * FOREIGN <= length
            if near and shared and length <= (_EXTENT if kept + own else COPIED_EXTENT_BYTES):
                current = Extent(run.file, current.offset, length, current.first, run.stop, kept + own > 0)
                kept += own
                continue
            yield current
        current, kept = run, own
    if current is not None:
        yield current


def _runs(chunks: ChunkTable, gap: int) -> Iterator[Extent]:
    """Generate runs of near chunks that are all kept or all copied."""
    if not len(chunks):
        return
    ends = chunks.offsets + chunks.lengths
    apart = (chunks.file_ids[1:] != chunks.file_ids[:-1]) | (chunks.offsets[1:] - ends[:-1] > gap)
    apart |= chunks.kept[1:] != chunks.kept[:-1]
    bounds = [0, *(np.flatnonzero(apart) + 1).tolist(), len(chunks)]
    for first, stop in pairwise(bounds):
        kept = bool(chunks.kept[first])
        size = _EXTENT if kept else COPIED_EXTENT_BYTES
        reached = np.maximum.accumulate(ends[first:stop])
        start = first
        while first < stop:
            fitting = start + int(np.searchsorted(reached, chunks.offsets[first] + size, "right"))
            last = max(first + 1, fitting)
            yield _extent(chunks, first, last, kept=kept)
            first = last


def _extent(chunks: ChunkTable, first: int, stop: int, *, kept: bool) -> Extent:
    offset = int(chunks.offsets[first])
    end = int((chunks.offsets[first:stop] + chunks.lengths[first:stop]).max())
    return Extent(chunks.file(first), offset, end - offset, first, stop, kept)


class Range(NamedTuple):
    """A wanted range of bytes in a data file."""

    file: str
    offset: int
    length: int
    array: int  # the wanted array of the range, as the caller counts them
    chunk: int  # the chunk's number in the array's grid
    keep: bool  # whether the caller keeps views of the bytes, which then need memory of their own


def read_ranges(
    files: Mapping[str, DataReader],
    ranges: Sequence[Range],
    use: Callable[[Range, Bytes], None],
    failed: Callable[[Range, Exception], None],
) -> int:
    """Read ranges and hand each to ``use``; see :func:`read_chunks`."""
    paths = list(files)
    ids = {path: number for number, path in enumerate(paths)}
    rows = [(ids[one.file], one.offset, one.length, one.array, one.chunk, one.keep) for one in ranges]
    columns = np.array(rows, np.int64).reshape(-1, 6).T
    unknown = np.full(len(ranges), -1, np.int64)
    chunks = ChunkTable(paths, columns[0], columns[1], columns[2], columns[3], columns[4], columns[5] != 0, unknown)

    def use_extent(extent: Extent, data: Bytes) -> None:
        for wanted in ranges[extent.first : extent.stop]:
            start = wanted.offset - extent.offset
            use(wanted, data[start : start + wanted.length])

    return read_chunks(files, chunks, use_extent, lambda row, error: failed(ranges[row], error))
