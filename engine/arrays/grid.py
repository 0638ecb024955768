"""The chunk grid of an array."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from ..pytree import Box


@dataclass(frozen=True, slots=True)
class ArraySpec:
    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    itemsize: int
    grid: tuple[int, ...] = field(init=False)  # number of chunks along each axis; 0 along an empty axis
    chunks: int = field(init=False)  # number of chunks
    chunk_nbytes: int = field(init=False)  # size of a full chunk in bytes, without its checksum
    nbytes: int = field(init=False)  # total size of all chunks in bytes, as if every chunk were full
    contiguous: bool = field(init=False)  # whether every chunk is contiguous in the array's C order

    def __post_init__(self) -> None:
        grid = tuple(-(-size // chunk) for size, chunk in zip(self.shape, self.chunk_shape, strict=True))
        object.__setattr__(self, "grid", grid)
        object.__setattr__(self, "chunks", math.prod(grid))
        object.__setattr__(self, "chunk_nbytes", math.prod(self.chunk_shape) * self.itemsize)
        object.__setattr__(self, "nbytes", self.chunks * self.chunk_nbytes)
        cut = next((axis for axis, size in enumerate(self.chunk_shape) if size > 1), len(grid))
        object.__setattr__(self, "contiguous", all(count <= 1 for count in grid[cut + 1 :]))

    def chunk_box(self, number: int, *, full: bool = False) -> Box:
        """Return the box of a chunk, clipped to the array's shape unless ``full`` is set."""
        position = np.unravel_index(number, self.grid) if self.grid else ()
        start = tuple([int(index) * size for index, size in zip(position, self.chunk_shape, strict=True)])
        box = Box.at(start, self.chunk_shape)
        return box if full else Box(start, tuple(map(min, box.stop, self.shape)))

    def cells(self, box: Box) -> tuple[slice, ...]:
        """Return the slices of the chunk grid that overlap a box."""
        bounds = zip(box.start, box.stop, self.chunk_shape, strict=True)
        return tuple([slice(low // size, -(-high // size)) for low, high, size in bounds])
