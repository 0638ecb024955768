"""Bulk data files: what is written into one and how it is read back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

from ..errors import DamagedCheckpointError
from .buffers import PAGE, Buffer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType

    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Segment:
    """A contiguous stretch of a data file and where its bytes come from.

    Attributes:
        offset: Where it starts in the file, in bytes; a multiple of 4096.
        size: Its length in bytes.
        parts: Called once, in one thread. Yields one-dimensional uint8 arrays of ``size`` bytes in total, best of at
            most 1 MiB each; the memory of one is copied before the next is asked for.
    """

    offset: int
    size: int
    parts: Callable[[], Iterator[NDArray[np.uint8]]]


@dataclass(frozen=True, slots=True)
class DataFile:
    """A data file to be written.

    Attributes:
        name: Where, below the directory that it belongs to.
        size: Its length in bytes.
        segments: Its content, in ascending order; gaps are zero.
    """

    name: str
    size: int
    segments: Sequence[Segment]


class DataReader(Protocol):
    """A bulk data file that is open for reading; every method may be called from many threads at once."""

    @property
    def size(self) -> int:
        """Length of the file in bytes."""

    def read(self, offset: int, length: int, buffer: Buffer | None = None) -> NDArray[np.uint8]:
        """Reads exactly ``length`` bytes.

        Args:
            offset: Where to start, in bytes.
            length: How many bytes to read.
            buffer: Memory to read into, for a caller that copies the bytes out; without it, fresh memory.

        Returns:
            A one-dimensional uint8 array of ``length`` bytes, a view of ``buffer`` when one is given.

        Raises:
            DamagedCheckpointError: The file is shorter than that.
            StorageError: The system refused to read.
        """

    def close(self) -> None:
        """Closes the file; arrays that were read stay valid."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def check_segments(size: int, segments: Sequence[Segment]) -> None:
    """Raises ValueError unless the segments are aligned, in order, apart from each other and within ``size`` bytes."""
    end = 0
    for segment in segments:
        if segment.offset % PAGE:
            raise ValueError(f"the segment at offset {segment.offset} does not start at a multiple of {PAGE}")
        if segment.size < 0 or segment.offset < end:
            raise ValueError(f"the segment at offset {segment.offset} begins before offset {end}, where the last ends")
        end = segment.offset + segment.size
    if end > size:
        raise ValueError(f"the last segment ends at {end}, after the end of the file ({size})")


def check_extent(place: str, size: int, offset: int, length: int) -> None:
    """Raises DamagedCheckpointError unless ``length`` bytes at ``offset`` lie within a file of ``size`` bytes."""
    if offset < 0 or length < 0 or offset + length > size:
        raise truncated(place, size, offset, length)


def truncated(place: str, size: int, offset: int, length: int) -> DamagedCheckpointError:
    """Returns the error for a data file that ends too early."""
    return DamagedCheckpointError(
        f"{place} is truncated or its index is wrong: expected {length} bytes at offset {offset}, "
        f"found a file of {size} bytes; restore an older checkpoint or copy this one again"
    )
