"""Read many chunks from data files on a few threads, joining neighboring chunks into large reads."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import DamagedCheckpointError, ObjectNotFoundError, StorageError
from ..storage import REQUESTS, Buffer, DataReader, is_unreadable, parallel_map
from .digests import Bytes, Integers


@dataclass(frozen=True, slots=True)
class ChunkTable:
    """A table of chunks in data files, stored as columns."""

    files: Sequence[str]  # paths of data files
    file_ids: Integers  # index into ``files``
    offsets: Integers  # byte offset in the file
    lengths: Integers  # size in bytes
    arrays: Integers  # index of each chunk's array, as numbered by the caller
    numbers: Integers  # the chunk's number in its array's grid
    kept: NDArray[np.bool_]  # whether the caller keeps views of the buffer, which then must not be reused
    checksums: Integers  # CRC-32C in the index; -1 if missing

    def __len__(self) -> int:
        return len(self.offsets)

    def file(self, row: int) -> str:
        return self.files[int(self.file_ids[row])]

    def take(self, rows: NDArray[Any]) -> ChunkTable:
        of_files = (self.file_ids[rows], self.offsets[rows], self.lengths[rows])
        return ChunkTable(
            self.files, *of_files, self.arrays[rows], self.numbers[rows], self.kept[rows], self.checksums[rows]
        )


def plausible(chunks: ChunkTable, sizes: Mapping[str, int], failed: Callable[[int, str], None]) -> ChunkTable:
    """Report chunks that overlap a previous chunk or exceed the file; return the others. This bounds the bytes read."""
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
_BUFFERS = 12  # the read buffers together may hold at most 1/12 of the data to read
_EXTENT = 16 << 20  # bytes per read, unless a single chunk is larger
COPIED_EXTENT_BYTES = 4 << 20  # bytes per read when chunks are copied out of a reused buffer
_FEW = 32  # maximum number of extents to read with one thread; with more, the thread would mostly wait for I/O
_SMALL = 16 << 10  # size, in bytes, below which a chunk takes longer to process than to read
LOCAL_GAP = 4 << 10  # maximum gap between chunks, in bytes, that is cheaper to read than to skip (one disk page)
REMOTE_GAP = 1 << 20  # maximum gap in object stores, in bytes; reading it takes about as long as starting a request
FOREIGN = 16  # gaps and copied chunks may take up at most 1/16 of a read buffer that views keep alive


class Extent(NamedTuple):
    """A run of chunks in one file that are read together."""

    file: str
    offset: int
    length: int
    first: int  # first row of the extent in the chunk table
    stop: int
    kept: bool  # whether views of the buffer are kept


class Destinations(NamedTuple):
    """Provides memory for receiving chunks without a copy. A chunk is identified by its row in the chunk table."""

    find: Callable[[int], Bytes | None]  # returns the memory for a chunk's values, or None
    filled: Callable[[int, Bytes, Bytes], None]  # called with the row, the filled memory, and the chunk's checksum


class ThreadBuffer(Buffer, threading.local):
    """A thread-local buffer."""


@dataclass(frozen=True, slots=True)
class ChunkReader:
    """Reads extents and passes them to ``use``, or reads them directly into memory that ``destinations`` provides."""

    files: Mapping[str, DataReader]
    chunks: ChunkTable
    use: Callable[[Extent, Bytes], None]  # receives an extent and its bytes; the buffer is reused unless `extent.kept`
    failed: Callable[[int, Exception], None]  # called with the row of a chunk and its error
    destinations: Destinations | None = None
    buffer: ThreadBuffer = field(default_factory=ThreadBuffer)

    def read(self, extent: Extent) -> int:
        """Read an extent; return the number of bytes read."""
        try:
            if self._receive(extent):
                return extent.length
            data = self.files[extent.file].read(extent.offset, extent.length, None if extent.kept else self.buffer)
        except (DamagedCheckpointError, StorageError) as error:
            if isinstance(error, StorageError) and not (isinstance(error, ObjectNotFoundError) or is_unreadable(error)):
                raise  # the data is only temporarily unavailable, not lost
            if extent.stop - extent.first == 1:
                self.failed(extent.first, error)
                return 0
            # Read the chunks one by one, so that only damaged ones fail.
            rows = range(extent.first, extent.stop)
            return sum(self.read(_extent(self.chunks, row, row + 1, kept=extent.kept)) for row in rows)
        if not extent.kept:
            data.flags.writeable = False  # otherwise, the checksum functions would create a read-only view per chunk
        self.use(extent, data)
        return extent.length

    def _receive(self, extent: Extent) -> bool:
        """Read an extent of one chunk directly into its destination; return True if that was possible."""
        if self.destinations is None or extent.stop - extent.first > 1 or extent.kept:
            return False
        if (values := self.destinations.find(extent.first)) is None:
            return False
        rest = np.empty(extent.length - values.size, np.uint8)
        if not self.files[extent.file].read_into(extent.offset, [values, rest]):
            return False
        self.destinations.filled(extent.first, values, rest)
        return True


def plan_reads(chunks: ChunkTable, *, remote: bool) -> tuple[list[Extent], int]:
    """Return the extents to read, and how many to read concurrently."""
    extents = list(plan_extents(chunks, REMOTE_GAP if remote else LOCAL_GAP))
    if remote:  # interleave files, because an object store may limit the throughput of each file
        ranks: Counter[str] = Counter()
        order = []
        for extent in extents:
            order.append(ranks[extent.file])
            ranks[extent.file] += 1
        return [extent for _, extent in sorted(zip(order, extents, strict=True), key=itemgetter(0))], REQUESTS
    total = int(chunks.lengths.sum())
    if len(extents) <= _FEW and total <= max(_EXTENT // 4, _SMALL * len(chunks)):
        return extents, 1  # for little data or many tiny chunks, threads would only contend for the GIL
    buffer = max((extent.length for extent in extents if not extent.kept), default=1)
    return extents, min(_THREADS, max(1, total // (buffer * _BUFFERS)))


def plan_extents(chunks: ChunkTable, gap: int) -> Iterator[Extent]:
    """Group sorted chunks into extents, and limit the memory wasted in buffers that views keep alive."""
    current: Extent | None = None
    kept = 0  # bytes of kept chunks in the current extent
    for run in _runs(chunks, gap):
        run_kept = run.length if run.kept else 0
        if current is not None:
            length = run.offset + run.length - current.offset
            near = run.file == current.file and 0 <= length - run.length - current.length <= gap
            both_kept = kept + run_kept
            worth = not both_kept or (length - both_kept) * FOREIGN <= length
            if near and worth and length <= (_EXTENT if both_kept else COPIED_EXTENT_BYTES):
                current = Extent(run.file, current.offset, length, current.first, run.stop, both_kept > 0)
                kept = both_kept
                continue
            yield current
        current, kept = run, run_kept
    if current is not None:
        yield current


def _runs(chunks: ChunkTable, gap: int) -> Iterator[Extent]:
    """Yield runs of neighboring chunks that are either all kept or all copied."""
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
    """A byte range to read from a data file."""

    file: str
    offset: int
    length: int
    array: int  # index of the range's array, as numbered by the caller
    chunk: int  # the chunk's number in the array's grid
    keep: bool  # whether the caller keeps views of the buffer, which then must not be reused


def read_ranges(
    files: Mapping[str, DataReader],
    ranges: Sequence[Range],
    use: Callable[[Range, Bytes], None],
    failed: Callable[[Range, Exception], None],
) -> int:
    """Read ranges and pass each to ``use``; return the number of bytes read."""
    ids = {path: number for number, path in enumerate(files)}
    rows = np.array([(ids[path], *numbers) for path, *numbers in ranges], np.int64).reshape(-1, 6)
    file_ids, offsets, lengths, arrays, numbers, keep = rows.T
    unknown = np.full(len(ranges), -1, np.int64)
    chunks = ChunkTable(list(files), file_ids, offsets, lengths, arrays, numbers, keep != 0, unknown)

    def use_extent(extent: Extent, data: Bytes) -> None:
        for wanted in ranges[extent.first : extent.stop]:
            start = wanted.offset - extent.offset
            use(wanted, data[start : start + wanted.length])

    reader = ChunkReader(files, chunks, use_extent, lambda row, error: failed(ranges[row], error))
    return sum(parallel_map(reader.read, *plan_reads(chunks, remote=False), name="holdfast-read"))
