"""Decides which chunk of which array goes to which place of which data file. Pure: no arrays, no files.

Arrays are cut into chunks of tens of MiB by their shape alone, so that a checkpoint looks the same whatever
devices it came from. Chunks lie one after the other, each starting on a cache line (so that a mapped or
directly read file can back an array) and followed by its checksum. Runs of whole chunks form segments, the
unit that one writer thread handles from end to end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..errors import OptionError

CHUNK_ALIGNMENT = 64
"""Every chunk starts at a multiple of this many bytes: a cache line, and what XLA needs to adopt host memory."""
SEGMENT_ALIGNMENT = 4096
"""Every segment starts at a multiple of this many bytes: what direct I/O needs."""
CHECKSUM_BYTES = 4
"""Length of the crc32c that follows the data of every chunk."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How large the parts of a checkpoint are.

    Attributes:
        chunk_bytes: Largest chunk of an array, the unit of partial reads.
        segment_bytes: How much one writer thread takes at a time.
        data_file_bytes: Data files are closed before they pass this size (a single chunk may); on object stores, the
            size of an upload.
    """

    chunk_bytes: int = 16 << 20
    segment_bytes: int = 16 << 20
    data_file_bytes: int = 4 << 30

    def __post_init__(self) -> None:
        for name in ("chunk_bytes", "segment_bytes", "data_file_bytes"):
            size = getattr(self, name)
            if not isinstance(size, int) or size < SEGMENT_ALIGNMENT:
                raise OptionError(f"{name}={size!r} must be a whole number of bytes, at least {SEGMENT_ALIGNMENT}")


class Chunk(NamedTuple):
    """One chunk of one array, in its place.

    Attributes:
        array: Position of the array in the list that was planned.
        number: The chunk's number in its array's grid, in C order.
        offset: Where its data starts in the data file, in bytes.
    """

    array: int
    number: int
    offset: int


@dataclass(frozen=True, slots=True)
class PlannedSegment:
    """A run of chunks that is written by one thread.

    Attributes:
        offset: Where it starts in the data file, in bytes.
        size: Its length in bytes, checksums and padding included.
        chunks: What it holds, in order.
    """

    offset: int
    size: int
    chunks: list[Chunk]


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """One data file: its size in bytes and its segments in order."""

    size: int
    segments: list[PlannedSegment]


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """What the plan needs to know of an array as it is stored.

    Attributes:
        shape: Its shape.
        chunk_shape: The shape of a whole chunk.
        itemsize: Bytes an element.
        grid: How many chunks there are along each axis (0 along an empty one).
        chunks: How many chunks there are in all.
        chunk_nbytes: Bytes of one whole chunk, without its checksum.
    """

    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    itemsize: int
    grid: tuple[int, ...] = field(init=False)
    chunks: int = field(init=False)
    chunk_nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        grid = tuple(-(-size // chunk) for size, chunk in zip(self.shape, self.chunk_shape, strict=True))
        object.__setattr__(self, "grid", grid)
        object.__setattr__(self, "chunks", math.prod(grid))
        object.__setattr__(self, "chunk_nbytes", math.prod(self.chunk_shape) * self.itemsize)


def chunk_shape(shape: tuple[int, ...], itemsize: int, limit: int) -> tuple[int, ...]:
    """Cuts an array into chunks that are contiguous in C order.

    Args:
        shape: The array's shape.
        itemsize: Bytes an element.
        limit: Largest chunk in bytes; a single element may be larger.

    Returns:
        The shape of a chunk: 1 on the leading axes, a part of one axis, the whole of the others. The part is as
        even as it can be, so that the last chunk (which is stored padded to full size) wastes little.

    >>> chunk_shape((1000, 10), 8, 32_000)
    (334, 10)
    """
    dims = [max(1, size) for size in shape]
    if not dims or math.prod(dims) * itemsize <= limit:
        return tuple(dims)
    inner, axis = itemsize, len(dims) - 1
    while inner * dims[axis] <= limit:
        inner *= dims[axis]
        axis -= 1
    count = -(-dims[axis] // max(1, limit // inner))
    return (*(1 for _ in range(axis)), -(-dims[axis] // count), *dims[axis + 1 :])


def plan_files(arrays: Sequence[ArraySpec], layout: Layout) -> list[PlannedFile]:
    """Places the chunks of arrays in data files.

    Args:
        arrays: The arrays in the order in which they are to lie.
        layout: Sizes of chunks, segments and files.

    Returns:
        The data files. Empty arrays take no place; without any data there is no file.
    """
    files: list[PlannedFile] = []
    segments: list[PlannedSegment] = []
    chunks: list[Chunk] = []
    start = end = 0  # of the open segment; `end` is where its last chunk's checksum ends

    def close_segment() -> None:
        nonlocal chunks, start
        if chunks:
            segments.append(PlannedSegment(start, end - start, chunks))
            chunks = []
        start = -(-end // SEGMENT_ALIGNMENT) * SEGMENT_ALIGNMENT

    def close_file() -> None:
        nonlocal segments, start, end
        close_segment()
        if segments:
            files.append(PlannedFile(end, segments))
            segments = []
        start = end = 0

    for number, array in enumerate(arrays):
        stored = array.chunk_nbytes + CHECKSUM_BYTES
        for chunk in range(array.chunks):
            offset = -(-end // CHUNK_ALIGNMENT) * CHUNK_ALIGNMENT
            if chunks and offset + stored - start > layout.segment_bytes:
                close_segment()
                offset = start
            if offset and offset + stored > layout.data_file_bytes:
                close_file()
                offset = start
            chunks.append(Chunk(number, chunk, offset))
            end = offset + stored
    close_file()
    return files
