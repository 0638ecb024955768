"""Objects in a key-value store that TensorStore can reach: memory, S3, Google Cloud Storage."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import threading
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote

import numpy as np

from ..errors import DamagedCheckpointError, HoldfastError, ObjectNotFoundError
from .backend import Entry
from .buffers import Buffer, aligned_empty
from .bulk import DataReader, Segment, check_extent, check_segments
from .statuses import map_status

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

    import tensorstore
    from numpy.typing import NDArray

RETRIES = 8
"""Attempts at one request; they take about two minutes before an unreachable service is given up."""

_LONGEST = 1 << 50
"""Bytes; ranges that end behind it are refused without asking, as no store has objects of that size."""

_context_lock = threading.Lock()


@functools.cache
def _new_context() -> tensorstore.Context:
    import tensorstore

    retries = {"max_retries": RETRIES}
    return tensorstore.Context({"s3_request_retries": retries, "gcs_request_retries": retries})


def shared_context() -> tensorstore.Context:
    """Returns the one TensorStore context of this process, by which ``memory://`` is the same store everywhere."""
    with _context_lock:
        return _new_context()


def store_spec(scheme: str, bucket: str) -> dict[str, Any]:
    """Returns TensorStore's JSON specification of a store.

    For S3, the environment variables that Amazon's own tools read give the rest: ``AWS_ENDPOINT_URL_S3`` or
    ``AWS_ENDPOINT_URL`` (another vendor's service), ``AWS_REGION`` or ``AWS_DEFAULT_REGION``, and the credentials.

    Args:
        scheme: ``"memory"``, ``"s3"`` or ``"gs"``.
        bucket: The bucket; empty for memory.
    """
    if scheme == "memory":
        return {"driver": "memory"}
    if scheme == "gs":
        return {"driver": "gcs", "bucket": bucket}
    spec: dict[str, Any] = {"driver": "s3", "bucket": bucket}
    environment = os.environ
    region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")
    endpoint = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
    if endpoint:
        spec |= {"endpoint": endpoint, "aws_region": region or "us-east-1"}
    elif region:
        spec["aws_region"] = region
    if "AWS_ACCESS_KEY_ID" in environment:
        # The default chain searches files and the network first, and complains about each that is not there.
        spec["aws_credentials"] = {"type": "environment"}
    return spec


def open_backend(scheme: str, bucket: str) -> KvStoreBackend:
    """Returns the backend for a bucket, the same one for the same settings."""
    return _open_backend(scheme, bucket, json.dumps(store_spec(scheme, bucket)))


@functools.lru_cache(maxsize=64)
def _open_backend(scheme: str, bucket: str, spec: str) -> KvStoreBackend:
    return KvStoreBackend(scheme, bucket, json.loads(spec))


