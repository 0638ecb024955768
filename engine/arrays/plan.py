"""Plans saves: how arrays are split into chunks, and where each chunk is placed in the data files.

The plan depends only on names, shapes, dtypes and shardings, so every process computes the same plan. Planning needs no
array values, and neither reads nor writes files.

Chunks are stored consecutively, each followed by its checksum. Each chunk starts on a cache line, so an array can be a
view of a file that was mapped or read directly. Runs of complete chunks form segments, which are page-aligned for
direct I/O; each segment is written by one thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from ..errors import OptionError, UnsupportedLeafError
from ..foreign_arguments import explains_arguments
from ..format import LEVELS, Stored, dtype_name, encode_array_metadata, key_order, storage_dtype
from ..pytree import ArrayLeaf, Part, ValueLeaf, format_path
from ..storage import PAGE, round_up
from .digests import CHECKSUM_BYTES, CHUNK_ALIGNMENT, Integers
from .grid import ArraySpec

T = TypeVar("T")

HostLeaf = ArrayLeaf | ValueLeaf

ChunkIds = tuple[Integers, Integers]  # for each chunk, the index of its array and its number within the array

_CHUNKS_LIMIT = 1 << 20
_TINY = 1024  # minimum chunk size, in bytes, of an array that has more than `_CHUNKS_LIMIT` chunks
_TOO_SMALL = 64  # chunks above the limit are better than chunks smaller than 1/64 of the limit


def batches(items: Iterable[T], size: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Split items into groups of at most ``limit`` bytes; a larger item forms its own group."""
    group: list[T] = []
    total = 0
    for item in items:
        if group and total + size(item) > limit:
            yield group
            group, total = [], 0
        group.append(item)
        total += size(item)
    if group:
        yield group


# ---- options


@explains_arguments
@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of the chunks, segments and data files in a checkpoint, and the compression of its chunks.

    Attributes:
        chunk_bytes: Maximum size of a chunk, in bytes. A chunk is the unit of partial reads.
        segment_bytes: Number of bytes that a writer thread writes at a time.
        data_file_bytes: Maximum size of a data file, in bytes. Only a file with a single chunk may be larger.
        upload_bytes: Maximum size, in bytes, of a data file in an object store, and of a data file on disk if the run
            has a mirror in an object store. Each file is one upload; up to eight are held in memory and sent at a time.
        compression: zstd level for the chunks, from 1 (fastest) to 22 (smallest). None stores them uncompressed,
            which is fastest and costs little space, because parameters and optimizer state hardly shrink.
    """

    chunk_bytes: int = 16 << 20
    segment_bytes: int = 16 << 20
    data_file_bytes: int = 4 << 30
    upload_bytes: int = 64 << 20
    compression: int | None = None

    def __post_init__(self) -> None:
        for name in ("chunk_bytes", "segment_bytes", "data_file_bytes", "upload_bytes"):
            check_size(name, getattr(self, name))
        check_level("compression", self.compression)

    def for_uploads(self) -> Layout:
        """Return this layout with data files limited to the upload size."""
        return replace(self, data_file_bytes=min(self.data_file_bytes, self.upload_bytes))


def check_size(name: str, size: object) -> None:
    """Raise OptionError unless an option is a valid size in bytes for chunks, segments or files."""
    if not isinstance(size, int) or size < PAGE:
        raise OptionError(f"{name}={size!r} must be a whole number of bytes, at least {PAGE}")


def check_level(name: str, level: object) -> None:
    """Raise OptionError unless an option is a compression level or None."""
    if level is not None and (type(level) is not int or level not in LEVELS):
        raise OptionError(f"{name}={level!r} must be a level of zstd, {LEVELS[0]} to {LEVELS[-1]}, or None")


# ---- chunks of one array


def chunk_shape(shape: tuple[int, ...], itemsize: int, limit: int, cuts: Sequence[int] = ()) -> tuple[int, ...]:
    """Choose the shape of chunks of at most ``limit`` bytes, contiguous in C order as far as the array's parts allow.

    >>> chunk_shape((1000, 10), 8, 32_000)
    (334, 10)
    >>> chunk_shape((1000, 10), 8, 32_000, (250, 5))
    (250, 5)
    """
    dims = [max(1, size) for size in shape]
    exact = [False] * len(dims)
    for axis, cut in enumerate(cuts):
        if cut:
            dims[axis], exact[axis] = cut, True
    if not dims or math.prod(dims) * itemsize <= limit:
        return tuple(dims)
    inner, axis = itemsize, len(dims) - 1
    while inner * dims[axis] <= limit:
        inner *= dims[axis]
        axis -= 1
    most = max(1, limit // inner)
    size = _divisor(dims[axis], most) if exact[axis] else -(-dims[axis] // -(-dims[axis] // most))
    return (*(1 for _ in range(axis)), size, *dims[axis + 1 :])


def _divisor(number: int, most: int) -> int:
    """Return the largest divisor of ``number`` up to ``most`` or, if that is too small, the next larger divisor."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    divisors = sorted({*small, *(number // divisor for divisor in small)})
    below = max(divisor for divisor in divisors if divisor <= most)
    return below if below * _TOO_SMALL >= most else min(divisor for divisor in divisors if divisor > most)


