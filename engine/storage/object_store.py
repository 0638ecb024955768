"""Object stores, by way of TensorStore: memory, S3 and Google Cloud Storage.

Services, regions and credentials come from the environment variables that Amazon's and Google's own tools read; a URL
only names the bucket and the object.
Every request ends, and its error names the object, the action and what may help.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import itertools
import json
import logging
import os
import re
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from ..errors import (
    DamagedCheckpointError,
    HoldfastError,
    ObjectNotFoundError,
    StorageConflictError,
    StoragePermissionError,
    StorageUnavailableError,
)
from .backend import DataReader, Entry, FileIdentity, Segment
from .buffers import Buffer, aligned_empty
from .parallel import REQUESTS, parallel_map
from .status import GarbledAnswerError, check_extent, map_status

if TYPE_CHECKING:
    import tensorstore

    from .transfer import Patience, Transfer

_logger = logging.getLogger("holdfast")

RETRIES = 8  # attempts at one request; an unreachable service is given up after about two minutes of them
# Seconds after which a request has failed even if TensorStore would try again: a service may never answer.
REQUEST_TIMEOUT = 300.0
WARN_AFTER = 20.0  # seconds after which the log names a request that is still waiting
SLOWEST = 64 << 10  # bytes a second; the time limit grows by what sending or receiving takes at this speed
# Bytes; no store has objects of that size, so ranges that end beyond it are refused without a request.
_LONGEST_RANGE = 1 << 50
_LIST_PAGE = 1000  # names that stores list at a time
_UNKNOWN_SIZE = 32 << 20  # bytes that the time limit allows for an object of unknown length

_TRUSTED = 256 << 20  # bytes that are allocated for a range before the store has shown that it is there

_BY_NAME = FileIdentity(0, 0, 0, 0)  # identity of every object

_LARGE = 256 << 20  # bytes of a file whose upload is repeated before TensorStore has all of it in memory
_AGAIN = (1.0, 5.0, 20.0)  # seconds to wait before each repetition

_LISTS = 3  # answers to a list that cannot be parsed, such as pages of a proxy, after which it has failed

_CONFLICTS = 5  # answers that ask to repeat a conditional request, S3's 409, after which it has failed

# The environment variables whose values go into headers.
_CREDENTIALS = {
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
    "gs": ("GOOGLE_AUTH_TOKEN_FOR_TESTING",),
}

_context_lock = threading.Lock()
_conditional: dict[str, bool] = {}  # whether each service honours conditions


@functools.cache
def _new_context() -> tensorstore.Context:
    import tensorstore

    retries = {"max_retries": RETRIES}
    return tensorstore.Context({"s3_request_retries": retries, "gcs_request_retries": retries})


def shared_context() -> tensorstore.Context:
    """Return the TensorStore context of this process; with it, ``memory://`` is the same store everywhere."""
    with _context_lock:
        return _new_context()


@functools.cache
def _missing() -> bytes:
    """Return TensorStore's generation of an object that does not exist."""
    import tensorstore

    store = tensorstore.KvStore.open({"driver": "memory"}, context=tensorstore.Context()).result()
    generation: bytes = store.read("nothing").result().stamp.generation
    return generation


