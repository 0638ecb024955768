"""The types that locations and their backends exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .buffers import Buffer


class Entry(NamedTuple):
    """One file or directory directly inside a directory."""

    name: str  # last path segment
    is_directory: bool  # True for a symlink to a directory, too
    # Length in bytes; None for directories, broken symlinks, and stores whose listings contain no sizes.
    size: int | None = None
    links: int = 1  # number of hard links to the file; its space is freed when the last one is deleted
    identity: tuple[int, int] | None = None  # equal for all hard links to a file; None if the listing has none


class Segment(NamedTuple):
    """A contiguous part of a data file and the source of its bytes."""

    offset: int  # first byte in the file; a multiple of 4096
    size: int  # length in bytes
    # Called once, in one thread. Yields one-dimensional uint8 arrays of ``size`` bytes in total, preferably of at most
    # 1 MiB each; the memory of an array is copied or sent before the next is requested.
    parts: Callable[[], Iterator[NDArray[np.uint8]]]
    lasting: bool = False  # whether parts stay unchanged until the file is written, so that they need no copy


class DataFile(NamedTuple):
    name: str  # path relative to the directory below which the files are written
    size: int  # length in bytes
    segments: Sequence[Segment]  # content, in ascending order; gaps are zeros


class FileIdentity(NamedTuple):
    """Properties that identify a data file as long as no process writes to it."""

    inode: int
    size: int  # bytes
    modified: int  # nanoseconds
    changed: int  # nanoseconds; changes with names and permissions, too, and cannot be set by programs


class DataReader(Protocol):
    """A bulk data file open for reading; every method may be called from many threads concurrently."""

    @property
    def size(self) -> int:
        """Length of the file in bytes."""

    def read(self, offset: int, length: int, buffer: Buffer | None = None) -> NDArray[np.uint8]:
        """Read exactly ``length`` bytes.

        Args:
            offset: Start of the range, in bytes.
            length: Number of bytes to read.
            buffer: Memory to read into, for a caller that copies the bytes; None allocates new memory.

        Returns:
            A one-dimensional uint8 array of ``length`` bytes; a view of ``buffer`` if one is given.

        Raises:
            DamagedCheckpointError: The file ends before the end of the range.
            StorageError: The read failed.
        """

    def read_into(self, offset: int, memory: Sequence[NDArray[np.uint8]]) -> bool:
        """Fill buffers, one after the other, with the bytes that start at ``offset``, without a copy.

        Returns:
            False if only :meth:`read` can read these bytes; the content of the buffers is then undefined.
        """
        return False

    def close(self) -> None:
        """Close the file; arrays that were read from it remain valid."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
