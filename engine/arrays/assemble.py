"""Assembles arrays, and boxes of arrays, from chunks as these arrive, and verifies every chunk."""

from __future__ import annotations

import errno
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import DamagedCheckpointError
from ..forks import Lock
from ..format import ArrayMetadata, checksums_of, crc32c, decompress_exactly
from ..pytree import Box, whole
from ..storage import Buffer, aligned_empty
from .digests import CHECKSUM_BYTES, CHUNK_ALIGNMENT, Bytes, checksum_after
from .extents import FOREIGN, ChunkTable
from .grid import ArraySpec

# Bytes; a smaller array is copied out of the memory that was read, so that it does not keep all of it.
COPY = 256 << 10

_SMALL = 8 << 10  # bytes of the largest array that shares its memory with others
_INCOMPRESSIBLE = 1 << 10  # bytes that zstd adds at most to a chunk, besides 1 in 128
_BLOCK = 64 << 10  # bytes that small arrays share, and that one of them may thus keep in memory
_LARGE_BLOCK = 2 << 20  # the same where there are many: one huge page costs less than thirty small ones
_MOST_AXES = 32  # of any array of numpy 1
_WASTE = 256  # bytes between two small arrays that are copied along


class ChunkDecoder:
    """Reads the chunks of arrays with the same metadata."""

    def __init__(self, metadata: ArrayMetadata) -> None:
        self.dtype: np.dtype[Any] = metadata.dtype
        self.shape = metadata.shape
        self.chunk_shape = metadata.chunk_shape
        self.spec = ArraySpec(metadata.shape, metadata.chunk_shape, self.dtype.itemsize)
        self.chunk_count = self.spec.chunks
        # Bytes of the values of one chunk, and of the chunk in its file: an upper bound if chunks are compressed.
        self.data_bytes = self.spec.chunk_nbytes
        self.compressed = metadata.compression is not None
        largest = self.data_bytes + self.data_bytes // 128 + _INCOMPRESSIBLE if self.compressed else self.data_bytes
        self.stored_bytes = largest + CHECKSUM_BYTES
        sole = metadata.chunk_shape == metadata.shape
        # Zero-copy: the read buffer of the single chunk becomes the array.
        self.adopted = sole and not self.compressed and self.data_bytes >= COPY
        self.lone = self.chunk_count == 1 and not self.compressed  # one chunk, of a size known in advance
        self.key = b"/c" + b"/0" * len(self.shape)  # follows the array's name in the key of its only chunk
        # Bytes between neighbours along each axis of the array.
        self.strides = tuple(math.prod(self.shape[axis + 1 :]) * self.dtype.itemsize for axis in range(len(self.shape)))
        # Whether the array is handled together with other small ones.
        self.small = sole and not self.compressed and self.data_bytes <= _SMALL

    def why_not(self, length: int) -> str:
        """Return why a stored chunk cannot have this length in bytes; "" if it can."""
        if length == self.stored_bytes or (self.compressed and CHECKSUM_BYTES < length < self.stored_bytes):
            return ""
        return f"has {length} bytes, expected {'at most ' if self.compressed else ''}{self.stored_bytes}"

    def content(self, data: Bytes, memory: Callable[[int], Bytes], indexed: int = -1) -> tuple[Bytes, str]:
        """Return the values of a stored chunk and what is wrong with it, or ""; ``indexed`` is its checksum, or -1."""
        problem = self.why_not(data.size)
        if problem:
            return data, problem
        values = data[:-CHECKSUM_BYTES]
        problem = self.check(values, data[-CHECKSUM_BYTES:], indexed)
        if problem:
            return data, problem
        if not self.compressed:
            return values, ""
        try:
            return decompress_exactly(values, self.data_bytes, memory), ""
        except DamagedCheckpointError as error:
            return data, f"cannot be decompressed: {error}"

    def check(self, values: Bytes, checksum: Bytes, indexed: int = -1) -> str:
        """Return what is wrong with the bytes of a chunk, given the checksum that follows them; "" if nothing is."""
        found, expected = crc32c(values), checksum_after(checksum.tobytes())
        if found != expected:
            return f"has crc32c {found:08x}, expected {expected:08x}"
        if indexed not in (found, -1):
            return f"has crc32c {found:08x}, expected {indexed:08x}: another chunk, or one of another save"
        return ""

    def chunk_box(self, number: int) -> Box:
        """Return the elements that a chunk holds, including those beyond the array's end."""
        return self.spec.chunk_box(number, full=True)

    def chunks_in(self, box: Box) -> list[int]:
        if not box.size:
            return []
        spans = [range(cells.start, cells.stop) for cells in self.spec.cells(box)]
        steps = [math.prod(self.spec.grid[axis + 1 :]) for axis in range(len(spans))]
        return [sum(map(int.__mul__, position, steps)) for position in product(*spans)]


