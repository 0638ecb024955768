"""How the arrays of one shape, element type and encoding are read: where their chunks are, and what these hold."""

from __future__ import annotations

import errno
import math
from itertools import product
from typing import Any

import numpy as np

from ..errors import DamagedCheckpointError
from ..format import ArrayMetadata, content_limit, crc32c, decompress_chunk
from ..storage import aligned_empty
from ..tree import Box
from .plan import CHECKSUM_BYTES
from .sources import Bytes

COPY = 256 << 10
"""Bytes; smaller arrays are copied out of what was read, so that a small one never keeps all of that in memory."""

_SMALL = 8 << 10  # bytes of the largest array that shares its memory with others
_INCOMPRESSIBLE = 1 << 10  # bytes that zstd adds at most to a chunk, besides 1 in 128


def fresh_memory(nbytes: int) -> Bytes:
    """Returns memory for an array, with arbitrary content.

    Raises:
        MemoryError: There is not so much of it.
    """
    try:
        return aligned_empty(nbytes)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise MemoryError(f"an array of {nbytes} bytes does not fit the memory that is left") from error


class Form:
    """How arrays with the same metadata are read.

    Args:
        metadata: The arrays' metadata.

    Attributes:
        dtype: Of the elements as they are stored.
        shape: Of the whole array.
        chunk_shape: Of one chunk.
        grid: How many chunks there are along each axis.
        chunk_count: How many chunks there are in all.
        data_bytes: Bytes of one chunk's values.
        stored_bytes: Bytes of one chunk in its file; where chunks are compressed, what they can be at most.
        compressed: Whether chunks are compressed.
        checksummed: Whether a checksum follows every chunk.
        sole: Whether the whole array is one chunk.
        adopted: Whether the memory that this chunk is read into becomes the array.
        lone: Whether there is one chunk, and no other size that it can have.
        key: What follows the array's name in the key of its only chunk.
        small: Whether it is so small besides that it is handled together with others.
    """

    __slots__ = (
        "adopted", "checksummed", "chunk_count", "chunk_shape", "compressed", "data_bytes", "dtype", "grid", "key",
        "lone", "shape", "small", "sole", "stored_bytes",
    )  # fmt: skip

    def __init__(self, metadata: ArrayMetadata) -> None:
        self.dtype: np.dtype[Any] = metadata.dtype
        self.shape = metadata.shape
        self.chunk_shape = metadata.chunk_shape
        self.grid = metadata.grid
        self.chunk_count = metadata.chunk_count
        self.data_bytes = math.prod(metadata.chunk_shape) * metadata.dtype.itemsize
        self.compressed = metadata.compression is not None
        self.checksummed = metadata.checksummed
        largest = self.data_bytes + self.data_bytes // 128 + _INCOMPRESSIBLE if self.compressed else self.data_bytes
        self.stored_bytes = largest + (CHECKSUM_BYTES if self.checksummed else 0)
        self.sole = metadata.chunk_shape == metadata.shape
        self.adopted = self.sole and not self.compressed and self.data_bytes >= COPY
        self.lone = self.chunk_count == 1 and not self.compressed
        self.key = b"/c" + b"/0" * len(self.shape)
        self.small = self.sole and self.checksummed and not self.compressed and self.data_bytes <= _SMALL

    @property
    def nbytes(self) -> int:
        """Returns the bytes of a whole array."""
        return math.prod(self.shape) * self.dtype.itemsize

    def why_not(self, length: int) -> str:
        """Says why a stored chunk cannot have a length in bytes, or nothing."""
        if length == self.stored_bytes or (self.compressed and CHECKSUM_BYTES < length < self.stored_bytes):
            return ""
        return f"should take {'at most ' if self.compressed else ''}{self.stored_bytes} bytes, not {length}"

    def content(self, data: Bytes) -> tuple[Bytes, str]:
        """Checks the bytes of a chunk.

        Args:
            data: The bytes as they are stored.

        Returns:
            The bytes of its values, and what is wrong with it, or nothing.
        """
        problem = self.why_not(data.size)
        if problem:
            return data, problem
        values = data
        if self.checksummed:
            values = data[:-CHECKSUM_BYTES]
            expected = int.from_bytes(data[-CHECKSUM_BYTES:].tobytes(), "little")
            found = crc32c(values)
            if found != expected:
                return data, f"has crc32c {found:08x} where {expected:08x} was written"
        if not self.compressed:
            return values, ""
        try:
            limit = content_limit(values.tobytes())
            if limit < self.data_bytes:  # before memory is taken for what the metadata claims
                return data, f"should hold {self.data_bytes} bytes, and can hold {limit} at most"
            content = fresh_memory(self.data_bytes)
            decompress_chunk(values, content)
        except DamagedCheckpointError as error:
            return data, f"cannot be decompressed: {error}"
        return content, ""

    def chunk_box(self, number: int) -> Box:
        """Returns which elements a chunk holds, those beyond the array's end included."""
        position = np.unravel_index(number, self.grid) if self.grid else ()
        start = [int(index) * size for index, size in zip(position, self.chunk_shape, strict=True)]
        return Box.at(start, self.chunk_shape)

    def chunks_in(self, box: Box) -> list[int]:
        """Returns the numbers of the chunks that hold elements of a box."""
        if not box.size:
            return []
        spans = [
            range(low // size, -(-high // size))
            for low, high, size in zip(box.start, box.stop, self.chunk_shape, strict=True)
        ]
        steps = [math.prod(self.grid[axis + 1 :]) for axis in range(len(self.grid))]
        return [sum(map(int.__mul__, position, steps)) for position in product(*spans)]
