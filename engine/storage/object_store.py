"""The common base of all object stores: directories as key prefixes, frozen listings and range reads.

Every request has a time limit. Error messages name the object, the action and possible remedies.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, TypeVar

from ..errors import (
    DamagedCheckpointError,
    HoldfastError,
    ObjectNotFoundError,
    StorageError,
    StorageUnavailableError,
)
from .backend import DataReader, Entry, FileIdentity, Segment
from .buffers import Buffer, aligned_empty
from .local import HIDDEN_SUFFIX
from .parallel import REQUESTS, parallel_map
from .status import GarbledAnswerError, check_extent, without_secrets

if TYPE_CHECKING:
    from concurrent.futures import Future

    import numpy as np
    from numpy.typing import NDArray

_logger = logging.getLogger("holdfast")

T = TypeVar("T")

RETRIES = 8  # maximum number of retries per request; if the service stays unreachable, they take about two minutes
# Time limit in seconds, including retries, for requests that transfer no data. Some services never respond.
REQUEST_TIMEOUT = 300.0
WARN_AFTER = 20.0  # seconds after which a warning about a pending request is logged
SLOWEST = 64 << 10  # slowest transfer speed that time limits allow for, in bytes per second
# Upper bound in bytes for the size of any object. Before a read at a larger offset, the actual size is requested.
_LONGEST_RANGE = 1 << 50
GARBLED = 3  # maximum number of attempts at a request if the responses cannot be parsed
UNKNOWN_SIZE = 32 << 20  # object length in bytes assumed for time limits if the actual length is unknown

_TOGETHER = 1000  # maximum number of objects that one request can delete
_SMALL = 64 << 10  # number of bytes to request first if the length of an object is unknown
_TRUSTED = 256 << 20  # maximum number of bytes allocated for a range before the store has confirmed the object's size

BY_NAME = FileIdentity(0, 0, 0, 0)  # identity of every object, because objects are recognised by name


def time_limit(nbytes: int) -> float:
    """Return the time limit, in seconds, of a request that transfers ``nbytes`` bytes."""
    return REQUEST_TIMEOUT + nbytes / SLOWEST


@dataclass
class _Listing:
    """The names of all objects that had a given prefix when they were listed."""

    prefix: str
    names: list[str]  # sorted
    others: dict[str, bool] = field(default_factory=dict)  # cache: whether each key outside the prefix exists


class ObjectStoreBackend:
    """An object store. A directory is a key prefix, and exists as long as there are objects below it."""

    is_local = False
    given: Any = None  # the file system object that the caller passed, if any
    prefix = ""  # common prefix of all paths in that file system

    def __init__(self, root: str, *, is_remote: bool) -> None:
        self.is_remote = is_remote
        self._root = root
        self._separator = "" if root.endswith("/") else "/"
        self._listing: _Listing | None = None

    # ---- requests to the service, implemented by subclasses; by default, a store is read-only

    def has_object(self, key: str) -> bool:
        try:
            self.object_size(key)
        except ObjectNotFoundError:
            return False
        return True

    def object_size(self, key: str) -> int:
        """Return the length of an object in bytes."""
        raise NotImplementedError

    def read_range(self, key: str, byte_range: slice | None) -> bytes:
        """Return an object or a byte range of it; raise DamagedCheckpointError if the object ends before the range."""
        raise NotImplementedError

    def list_objects(self, key: str, *, itself: bool) -> list[str]:
        """Return the sorted keys below ``key``, and ``key`` if ``itself``; may include other keys with this prefix."""
        raise NotImplementedError

    def write_bytes(self, key: str, data: bytes, *, atomic: bool) -> None:
        """Write an object, replacing any existing one; the write is atomic and durable if the service supports it."""
        raise StorageError(f"{self.url(key)} is read-only")

    def write_data(self, key: str, size: int, segments: Sequence[Segment]) -> None:
        # A stream allocated at its final length can return its contents without a copy.
        stream = io.BytesIO(bytes(size))
        for part in file_parts(size, segments):
            stream.write(part.data)
        self.write_bytes(key, stream.getvalue(), atomic=True)

    def remove(self, key: str) -> None:
        raise StorageError(f"{self.url(key)} is read-only")

    def remove_together(self, names: Sequence[str]) -> bool:
        """Delete up to 1,000 objects with one request; return False if they must be deleted one by one."""
        return False

    def read_into(
        self, key: str, offset: int, memory: Sequence[NDArray[np.uint8]], answered: Callable[[], None]
    ) -> bool:
        """Read a range into arrays, and call ``answered`` when the service responds; return False if the read fails."""
        try:
            rest = memoryview(self.read_range(key, slice(offset, offset + sum(part.size for part in memory))))
        except DamagedCheckpointError:  # the object ends within the range, or the server does not support ranges
            return False
        for part in memory:
            if len(rest) < part.size:
                return False
            part.data[:], rest = rest[: part.size], rest[part.size :]
        return True

    def can_share(self) -> bool:
        return False

    def share(self, key: str, target: str, expected: FileIdentity) -> FileIdentity:
        raise NotImplementedError

    def honours_conditions(self, key: str, data: bytes | None) -> bool:
        """Return whether the service honours conditional writes. To test this, ``data`` may be written."""
        return False

    def read_generation(self, key: str) -> tuple[bytes | None, Any]:
        """Return the contents of an object (None if missing) and its generation. Every write changes the generation."""
        raise NotImplementedError

    def write_where(self, key: str, data: bytes, generation: Any) -> bool:
        """Write an object if its generation matches (None: if it does not exist). Return whether it was written."""
        raise NotImplementedError

    def failures(self) -> tuple[type[Exception], ...]:
        """Return the exception types that requests raise."""
        raise NotImplementedError

    def explained(self, error: Exception, key: str, action: str) -> HoldfastError:
        """Convert an exception raised by a request to a holdfast error."""
        raise NotImplementedError

    def shown_cause(self, error: Exception) -> Exception | None:
        """Return the error, so that a traceback can show it as the cause, or None if its text contains secrets."""
        text = str(error)
        return error if without_secrets(text) == text else None

    def advice(self, kind: type[HoldfastError]) -> str:
        """Return advice in parentheses to append to an error message, or "" if there is none."""
        return ""

    def _advice(self, kind: type[HoldfastError]) -> str:
        with contextlib.suppress(Exception):  # the error itself reports unreadable settings
            return self.advice(kind)
        return ""

    # ---- the interface of a backend

    def url(self, key: str) -> str:
        from urllib.parse import quote  # imported lazily because local paths need no URL

        path = quote(key, safe="/-_.~!$&'()*+,;=:@", errors="surrogateescape")
        return f"{self._root}{self._separator if key else ''}{path}"

    def is_there(self, key: str) -> bool:
        if not key:
            return False
        listing = self._listing
        if listing is None:
            return self.has_object(key)
        if not key.startswith(listing.prefix):  # cached because callers look up the same key several times
            if key not in listing.others:
                listing.others[key] = self.has_object(key)
            return listing.others[key]
        at = bisect_left(listing.names, key)
        return at < len(listing.names) and listing.names[at] == key

    def is_directory(self, key: str) -> bool:
        return not key or bool(self.names(key))

    def entries(self, key: str) -> list[Entry]:
        folders: dict[str, bool] = {}
        for name in self.names(key):
            head, slash, _ = name.partition("/")
            if head and not head.endswith(HIDDEN_SUFFIX):
                folders[head] = folders.get(head, False) or bool(slash)
        return sorted(Entry(name, is_directory) for name, is_directory in folders.items())

    def read_bytes(self, key: str, limit: int | None, size: int | None) -> bytes:
        # One request is enough if the object has the expected size or is small.
        is_known = size is not None and (limit is None or size <= limit)
        part = size if is_known else None if limit is None else min(limit, _SMALL)
        if part is not None:
            with contextlib.suppress(DamagedCheckpointError):  # a shorter object, or a server that lacks range support
                content = self.read_range(key, slice(0, part if is_known else part + 1))
                if is_known or len(content) <= part:
                    return content
        if limit is not None and self.object_size(key) > limit:
            raise DamagedCheckpointError(f"{self.url(key)} is longer than the limit of {limit} bytes")
        return self.read_range(key, None)

    def has_size(self, key: str, size: int) -> bool:
        return self.object_size(key) == size

    def write_bytes_if(self, key: str, data: bytes, expected: bytes | None) -> bool:
        generation = None
        if expected is not None:
            content, generation = self.read_generation(key)
            if content != expected:
                return content == data
        # If the response to a successful write is lost, the retry is refused, so compare the contents as well.
        return self.write_where(key, data, generation) or self.read_generation(key)[0] == data

    def remove_if(self, key: str, expected: bytes) -> None:
        if self.read_generation(key)[0] == expected:
            self.remove(key)

    def make_directory(self, key: str, *, sync: bool) -> bool:
        return False  # prefixes need not be created

    def sync_directory(self, key: str) -> None:
        pass  # objects are listed as soon as they are written, so there is nothing to sync

    def rename(self, key: str, target: str) -> None:
        names = self._listed(key, itself=True)
        if not names:
            raise ObjectNotFoundError(f"cannot rename {self.url(key)}: there is no such object or directory")
        for name in names:
            self.write_bytes(target + name.removeprefix(key), self.read_range(name, None), atomic=True)
        parallel_map(self.remove, names, REQUESTS)

    def remove_tree(self, key: str, first: str | None, last: str | None) -> None:
        below = f"{key}/" if key else ""
        names = self._listed(key, itself=True)
        beginning, end = (None if name is None else f"{below}{name}" for name in (first, last))
        if beginning in names:
            self.remove(beginning)
        others = [name for name in names if name not in (beginning, end)]
        while len(others) > 1 and self.remove_together(others[:_TOGETHER]):
            others = others[_TOGETHER:]
        parallel_map(self.remove, others, REQUESTS)
        if end in names:
            self.remove(end)

    def open_data(self, key: str, size: int | None, *, cached: bool | None) -> DataReader:
        if size is None and not self.is_there(key):
            raise ObjectNotFoundError(f"cannot open {self.url(key)}: there is no such object")
        return ObjectReader(self, key, size)

    def identity(self, key: str) -> FileIdentity:
        return BY_NAME

    def request(
        self, key: str, action: str, start: Callable[[], Future[T]], nbytes: int = 0, *, attempts: int = 1
    ) -> T:
        """Send a request and wait for its result, with a time limit; retry if the response cannot be parsed."""
        for _ in range(attempts - 1):
            with contextlib.suppress(GarbledAnswerError):
                return self._request_once(key, action, start, nbytes)
        return self._request_once(key, action, start, nbytes)

    def _request_once(self, key: str, action: str, start: Callable[[], Future[T]], nbytes: int) -> T:
        began = time.monotonic()
        timeout = time_limit(nbytes)
        future = None
        try:
            future = start()
            try:
                return future.result(timeout=min(WARN_AFTER, timeout))
            except TimeoutError:
                if timeout <= WARN_AFTER:
                    raise
                advice = self._advice(StorageUnavailableError)
                _logger.warning("%s: still waiting to %s it after %.0f s%s", self.url(key), action, WARN_AFTER, advice)
                return future.result(timeout=timeout - WARN_AFTER)
        except TimeoutError as error:
            assert future is not None
            future.cancel()
            raise StorageUnavailableError(
                f"cannot {action} {self.url(key)}: no answer after {time.monotonic() - began:.0f} s; check the "
                f"connection and try again{self._advice(StorageUnavailableError)}"
            ) from error
        except KeyboardInterrupt:
            if future is not None:
                future.cancel()
            raise
        except HoldfastError:
            raise
        except self.failures() as error:
            # A local variable for the error would form a reference cycle that keeps the callers' objects alive.
            raise self._advised(self.explained(error, key, action)) from self.shown_cause(error)

    def _advised(self, error: HoldfastError) -> HoldfastError:
        advice = self._advice(type(error))
        return type(error)(f"{error}{advice}") if advice else error

    def snapshot(self, key: str, known: Collection[str] = ()) -> Self:
        """Return a copy of this store with a frozen listing of ``known`` and all objects below a key."""
        frozen = copy.copy(self)
        frozen._listing = None
        prefix = f"{key}/" if key else ""
        frozen._listing = _Listing(prefix, sorted(prefix + name for name in {*frozen.names(key), *known}))
        return frozen

    def names(self, key: str) -> list[str]:
        """Return the sorted names of all objects below a key, relative to the key."""
        below = f"{key}/" if key else ""
        return [name.removeprefix(below) for name in self._listed(key, itself=False)]

    def _listed(self, key: str, *, itself: bool) -> list[str]:
        """Return the names of all objects below a key; if ``itself``, include any object with exactly this key."""
        below = f"{key}/" if key else ""
        listing = self._listing
        if listing is None or not below.startswith(listing.prefix):
            names = self.list_objects(key, itself=itself)
        else:
            end = bisect_left(listing.names, f"{key}0") if key else None  # "0" follows "/" in ASCII
            names = listing.names[bisect_left(listing.names, key if itself else below) : end]
        return [name for name in names if name.startswith(below) or (itself and name == key)]


class ObjectReader(DataReader):
    """A reader for one object. It reads byte ranges, or the entire object once if the store lacks range support."""

    def __init__(self, backend: ObjectStoreBackend, key: str, expected: int | None) -> None:
        self._backend = backend
        self._key = key
        self._expected = expected  # length in bytes, if known
        self._lock = threading.Lock()
        self._whole: bytes | None = None
        self._missing: ObjectNotFoundError | None = None
        self._first = threading.Lock()  # acquired by the first read and never released
        self._answered = threading.Event()  # set when the first read has received a response or has failed

    @property
    def size(self) -> int:
        return self._backend.object_size(self._key)

    def read(self, offset: int, length: int, buffer: Buffer | None = None) -> NDArray[np.uint8]:
        if self._missing is not None:  # an earlier read has found that the object does not exist
            raise self._missing
        url, size = self._backend.url(self._key), self._expected
        try:
            # The expected length may be wrong, so check the actual size before allocating a large buffer.
            trusted = UNKNOWN_SIZE if size is None else _TRUSTED
            if not (0 <= offset <= _LONGEST_RANGE and 0 <= length <= trusted):
                size = self.size
            if size is not None:
                check_extent(url, size, offset, length)
            memory = aligned_empty(length) if buffer is None else buffer.view(length)
            if not self.read_into(offset, [memory]):
                with self._lock:
                    whole = self._whole = self._whole or self._backend.read_range(self._key, None)
                check_extent(url, len(whole), offset, length)
                memory.data[:] = memoryview(whole)[offset : offset + length]
        except ObjectNotFoundError as error:
            self._missing = error
            raise
        return memory

    def read_into(self, offset: int, memory: Sequence[NDArray[np.uint8]]) -> bool:
        if self._whole is not None or self._missing is not None:
            return False
        # Later reads wait for the first response: until then, the service may still be hashing or fetching the object.
        if not self._first.acquire(blocking=False):
            self._answered.wait(REQUEST_TIMEOUT)
        try:
            return self._backend.read_into(self._key, offset, memory, self._answered.set)
        finally:
            self._answered.set()

    def close(self) -> None:
        self._whole = None


def file_parts(size: int, segments: Sequence[Segment]) -> Iterator[NDArray[np.uint8]]:
    """Yield the bytes of a data file, including the zeros between segments."""
    import numpy as np  # imported lazily because listing checkpoints imports this module but needs no arrays

    position = 0
    for segment in [*segments, Segment(size, 0, lambda: iter(()))]:
        while position < segment.offset:
            yield np.zeros(min(segment.offset - position, 1 << 20), np.uint8)
            position += min(segment.offset - position, 1 << 20)
        yield from segment.checked_parts()
        position += segment.size


@contextlib.contextmanager
def failing_parts(parts: Iterator[T]) -> Iterator[Iterator[T]]:
    """Yield an iterator over the parts of an upload; if the iterator fails, raise its error, not the upload error."""
    failed: list[BaseException] = []

    def watched() -> Iterator[T]:
        try:
            yield from parts
        except BaseException as error:
            failed.append(error)
            raise

    try:
        yield watched()
    except HoldfastError:
        if failed:
            raise failed[0] from None
        raise
