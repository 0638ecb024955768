"""Azure Blob Storage, through obstore: the extra ``azure`` of the package.

The account and its credentials come from the environment variables that obstore reads, ``AZURE_STORAGE_...``; a URL
names the container and may name the account.

Requests run on an event loop in a thread of their own, so that Ctrl-C ends the wait for one and cancels it: obstore's
blocking calls do not react to signals.
"""

from __future__ import annotations

import asyncio
import datetime
import functools
import importlib.util
import os
import re
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import (
    DamagedCheckpointError,
    HoldfastError,
    InvalidLocationError,
    ObjectNotFoundError,
    OptionError,
    StorageConflictError,
    StorageError,
    StorageFullError,
    StoragePermissionError,
    StorageUnavailableError,
)
from . import object_store
from .backend import Segment
from .buffers import aligned_empty
from .object_store import GARBLED, UNKNOWN_SIZE, ObjectStoreBackend, failing_parts, file_parts
from .status import GarbledAnswerError, check_header, explain_failure, hidden_address

if TYPE_CHECKING:
    from obstore.store import AzureStore

_STALLED = datetime.timedelta(seconds=120)  # without a byte, after which an attempt has failed
_ATTEMPT = datetime.timedelta(days=1)  # holdfast limits the time of a request itself, by its size
BACKOFF = {"init_backoff": datetime.timedelta(seconds=0.1), "max_backoff": datetime.timedelta(seconds=15), "base": 2}

SINGLE_REQUEST_BYTES = 256 << 20  # bytes of a file that is sent in one request; larger ones are sent in blocks
BLOCK_BYTES = 32 << 20  # bytes
_BLOCKS = 4  # sent at a time

_ACCOUNT = re.compile(r"[a-z0-9]{3,24}(\.[a-z0-9-]+)*")
_HTTPS = re.compile(r"[a-z0-9]{3,24}\.(blob|dfs)\.core\.windows\.net")
_SERVICE = ".dfs.core.windows.net"  # the suffix of the name of an account

_FAILURES: tuple[tuple[re.Pattern[str], type[HoldfastError]], ...] = (
    (re.compile(r"Header missing|invalid [\w ]+response|response body error"), GarbledAnswerError),
    (re.compile(r"status code: 416|InvalidRange|Wanted range starting|bytes 0--1/0"), DamagedCheckpointError),
    (re.compile(r"status code: 507|InsufficientStorage|QuotaExceeded|AccountLimitExceeded"), StorageFullError),
    (re.compile(r"status code: 413|RequestBodyTooLarge"), StorageFullError),
    (
        re.compile(
            r"code: 40[13]\b|ExpiredAuthenticationToken|Authenticat(ion|e)|token request|[Cc]redential"
            r"|Invalid Access Key|SAS query|Account must be specified"
        ),
        StoragePermissionError,
    ),
    (re.compile(r"status code: 404"), ObjectNotFoundError),
    (re.compile(r"status code: 409"), StorageConflictError),
    (
        re.compile(r"status code: (408|429|5\d\d)|HTTP error|timed? ?out|Header missing|invalid \w+ "),
        StorageUnavailableError,
    ),
)
"""What obstore reports without a class of its own."""

_CLASSES: dict[str, type[HoldfastError]] = {
    "FileNotFoundError": ObjectNotFoundError,
    "AlreadyExistsError": StorageConflictError,
    "PreconditionError": StorageConflictError,
    "PermissionDeniedError": StoragePermissionError,
    "UnauthenticatedError": StoragePermissionError,
    "InvalidPathError": InvalidLocationError,
}

_PLACES = re.compile(r"AZURE_(STORAGE_)?ENDPOINT|AZURE_.*USE_.*(EMULATOR|FABRIC).*|AZURITE.*")
"""The variables that choose the service, in capitals; keys and tokens may change while a program runs."""

_lock = threading.Lock()
_loops: list[tuple[int, asyncio.AbstractEventLoop]] = []  # one at most, with the process that runs it


def azure_root(scheme: str, authority: str, path: str) -> tuple[str, str] | None:
    """Return the address of a container and the path inside it; None if the address is not one of Azure."""
    shown = hidden_address(f"{scheme}://{authority}/{path}")
    if scheme == "https":
        if not _HTTPS.fullmatch(authority):
            return None
        container, _, path = path.partition("/")
        account = authority.partition(".")[0] + _SERVICE
    else:
        container, at, account = authority.partition("@")
        if ":" in authority or (at and not _ACCOUNT.fullmatch(account)):
            raise InvalidLocationError(
                f"{shown!r} does not name an account as abfs://container@account.dfs.core.windows.net/name does; "
                "keys and tokens come from the environment"
            )
        if account and "." not in account:
            account += _SERVICE
        account = account.replace(".blob.core.windows.net", _SERVICE)
    if not container:
        raise InvalidLocationError(f"{shown!r} names no container: write az://container/name")
    return (f"abfs://{container}@{account}" if account else f"az://{container}"), path


