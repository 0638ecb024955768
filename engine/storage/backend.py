"""The types that a location and its backends exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .buffers import Buffer


class Entry(NamedTuple):
    """One name directly inside a directory."""

    name: str  # the last segment of its path
    is_directory: bool  # a link to a directory counts as one
    # Length in bytes; None for directories, broken links, and stores whose listings have no sizes.
    size: int | None = None
    links: int = 1  # number of names of its file; its space is freed with the last of them
    identity: tuple[int, int] | None = None  # the same for all names of a file, if the caller has requested it


class Segment(NamedTuple):
    """A contiguous part of a data file and the source of its bytes."""

    offset: int  # first byte in the file; a multiple of 4096
    size: int  # length in bytes
    # Called once, in one thread. Yields one-dimensional uint8 arrays of ``size`` bytes in total, preferably of at most
    # 1 MiB each; the memory of an array is copied or sent before the next is requested.
    parts: Callable[[], Iterator[NDArray[np.uint8]]]
    lasting: bool = False  # whether parts keep their content until the file is written, so that they need no copy


class DataFile(NamedTuple):
    name: str  # path relative to the directory it belongs to
    size: int  # length in bytes
    segments: Sequence[Segment]  # content, in ascending order; gaps are zero


class FileIdentity(NamedTuple):
    """Facts that identify a data file as long as no process writes to it."""

    inode: int
    size: int  # bytes
    modified: int  # nanoseconds
    changed: int  # nanoseconds; programs cannot set this time, and new names and permissions change it


class DataReader(Protocol):
    """A bulk data file that is open for reading; every method may be called from many threads at once."""

    @property
    def size(self) -> int:
        """Length of the file in bytes."""

    def read(self, offset: int, length: int, buffer: Buffer | None = None) -> NDArray[np.uint8]:
        """Read exactly ``length`` bytes.

        Args:
            offset: Where to start, in bytes.
            length: How many bytes to read.
            buffer: Memory to read into, for a caller that copies the bytes; None reads into fresh memory.

        Returns:
            A one-dimensional uint8 array of ``length`` bytes, a view of ``buffer`` when one is given.

        Raises:
            DamagedCheckpointError: The file ends before these bytes do.
            StorageError: The system refused to read.
        """

    def read_into(self, offset: int, memory: Sequence[NDArray[np.uint8]]) -> bool:
        """Fill memory, one piece after the other, with the bytes from ``offset`` on, without a copy.

        Returns:
            False if only :meth:`read` can read them; the content of the memory is undefined then.
        """
        return False

    def close(self) -> None:
        """Close the file; arrays that were read remain valid."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
