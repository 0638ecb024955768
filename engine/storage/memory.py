"""Object stores in memory: ``memory://``, and folders whose files are in memory or on several hosts."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ..errors import DamagedCheckpointError, ObjectNotFoundError
from ..forks import Lock, cached_property
from .backend import DataReader, Segment
from .location import Location
from .object_store import ObjectStoreBackend, file_parts

if TYPE_CHECKING:
    import tensorstore

_opening = Lock()


@functools.cache
def _shared_context() -> tensorstore.Context:
    import tensorstore

    return tensorstore.Context()


def shared_context() -> tensorstore.Context:
    """Return the TensorStore context of this process; with it, ``memory://`` is the same store everywhere."""
    with _opening:
        return _shared_context()


@functools.cache
def open_memory() -> MemoryBackend:
    """Return the backend of the memory of this process."""
    return MemoryBackend("memory://", is_remote=False)


class MemoryBackend(ObjectStoreBackend):
    """The memory of this process, a store of TensorStore, which reads its own formats there as on a disk."""

    @cached_property
    def _store(self) -> tensorstore.KvStore:
        import tensorstore

        return tensorstore.KvStore.open({"driver": "memory"}, context=shared_context()).result()

    def has_object(self, key: str) -> bool:
        answer = self.request(key, "access", lambda: self._store.read(key, byte_range=slice(0, 0)))
        return bool(answer.state == "value")

    def read_range(self, key: str, byte_range: slice | None) -> bytes:
        answer = self.request(key, "read", lambda: self._store.read(key, byte_range=byte_range))
        if answer.state != "value":
            raise ObjectNotFoundError(f"cannot read {self.url(key)}: there is no such object")
        return answer.value

    def object_size(self, key: str) -> int:
        return len(self.read_range(key, None))

    def write_bytes(self, key: str, data: bytes, *, atomic: bool) -> None:
        self.request(key, "write", lambda: self._store.write(key, data))

    def write_data(self, key: str, size: int, segments: Sequence[Segment]) -> None:
        # The stream returns its bytes without a copy, because they have their final length from the start.
        stream = io.BytesIO(bytes(size))
        for part in file_parts(size, segments):
            stream.write(part.data)
        self.write_bytes(key, stream.getvalue(), atomic=True)

    def remove(self, key: str) -> None:
        self.request(key, "remove", lambda: self._store.write(key, None))

    def list_objects(self, key: str, *, itself: bool) -> list[str]:
        import tensorstore

        span = tensorstore.KvStore.KeyRange(key if itself or not key else f"{key}/", f"{key}0" if key else "")
        names: list[bytes] = self.request(key, "list", lambda: self._store.list(span))  # "0" follows "/"
        return sorted(name.decode("utf-8", "surrogateescape") for name in names)

    def honours_conditions(self, key: str, data: bytes | None) -> bool:
        return True

    def read_generation(self, key: str) -> tuple[bytes | None, bytes]:
        answer = self.request(key, "read", lambda: self._store.read(key))
        return answer.value if answer.state == "value" else None, answer.stamp.generation

    def write_where(self, key: str, data: bytes, generation: bytes | None) -> bool:
        expected = self.read_generation("")[1] if generation is None else generation  # the root is no object
        return bool(self.request(key, "write", lambda: self._store.write(key, data, if_equal=expected)).generation)


class FolderInMemory(ObjectStoreBackend):
    """The files of one folder by path, before they are written together or after they were read together."""

    def __init__(self, url: str, files: dict[str, bytes]) -> None:
        super().__init__(url, is_remote=False)
        self.files = files

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

    def write_data(self, key: str, size: int, segments: Sequence[Segment]) -> None:
        self.files[key] = b"".join(part.tobytes() for part in file_parts(size, segments))

    def remove(self, key: str) -> None:
        self.files.pop(key, None)


def folder_in_memory(location: Location, files: dict[str, bytes]) -> Location:
    """Return a folder with these files that messages name as ``location``; writes go into ``files``."""
    return Location(FolderInMemory(location.url, files), "")


class ScatteredFiles(ObjectStoreBackend):
    """The files of one folder, each on some host, by path, with their sizes in bytes; they are read-only."""

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
