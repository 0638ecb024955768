"""Objects in a key-value store that TensorStore can reach: memory, S3, Google Cloud Storage."""

from __future__ import annotations

import functools
import io
import json
import threading
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ..errors import DamagedCheckpointError, HoldfastError, ObjectNotFoundError
from .backend import Entry
from .bulk import DataReader, Segment, check_segments
from .kv_reader import KvDataReader
from .requests import finish
from .several import REQUESTS, several
from .stores import hint, shared_context, store_settings, store_spec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import tensorstore

_PAGE = 1000
"""How many names stores list at a time."""
_UNTOLD = 32 << 20
"""Bytes that an object of unknown length may have before it counts as slow."""


def open_backend(scheme: str, bucket: str) -> KvStoreBackend:
    """Returns the backend for a bucket, the same one for the same settings."""
    return _open_backend(scheme, bucket, json.dumps(store_settings(scheme, bucket)))


@functools.lru_cache(maxsize=64)
def _open_backend(scheme: str, bucket: str, settings: str) -> KvStoreBackend:  # noqa: ARG001 - a part of the key
    return KvStoreBackend(scheme, bucket, store_spec(scheme, bucket))


class KvStoreBackend:
    """A bucket, or the memory of this process; keys are object names without a leading slash.

    Directories are prefixes: they exist while an object lies below them.

    Args:
        scheme: The scheme of its URLs.
        bucket: The bucket; empty for memory.
        spec: TensorStore's specification, which is opened at the first use.

    Attributes:
        scheme: The scheme of its URLs.
        bucket: The bucket.
        spec: TensorStore's specification.
        is_remote: Whether it is reached over a network.
    """

    is_local = False

    def __init__(self, scheme: str, bucket: str, spec: dict[str, Any]) -> None:
        self.is_remote = scheme != "memory"
        self.scheme = scheme
        self.bucket = bucket
        self._root = f"{scheme}://{bucket}"
        self._separator = "/" if bucket else ""
        self.spec = spec
        self._lock = threading.Lock()
        self._opened: tensorstore.KvStore | None = None

    def url(self, key: str) -> str:
        """Returns the URL of a key."""
        path = quote(key, safe="/-_.~!$&'()*+,;=:@", errors="surrogateescape")
        return f"{self._root}{self._separator if key else ''}{path}"

    def exists(self, key: str) -> bool:
        """Returns whether an object has this key, or lies below it."""
        return self.is_there(key) or self.is_directory(key)

    def is_there(self, key: str) -> bool:
        """Returns whether an object has this key."""
        if not key:
            return False
        answer = self._ask(key, "look at", lambda: self._store().read(key, byte_range=slice(0, 0)))
        return bool(answer.state == "value")

    def is_directory(self, key: str) -> bool:
        """Returns whether any object lies below this key; the root always counts as one."""
        return not key or bool(self.names(key))

    def entries(self, key: str) -> list[Entry]:
        """Returns what lies directly below, sorted by name."""
        kinds: dict[str, bool] = {}
        for name in self.names(key):
            head, slash, _ = name.partition("/")
            if head and not head.endswith(".__lock"):
                kinds[head] = kinds.get(head, False) or bool(slash)
        return sorted(Entry(name, is_directory) for name, is_directory in kinds.items())

    def read_bytes(self, key: str, limit: int | None, size: int | None) -> bytes:
        """Returns the whole object: in one request where it is as long as it should be.

        Otherwise the first request is for the byte behind the ``limit``, which should not be there.
        """
        if size is not None and (limit is None or size <= limit):
            try:
                return self.read_range(key, slice(0, size))
            except DamagedCheckpointError:
                pass  # it is shorter; or the server does not know ranges
        data = None
        if limit is None or not self._has_byte(key, limit):
            data = self.read_range(key, None)
        if limit is not None and (data is None or len(data) > limit):
            raise DamagedCheckpointError(f"{self.url(key)} is longer than the {limit} bytes it may have")
        return data or b""

    def has_size(self, key: str, size: int) -> bool:
        """Returns whether an object has just this length, from its last byte and the one behind that."""
        if self._has_byte(key, size):
            return False
        if size == 0:
            return self.read_range(key, None) == b""
        if self._has_byte(key, size - 1):
            return True
        return len(self.read_range(key, None)) == size  # for servers that do not know ranges

    def write_bytes(self, key: str, data: bytes, *, atomic: bool) -> None:
        """Writes an object; stores replace objects in one step and answer when they are durable."""
        self._write(key, [bytes(data)])

    def make_directory(self, key: str, *, sync: bool) -> None:
        """Does nothing: prefixes need no creation."""

    def sync_directory(self, key: str) -> None:
        """Does nothing: an object that is written is listed."""

    def rename(self, key: str, target: str) -> None:
        """Copies the object, or every object below, one after the other, then deletes the originals."""
        names = self._list_with(key)
        if not names:
            raise ObjectNotFoundError(f"cannot rename {self.url(key)}: there is nothing")
        for name in names:
            self._write(target + name.removeprefix(key), [self.read_range(name, None)])
        several(self.remove, names, REQUESTS)

    def remove(self, key: str) -> None:
        """Deletes an object; missing is fine."""
        self._ask(key, "remove", lambda: self._store().write(key, None))

    def remove_tree(self, key: str, last: str | None) -> None:
        """Deletes the object and every object below."""
        names = self._list_with(key)
        final = [] if last is None else [f"{key}/{last}" if key else last]
        several(self.remove, [name for name in names if name not in final], REQUESTS)
        for name in final:
            if name in names:
                self.remove(name)

    def write_data(self, key: str, size: int, segments: Sequence[Segment]) -> None:
        """Writes one object, whose bytes are gathered in memory first: stores take a value as a whole."""
        check_segments(size, segments)
        # The stream hands out its own bytes in the end, without a copy, because they have the final length already.
        stream = io.BytesIO(bytes(size))
        for segment in segments:
            stream.seek(segment.offset)
            for part in segment.parts():
                stream.write(part.data)
            if stream.tell() != segment.offset + segment.size:
                raise ValueError(
                    f"the segment at offset {segment.offset} should have {segment.size} bytes, "
                    f"but its parts have {stream.tell() - segment.offset}"
                )
        content = [stream.getvalue()]
        del stream
        self._write(key, content)

    def open_data(self, key: str, size: int | None) -> DataReader:
        """Opens an object for reading ranges of it; without asking for it now where its ``size`` is known."""
        if size is None and not self.is_there(key):
            raise ObjectNotFoundError(f"cannot open {self.url(key)}: there is no such object")
        return KvDataReader(self, key, size)

    def read_range(self, key: str, byte_range: slice | None) -> bytes:
        """Returns a range of an object, or all of it.

        Raises:
            ObjectNotFoundError: There is no such object.
            DamagedCheckpointError: It ends before the range does.
        """
        length = _UNTOLD if byte_range is None else byte_range.stop - byte_range.start
        answer = self._ask(key, "read", lambda: self._store().read(key, byte_range=byte_range), length)
        if answer.state != "value":
            raise ObjectNotFoundError(f"cannot read {self.url(key)}: there is no such object")
        value: bytes = answer.value
        return value

    def _write(self, key: str, content: list[bytes]) -> None:
        """Writes an object. TensorStore takes a copy of the bytes, so that those in the list need not stay, too."""
        self._ask(key, "write", lambda: self._store().write(key, content.pop()), len(content[0]))

    def _store(self) -> tensorstore.KvStore:
        with self._lock:
            if self._opened is None:
                import tensorstore

                self._opened = tensorstore.KvStore.open(self.spec, context=shared_context()).result()
            return self._opened

    def names(self, key: str) -> list[str]:
        """Returns the names of all objects below a key, relative to it, sorted."""
        prefix = f"{key}/" if key else ""
        return [name.removeprefix(prefix) for name in self._names(key, prefix)]

    def _list_with(self, key: str) -> list[str]:
        """Returns the key, if there is such an object, and the names of all objects below it."""
        below = f"{key}/" if key else ""
        return [name for name in self._names(key, key) if name == key or name.startswith(below)]

    def _names(self, key: str, prefix: str) -> list[str]:
        """Returns the names of all objects from a prefix on, up to those that begin with the key and a "0"."""
        import tensorstore

        span = tensorstore.KvStore.KeyRange(prefix, f"{key}0" if key else "")  # "0" follows "/"
        names: list[bytes] = self._ask(key, "list", lambda: self._store().list(span))
        if self.scheme == "gs" and (not names or len(names) >= _PAGE):
            # A list that Google refuses is an empty one for TensorStore 0.1.86; of an object, it passes the refusal on.
            self._ask(key, "list", lambda: self._store().read(f"{prefix}.", byte_range=slice(0, 0)))
        return sorted(name.decode("utf-8", "surrogateescape") for name in names)

    def _has_byte(self, key: str, position: int) -> bool:
        try:
            return bool(self.read_range(key, slice(position, position + 1)))
        except DamagedCheckpointError:  # Out of range.
            return False

    def _ask(self, key: str, action: str, start: Callable[[], tensorstore.Future[Any]], nbytes: int = 0) -> Any:
        def advice(kind: type[HoldfastError]) -> str:
            return hint(self.scheme, self.spec, kind)

        return finish(start, self.url(key), action, advice, nbytes=nbytes)
