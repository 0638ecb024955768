"""The seam between a location and the system that keeps its bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .bulk import DataReader, Segment


@dataclass(frozen=True, slots=True, order=True)
class Entry:
    """One name directly inside a directory.

    Attributes:
        name: The last segment of its path.
        is_directory: Whether it holds other names; a link to a directory counts as one.
        size: Its length in bytes; None for directories, broken links, and where listing does not tell.
    """

    name: str
    is_directory: bool
    size: int | None = None


class Backend(Protocol):
    """What a storage system has to offer; every key is the full path inside it.

    All methods raise only errors of ``holdfast.engine.errors``, with the path in the message. What "durable" means
    here: the bytes survive a power cut. Keys are never empty except where the root itself is meant.
    """

    is_local: bool
    """Whether keys are paths of the operating system."""

    is_remote: bool
    """Whether requests go over a network, by which one may arrive when nobody waits for it any more."""

    def url(self, key: str) -> str:
        """Returns the text that ``as_location`` turns back into this key."""

    def exists(self, key: str) -> bool:
        """Returns whether a file, an object or a directory has this key."""

    def is_there(self, key: str) -> bool:
        """Returns whether a file, a directory or an object has just this key; one request where there are any."""

    def is_directory(self, key: str) -> bool:
        """Returns whether the key is a directory; on an object store, whether any object lies below it."""

    def entries(self, key: str) -> list[Entry]:
        """Returns what lies directly inside, sorted by name; nothing when the directory is missing."""

    def read_bytes(self, key: str, limit: int | None, size: int | None) -> bytes:
        """Returns the whole content, refusing more than ``limit`` bytes before reading them; see ``Location``."""

    def has_size(self, key: str, size: int) -> bool:
        """Returns whether a file or object has just this length, without reading it where possible."""

    def write_bytes(self, key: str, data: bytes, *, atomic: bool) -> None:
        """Writes a small object and make its content durable, see ``Location.write_bytes``."""

    def make_directory(self, key: str, *, sync: bool) -> None:
        """Creates a directory and its parents; nothing on object stores."""

    def sync_directory(self, key: str) -> None:
        """Makes the names inside a directory durable; nothing on object stores."""

    def rename(self, key: str, target: str) -> None:
        """Moves a file or a directory within its parent and make the move durable."""

    def remove(self, key: str) -> None:
        """Deletes a file or an object; missing is fine."""

    def remove_tree(self, key: str, last: str | None) -> None:
        """Deletes everything below and the directory itself, never following links; missing is fine."""

    def write_data(self, key: str, size: int, segments: Sequence[Segment]) -> None:
        """Writes one bulk data file of ``size`` bytes and make its content durable."""

    def open_data(self, key: str, size: int | None) -> DataReader:
        """Opens a bulk data file for reading by many threads."""