def store_spec(scheme: str, bucket: str) -> dict[str, Any]:
    """Return TensorStore's JSON specification of a store.

    For S3 it includes the service (``AWS_ENDPOINT_URL_S3`` or ``AWS_ENDPOINT_URL``), the region (``AWS_REGION`` or
    ``AWS_DEFAULT_REGION``) and the source of the credentials.
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
        spec |= {"endpoint": endpoint.rstrip("/"), "aws_region": region or "us-east-1"}
    elif region:
        spec["aws_region"] = region
    if "AWS_ACCESS_KEY_ID" in environment:
        # The default chain searches files and the network first, and logs a warning for each that is missing.
        spec["aws_credentials"] = {"type": "environment"}
    return spec


def open_backend(scheme: str, bucket: str) -> ObjectStoreBackend:
    """Return the backend of a bucket: the same object for the same settings."""
    gcs_url = os.environ.get("TENSORSTORE_GCS_HTTP_URL", "") if scheme == "gs" else ""  # TensorStore reads it itself
    return _open_backend(scheme, bucket, json.dumps(store_spec(scheme, bucket)), gcs_url)


@functools.lru_cache(maxsize=64)
def _open_backend(scheme: str, bucket: str, spec: str, gcs_url: str) -> ObjectStoreBackend:  # noqa: ARG001 - in the key
    return ObjectStoreBackend(scheme, bucket, json.loads(spec))


class ObjectStoreBackend:
    """A bucket, or the memory of this process; keys are object names without a leading slash.

    Directories are prefixes: they exist while an object lies below them.
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
        self._bulk: list[Transfer | None] | None = None  # a list of one, once it is known

    def url(self, key: str) -> str:
        path = quote(key, safe="/-_.~!$&'()*+,;=:@", errors="surrogateescape")
        return f"{self._root}{self._separator if key else ''}{path}"

    def is_there(self, key: str) -> bool:
        if not key:
            return False
        answer = self._request(key, "access", lambda: self._store().read(key, byte_range=slice(0, 0)))
        return bool(answer.state == "value")

    def is_directory(self, key: str) -> bool:
        return not key or bool(self.names(key))

    def entries(self, key: str) -> list[Entry]:
        kinds: dict[str, bool] = {}
        for name in self.names(key):
            head, slash, _ = name.partition("/")
            if head and not head.endswith(".__lock"):
                kinds[head] = kinds.get(head, False) or bool(slash)
        return sorted(Entry(name, is_directory) for name, is_directory in kinds.items())

    def read_bytes(self, key: str, limit: int | None, size: int | None) -> bytes:
        # One request suffices for an object that has the expected size. Otherwise the first request is for the byte at
        # ``limit``, which should not exist.
        if size is not None and (limit is None or size <= limit):
            try:
                return self.read_range(key, slice(0, size))
            except DamagedCheckpointError:
                pass  # the object is shorter, or the server does not serve ranges
        data = None
        if limit is None or not self._has_byte(key, limit):
            data = self.read_range(key, None)
        if limit is not None and (data is None or len(data) > limit):
            raise DamagedCheckpointError(f"{self.url(key)} is longer than the {limit} bytes it may have")
        return data or b""

    def has_size(self, key: str, size: int) -> bool:
        # TensorStore reports no sizes: the last byte must exist, and the one after it must not.
        if self._has_byte(key, size):
            return False
        if size == 0:
            return self.read_range(key, None) == b""
        if self._has_byte(key, size - 1):
            return True
        return len(self.read_range(key, None)) == size  # this server does not serve ranges

    def write_bytes(self, key: str, data: bytes, *, atomic: bool) -> None:
        # Stores replace objects in one step, and answer when they are durable.
        self._write(key, [bytes(data)])

    def honours_conditions(self, key: str, data: bytes) -> bool:
        """Return whether the service refuses to create an object that exists; each service is asked once.

        ``key`` holds ``data``, which a service that ignores conditions writes again.
        """
        service = self.spec.get("endpoint", "") if self.scheme == "s3" else ""
        if self.scheme == "s3" and service not in _conditional:
            try:
                # If the first one succeeds, the object may have been missing.
                found = not all(self._write_where(key, data, _missing()) for _ in range(2))
            except StorageUnavailableError:
                raise
            except HoldfastError:
                found = False
            if not found:
                _logger.info("%s: no conditional writes here; two saves to one path are not kept apart", self._root)
            _conditional[service] = found
        return self.scheme != "s3" or _conditional[service]

    def write_bytes_if(self, key: str, data: bytes, expected: bytes | None) -> bool:
        generation = _missing()
        if expected is not None:
            content, generation = self._read_with_generation(key)
            if content != expected:
                return content == data
        # A repeated request whose first answer was lost is refused, as it has changed the object itself.
        return self._write_where(key, data, generation) or self._read_with_generation(key)[0] == data

    def remove_if(self, key: str, expected: bytes) -> None:
        content, generation = self._read_with_generation(key)
        if content == expected:
            self._write_where(key, None, generation)

    def _read_with_generation(self, key: str) -> tuple[bytes | None, bytes]:
        answer = self._request(key, "read", lambda: self._store().read(key), _UNKNOWN_SIZE)
        return answer.value if answer.state == "value" else None, answer.stamp.generation

    def _write_where(self, key: str, data: bytes | None, generation: bytes) -> bool:
        """Write or delete an object that has a generation; return whether the service did."""
        nbytes = len(data or b"")
        for attempt in itertools.count(1):
            try:
                stamp = self._request(key, "write", lambda: self._store().write(key, data, if_equal=generation), nbytes)
                return bool(stamp.generation)  # unknown, which is empty, after a refusal
            except StorageConflictError:
                if attempt == _CONFLICTS:
                    raise
            time.sleep(0.05 * attempt)
        raise AssertionError

    def make_directory(self, key: str, *, sync: bool) -> bool:
        return False  # prefixes need no creation

    def sync_directory(self, key: str) -> None:
        pass  # every written object is listed

    def rename(self, key: str, target: str) -> None:
        names = self._list_with(key)
        if not names:
            raise ObjectNotFoundError(f"cannot rename {self.url(key)}: there is no such object or directory")
        for name in names:
            self._write(target + name.removeprefix(key), [self.read_range(name, None)])
        parallel_map(self.remove, names, REQUESTS)

    def remove(self, key: str) -> None:
        self._request(key, "remove", lambda: self._store().write(key, None))

    def remove_tree(self, key: str, last: str | None) -> None:
        names = self._list_with(key)
        final = [] if last is None else [f"{key}/{last}" if key else last]
        parallel_map(self.remove, [name for name in names if name not in final], REQUESTS)
        for name in final:
            if name in names:
                self.remove(name)

    def write_data(self, key: str, size: int, segments: Sequence[Segment], awaited: threading.Event | None) -> None:
        transfer = self._transfer()
        if transfer is not None and transfer.put(
            key,
            size,
            lambda sent: _parts(size, segments, sent),
            self._patience(key, "write", size),
            again=_AGAIN if size > _LARGE else (),
        ):
            return
        # TensorStore takes a value as a whole, and copies it twice. The stream returns its bytes without a copy,
        # because they have their final length from the start.
        stream = io.BytesIO(bytes(size))
        for part in _parts(size, segments, sent=True):
            stream.write(part.data)
        content = [stream.getvalue()]
        del stream
        self._write(key, content)

    def open_data(self, key: str, size: int | None, *, cached: bool) -> DataReader:
        if size is None and not self.is_there(key):
            raise ObjectNotFoundError(f"cannot open {self.url(key)}: there is no such object")
        return ObjectReader(self, key, size)

    def can_share(self) -> bool:
        transfer = self._transfer()
        return transfer is not None and transfer.copies

    def identity(self, key: str) -> FileIdentity:
        return _BY_NAME

    def share(self, key: str, target: str, known: FileIdentity) -> FileIdentity:
        transfer = self._transfer()
        if transfer is None or not transfer.copy(key, target, self._patience(key, "copy", _UNKNOWN_SIZE)):
            raise OSError(errno.EAGAIN, "the service did not copy it", self.url(key))
        return _BY_NAME

    def read_range(self, key: str, byte_range: slice | None) -> bytes:
        length = _UNKNOWN_SIZE if byte_range is None else byte_range.stop - byte_range.start
        answer = self._request(key, "read", lambda: self._store().read(key, byte_range=byte_range), length)
        if answer.state != "value":
            raise ObjectNotFoundError(f"cannot read {self.url(key)}: there is no such object")
        value: bytes = answer.value
        return value

    def read_into(
        self, key: str, offset: int, memory: Sequence[NDArray[np.uint8]], answered: Callable[[], None]
    ) -> bool:
        """Fill memory with a range of an object; return False where only :meth:`read_range` can tell what is there.

        ``answered`` is called when the service begins to answer, if it does.
        """
        transfer = self._transfer()
        size = sum(part.size for part in memory)
        if transfer is None or not size:
            return False
        return transfer.get(key, offset, memory, self._patience(key, "read", size), answered)

    def _write(self, key: str, content: list[bytes]) -> None:
        # TensorStore copies the bytes, so the list gives its own up.
        self._request(key, "write", lambda: self._store().write(key, content.pop()), len(content[0]))

    def _store(self) -> tensorstore.KvStore:
        for name in _CREDENTIALS.get(self.scheme, ()):  # TensorStore 0.1.86 ends the process, and prints the header
            value = os.environ.get(name, "")
            if not (value.isascii() and value.isprintable()):
                raise StoragePermissionError(
                    f"cannot reach {self._root}: the value of {name} holds a character that no header can have, "
                    "perhaps a line break at its end; set it again without"
                )
        with self._lock:
            if self._opened is None:
                import tensorstore

                # TensorStore would otherwise ask for an object before each conditional write of it.
                extra = {"use_conditional_write": True} if self.scheme == "s3" else {}
                self._opened = tensorstore.KvStore.open(self.spec | extra, context=shared_context()).result()
            return self._opened

    def _transfer(self) -> Transfer | None:
        """Return the client for bulk data, if this store has one."""
        if not self.is_remote:
            return None
        with self._lock:
            if self._bulk is None:
                from .gcs_transfer import GcsTransfer
                from .s3_transfer import S3Transfer

                self._bulk = [(S3Transfer if self.scheme == "s3" else GcsTransfer).open(self.spec)]
            return self._bulk[0]

    def _patience(self, key: str, action: str, nbytes: int) -> Patience:
        from .transfer import Patience

        return Patience(REQUEST_TIMEOUT + nbytes / SLOWEST, WARN_AFTER, lambda: self._warn(key, action))

    def _warn(self, key: str, action: str) -> None:
        advice = self._advice(StorageUnavailableError)
        _logger.warning("%s: still waiting to %s it after %.0f s%s", self.url(key), action, WARN_AFTER, advice)

    def names(self, key: str) -> list[str]:
        """Return the names of all objects below a key, relative to it, sorted."""
        prefix = f"{key}/" if key else ""
        return [name.removeprefix(prefix) for name in self._names(key, prefix)]

    def _list_with(self, key: str) -> list[str]:
        """Return the key, if there is such an object, and the names of all objects below it."""
        below = f"{key}/" if key else ""
        return [name for name in self._names(key, key) if name == key or name.startswith(below)]

    def _names(self, key: str, prefix: str) -> list[str]:
        """Return the names of all objects from ``prefix`` up to ``key`` followed by a "0"."""
        import tensorstore

        span = tensorstore.KvStore.KeyRange(prefix, f"{key}0" if key else "")  # "0" follows "/"
        for left in reversed(range(_LISTS)):
            try:
                names: list[bytes] = self._request(key, "list", lambda: self._store().list(span))
                break
            except GarbledAnswerError:
                if not left:
                    raise
        if self.scheme == "gs" and (not names or len(names) >= _LIST_PAGE):
            # TensorStore 0.1.86 returns an empty list where Google refuses to list, but reports the refusal of a read.
            self._request(key, "list", lambda: self._store().read(f"{prefix}.", byte_range=slice(0, 0)))
        return sorted(name.decode("utf-8", "surrogateescape") for name in names)

    def _has_byte(self, key: str, position: int) -> bool:
        try:
            return bool(self.read_range(key, slice(position, position + 1)))
        except DamagedCheckpointError:  # out of range
            return False

    def _request(self, key: str, action: str, start: Callable[[], tensorstore.Future[Any]], nbytes: int = 0) -> Any:
        """Start a request and wait for its answer, for as long as ``nbytes`` may take."""
        began = time.monotonic()
        timeout = REQUEST_TIMEOUT + nbytes / SLOWEST
        future = None
        try:
            future = start()
            try:
                return future.result(timeout=min(WARN_AFTER, timeout))
            except TimeoutError:
                if timeout <= WARN_AFTER:
                    raise
                self._warn(key, action)
                return future.result(timeout=timeout - WARN_AFTER)
        except TimeoutError as error:
            assert future is not None
            future.cancel()
            raise StorageUnavailableError(
                f"cannot {action} {self.url(key)}: no answer after {time.monotonic() - began:.0f} s; check the "
                f"connection and try again{self._advice(StorageUnavailableError)}"
            ) from error
        except HoldfastError:
            raise
        except (ValueError, IndexError, RuntimeError, OSError) as error:
            # No local variable holds the new error: a cycle with its own frame would keep its callers' objects alive.
            raise self._advised(map_status(error, self.url(key), action)) from error

    def _advised(self, error: HoldfastError) -> HoldfastError:
        advice = self._advice(type(error))
        return type(error)(f"{error}{advice}") if advice else error

    def _advice(self, kind: type[HoldfastError]) -> str:
        """Return what may help against an error, in brackets, or ""."""
        if self.scheme == "memory":
            return ""
        if self.scheme == "s3":
            endpoint, region = self.spec.get("endpoint"), self.spec.get("aws_region")
            asked = f"asked {_without_user(endpoint)}, the value of AWS_ENDPOINT_URL" if endpoint else "asked Amazon"
            asked += f", region {region}" if region else ", no AWS_REGION set"
            source = (
                "the credentials of AWS_ACCESS_KEY_ID"
                if "aws_credentials" in self.spec
                else "the credentials in ~/.aws or of this machine, if any (AWS_ACCESS_KEY_ID is not set)"
            )
        else:
            url = os.environ.get("TENSORSTORE_GCS_HTTP_URL")
            asked = (
                f"asked {_without_user(url)}, the value of TENSORSTORE_GCS_HTTP_URL"
                if url
                else "asked storage.googleapis.com"
            )
            source = (
                "the credentials in the file that GOOGLE_APPLICATION_CREDENTIALS names, or those that "
                "`gcloud auth application-default login` makes"
            )
        if issubclass(kind, StoragePermissionError):
            return f" ({asked}, with {source}; they must allow listing, reading, writing and deleting objects)"
        if issubclass(kind, ObjectNotFoundError):
            return f" ({asked}; is there a bucket {self.bucket!r}? Create it first)"
        return f" ({asked})" if issubclass(kind, StorageUnavailableError) else ""


