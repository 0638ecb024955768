"""Access to S3, Google Cloud Storage and Azure Blob Storage through obstore (extras ``s3``, ``gcs`` and ``azure``).

Requests run on an event loop in a background thread, so that Ctrl-C can cancel a request while the caller waits for
it. obstore's blocking calls do not react to signals.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import errno
import functools
import importlib.util
import logging
import os
import queue
import re
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..errors import (
    DamagedCheckpointError,
    HoldfastError,
    ObjectNotFoundError,
    OptionError,
    StorageConflictError,
    StorageError,
    StoragePermissionError,
    StorageUnavailableError,
)
from ..forks import Lock
from ..installed import install_command
from . import object_store
from .backend import FileIdentity, Segment
from .object_store import BY_NAME, GARBLED, UNKNOWN_SIZE, ObjectStoreBackend, failing_parts, file_parts, time_limit
from .status import check_header, map_obstore_error

T = TypeVar("T")

_logger = logging.getLogger("holdfast")

_NEVER = datetime.timedelta(days=1)  # effectively no timeout in obstore; holdfast sets a time limit for each request
BACKOFF = {"init_backoff": datetime.timedelta(seconds=0.1), "max_backoff": datetime.timedelta(seconds=15), "base": 2}

SINGLE_REQUEST_BYTES = 128 << 20  # maximum size in bytes of a file uploaded in one request rather than in blocks
BLOCK_BYTES = 8 << 20  # minimum block size in bytes
_BLOCKS = 3  # number of blocks uploaded concurrently
_MOST_BLOCKS = 10_000  # maximum number of blocks per object in S3 and Google Cloud Storage
_PIECE = 4 << 20  # minimum chunk size in bytes when a range is streamed

_LIST_PAGE = 1000  # number of names per page of a service's listing
_CONFLICTS = 5  # maximum number of attempts at a conditional request; S3 responds with 409 to ask for a retry
_ANONYMOUS = 60.0  # seconds to wait before looking for credentials again if none were found

_REFUSALS = re.compile(r"status: 412|PreconditionFailed|BlobAlreadyExists|ConditionNotMet")
_AGAIN = re.compile("ConditionalRequestConflict|OperationAborted")
_UNKNOWN_REQUEST = re.compile("status: (400|403|404|405|411|501)")  # statuses of unsupported or forbidden requests

_lock = Lock()
_loops: list[tuple[int, asyncio.AbstractEventLoop]] = []  # at most one entry: an event loop and the PID of its process
_conditional: dict[str, bool] = {}  # whether each service honours conditional writes, keyed by address


def open_cloud(service: type[CloudBackend], root: str) -> CloudBackend:
    """Return the backend for a bucket or container. Calls with equal settings return the same object."""
    for package in service.packages:
        check_installed(package, root, service.extra)
    return _open_cloud(service, root, service.settings())  # type: ignore[arg-type]


@functools.lru_cache(maxsize=64)
def _open_cloud(service: Callable[[str], CloudBackend], root: str, settings: object) -> CloudBackend:  # noqa: ARG001 - in the key
    return service(root)


def check_installed(package: str, root: str, extra: str) -> None:
    """Raise OptionError unless a package is installed."""
    with contextlib.suppress(ModuleNotFoundError):  # raised if the parent package is missing
        if importlib.util.find_spec(package) is not None:
            return
    raise OptionError(f"{root} needs {package.partition('.')[0]}: {install_command(extra)}")


class CloudBackend(ObjectStoreBackend):
    """A bucket or container of a cloud service, accessed through obstore. Each service has its own subclass."""

    extra: ClassVar[str]  # the holdfast extra that installs the packages
    packages: ClassVar[tuple[str, ...]] = ("obstore",)  # packages of the extra that the service always needs
    variables: ClassVar[tuple[str, ...]]  # uppercase prefixes of the environment variables that configure the service
    secrets: ClassVar[re.Pattern[str]]  # matches uppercase names of variables whose values are sent in HTTP headers
    is_conditional: ClassVar[bool] = True  # whether the service is known to support conditional writes
    lacks: ClassVar[frozenset[str]] = frozenset()  # unsupported requests: "copy", "remove" (bulk deletion), "range"

    def __init__(self, root: str, address: str = "") -> None:
        super().__init__(root, is_remote=True)
        self._address = address  # address of the service; "" for the default address
        self._identity: tuple[object, ...] = (root, address)  # equal for all URLs of the same bucket
        self._bucket = root.partition("://")[2]
        # Snapshots of this backend are shallow copies, so they share the following objects.
        self._stores: dict[bool, tuple[float, Any]] = {}  # expiry time and store, keyed by ``once`` (see connect)
        self._opening = Lock()
        self._lacks = set(self.lacks)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CloudBackend) and self._listing is other._listing and self._identity == other._identity

    @classmethod
    def settings(cls) -> tuple[tuple[str, str], ...]:
        """Return the environment variables that configure the service, as sorted (name, value) pairs."""
        return tuple(sorted(item for item in os.environ.items() if item[0].upper().startswith(cls.variables)))

    def connect(self, options: Mapping[str, Any], client: Any, *, once: bool) -> Any:
        """Open an obstore store with HTTP client options. If ``once`` is true, the store does not retry."""
        raise NotImplementedError

    # ---- reads

    def object_size(self, key: str) -> int:
        async def ask(store: Any) -> int:
            return int(_checked(await store.head_async(key))["size"])

        return self._ask(key, "access", ask)

    def read_range(self, key: str, byte_range: slice | None) -> bytes:
        if byte_range is None:
            return self._read(key)[0]
        start, stop = byte_range.start, byte_range.stop
        if start == stop:
            self.object_size(key)
            return b""

        async def read(store: Any) -> bytes:
            answer = await store.get_async(key, options={"range": (start, stop)})
            _checked(answer.meta)
            return bytes(await answer.bytes_async())

        return self._ask_range(key, start, stop, read)

    def read_into(
        self, key: str, offset: int, memory: Sequence[NDArray[np.uint8]], answered: Callable[[], None]
    ) -> bool:
        size = sum(part.size for part in memory)
        if not size:
            return False

        async def receive(store: Any) -> bool:
            answer = await store.get_async(key, options={"range": (offset, offset + size)})
            _checked(answer.meta)
            answered()
            first, last = answer.range
            if last - first != size:
                return False
            left, filled = [part for part in memory if part.size], 0  # arrays to fill; bytes filled in the first one
            async for piece in answer.stream(min_chunk_size=_PIECE):
                received = np.frombuffer(piece, np.uint8)
                while received.size:
                    if not left:
                        return False
                    count = min(received.size, left[0].size - filled)
                    left[0][filled : filled + count] = received[:count]
                    received, filled = received[count:], filled + count
                    if filled == left[0].size:
                        left, filled = left[1:], 0
            return not left

        try:
            return self._ask_range(key, offset, offset + size, receive)
        except DamagedCheckpointError:
            return False

    def _ask_range(self, key: str, start: int, stop: int, read: Callable[[Any], Awaitable[T]]) -> T:
        """Request a byte range of an object; raise an error if the service is known not to support ranges."""
        if "range" in self._lacks:
            raise DamagedCheckpointError(f"cannot read {self.url(key)} from byte {start}: ranges are not supported")
        try:
            return self._ask(key, "read", read, stop - start)
        except DamagedCheckpointError as error:
            if "non-partial" in str(error):
                self._lacks.add("range")
            raise

    def _read(self, key: str) -> tuple[bytes, dict[str, Any]]:
        """Return the contents of an object and the metadata that identifies its version."""

        async def read(store: Any) -> tuple[bytes, dict[str, Any]]:
            answer = await store.get_async(key)
            meta = _checked(answer.meta)
            return bytes(await answer.bytes_async()), {name: meta[name] for name in ("e_tag", "version") if meta[name]}

        return self._ask(key, "read", read, UNKNOWN_SIZE)

    def list_objects(self, key: str, *, itself: bool) -> list[str]:
        names: list[str] = []

        async def below(store: Any) -> list[str]:
            last = names[-1] if names else None
            return [meta["path"] async for page in store.list(key or None, offset=last) for meta in page]

        names += self._ask(key, "list", below)
        exact = [key] if itself and key and self.has_object(key) else []  # obstore does not list the prefix itself
        # A proxy's response may look like the end of a listing. Retry if the listing is empty or ends with a full page.
        if not names and not exact:
            names += self._ask(key, "list", below)
        while names and not len(names) % _LIST_PAGE and (more := self._ask(key, "list", below)):
            names += more
        return sorted(exact + names)

    # ---- writes

    def write_bytes(self, key: str, data: bytes, *, atomic: bool) -> None:
        self._put(key, data, len(data))

    def _put(self, key: str, body: Any, size: int, **options: Any) -> None:
        self._ask(
            key,
            "write",
            lambda store: store.put_async(key, body, use_multipart=False, **options),
            size,
            attempts=1 if options else GARBLED,  # a conditional write that has succeeded would fail if retried
        )

    def write_data(self, key: str, size: int, segments: Sequence[Segment]) -> None:
        if size > SINGLE_REQUEST_BYTES:
            with failing_parts(file_parts(size, segments)) as parts:
                self._put_blocks(key, size, parts)
        elif all(segment.lasting for segment in segments):
            self._put(key, [part for part in file_parts(size, segments) if part.size] or b"", size)
        else:
            super().write_data(key, size, segments)

    def _put_blocks(self, key: str, size: int, parts: Iterator[NDArray[np.uint8]]) -> None:
        # This thread produces the parts, because waiting for them in an obstore thread would block other requests.
        wanted: queue.SimpleQueue[asyncio.Future[bytes | None] | None] = queue.SimpleQueue()

        async def given() -> AsyncIterator[bytes]:
            while True:
                answer: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
                wanted.put(answer)
                part = await answer
                if part is None:
                    return
                yield part

        def give(upload: Future[Any], loop: asyncio.AbstractEventLoop) -> None:
            upload.add_done_callback(lambda _: wanted.put(None))
            with contextlib.suppress(queue.Empty):
                while (answer := wanted.get(timeout=time_limit(0))) is not None:
                    # Copy the part: several parts are in flight at once, and the next part may reuse the same memory.
                    part = next((part.tobytes() for part in parts if part.size), None)
                    loop.call_soon_threadsafe(_answer, answer, part)

        options = {"chunk_size": max(BLOCK_BYTES, -(-size // _MOST_BLOCKS)), "max_concurrency": _BLOCKS}
        self._ask(
            key,
            "write",
            lambda store: store.put_async(key, given(), use_multipart=True, **options),
            size,
            attempts=1,
            meanwhile=give,
        )

    def remove(self, key: str) -> None:
        try:
            self._ask(key, "remove", lambda store: store.delete_async(key))
        except ObjectNotFoundError as error:
            if re.search("ContainerNotFound|NoSuchBucket", str(error)):
                raise

    def remove_together(self, names: Sequence[str]) -> bool:
        if "remove" in self._lacks:
            return False
        try:
            self._try(names[0], "remove", lambda store: store.delete_async(list(names)))
        except HoldfastError as error:
            if _UNKNOWN_REQUEST.search(str(error)) and not isinstance(error, ObjectNotFoundError):
                self._lacks.add("remove")
            return False
        return True

    # ---- copies

    def can_share(self) -> bool:
        return "copy" not in self._lacks

    def share(self, key: str, target: str, expected: FileIdentity) -> FileIdentity:
        if self.can_share() and self._is_copied(key, target):
            return BY_NAME
        raise OSError(errno.EAGAIN, "the service did not copy it", self.url(key))

    def _is_copied(self, key: str, target: str) -> bool:
        try:
            self._try(key, "copy", lambda store: store.copy_async(key, target))
            # Check the size: some services report errors with a success status or treat the request as an empty upload.
            if self.object_size(target):
                return True
            self._lacks.add("copy")
            self.remove(target)
        except HoldfastError as error:
            if isinstance(error, StoragePermissionError) or re.search("status: (405|501)", str(error)):
                self._lacks.add("copy")
        if not self.can_share():
            _logger.info("%s: the service cannot copy objects", self._root)
        return False

    # ---- conditions

    def honours_conditions(self, key: str, data: bytes | None) -> bool:
        # Test each service once: if it ignores conditions, creating the same object twice succeeds both times.
        if self.is_conditional:
            return True
        if self._address not in _conditional and data is not None:
            try:
                # The first write may succeed even if conditions are honoured, because the object may not exist.
                honoured = not all(self.write_where(key, data, None) for _ in range(2))
            except HoldfastError as error:
                if isinstance(error, StorageUnavailableError) and not _UNKNOWN_REQUEST.search(str(error)):
                    raise
                honoured = False
            if not honoured:
                _logger.info("%s: no conditional writes, so two saves to one path are not kept apart", self._root)
            _conditional[self._address] = honoured
        return _conditional.get(self._address, False)

    def read_generation(self, key: str) -> tuple[bytes | None, dict[str, Any] | None]:
        try:
            return self._read(key)
        except ObjectNotFoundError:
            return None, None

    def write_where(self, key: str, data: bytes, generation: dict[str, Any] | None) -> bool:
        for attempt in range(1, _CONFLICTS + 1):
            try:
                self._put(key, data, len(data), mode="create" if generation is None else generation)
            except ObjectNotFoundError:
                if generation is None:
                    raise
                return False  # the object has been deleted in the meantime
            except StorageConflictError as error:
                if _REFUSALS.search(str(error)):
                    return False
                if attempt == _CONFLICTS or not _AGAIN.search(str(error)):
                    raise
                time.sleep(0.05 * attempt)
            else:
                return True
        raise AssertionError

    # ---- requests

    def _ask(
        self,
        key: str,
        action: str,
        start: Callable[[Any], Awaitable[T]],
        nbytes: int = 0,
        *,
        attempts: int = GARBLED,
        once: bool = False,
        meanwhile: Callable[[Future[Any], asyncio.AbstractEventLoop], None] | None = None,
    ) -> T:
        def begin() -> Future[T]:
            loop = _running_loop(self.url(key))
            store = self._store(once)

            async def answer() -> T:
                return await start(store)

            future = asyncio.run_coroutine_threadsafe(answer(), loop)
            if meanwhile is not None:
                try:
                    meanwhile(future, loop)
                except BaseException:
                    future.cancel()
                    raise
            return future

        # Garbled responses are retried here because obstore does not retry a request whose response is cut off.
        return self.request(key, action, begin, nbytes, attempts=attempts)

    def _try(self, key: str, action: str, start: Callable[[Any], Awaitable[Any]]) -> None:
        """Send a request without retries, for a caller that has a fallback."""
        self._ask(key, action, start, UNKNOWN_SIZE, once=True)

    def _store(self, once: bool) -> Any:
        with self._opening:
            end, store = self._stores.get(once, (0.0, None))
            if time.monotonic() >= end:
                # An attempt fails if no data is received for this many seconds.
                stalled = float(os.environ.get("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS") or 120)
                client: Any = {"timeout": _NEVER, "read_timeout": datetime.timedelta(seconds=stalled)}
                if certificates := os.environ.get("TENSORSTORE_CA_BUNDLE"):
                    with open(certificates, "rb") as file:
                        client["root_certificate"] = file.read()
                most = 0 if once else object_store.RETRIES
                retries = {"max_retries": most, "retry_timeout": _NEVER, "backoff": BACKOFF}
                for name, value in self.settings():
                    if self.secrets.fullmatch(name.upper()):
                        check_header(self._root, name, value)
                store = self.connect({"retry_config": retries}, client, once=once)
                lasting = _ANONYMOUS if store.config.get("skip_signature") else float("inf")
                self._stores[once] = time.monotonic() + lasting, store
            return store

    def explained(self, error: Exception, key: str, action: str) -> HoldfastError:
        return map_obstore_error(error, self.url(key), action)

    def failures(self) -> tuple[type[Exception], ...]:
        from obstore.exceptions import BaseError

        return (BaseError, ValueError, OSError)


def _checked(meta: Any) -> Any:
    """Return the metadata of a response. Raise ValueError if there is no ETag: the response may come from a proxy."""
    if not meta["e_tag"]:
        raise ValueError("the answer has no ETag")
    return meta


def _answer(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():  # the future may have been cancelled
        future.set_result(value)


def _running_loop(url: str) -> asyncio.AbstractEventLoop:
    """Return the event loop of this process, which runs in a background thread."""
    with _lock:
        if not _loops:
            loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="store-requests", daemon=True).start()
            _loops.append((os.getpid(), loop))
    process, loop = _loops[0]
    if process != os.getpid():
        raise StorageError(
            f"cannot reach {url}: this process was forked from one that had used an object store, and obstore does not "
            'work in both; start processes with the method "spawn" or "forkserver" of multiprocessing, such as '
            'DataLoader(..., multiprocessing_context="spawn")'
        )
    return loop
