"""Types shared by locations and their storage backends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .buffers import Buffer

# What a location may be, for error messages.
KNOWN_PLACES = "a path, file:///path, memory://name, s3://bucket/name, gs://bucket/name or az://container/name"


class Entry(NamedTuple):
    """An entry of a directory: a file or a subdirectory."""

    name: str  # last path segment
    is_directory: bool  # also True for a symlink to a directory
    # Length in bytes; None for a directory or a broken symlink, or if the store does not list sizes.
    size: int | None = None
    links: int = 1  # number of hard links to the file; deleting the last one frees its space
    identity: tuple[int, int] | None = None  # device and inode, equal for all hard links to a file; None if unknown


class Segment(NamedTuple):
    """A contiguous byte range of a data file, and a function that produces its bytes."""

    offset: int  # offset in the file in bytes, a multiple of 4096
    size: int  # length in bytes
    # Called once, in one thread. Yields one-dimensional uint8 arrays that add up to ``size`` bytes, preferably of at
    # most 1 MiB each. Each array is copied or sent before the next one is requested.
    parts: Callable[[], Iterator[NDArray[np.uint8]]]
    lasting: bool = False  # whether the arrays stay unchanged until the file is written, so that no copy is needed

    def checked_parts(self) -> Iterator[NDArray[np.uint8]]:
        """Yield the parts; raise ValueError if they do not add up to ``size``, before any excess part is yielded."""
        total = 0
        for part in self.parts():
            total += part.size
            if total > self.size:
                break
            yield part
        if total != self.size:
            raise ValueError(
                f"the segment at offset {self.offset} should have {self.size} bytes, but its parts have {total}"
            )


class DataFile(NamedTuple):
    name: str  # path relative to the target directory
    size: int  # length in bytes
    segments: Sequence[Segment]  # contents of the file, sorted by offset; gaps are filled with zeros


class FileIdentity(NamedTuple):
    """Metadata that identifies a data file as long as the file is not modified."""

    inode: int
    size: int  # length in bytes
    modified: int  # mtime in nanoseconds
    changed: int  # ctime in nanoseconds; programs cannot set it; also changes with links and permissions


class DataReader(Protocol):
    """A bulk data file open for reading. Its methods may be called from several threads at once."""

    @property
    def size(self) -> int:
        """Length of the file in bytes."""

    def read(self, offset: int, length: int, buffer: Buffer | None = None) -> NDArray[np.uint8]:
        """Read exactly ``length`` bytes.

        Args:
            offset: Start of the range, in bytes.
            length: Number of bytes to read.
            buffer: A buffer to read into, reusable once the bytes have been copied. If None, new memory is allocated.

        Returns:
            A one-dimensional uint8 array of ``length`` bytes. If a buffer is given, the array is a view of it.

        Raises:
            DamagedCheckpointError: The file ends before the end of the range.
            StorageError: The read failed.
        """

    def read_into(self, offset: int, memory: Sequence[NDArray[np.uint8]]) -> bool:
        """Read bytes starting at ``offset`` directly into the given arrays, one after the other.

        Returns:
            True if all arrays have been filled. If False, their contents are undefined; use :meth:`read` instead.
        """
        return False

    def close(self) -> None:
        """Close the file. Arrays returned by :meth:`read` remain valid."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
