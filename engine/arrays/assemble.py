"""Assembles arrays, or boxes of arrays, from chunks as they arrive, and verifies every chunk."""

from __future__ import annotations

import errno
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import DamagedCheckpointError
from ..forks import Lock
from ..format import ArrayMetadata, checksums_of, crc32c, decompress_exactly
from ..pytree import Box, whole
from ..storage import aligned_empty
from .digests import CHECKSUM_BYTES, CHUNK_ALIGNMENT, Bytes, Integers, checksum_after
from .extents import FOREIGN, ChunkTable, ThreadBuffer
from .grid import ArraySpec

# Arrays smaller than this many bytes are copied out of the read buffer, because a view would keep all of it alive.
COPY = 256 << 10

_SMALL = 8 << 10  # maximum size, in bytes, of arrays that share a memory block
_INCOMPRESSIBLE = 1 << 10  # zstd may enlarge an incompressible chunk by 1/128 of its size plus this many bytes
_BLOCK = 64 << 10  # bytes per memory block for small arrays; any array in a block keeps the whole block alive
_LARGE_BLOCK = 2 << 20  # bytes per block for many small arrays; one huge page is cheaper than 32 small blocks
_MOST_AXES = 32  # maximum number of axes in numpy 1
_WASTE = 256  # maximum gap, in bytes, between two small arrays that share a block


class ChunkDecoder:
    """Decodes and verifies the chunks of arrays that have the same metadata."""

    def __init__(self, metadata: ArrayMetadata) -> None:
        self.dtype: np.dtype[Any] = metadata.dtype
        self.spec = ArraySpec(metadata.shape, metadata.chunk_shape, self.dtype.itemsize)
        self.compressed = metadata.compression is not None
        # Stored size of a chunk, including its checksum; an upper bound if chunks are compressed.
        self.stored_bytes = self.spec.chunk_nbytes + CHECKSUM_BYTES
        if self.compressed:
            self.stored_bytes += self.spec.chunk_nbytes // 128 + _INCOMPRESSIBLE
        self.lone = self.spec.chunks == 1 and not self.compressed  # True for an uncompressed array with one chunk
        is_one_chunk = metadata.chunk_shape == metadata.shape and not self.compressed
        # True if the array is a view of the buffer into which its single chunk is read (zero-copy).
        self.adopted = is_one_chunk and self.spec.chunk_nbytes >= COPY
        self.small = is_one_chunk and self.spec.chunk_nbytes <= _SMALL  # True if the array can be decoded in a batch
        self.key = b"/c" + b"/0" * len(metadata.shape)  # the key of the only chunk is the array's name plus this suffix

    def length_problem(self, length: int) -> str:
        """Return an error message if a stored chunk has the wrong length; otherwise, return ""."""
        if length == self.stored_bytes or (self.compressed and CHECKSUM_BYTES < length < self.stored_bytes):
            return ""
        return f"has {length} bytes, expected {'at most ' if self.compressed else ''}{self.stored_bytes}"

    def content(self, data: Bytes, memory: Callable[[int], Bytes], indexed: int = -1) -> tuple[Bytes, str]:
        """Verify a chunk; return its values and an error message or "". ``indexed`` is the index's checksum or -1."""
        values = data[:-CHECKSUM_BYTES]
        problem = self.length_problem(data.size) or self.checksum_problem(values, data[-CHECKSUM_BYTES:], indexed)
        if problem or not self.compressed:
            return values, problem
        try:
            return decompress_exactly(values, self.spec.chunk_nbytes, memory), ""
        except DamagedCheckpointError as error:
            return values, f"cannot be decompressed: {error}"

    def checksum_problem(self, values: Bytes, checksum: Bytes, indexed: int) -> str:
        """Compare a chunk's computed checksum with the stored and indexed checksums; return an error message or ""."""
        computed, expected = crc32c(values), checksum_after(checksum.tobytes())
        if computed != expected:
            return f"has crc32c {computed:08x}, expected {expected:08x}"
        if indexed not in (computed, -1):
            return f"has crc32c {computed:08x}, expected {indexed:08x}: it is another chunk or from another save"
        return ""

    def chunks_in(self, box: Box) -> list[int]:
        if not box.size:
            return []
        spans = [range(cells.start, cells.stop) for cells in self.spec.cells(box)]
        steps = [math.prod(self.spec.grid[axis + 1 :]) for axis in range(len(spans))]
        return [sum(map(int.__mul__, position, steps)) for position in product(*spans)]


