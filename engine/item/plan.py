"""Decides which chunk of which array goes to which place of which data file. Pure: no arrays, no files.

Chunks lie one after the other, each starting on a cache line (so that a mapped or directly read file can back an
array) and followed by its checksum. Runs of whole chunks form segments, the unit that one writer thread handles from
end to end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import OptionError
from ..format import LEVELS

CHUNK_ALIGNMENT = 64
"""Every chunk starts at a multiple of this many bytes: a cache line, and what XLA needs to adopt host memory."""
SEGMENT_ALIGNMENT = 4096
"""Every segment starts at a multiple of this many bytes: what direct I/O needs."""
CHECKSUM_BYTES = 4
"""Length of the crc32c that follows the data of every chunk."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How large the parts of a checkpoint are, and whether they are compressed.

    Attributes:
        chunk_bytes: Largest chunk of an array, the unit of partial reads.
        segment_bytes: How much one writer thread takes at a time.
        data_file_bytes: Data files are closed before they pass this size (a single chunk may).
        upload_bytes: The same in object stores, where each data file is one upload: eight of them are in memory, and
            under way, at a time.
        compression: The level of zstd, from 1 (fastest) to 22 (smallest), that chunks are compressed with. None
            stores them as they are, which is fastest: parameters and optimizer state hardly get smaller.
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
        """Returns the layout of the same checkpoint in an object store."""
        return replace(self, data_file_bytes=min(self.data_file_bytes, self.upload_bytes))


def check_size(name: str, size: object) -> None:
    """Raises OptionError unless an option is a size that chunks, segments and files can have."""
    if not isinstance(size, int) or size < SEGMENT_ALIGNMENT:
        raise OptionError(f"{name}={size!r} must be a whole number of bytes, at least {SEGMENT_ALIGNMENT}")


def check_level(name: str, level: object) -> None:
    """Raises OptionError unless an option is a level of compression, or None."""
    if level is not None and (type(level) is not int or level not in LEVELS):
        raise OptionError(f"{name}={level!r} must be a level of zstd, {LEVELS[0]} to {LEVELS[-1]}, or None")


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
        contiguous: Whether every chunk is one run of the array's elements in C order.
    """

    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    itemsize: int
    grid: tuple[int, ...] = field(init=False)
    chunks: int = field(init=False)
    chunk_nbytes: int = field(init=False)
    contiguous: bool = field(init=False)

    def __post_init__(self) -> None:
        grid = tuple(-(-size // chunk) for size, chunk in zip(self.shape, self.chunk_shape, strict=True))
        object.__setattr__(self, "grid", grid)
        object.__setattr__(self, "chunks", math.prod(grid))
        object.__setattr__(self, "chunk_nbytes", math.prod(self.chunk_shape) * self.itemsize)
        cut = next((axis for axis, size in enumerate(self.chunk_shape) if size > 1), len(grid))
        object.__setattr__(self, "contiguous", all(count <= 1 for count in grid[cut + 1 :]))

    def place(self, number: int) -> tuple[int, ...]:
        """Returns the index of the first element of a chunk."""
        index = np.unravel_index(number, self.grid) if self.grid else ()
        return tuple(int(i) * size for i, size in zip(index, self.chunk_shape, strict=True))

    def extent(self, starts: Sequence[int]) -> tuple[int, ...]:
        """Returns how many elements of the chunk that begins there lie inside the array, along each axis."""
        return tuple(
            min(size, limit - start) for size, limit, start in zip(self.chunk_shape, self.shape, starts, strict=True)
        )


def plan_files(
    arrays: Sequence[ArraySpec], layout: Layout, share: Iterable[tuple[int, int]] | None = None
) -> list[PlannedFile]:
    """Places chunks of arrays in data files.

    Args:
        arrays: The arrays.
        layout: Sizes of chunks, segments and files.
        share: Which chunks, in the order in which they are to lie: the position of the array, and the number of the
            chunk in its grid. None is all chunks of all arrays.

    Returns:
        The data files. Without any data there is no file.
    """
    if share is None:
        share = ((number, chunk) for number, array in enumerate(arrays) for chunk in range(array.chunks))
    sizes = [array.chunk_nbytes + CHECKSUM_BYTES for array in arrays]
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

    for number, chunk in share:
        stored = sizes[number]
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


def planned_places(files: Sequence[PlannedFile], arrays: Sequence[ArraySpec]) -> NDArray[np.int64]:
    """Lists where chunks were placed.

    Args:
        files: The data files.
        arrays: The arrays that were planned.

    Returns:
        A row for each chunk, in the order of their places: array, number, file, offset, and length with its checksum.
    """
    rows = [
        (*chunk[:2], number, chunk.offset)
        for number, file in enumerate(files)
        for segment in file.segments
        for chunk in segment.chunks
    ]
    places = np.array(rows, np.int64).reshape(-1, 4)
    lengths = np.array([array.chunk_nbytes + CHECKSUM_BYTES for array in arrays], np.int64)
    return np.column_stack((places, lengths[places[:, 0]]))
