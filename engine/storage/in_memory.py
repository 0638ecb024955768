"""A folder whose files are in memory, until they are written together or since they were read together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ..errors import DamagedCheckpointError, ObjectNotFoundError
from .backend import Segment
from .location import Location
from .object_store import ObjectStoreBackend, file_parts


class FolderInMemory(ObjectStoreBackend):
    """The files of one folder by their paths."""

    def __init__(self, url: str, files: dict[str, bytes]) -> None:
        super().__init__(url, is_remote=False)
        self.files = files

    def has_object(self, key: str) -> bool:
        return key in self.files

    def object_size(self, key: str) -> int:
        return len(self._content(key))

    def read_range(self, key: str, byte_range: slice | None) -> bytes:
        content = self._content(key)
        if byte_range is None:
            return content
        if byte_range.start >= len(content):
            raise DamagedCheckpointError(f"{self.url(key)} ends before byte {byte_range.start}")
        return content[byte_range]

    def read_into(
        self, key: str, offset: int, memory: Sequence[NDArray[np.uint8]], answered: Callable[[], None]
    ) -> bool:
        content = np.frombuffer(self._content(key), np.uint8)
        if offset + sum(part.size for part in memory) > len(content):
            return False
        for part in memory:
            part[:] = content[offset : offset + part.size]
            offset += part.size
        return True

    def write_object(self, key: str, content: list[bytes]) -> None:
        self.files[key] = content[0]

    def write_data(self, key: str, size: int, segments: Sequence[Segment], awaited: threading.Event | None) -> None:
        self.files[key] = b"".join(part.tobytes() for part in file_parts(size, segments, sent=True))

    def remove(self, key: str) -> None:
        self.files.pop(key, None)

    def list_objects(self, key: str, *, itself: bool) -> list[str]:
        return sorted(self.files)

    def _content(self, key: str) -> bytes:
        try:
            return self.files[key]
        except KeyError:
            raise ObjectNotFoundError(f"cannot read {self.url(key)}: there is no such file") from None


def folder_in_memory(place: Location, files: dict[str, bytes]) -> Location:
    """Return a folder with these files, which shows itself as ``place``; what is written there goes into ``files``."""
    return Location(FolderInMemory(place.url, files), "")