class OutputBox(NamedTuple):
    """A requested box of an array, and its index in the results."""

    output: int
    box: Box


class Assembly:
    """Assembles the requested arrays while threads read their chunks; if ``keep`` is false, only verifies chunks."""

    # An array is allocated only after its first chunk has been verified, because forged metadata may claim any size.

    def __init__(
        self,
        metadata: Sequence[ArrayMetadata],
        boxes: Sequence[Sequence[Box] | None] | None = None,
        *,
        keep: bool,
    ) -> None:
        # Arrays with equal metadata usually share one object, and comparing ids is faster than comparing contents.
        objects = {id(array): array for array in metadata}
        numbers = {content: number for number, content in enumerate(dict.fromkeys(objects.values()))}
        number_of = {identity: numbers[content] for identity, content in objects.items()}
        decoder_ids = [number_of[id(array)] for array in metadata]
        self._distinct = list(map(ChunkDecoder, numbers))
        self._decoder_ids: Integers = np.array(decoder_ids, np.int64)  # index into `_distinct` for each array
        self.decoders = [self._distinct[number] for number in decoder_ids]
        self.keep = keep
        self._boxes: dict[int, list[OutputBox]] = {}
        # Index in the results of each array or, if only boxes of the array are requested, of the first box.
        self._outputs = list(range(len(metadata))) if boxes is None else []
        count = len(self._outputs)
        for array, wanted in enumerate(boxes or ()):
            self._outputs.append(count)
            if wanted is None:
                count += 1
            else:
                self._boxes[array] = [OutputBox(count + position, box) for position, box in enumerate(wanted)]
                count += len(wanted)
        self.are_whole = np.ones(len(metadata), bool)  # True for each array that is requested in full
        self.are_whole[list(self._boxes)] = False
        self._small = self.column(lambda decoder: decoder.small, bool) & self.are_whole
        self._arrays: list[NDArray[Any] | None] = [None] * count
        self._damaged: set[int] = set()
        self._lock = Lock()
        self._scratch = ThreadBuffer()  # decompression buffer; its contents are copied into the arrays

    @property
    def wants_everything(self) -> bool:
        """True if all elements of all arrays are requested."""
        return all(
            any(wanted.box == whole(self.decoders[array].spec.shape) for wanted in boxes)
            for array, boxes in self._boxes.items()
        )

    def column(self, value: Callable[[ChunkDecoder], Any], dtype: Any = np.int64) -> NDArray[Any]:
        """Apply ``value`` to each array's decoder; return an array with one entry per array."""
        return np.array(list(map(value, self._distinct)), dtype)[self._decoder_ids]

    def _output_boxes(self, array: int) -> list[OutputBox]:
        boxes = self._boxes.get(array)
        return [OutputBox(self._outputs[array], whole(self.decoders[array].spec.shape))] if boxes is None else boxes

    def wanted_chunks(self, array: int) -> list[int]:
        decoder = self.decoders[array]
        if self.are_whole[array]:
            return list(range(decoder.spec.chunks))
        return sorted({chunk for wanted in self._boxes[array] for chunk in decoder.chunks_in(wanted.box)})

    def keeps(self, array: int, chunk: int) -> bool:
        """Return True if results will be zero-copy views of the buffer into which a chunk is read."""
        return not self.decoders[array].compressed and bool(self._adopters(array, chunk))

    def _adopters(self, array: int, chunk: int) -> Sequence[OutputBox]:
        """Return the boxes that can be contiguous views of a chunk, or none if they cover too little of the chunk."""
        spec, boxes = self.decoders[array].spec, self._output_boxes(array)
        if not self.keep or spec.chunk_nbytes < COPY:
            return ()
        chunk_box = spec.chunk_box(chunk, full=True)
        if [wanted.box for wanted in boxes] == [chunk_box]:
            return boxes
        adopters: list[OutputBox] = []
        used = reached = 0
        for wanted in sorted(boxes, key=lambda wanted: wanted.box.start):
            start = _run_start(wanted.box, chunk_box)
            if start is not None and start >= reached:  # a box that overlaps an earlier one is copied instead
                adopters.append(wanted)
                used += wanted.box.size
                reached = start + wanted.box.size
        return adopters if (chunk_box.size - used) * FOREIGN <= chunk_box.size else ()

    def give_up(self, array: int) -> None:
        """Mark an array as damaged: its chunks are still verified, but no memory is allocated for it."""
        self._damaged.add(array)

    def accept(self, array: int, chunk: int, data: Bytes, *, kept: bool = False, indexed: int = -1) -> str:
        """Verify a chunk and copy it into its array; return an error message, or "" if the chunk is intact."""
        decoder, boxes = self.decoders[array], self._output_boxes(array)
        adopters = self._adopters(array, chunk) if kept or decoder.compressed else ()
        memory = _fresh_memory if decoder.compressed and adopters else self._scratch.view
        values, problem = decoder.content(data, memory, indexed)
        if problem:
            return f"chunk {chunk} {problem}"
        if not self.keep or array in self._damaged:
            return ""
        view = values.view(decoder.dtype).reshape(decoder.spec.chunk_shape)
        if not (view.flags.aligned and view.flags.writeable):
            adopters = ()
        chunk_box = decoder.spec.chunk_box(chunk, full=True)
        for wanted in boxes:
            common = chunk_box.common(wanted.box)
            if common is None:
                continue
            piece = view[common.within(chunk_box)]
            if wanted in adopters:
                self._arrays[wanted.output] = piece
            elif wanted.box == chunk_box:
                self._arrays[wanted.output] = view.copy()
            else:
                self._array(array, wanted)[common.within(wanted.box)] = piece
        return ""

    def memory_for(self, array: int, chunk: int, length: int) -> Bytes | None:
        """Return the contiguous memory into which a chunk can be read directly, or None if there is no such memory."""
        decoder, boxes = self.decoders[array], self._output_boxes(array)
        output = self._arrays[boxes[0].output] if self.keep and len(boxes) == 1 else None
        if output is None or decoder.compressed or length != decoder.stored_bytes or array in self._damaged:
            return None
        chunk_box, box = decoder.spec.chunk_box(chunk, full=True), boxes[0].box
        if chunk_box.common(box) != chunk_box:
            return None
        view = output[chunk_box.within(box)]
        return view.reshape(-1).view(np.uint8) if view.flags.c_contiguous and view.flags.writeable else None

    def accept_many(
        self, chunks: ChunkTable, rows: range, base: int, data: Bytes, kept: bool
    ) -> Iterator[tuple[int, str]]:
        """Accept chunks that were read together; for each damaged chunk, yield its table row and an error message."""
        others: Sequence[int] = rows
        mask = self._small[chunks.arrays[rows.start : rows.stop]]
        if len(rows) > 1 and mask.any():
            small = np.flatnonzero(mask) + rows.start
            owners = chunks.arrays[small]
            starts, decoder_ids = chunks.offsets[small] - base, self._decoder_ids[owners]
            checksums = chunks.checksums[small]
            good, made = _small_arrays(data, starts, self._distinct, decoder_ids, checksums, keep=self.keep)
            arrays, outputs = self._arrays, self._outputs
            for array, value in zip(owners[good].tolist(), made, strict=self.keep):
                arrays[outputs[array]] = value
            others = sorted([*(np.flatnonzero(~mask) + rows.start).tolist(), *np.delete(small, good).tolist()])
        for row in others:
            start = int(chunks.offsets[row]) - base
            array, chunk = int(chunks.arrays[row]), int(chunks.numbers[row])
            stored = data[start : start + int(chunks.lengths[row])]
            indexed = int(chunks.checksums[row])
            if problem := self.accept(array, chunk, stored, kept=kept and bool(chunks.kept[row]), indexed=indexed):
                yield row, problem

    def finish(self) -> list[NDArray[Any] | None]:
        """Return all arrays or boxes, allocating those that have no chunks. Call this only if no array is damaged."""
        if any(array is None for array in self._arrays):
            for array in range(len(self.decoders)):
                for wanted in self._output_boxes(array):
                    self._array(array, wanted)
        return self._arrays

    def _array(self, array: int, wanted: OutputBox) -> NDArray[Any]:
        with self._lock:
            output = self._arrays[wanted.output]
            if output is None:
                dtype = self.decoders[array].dtype
                memory = _fresh_memory(wanted.box.size * dtype.itemsize)
                output = self._arrays[wanted.output] = memory.view(dtype).reshape(wanted.box.shape)
            return output


