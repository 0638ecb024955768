"""Folders that lie in no single place: their files are in memory, or on several hosts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from ..errors import DamagedCheckpointError, ObjectNotFoundError, StorageError
from .backend import DataReader, Segment
from .location import Location
from .object_store import ObjectStoreBackend, file_parts


class FolderInMemory(ObjectStoreBackend):
    """The files of one folder by their paths, until they are written together or since they were read together."""

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

    def write_object(self, key: str, content: list[bytes]) -> None:
        self.files[key] = content[0]

    def write_data(self, key: str, size: int, segments: Sequence[Segment], awaited: threading.Event | None) -> None:
        self.files[key] = b"".join(part.tobytes() for part in file_parts(size, segments))

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


class ScatteredFiles(ObjectStoreBackend):
    """The files of one folder by path, with their sizes in bytes, each on some host; they are only read."""

    def __init__(self, name: str, sizes: Mapping[str, int], opened: Callable[[str], DataReader]) -> None:
        super().__init__(name, is_remote=False)
        self._sizes = dict(sizes)
        self._opened = opened

    def has_object(self, key: str) -> bool:
        return key in self._sizes

    def object_size(self, key: str) -> int:
        try:
            return self._sizes[key]
        except KeyError:
            raise ObjectNotFoundError(f"{self.url(key)} is on none of the hosts") from None

    def read_bytes(self, key: str, limit: int | None, size: int | None) -> bytes:
        length = self.object_size(key)
        if limit is not None and length > limit:
            raise DamagedCheckpointError(f"{self.url(key)} has {length} bytes, more than the {limit} it may have")
        with self._opened(key) as file:
            return file.read(0, length).tobytes() if length else b""

    def open_data(self, key: str, size: int | None, *, cached: bool | None) -> DataReader:
        self.object_size(key)
        return self._opened(key)

    def list_objects(self, key: str, *, itself: bool) -> list[str]:
        return sorted(self._sizes)

    def _refuse(self, key: str) -> NoReturn:
        raise StorageError(f"{self.url(key)} lies on several hosts, and is only read")

    def write_object(self, key: str, content: list[bytes]) -> None:
        self._refuse(key)

    def write_data(self, key: str, size: int, segments: Sequence[Segment], awaited: threading.Event | None) -> None:
        self._refuse(key)

    def remove(self, key: str) -> None:
        self._refuse(key)