def common_cuts(shape: tuple[int, ...], parts: Sequence[Part] | None) -> tuple[int, ...]:
    """Return the greatest common divisor of the part boundaries along each axis; 0 if an axis has no boundaries."""
    if parts is None or not shape or 0 in shape:
        return (0,) * len(shape)
    boxes = [part.box for part in parts if 0 not in part.shape]
    starts, ends = (np.array(corners, np.int64) for corners in zip(*boxes, strict=True))
    inside = np.where(ends < np.array(shape), ends, 0)
    return tuple(np.gcd.reduce(np.concatenate((starts, inside)), axis=0).tolist())


# ---- the arrays of a tree


class ArrayEncoding(NamedTuple):
    spec: ArraySpec
    stored: Stored  # element type in the data files
    metadata: bytes  # content of ``zarr.json``
    compression: int | None  # zstd level for the chunks, or None
    facts: dict[str, Any]  # entries of the leaf in ``tree.json`` that are not in the array metadata
    # The parts of the stored array and the processes that hold them; None if every process holds the whole array.
    parts: Sequence[Part] | None
    is_tensor: bool  # whether the leaf is a torch tensor
    text: str  # a description of the encoding, for errors and for comparing processes


class Catalog:
    """The arrays of a tree, numbered in the order of their index keys, which is the same on every process."""

    def __init__(
        self,
        names: Sequence[str],
        leaves: Sequence[HostLeaf],
        layout: Layout,
        compression: Mapping[str, int | None] | None = None,
        chunk_bytes: Mapping[str, int] | None = None,
    ) -> None:
        compression, chunk_bytes = compression or {}, chunk_bytes or {}
        ids: dict[tuple[Any, ...], int] = {}
        self.distinct: list[ArrayEncoding] = []  # one entry for each distinct encoding
        arrays: list[str] = []
        positions: list[int] = []
        encoding_ids: list[int] = []
        special = compression.keys() | chunk_bytes.keys()
        level, limit = layout.compression, layout.chunk_bytes
        for position, (name, leaf) in enumerate(zip(names, leaves, strict=True)):
            if isinstance(leaf, ValueLeaf):
                continue
            if special:
                level = compression.get(name, layout.compression)
                limit = chunk_bytes.get(name, layout.chunk_bytes)
            # Leaves with the same sharding share one list of parts. Compare these lists by id, because comparing the
            # contents of thousands of lists would take longer than all other work.
            is_tensor = leaf.details["kind"] == "torch"
            key = (leaf.shape, leaf.dtype, limit, level, id(leaf.parts), is_tensor)
            if key not in ids:
                ids[key] = len(self.distinct)
                self.distinct.append(_encoding(name, leaf, limit, level, is_tensor))
            arrays.append(name)
            positions.append(position)
            encoding_ids.append(ids[key])
        order = key_order(arrays)
        self.names = [arrays[i] for i in order]
        self.positions: Integers = np.array(positions, np.int64)[order]  # index of each array's leaf
        self.encoding_ids: Integers = np.array(encoding_ids, np.int64)[order]  # indexes into `distinct`
        self.encodings: list[ArrayEncoding] = [self.distinct[i] for i in self.encoding_ids.tolist()]
        # Global number of each array's first chunk; the last entry is the total number of chunks.
        self.starts: Integers = np.zeros(len(order) + 1, np.int64)
        np.cumsum(self.column(lambda encoding: encoding.spec.chunks), out=self.starts[1:])
        # Size of each array's chunks in bytes before compression, including the checksum.
        self.lengths = self.column(lambda encoding: encoding.spec.chunk_nbytes + CHECKSUM_BYTES)
        self._values = [name for name, leaf in zip(names, leaves, strict=True) if isinstance(leaf, ValueLeaf)]

    def column(self, value: Callable[[ArrayEncoding], Any], dtype: Any = np.int64) -> NDArray[Any]:
        """Apply ``value`` to each array's encoding; return an array with one entry per array."""
        return np.array(list(map(value, self.distinct)), dtype)[self.encoding_ids]

    def documents(self, leaves: Sequence[HostLeaf]) -> list[dict[str, Any]]:
        """Return the ``tree.json`` entries of all leaves, in tree order."""
        documents = [leaf.details for leaf in leaves]
        if any(encoding.facts for encoding in self.distinct):
            for position, encoding in zip(self.positions.tolist(), self.encodings, strict=True):
                if encoding.facts:
                    documents[position] = {**documents[position], **encoding.facts}
        return documents

    def all_chunks(self) -> ChunkIds:
        arrays = np.repeat(np.arange(len(self.names)), np.diff(self.starts))
        return arrays, np.arange(len(arrays)) - self.starts[arrays]

    def in_tree_order(self, arrays: Integers, numbers: Integers) -> ChunkIds:
        """Sort chunks into the order in which data files store them: by the position of their leaf in the tree."""
        order = np.lexsort((numbers, self.positions[arrays]))
        return arrays[order], numbers[order]

    def lines(self, values: Mapping[str, str]) -> list[str]:
        """Describe each leaf in one line: its name, a tab, and everything that must be equal on all processes."""
        described = zip(self.names, self.encodings, strict=True)
        lines = [f"{name}\t{values.get(name, encoding.text)}" for name, encoding in described]
        return lines + [f"{name}\t{values.get(name, 'a value')}" for name in sorted(self._values)]