class OutputBox(NamedTuple):
    """A wanted box of an array, and its position in the result."""

    output: int
    box: Box


class Assembly:
    """Collects the wanted arrays as their chunks arrive, from any number of threads; it may only verify them."""

    # Memory for an array is taken once a first chunk of it is verified: a description alone never costs memory.

    def __init__(
        self,
        metadata: Sequence[ArrayMetadata],
        boxes: Sequence[Sequence[Box] | None] | None = None,
        *,
        keep: bool,
    ) -> None:
        # Equal metadata is mostly one object; comparing identities is faster than comparing contents.
        identities = list(map(id, metadata))
        objects = dict(zip(identities, metadata, strict=True))
        numbers = {one: number for number, one in enumerate(dict.fromkeys(objects.values()))}
        self._kinds = list(map(ChunkDecoder, numbers))  # the distinct decoders
        by_identity = {key: numbers[one] for key, one in objects.items()}
        kind_of = list(map(by_identity.__getitem__, identities))
        self._kind_of = np.array(kind_of, np.int64)  # the position there of each array's
        self.decoders = list(map(self._kinds.__getitem__, kind_of))
        self.keep = keep
        self._boxes: dict[int, list[OutputBox]] = {}
        # The position in the result of each array, or of its first box.
        self._outputs = list(range(len(metadata))) if boxes is None else []
        count = len(self._outputs)
        for array, wanted in enumerate(boxes or ()):
            self._outputs.append(count)
            if wanted is None:
                count += 1
            else:
                self._boxes[array] = [OutputBox(count + position, box) for position, box in enumerate(wanted)]
                count += len(wanted)
        self.are_whole = np.ones(len(metadata), bool)  # whether all of each array is wanted
        self.are_whole[list(self._boxes)] = False
        self._small = self.column(lambda decoder: decoder.small, bool) & self.are_whole
        self._arrays: list[NDArray[Any] | None] = [None] * count
        self._damaged: set[int] = set()
        self._lock = Lock()
        self._threads = threading.local()  # a buffer for each thread: it decompresses into it, and copies out of it

    @property
    def wants_everything(self) -> bool:
        """Whether all elements of all arrays are wanted."""
        return all(
            any(one.box == whole(self.decoders[array].shape) for one in wanted) for array, wanted in self._boxes.items()
        )

    def column(self, value: Callable[[ChunkDecoder], Any], dtype: Any = np.int64) -> NDArray[Any]:
        """Return a value for each array, which its decoder decides."""
        return np.array(list(map(value, self._kinds)), dtype)[self._kind_of]

    def output_boxes(self, array: int) -> list[OutputBox]:
        found = self._boxes.get(array)
        return [OutputBox(self._outputs[array], whole(self.decoders[array].shape))] if found is None else found

    def wanted_chunks(self, array: int) -> list[int]:
        decoder = self.decoders[array]
        if self.are_whole[array]:
            return list(range(decoder.chunk_count))
        return sorted({chunk for wanted in self._boxes[array] for chunk in decoder.chunks_in(wanted.box)})

    def keeps(self, array: int, chunk: int) -> bool:
        """Return whether the memory that a chunk is read into becomes arrays of the result."""
        return not self.decoders[array].compressed and bool(self._adopters(array, chunk))

    def _adopters(self, array: int, chunk: int) -> Sequence[OutputBox]:
        """Return the boxes that become views of a chunk's memory: runs of it, which together need nearly all of it."""
        decoder, boxes = self.decoders[array], self.output_boxes(array)
        if not self.keep or decoder.data_bytes < COPY:
            return ()
        part = decoder.chunk_box(chunk)
        if [one.box for one in boxes] == [part]:
            return boxes
        found: list[OutputBox] = []
        used = reached = 0
        for wanted in sorted(boxes, key=lambda one: one.box.start):
            start = _run_start(wanted.box, part)
            if start is not None and start >= reached:  # another box of the same elements gets its own memory
                found.append(wanted)
                used += wanted.box.size
                reached = start + wanted.box.size
        return found if (part.size - used) * FOREIGN <= part.size else ()

    def give_up(self, array: int) -> None:
        """Mark an array as damaged: its chunks are still verified, but it takes no memory."""
        self._damaged.add(array)

    def accept(self, array: int, chunk: int, data: Bytes, *, kept: bool = False, indexed: int = -1) -> str:
        """Verify a chunk and copy it to its place; return what is wrong with it, or ""."""
        decoder, boxes = self.decoders[array], self.output_boxes(array)
        adopters = self._adopters(array, chunk) if kept or decoder.compressed else ()
        own = decoder.compressed and bool(adopters)
        values, problem = decoder.content(data, _fresh_memory if own else self._scratch, indexed)
        if problem:
            return f"chunk {chunk} {problem}"
        if not self.keep or array in self._damaged:
            return ""
        view = values.view(decoder.dtype).reshape(decoder.chunk_shape)
        if not (view.flags.aligned and view.flags.writeable):
            adopters = ()
        part = decoder.chunk_box(chunk)
        for wanted in boxes:
            common = part.common(wanted.box)
            if common is None:
                continue
            piece = view[common.within(part)]
            if wanted in adopters:
                self._arrays[wanted.output] = piece
            elif wanted.box == part:
                self._arrays[wanted.output] = view.copy()
            else:
                self._array(array, wanted)[common.within(wanted.box)] = piece
        return ""

    def place(self, array: int, chunk: int, length: int) -> Bytes | None:
        """Return an array's memory for the values of a stored chunk; None if it is not one run, or not there yet."""
        decoder, boxes = self.decoders[array], self.output_boxes(array)
        found = self._arrays[boxes[0].output] if self.keep and len(boxes) == 1 else None
        if found is None or decoder.compressed or length != decoder.stored_bytes or array in self._damaged:
            return None
        part, box = decoder.chunk_box(chunk), boxes[0].box
        if part.common(box) != part:
            return None
        view = found[part.within(box)]
        return view.reshape(-1).view(np.uint8) if view.flags.c_contiguous and view.flags.writeable else None

    def accept_many(
        self, chunks: ChunkTable, rows: range, base: int, data: Bytes, kept: bool
    ) -> Iterator[tuple[int, str]]:
        """Accept chunks that were read in one piece; generate the row of each damaged one and what is wrong."""
        others: Sequence[int] = rows
        if len(rows) > 1:
            span = slice(rows.start, rows.stop)
            mask = self._small[chunks.arrays[span]]
            if mask.any():
                some = np.flatnonzero(mask) + rows.start
                owners = chunks.arrays[some]
                starts, kinds = chunks.offsets[some] - base, self._kind_of[owners]
                good, made = _small_arrays(data, starts, self._kinds, kinds, chunks.checksums[some], keep=self.keep)
                arrays, outputs = self._arrays, self._outputs
                for array, value in zip(owners[good].tolist(), made, strict=self.keep):
                    arrays[outputs[array]] = value
                others = sorted([*(np.flatnonzero(~mask) + rows.start).tolist(), *np.delete(some, good).tolist()])
        for row in others:
            start = int(chunks.offsets[row]) - base
            array, chunk = int(chunks.arrays[row]), int(chunks.numbers[row])
            stored = data[start : start + int(chunks.lengths[row])]
            indexed = int(chunks.checksums[row])
            what = self.accept(array, chunk, stored, kept=kept and bool(chunks.kept[row]), indexed=indexed)
            if what:
                yield row, what

    def finish(self) -> list[NDArray[Any] | None]:
        """Return the arrays, box by box, if none is damaged. Those without elements have no chunks."""
        if any(array is None for array in self._arrays):
            for array in range(len(self.decoders)):
                for wanted in self.output_boxes(array):
                    self._array(array, wanted)
        return self._arrays

    def _scratch(self, nbytes: int) -> Bytes:
        buffer: Buffer | None = getattr(self._threads, "buffer", None)
        if buffer is None:
            buffer = self._threads.buffer = Buffer()
        return buffer.view(nbytes)

    def _array(self, array: int, wanted: OutputBox) -> NDArray[Any]:
        found = self._arrays[wanted.output]
        if found is not None:
            return found
        with self._lock:
            found = self._arrays[wanted.output]
            if found is None:
                dtype = self.decoders[array].dtype
                memory = _fresh_memory(wanted.box.size * dtype.itemsize)
                found = self._arrays[wanted.output] = memory.view(dtype).reshape(wanted.box.shape)
            return found