class ObjectStoreSnapshot(ObjectStoreBackend):
    """A store whose names below a key are listed once; reads see the current content."""

    def __init__(self, store: ObjectStoreBackend, key: str) -> None:
        super().__init__(store.scheme, store.bucket, store.spec)
        self.live = store
        self._store = store._store  # type: ignore[method-assign]  # opened once, for both
        self._transfer = store._transfer  # type: ignore[method-assign]
        self._prefix = f"{key}/" if key else ""
        self._known = [self._prefix + name for name in store.names(key)]
        self._others: dict[str, bool] = {}

    def is_there(self, key: str) -> bool:
        if not key.startswith(self._prefix):  # callers ask several times for the key itself
            if key not in self._others:
                self._others[key] = super().is_there(key)
            return self._others[key]
        at = bisect_left(self._known, key)
        return at < len(self._known) and self._known[at] == key

    def _names(self, key: str, prefix: str) -> list[str]:
        if not prefix.startswith(self._prefix):
            return super()._names(key, prefix)
        first = bisect_left(self._known, prefix)
        return self._known[first : bisect_left(self._known, f"{key}0") if key else None]


class ObjectReader(DataReader):
    """One object, read by ranges, or once as a whole where the store does not serve ranges."""

    def __init__(self, backend: ObjectStoreBackend, key: str, known: int | None = None) -> None:
        self._backend = backend
        self._key = key
        self._known = known
        self._lock = threading.Lock()
        self._whole: bytes | None = None
        self._missing: ObjectNotFoundError | None = None
        self._first = threading.Lock()  # the first read takes it for good
        self._answered = threading.Event()  # set when the first read has been answered, or has ended

    @property
    def size(self) -> int:
        # TensorStore reports no sizes.
        return len(self._read_whole())

    def read(self, offset: int, length: int, buffer: Buffer | None = None) -> NDArray[np.uint8]:
        if self._missing is not None:  # one request suffices
            raise self._missing
        if self._known is not None:
            check_extent(self._backend.url(self._key), self._known, offset, length)
        trusted = _UNKNOWN_SIZE if self._known is None else _TRUSTED
        if self._whole is None and offset >= 0 and 0 < length <= trusted:
            memory = aligned_empty(length) if buffer is None else buffer.view(length)
            if self.read_into(offset, [memory]):
                return memory
        value = self._fetch(offset, length)
        memory = aligned_empty(length) if buffer is None else buffer.view(length)
        memory[:] = np.frombuffer(value, np.uint8)
        return memory

    def read_into(self, offset: int, memory: Sequence[NDArray[np.uint8]]) -> bool:
        if self._whole is not None or self._missing is not None:
            return False
        # Only one request waits for the first answer: before that, a service may hash or fetch the object.
        if self._first.acquire(blocking=False):
            try:
                return self._backend.read_into(self._key, offset, memory, self._answered.set)
            finally:
                self._answered.set()
        self._answered.wait(REQUEST_TIMEOUT)
        return self._backend.read_into(self._key, offset, memory, self._answered.set)

    def close(self) -> None:
        self._whole = None

    def _fetch(self, offset: int, length: int) -> bytes | memoryview:
        end = offset + length
        try:
            if self._whole is None and 0 <= offset < end <= _LONGEST_RANGE:
                with contextlib.suppress(DamagedCheckpointError):
                    value = self._backend.read_range(self._key, slice(offset, end))
                    if len(value) == length:
                        return value
                # The object ends before the range does, or the server does not serve ranges.
            whole = self._read_whole()
        except ObjectNotFoundError as error:
            self._missing = error
            raise
        check_extent(self._backend.url(self._key), len(whole), offset, length)
        return memoryview(whole)[offset:end]

    def _read_whole(self) -> bytes:
        with self._lock:
            if self._whole is None:
                self._whole = self._backend.read_range(self._key, None)
            return self._whole


def _without_user(url: str) -> str:
    """Return a URL for an error, without the name and password that it may have."""
    return re.sub(r"//[^/]*@", "//", url)


def _parts(size: int, segments: Sequence[Segment], sent: bool) -> Iterator[NDArray[np.uint8]]:
    """Generate the bytes of a data file, the zeros between segments included, to send them or only to hash them."""
    position = 0
    for segment in [*segments, Segment(size, 0, lambda: iter(()))]:
        while position < segment.offset:
            yield np.zeros(min(segment.offset - position, 1 << 20), np.uint8)
            position += min(segment.offset - position, 1 << 20)
        for part in segment.parts() if sent or segment.peek is None else segment.peek():
            position += part.size
            if position > segment.offset + segment.size:
                break
            yield part
        if position != segment.offset + segment.size:
            raise ValueError(
                f"the segment at offset {segment.offset} should have {segment.size} bytes, "
                f"but its parts have {position - segment.offset}"
            )