def _run_start(box: Box, outer: Box) -> int | None:
    """Return the offset, in elements, of a box in the memory of ``outer``; None if the box is not contiguous there."""
    if not box.size or outer.common(box) != box:
        return None
    lengths, sizes = box.shape, outer.shape
    first = next((axis for axis, length in enumerate(lengths) if length > 1), len(lengths))
    if lengths[first + 1 :] != sizes[first + 1 :]:
        return None
    start = 0
    for begin, origin, size in zip(box.start, outer.start, sizes, strict=True):
        start = start * size + begin - origin
    return start


def _small_arrays(
    data: Bytes,
    starts: Integers,
    decoders: Sequence[ChunkDecoder],
    decoder_ids: Integers,
    indexed: Integers,
    *,
    keep: bool,
) -> tuple[Integers, list[NDArray[Any]]]:
    """Verify chunks that each hold one small array; return the indices of the valid chunks, and their arrays."""
    # This is vectorized, because a Python loop over ten thousand small arrays would take too long.
    sizes = np.array([decoder.spec.chunk_nbytes for decoder in decoders], np.int64)[decoder_ids]
    stops = starts + sizes
    expected = _elements_at(data, stops, np.dtype("<u4"))
    computed = np.empty(len(starts), np.uint32)
    order = np.argsort(sizes, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(sizes[order])) + 1):
        contents = _elements_at(data, starts[rows], np.dtype((np.void, int(sizes[rows[0]]))))
        computed[rows] = checksums_of(contents.tolist())
    verified = (computed == expected) & ((indexed == computed) | (indexed == -1))
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
    # Arrays with equal metadata that are evenly spaced in a block are created together, as rows of one strided array.
    blocks = np.concatenate([[0], np.cumsum(apart)])
    good = good[np.argsort(blocks * len(decoders) + decoder_ids[good], kind="stable")]
    first, decoder_ids = starts[good], decoder_ids[good]
    steps = np.diff(first)
    ends_run = (blocks[1:] != blocks[:-1]) | (decoder_ids[1:] != decoder_ids[:-1])
    ends_run[1:] |= (steps[1:] != steps[:-1]) & ~ends_run[:-1]
    made: list[NDArray[Any]] = []
    for (low, high), (origin, end) in zip(pairwise(bounds), spans, strict=True):
        block = aligned_empty(end - origin) if end - origin > _BLOCK else np.empty(end - origin, np.uint8)
        block[:] = data[origin:end]
        for start, stop in pairwise([low, *(np.flatnonzero(ends_run[low : high - 1]) + low + 1).tolist(), high]):
            decoder = decoders[decoder_ids[start]]
            shape, dtype = decoder.spec.shape, decoder.dtype
            offsets = (first[start:stop] - origin).tolist()
            if stop - start > 1 and 0 < len(shape) < _MOST_AXES:
                strides = (int(steps[start]), *np.ndarray(shape, dtype, block, offsets[0]).strides)
                made.extend(np.ndarray((stop - start, *shape), dtype, block, offsets[0], strides))
            else:
                made.extend(np.ndarray(shape, dtype, block, offset) for offset in offsets)
    return good, made


def _elements_at(data: Bytes, offsets: Integers, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return a copy of the elements that begin at the given byte offsets."""
    return np.ndarray(data.size - dtype.itemsize + 1, dtype, data, strides=(1,))[offsets]


def _fresh_memory(nbytes: int) -> Bytes:
    try:
        return aligned_empty(nbytes)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise MemoryError(f"an array of {nbytes} bytes does not fit in the remaining memory") from error
