"""A folder whose files lie on several hosts: it can only be read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from ..errors import DamagedCheckpointError, ObjectNotFoundError, StorageError
from .backend import Backend, DataReader, Entry, FileIdentity, Segment


class ScatteredFiles(Backend):
    """The files of one folder.

    Args:
        name: What the folder is called in errors.
        sizes: The files by path, each with its size in bytes.
        opened: Opens a file, wherever it is.
    """

    is_local = False
    is_remote = False

    def __init__(self, name: str, sizes: Mapping[str, int], opened: Callable[[str], DataReader]) -> None:
        self._name = name
        self._sizes = dict(sizes)
        self._opened = opened

    def url(self, key: str) -> str:
        return f"{self._name}/{key}" if key else self._name

    def is_there(self, key: str) -> bool:
        return key in self._sizes

    def is_directory(self, key: str) -> bool:
        return bool(self.entries(key))

    def entries(self, key: str) -> list[Entry]:
        begin = f"{key}/" if key else ""
        found: dict[str, Entry] = {}
        for path, size in self._sizes.items():
            if path.startswith(begin):
                name, slash, _ = path.removeprefix(begin).partition("/")
                found[name] = Entry(name, bool(slash), None if slash else size)
        return sorted(found.values())

    def read_bytes(self, key: str, limit: int | None, size: int | None) -> bytes:
        length = self._size(key)
        if limit is not None and length > limit:
            raise DamagedCheckpointError(f"{self.url(key)} has {length} bytes, more than the {limit} it may have")
        with self._opened(key) as file:
            return file.read(0, length).tobytes() if length else b""

    def has_size(self, key: str, size: int) -> bool:
        return self._size(key) == size

    def open_data(self, key: str, size: int | None, *, cached: bool | None) -> DataReader:
        self._size(key)
        return self._opened(key)

    def can_share(self) -> bool:
        return False

    def _size(self, key: str) -> int:
        try:
            return self._sizes[key]
        except KeyError:
            raise ObjectNotFoundError(f"{self.url(key)} is on none of the hosts") from None

    def _refuse(self, key: str) -> NoReturn:
        raise StorageError(f"{self.url(key)} lies on several hosts, and is only read")

    def write_bytes(self, key: str, data: bytes, *, atomic: bool) -> None:
        self._refuse(key)

    def make_directory(self, key: str, *, sync: bool) -> bool:
        self._refuse(key)

    def sync_directory(self, key: str) -> None:
        self._refuse(key)

    def rename(self, key: str, target: str) -> None:
        self._refuse(key)

    def remove(self, key: str) -> None:
        self._refuse(key)

    def remove_tree(self, key: str, first: str | None, last: str | None) -> None:
        self._refuse(key)

    def write_data(self, key: str, size: int, segments: Sequence[Segment], awaited: threading.Event | None) -> None:
        self._refuse(key)

    def identity(self, key: str) -> FileIdentity:
        self._refuse(key)

    def share(self, key: str, target: str, known: FileIdentity) -> FileIdentity:
        self._refuse(key)