def open_azure(root: str) -> AzureBackend:
    """Return the backend of a container: the same object for the same settings."""
    if importlib.util.find_spec("obstore") is None:
        raise OptionError(f"{root} needs obstore: pip install 'holdfast[azure]'")
    # obstore reads the names in any case.
    settings = {name: value for name, value in os.environ.items() if name.upper().startswith(("AZURE", "AZURITE"))}
    return _open_azure(root, tuple(sorted(settings.items())))


@functools.lru_cache(maxsize=64)
def _open_azure(root: str, settings: tuple[tuple[str, str], ...]) -> AzureBackend:
    for name, value in settings:
        check_header(root, name, value)
    account = next((value for name, value in settings if name.upper() == "AZURE_STORAGE_ACCOUNT_NAME"), "")
    container, _, named = root.partition("://")[2].partition("@")
    named = named or f"{account}{_SERVICE}"
    place = (container, named, *((name, value) for name, value in settings if _PLACES.fullmatch(name.upper())))
    # The URL keeps the account that it names: the environment of another process may name another one.
    return AzureBackend(root, container if named == f"{account}{_SERVICE}" else root, place)


class AzureBackend(ObjectStoreBackend):
    """A container of Azure Blob Storage: its name in the account of the environment, or the URL of one in another.

    ``place`` tells one container from another: its name, its account, and the service that the environment names.
    """

    def __init__(self, root: str, container: str, place: tuple[object, ...]) -> None:
        super().__init__(root, is_remote=True)
        self._container = container
        self._place = place
        self._opened: list[AzureStore] = []  # one at most
        self._opening = threading.Lock()

    def __eq__(self, other: object) -> bool:
        """Whether both reach the same container, by URLs that may differ."""
        if not isinstance(other, AzureBackend) or self._listing is not other._listing:
            return False
        return self._place == other._place

    def __hash__(self) -> int:
        return hash(self._place)

    def has_object(self, key: str) -> bool:
        try:
            self.object_size(key)
        except ObjectNotFoundError:
            return False
        return True

    def object_size(self, key: str) -> int:
        size: int = self._ask(key, "access", lambda store, obstore: obstore.head_async(store, key))["size"]
        return size

    def read_range(self, key: str, byte_range: slice | None) -> bytes:
        if byte_range is None:
            return self._read(key)[0]
        if byte_range.start == byte_range.stop:
            self.object_size(key)
            return b""
        return bytes(self._read_part(key, byte_range.start, byte_range.stop))

    def read_into(
        self, key: str, offset: int, memory: Sequence[NDArray[np.uint8]], answered: Callable[[], None]
    ) -> bool:
        size = sum(part.size for part in memory)
        if not size:
            return False
        try:
            found = np.frombuffer(self._read_part(key, offset, offset + size), np.uint8)
        except DamagedCheckpointError:
            return False
        if found.size != size:
            return False
        position = 0
        for part in memory:
            part[:] = found[position : position + part.size]
            position += part.size
        return True

    def _read_part(self, key: str, start: int, stop: int) -> Any:
        return self._ask(
            key,
            "read",
            lambda store, obstore: obstore.get_range_async(store, key, start=start, end=stop),
            stop - start,
        )

    def _read(self, key: str) -> tuple[bytes, str]:
        """Return the content of an object and its ETag."""

        async def read(store: AzureStore, obstore: Any) -> tuple[bytes, str]:
            answer = await obstore.get_async(store, key)
            return bytes(await answer.bytes_async()), answer.meta["e_tag"]

        found: tuple[bytes, str] = self._ask(key, "read", read, UNKNOWN_SIZE)
        return found

    def write_object(self, key: str, content: list[bytes]) -> None:
        data = content.pop()
        self._put(key, data, len(data))

    def _put(self, key: str, body: Any, size: int, **options: Any) -> None:
        options.setdefault("use_multipart", False)
        self._ask(key, "write", lambda store, obstore: obstore.put_async(store, key, body, **options), size)

    def write_data(self, key: str, size: int, segments: Sequence[Segment], awaited: threading.Event | None) -> None:
        if size > SINGLE_REQUEST_BYTES:
            self._put_blocks(key, size, segments)
        elif all(segment.lasting for segment in segments):
            self._put(key, [part for part in file_parts(size, segments, sent=True) if part.size] or b"", size)
        else:
            memory, end = aligned_empty(size), 0
            for part in file_parts(size, segments, sent=True):
                memory[end : end + part.size] = part
                end += part.size
            self._put(key, memory, size)

    def _put_blocks(self, key: str, size: int, segments: Sequence[Segment]) -> None:
        # Several parts wait, and the memory of one may be used for the next.
        copies = (part.tobytes() for part in file_parts(size, segments, sent=True))
        with failing_parts(copies) as parts:
            self._put(key, parts, size, use_multipart=True, chunk_size=BLOCK_BYTES, max_concurrency=_BLOCKS)

    def remove(self, key: str) -> None:
        try:
            self._ask(key, "remove", lambda store, obstore: obstore.delete_async(store, key))
        except ObjectNotFoundError as error:
            if "ContainerNotFound" in str(error):
                raise

    def remove_objects(self, names: Sequence[str]) -> None:
        if not names:
            return
        try:  # 256 in each request
            self._ask(os.path.commonpath(names), "remove", lambda store, obstore: obstore.delete_async(store, names))
        except ObjectNotFoundError:
            super().remove_objects(names)

    def list_objects(self, key: str, *, itself: bool) -> list[str]:
        async def collect(store: AzureStore, obstore: Any) -> list[str]:
            return [found["path"] async for some in obstore.list(store, key or None) for found in some]

        names: list[str] = self._ask(key, "list", collect)
        if itself and key and self.has_object(key):  # obstore lists what is below a prefix
            names.append(key)
        return sorted(names)

    def honours_conditions(self, key: str, data: bytes | None) -> bool:
        return True

    def read_generation(self, key: str) -> tuple[bytes | None, str | None]:
        try:
            return self._read(key)
        except ObjectNotFoundError:
            return None, None

    def write_where(self, key: str, data: bytes | None, generation: str | None) -> bool:
        if data is None:  # obstore deletes without conditions
            self.remove(key)
            return True
        try:
            self._put(key, data, len(data), mode="create" if generation is None else {"e_tag": generation})
        except StorageConflictError as error:
            if re.search("BlobAlreadyExists|ConditionNotMet", str(error)):
                return False
            raise
        return True

    def _ask(self, key: str, action: str, start: Callable[[Any, Any], Awaitable[Any]], nbytes: int = 0) -> Any:
        """Start a request with the store and the module obstore, and wait for its answer."""
        import obstore

        async def answer() -> Any:
            return await start(self._store(), obstore)

        def begin() -> Future[Any]:
            return asyncio.run_coroutine_threadsafe(answer(), _running_loop(self.url(key)))

        # obstore repeats no request whose answer ends half-way. A body may be an iterator, which has ended.
        return self.request(key, action, begin, nbytes, attempts=1 if action == "write" else GARBLED)

    def _store(self) -> AzureStore:
        with self._opening:
            if not self._opened:
                from obstore.store import AzureStore

                options: dict[str, Any] = {
                    "client_options": {
                        "timeout": _ATTEMPT,
                        "read_timeout": _STALLED,
                        "allow_http": os.environ.get("AZURE_ALLOW_HTTP", "").lower() in ("true", "1"),
                    },
                    "retry_config": {
                        "max_retries": object_store.RETRIES,
                        "retry_timeout": _STALLED,
                        "backoff": BACKOFF,
                    },
                }
                make = AzureStore.from_url if "://" in self._container else AzureStore
                self._opened.append(make(self._container, **options))
            return self._opened[0]

    def explained(self, error: Exception, key: str, action: str) -> HoldfastError:
        # obstore appends a dump of its own structures, which repeats everything.
        text = re.sub(r"\s+", " ", str(error).partition("\n\nDebug source:")[0]).strip()
        kind = _CLASSES.get(type(error).__name__)
        if kind is None:
            kind = next((kind for pattern, kind in _FAILURES if pattern.search(text)), StorageError)
        return explain_failure(kind, action, self.url(key), text)

    def failures(self) -> tuple[type[Exception], ...]:
        from obstore.exceptions import BaseError

        return (BaseError, ValueError, OSError)

    def _advice(self, kind: type[HoldfastError]) -> str:
        if issubclass(kind, StoragePermissionError):
            return (
                " (the account and its key come from AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or the "
                "others that docs/object_stores.md names; they must allow listing, reading, writing and deleting blobs)"
            )
        if issubclass(kind, ObjectNotFoundError):
            return " (is there such a container? Create it first)"
        return ""


def _running_loop(url: str) -> asyncio.AbstractEventLoop:
    """Return the event loop of this process, which runs in a thread."""
    with _lock:
        if _loops and _loops[0][0] != os.getpid():
            raise StorageError(
                f"cannot reach {url}: this process was forked from one that had used Azure, and obstore does not work "
                "in both; start processes with the method 'spawn' or 'forkserver' of multiprocessing"
            )
        if not _loops:
            loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="azure-requests", daemon=True).start()
            _loops.append((os.getpid(), loop))
        return _loops[0][1]
