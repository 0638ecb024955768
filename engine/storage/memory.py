"""The ``memory://`` backend: a TensorStore key-value store in process memory, with the same formats as on disk."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from ..errors import ObjectNotFoundError
from ..forks import Lock, cached_property
from .object_store import ObjectStoreBackend

if TYPE_CHECKING:
    import tensorstore

_opening = Lock()


@functools.cache
def _shared_context() -> tensorstore.Context:
    import tensorstore

    return tensorstore.Context()


def shared_context() -> tensorstore.Context:
    """Return the TensorStore context of this process, through which all ``memory://`` locations share one store."""
    with _opening:
        return _shared_context()


@functools.cache
def open_memory() -> MemoryBackend:
    return MemoryBackend("memory://", is_remote=False)


class MemoryBackend(ObjectStoreBackend):
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

    def remove(self, key: str) -> None:
        self.request(key, "remove", lambda: self._store.write(key, None))

    def list_objects(self, key: str, *, itself: bool) -> list[str]:
        import tensorstore

        span = tensorstore.KvStore.KeyRange(key if itself or not key else f"{key}/", f"{key}0" if key else "")
        names: list[bytes] = self.request(key, "list", lambda: self._store.list(span))  # "0" follows "/" in ASCII
        return sorted(name.decode("utf-8", "surrogateescape") for name in names)

    def honours_conditions(self, key: str, data: bytes | None) -> bool:
        return True

    def read_generation(self, key: str) -> tuple[bytes | None, bytes]:
        answer = self.request(key, "read", lambda: self._store.read(key))
        return answer.value if answer.state == "value" else None, answer.stamp.generation

    def write_where(self, key: str, data: bytes, generation: bytes | None) -> bool:
        # The empty key never has an object, so its generation stands for a missing object.
        expected = self.read_generation("")[1] if generation is None else generation
        return bool(self.request(key, "write", lambda: self._store.write(key, data, if_equal=expected)).generation)