def _run_start(box: Box, part: Box) -> int | None:
    """Return where a box begins in the memory of another, in elements; None if it is not one run inside of it."""
    if not box.size or part.common(box) != box:
        return None
    lengths, sizes = box.shape, part.shape
    first = next((axis for axis, length in enumerate(lengths) if length > 1), len(lengths))
    if lengths[first + 1 :] != sizes[first + 1 :]:
        return None
    start = 0
    for begin, origin, size in zip(box.start, part.start, sizes, strict=True):
        start = start * size + begin - origin
    return start


def _small_arrays(
    data: Bytes,
    starts: NDArray[np.int64],
    decoders: Sequence[ChunkDecoder],
    kinds: NDArray[np.int64],
    indexed: NDArray[np.int64],
    *,
    keep: bool,
) -> tuple[NDArray[np.int64], list[NDArray[Any]]]:
    """Verify chunks that are whole small arrays; return the positions of the good ones, and their arrays."""
    # The work for each of ten thousand arrays must cost next to nothing, so numpy handles all of them at once.
    sizes = np.array([decoder.data_bytes for decoder in decoders], np.int64)[kinds]
    stops = starts + sizes
    expected = _at(data, stops, np.dtype("<u4"))
    found = np.empty(len(kinds), np.uint32)
    order = np.argsort(sizes, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(sizes[order])) + 1):
        found[rows] = checksums_of(_at(data, starts[rows], np.dtype((np.void, int(sizes[rows[0]])))).tolist())
    verified = (found == expected) & ((indexed == found) | (indexed == -1))
    if keep:
        verified &= (starts - starts[0]) % CHUNK_ALIGNMENT == 0
    good = np.flatnonzero(verified)
    if not keep or not len(good):
        return good, []
    first, last = starts[good], stops[good]
    size = _BLOCK if sizes.sum() < _LARGE_BLOCK else _LARGE_BLOCK
    apart = (first[1:] - last[:-1] > _WASTE) | ((first[1:] - first[:1]) // size != (first[:-1] - first[:1]) // size)
    bounds = [0, *(np.flatnonzero(apart) + 1).tolist(), len(good)]
    spans = [(int(first[low]), int(last[high - 1])) for low, high in pairwise(bounds)]
    # Arrays of one kind that lie at equal distances in a block are rows of one that has another axis.
    blocks = np.concatenate([[0], np.cumsum(apart)])
    good = good[np.argsort(blocks * len(decoders) + kinds[good], kind="stable")]
    first, kinds = starts[good], kinds[good]
    steps = np.diff(first)
    ends_run = (blocks[1:] != blocks[:-1]) | (kinds[1:] != kinds[:-1])
    ends_run[1:] |= (steps[1:] != steps[:-1]) & ~ends_run[:-1]
    made: list[NDArray[Any]] = []
    for (low, high), (origin, end) in zip(pairwise(bounds), spans, strict=True):
        block = aligned_empty(end - origin) if end - origin > _BLOCK else np.empty(end - origin, np.uint8)
        block[:] = data[origin:end]
        for start, stop in pairwise([low, *(np.flatnonzero(ends_run[low : high - 1]) + low + 1).tolist(), high]):
            decoder = decoders[kinds[start]]
            if stop - start > 1 and 0 < len(decoder.shape) < _MOST_AXES:
                shape, strides = (stop - start, *decoder.shape), (int(steps[start]), *decoder.strides)
                made.extend(np.ndarray(shape, decoder.dtype, block, int(first[start]) - origin, strides))
            else:
                places = (first[start:stop] - origin).tolist()
                made.extend(np.ndarray(decoder.shape, decoder.dtype, block, place) for place in places)
    return good, made


def _at(data: Bytes, places: NDArray[np.int64], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return the elements that lie at some places, as a copy."""
    return np.ndarray(data.size - dtype.itemsize + 1, dtype, data, strides=(1,))[places]


def _fresh_memory(nbytes: int) -> Bytes:
    try:
        return aligned_empty(nbytes)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise MemoryError(f"an array of {nbytes} bytes does not fit into the remaining memory") from error
