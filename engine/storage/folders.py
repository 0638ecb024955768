"""Objects in the memory of this process, and folders whose files are spread over several hosts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from ..errors import DamagedCheckpointError, ObjectNotFoundError
from ..forks import Lock
from .backend import DataReader
from .object_store import ObjectStoreBackend


class FolderInMemory(ObjectStoreBackend):
    """A folder whose files are held in memory, keyed by path, and stored together in one zip file."""

    def __init__(self, url: str, files: dict[str, bytes]) -> None:
        super().__init__(url, is_remote=False)
        self.files = files

    def has_object(self, key: str) -> bool:
        return key in self.files

    def object_size(self, key: str) -> int:
        return len(self.read_range(key, None))

    def read_range(self, key: str, byte_range: slice | None) -> bytes:
        content = self.files.get(key)
        if content is None:
            raise ObjectNotFoundError(f"cannot read {self.url(key)}: there is no such file")
        if byte_range is None:
            return content
        if byte_range.start >= len(content):
            raise DamagedCheckpointError(f"{self.url(key)} ends before byte {byte_range.start}")
        return content[byte_range]

    def list_objects(self, key: str, *, itself: bool) -> list[str]:
        return sorted(self.files)

    def write_bytes(self, key: str, data: bytes, *, atomic: bool) -> None:
        self.files[key] = data

    def remove(self, key: str) -> None:
        self.files.pop(key, None)


class MemoryBackend(FolderInMemory):
    """All objects of ``memory://``, with conditional writes. The generation of an object is its contents."""

    def __init__(self) -> None:
        super().__init__("memory://", {})
        self._changing = Lock()

    def honours_conditions(self, key: str, data: bytes | None) -> bool:
        return True

    def read_generation(self, key: str) -> tuple[bytes | None, bytes | None]:
        content = self.files.get(key)
        return content, content

    def write_where(self, key: str, data: bytes, generation: bytes | None) -> bool:
        with self._changing:
            if self.files.get(key) != generation:
                return False
            self.files[key] = data
            return True


@functools.cache
def open_memory() -> MemoryBackend:
    return MemoryBackend()


class ScatteredFiles(ObjectStoreBackend):
    """A read-only folder whose files are on several hosts; ``sizes`` maps each file path to its size in bytes."""

    def __init__(self, name: str, sizes: Mapping[str, int], open_file: Callable[[str], DataReader]) -> None:
        super().__init__(name, is_remote=False)
        self._sizes = dict(sizes)
        self._open_file = open_file

    def object_size(self, key: str) -> int:
        if key not in self._sizes:
            raise ObjectNotFoundError(f"{self.url(key)} is on none of the hosts")
        return self._sizes[key]

    def read_range(self, key: str, byte_range: slice | None) -> bytes:
        start, stop, _ = (byte_range or slice(None)).indices(self.object_size(key))
        with self._open_file(key) as file:
            return file.read(start, stop - start).tobytes() if stop > start else b""

    def open_data(self, key: str, size: int | None, *, cached: bool | None) -> DataReader:
        self.object_size(key)
        return self._open_file(key)

    def list_objects(self, key: str, *, itself: bool) -> list[str]:
        return sorted(self._sizes)