def _encoding(name: str, leaf: ArrayLeaf, limit: int, level: int | None, is_tensor: bool) -> ArrayEncoding:
    stored = storage_dtype(leaf.dtype)
    shape, parts = leaf.shape, leaf.parts
    if stored.extra is not None:
        shape = (*shape, stored.extra)
        parts = parts and tuple(part.with_axis(stored.extra) for part in parts)
    chunks = chunk_shape(shape, stored.numpy.itemsize, limit, common_cuts(shape, parts))
    spec = ArraySpec(shape, chunks, stored.numpy.itemsize)
    if spec.chunks > _CHUNKS_LIMIT and spec.chunk_nbytes < _TINY:
        raise UnsupportedLeafError(
            f"the leaf {format_path(name)} of shape {list(leaf.shape)} cannot be saved: the boundaries of its parts "
            f"have no large common divisor, so it would be cut into {spec.chunks} chunks of {spec.chunk_nbytes} "
            "bytes; divide it more evenly, or save it from one process"
        )
    dtype = dtype_name(leaf.dtype)
    text = f"{dtype}{list(leaf.shape)} in chunks of {list(chunks)}"
    if level is not None:
        text += f", compressed with level {level}"
    if parts is not None:
        digest = xxhash.xxh3_64_hexdigest(repr(tuple(parts)).encode())
        text += f", divided into {len(parts)} parts ({digest})"
    facts = {} if stored.extra is None and leaf.dtype.isnative else {"dtype": dtype}
    metadata = encode_array_metadata(shape, stored.data_type, chunks, level)
    return ArrayEncoding(spec, stored, metadata, level, facts, parts, is_tensor, text)


# ---- data files


class PlannedSegment(NamedTuple):
    """A run of chunks that one thread writes, as columns sorted by offset."""

    offset: int
    size: int
    arrays: Integers  # index of each chunk's array
    numbers: Integers  # each chunk's number within its array
    offsets: Integers  # start of each chunk in the file
    lengths: Integers  # stored size of each chunk, including its checksum
    first: int  # number of chunks in all preceding segments and files


class PlannedFile(NamedTuple):
    """A data file, with its segments in order."""

    segments: list[PlannedSegment]

    @property
    def size(self) -> int:
        return self.segments[-1].offset + self.segments[-1].size


def plan_files(lengths: Integers, layout: Layout, *groups: ChunkIds) -> list[PlannedFile]:
    """Place groups of chunks in separate data files. ``lengths`` contains the size in bytes of each array's chunks."""
    files: list[PlannedFile] = []
    before = 0
    for arrays, numbers in groups:
        sizes = lengths[arrays]
        padded = -(-sizes // CHUNK_ALIGNMENT) * CHUNK_ALIGNMENT
        # Start and end of each chunk, as if all chunks were in one segment.
        starts = np.cumsum(padded) - padded
        ends = starts + sizes
        segments: list[PlannedSegment] = []
        first = offset = 0
        while first < len(arrays):
            if offset and offset + int(sizes[first]) > layout.data_file_bytes:
                files.append(PlannedFile(segments))
                segments, offset = [], 0
            room = min(layout.segment_bytes, layout.data_file_bytes - offset) + int(starts[first])
            stop = max(first + 1, int(np.searchsorted(ends, room, "right")))
            some = slice(first, stop)
            size = int(ends[stop - 1] - starts[first])
            offsets = starts[some] + (offset - int(starts[first]))
            segments.append(
                PlannedSegment(offset, size, arrays[some], numbers[some], offsets, sizes[some], before + first)
            )
            first, offset = stop, round_up(offset + size)
        before += len(arrays)
        if segments:
            files.append(PlannedFile(segments))
    return files


def chunk_table(files: Sequence[PlannedFile], checksums: NDArray[np.uint32], first: int = 0) -> Integers:
    """Return one row per placed chunk: array, chunk number, file (counted from ``first``), offset, length, checksum."""
    table: Integers = np.empty((len(checksums), 6), np.int64)
    table[:, 5] = checksums
    for number, file in enumerate(files, first):
        for segment in file.segments:
            rows = table[segment.first : segment.first + len(segment.arrays)]
            rows[:, 0], rows[:, 1], rows[:, 2] = segment.arrays, segment.numbers, number
            rows[:, 3], rows[:, 4] = segment.offsets, segment.lengths
    return table