class KvStoreBackend:
    """A bucket, or the memory of this process; keys are object names without a leading slash.

    Directories are prefixes: they exist while an object lies below them.

    Args:
        scheme: The scheme of its URLs.
        bucket: The bucket; empty for memory.
        spec: TensorStore's specification, which is opened at the first use.
    """

    is_local = False

    def __init__(self, scheme: str, bucket: str, spec: dict[str, Any]) -> None:
        self._root = f"{scheme}://{bucket}"
        self._separator = "/" if bucket else ""
        self._spec = spec
        self._lock = threading.Lock()
        self._opened: tensorstore.KvStore | None = None

    def url(self, key: str) -> str:
        """Returns the URL of a key."""
        path = quote(key, safe="/-_.~!$&'()*+,;=:@", errors="surrogateescape")
        return f"{self._root}{self._separator if key else ''}{path}"

    def exists(self, key: str) -> bool:
        """Returns whether an object has this key, or lies below it."""
        return self._has_object(key) or self.is_directory(key)

    def is_directory(self, key: str) -> bool:
        """Returns whether any object lies below this key; the root always counts as one."""
        return not key or bool(self._list(key))

    def entries(self, key: str) -> list[Entry]:
        """Returns what lies directly below, sorted by name."""
        kinds: dict[str, bool] = {}
        for name in self._list(key):
            head, slash, _ = name.partition("/")
            if head and not head.endswith(".__lock"):
                kinds[head] = kinds.get(head, False) or bool(slash)
        return sorted(Entry(name, is_directory) for name, is_directory in kinds.items())

    def read_bytes(self, key: str, limit: int | None) -> bytes:
        """Returns the whole object; first asks for the byte behind the ``limit``, which should not be there."""
        data = None
        if limit is None or not self._has_byte(key, limit):
            data = self.read_range(key, None)
        if limit is not None and (data is None or len(data) > limit):
            raise DamagedCheckpointError(f"{self.url(key)} is longer than the {limit} bytes it may have")
        return data or b""

    def write_bytes(self, key: str, data: bytes, *, atomic: bool) -> None:
        """Writes an object; stores replace objects in one step and answer when they are durable."""
        with self._statuses(key, "write"):
            self._store().write(key, bytes(data)).result()

    def make_directory(self, key: str, *, sync: bool) -> None:
        """Does nothing: prefixes need no creation."""

    def sync_directory(self, key: str) -> None:
        """Does nothing: an object that is written is listed."""

    def rename(self, key: str, target: str) -> None:
        """Copies the object, or every object below, one after the other, then deletes the originals."""
        names = [f"/{name}" for name in self._list(key)]
        if self._has_object(key):
            names.append("")
        if not names:
            raise ObjectNotFoundError(f"cannot rename {self.url(key)}: there is nothing")
        for name in names:
            self.write_bytes(target + name, self.read_range(key + name, None), atomic=True)
        for name in names:
            self.remove(key + name)

    def remove(self, key: str) -> None:
        """Deletes an object; missing is fine."""
        with self._statuses(key, "remove"):
            self._store().write(key, None).result()

    def remove_tree(self, key: str, last: str | None) -> None:
        """Deletes the object and every object below."""
        prefix = f"{key}/" if key else ""
        names = self._list(key)
        with self._statuses(key, "remove"):
            store = self._store()
            for answer in [store.write(prefix + name, None) for name in names if name != last]:
                answer.result()
        if last in names:
            self.remove(f"{prefix}{last}")
        if key:
            self.remove(key)

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
        self.write_bytes(key, stream.getvalue(), atomic=True)

    def open_data(self, key: str) -> DataReader:
        """Opens an object for reading ranges of it."""
        if not self._has_object(key):
            raise ObjectNotFoundError(f"cannot open {self.url(key)}: there is no such object")
        return KvDataReader(self, key)

    def read_range(self, key: str, byte_range: slice | None) -> bytes:
        """Returns a range of an object, or all of it.

        Raises:
            ObjectNotFoundError: There is no such object.
            DamagedCheckpointError: It ends before the range does.
        """
        with self._statuses(key, "read"):
            answer = self._store().read(key, byte_range=byte_range).result()
        if answer.state != "value":
            raise ObjectNotFoundError(f"cannot read {self.url(key)}: there is no such object")
        value: bytes = answer.value
        return value

    def _store(self) -> tensorstore.KvStore:
        with self._lock:
            if self._opened is None:
                import tensorstore

                self._opened = tensorstore.KvStore.open(self._spec, context=shared_context()).result()
            return self._opened

    def _has_object(self, key: str) -> bool:
        if not key:
            return False
        with self._statuses(key, "look at"):
            state = self._store().read(key, byte_range=slice(0, 0)).result().state
        return bool(state == "value")

    def _list(self, key: str) -> list[str]:
        """Returns the names of all objects below a key, relative to it, sorted."""
        import tensorstore

        prefix = f"{key}/" if key else ""
        below = tensorstore.KvStore.KeyRange(prefix, f"{prefix[:-1]}0" if prefix else "")  # "0" follows "/".
        with self._statuses(key, "list"):
            names: list[bytes] = self._store().list(below, strip_prefix_length=len(prefix.encode())).result()
        return sorted(name.decode("utf-8", "surrogateescape") for name in names)

    def _has_byte(self, key: str, position: int) -> bool:
        try:
            return bool(self.read_range(key, slice(position, position + 1)))
        except DamagedCheckpointError:  # Out of range.
            return False

    @contextlib.contextmanager
    def _statuses(self, key: str, action: str) -> Iterator[None]:
        """Raises holdfast's errors in place of TensorStore's."""
        try:
            yield
        except HoldfastError:
            raise
        except (ValueError, IndexError, RuntimeError, OSError) as error:
            raise map_status(error, self.url(key), action) from error


class KvDataReader:
    """One object, read by ranges; as a whole, once, where the store does not serve ranges.

    Args:
        backend: Where it is.
        key: Its name.
    """

    def __init__(self, backend: KvStoreBackend, key: str) -> None:
        self._backend = backend
        self._key = key
        self._lock = threading.Lock()
        self._whole: bytes | None = None

    @property
    def size(self) -> int:
        """Length of the object in bytes. TensorStore does not tell, so the first look reads all of it."""
        return len(self._read_whole())

    def read(self, offset: int, length: int, buffer: Buffer | None = None) -> NDArray[np.uint8]:
        """Reads exactly ``length`` bytes; see ``DataReader.read``."""
        value = self._fetch(offset, length)
        memory = aligned_empty(length) if buffer is None else buffer.view(length)
        memory[:] = np.frombuffer(value, np.uint8)
        return memory

    def close(self) -> None:
        """Forgets the object; arrays that were read stay valid."""
        self._whole = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _fetch(self, offset: int, length: int) -> bytes | memoryview:
        end = offset + length
        if self._whole is None and 0 <= offset < end <= _LONGEST:
            with contextlib.suppress(DamagedCheckpointError):
                value = self._backend.read_range(self._key, slice(offset, end))
                if len(value) == length:
                    return value
            # The object ends before the range does, or some servers answer with the range as if it were everything.
        whole = self._read_whole()
        check_extent(self._backend.url(self._key), len(whole), offset, length)
        return memoryview(whole)[offset:end]

    def _read_whole(self) -> bytes:
        with self._lock:
            if self._whole is None:
                self._whole = self._backend.read_range(self._key, None)
            return self._whole
