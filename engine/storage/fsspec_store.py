"""Access through fsspec (the extra ``fsspec``) to all other URL schemes and to pyarrow file systems.

When a file system is opened, a warning lists the guarantees that it does not provide; see docs/object_stores.md.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import importlib.util
import logging
import os
import re
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar
from urllib.parse import quote, quote_plus

from ..errors import (
    HoldfastError,
    InvalidLocationError,
    ObjectNotFoundError,
    OptionError,
    StorageError,
    StoragePermissionError,
    StorageUnavailableError,
)
from ..forks import Lock
from ..installed import install_command
from .backend import KNOWN_PLACES, Segment
from .local import TEMPORARY_PREFIX
from .object_store import UNKNOWN_SIZE, ObjectStoreBackend, failing_parts, file_parts
from .status import OS_ERRORS, explain_failure, hidden_address, map_os_error, truncated

_logger = logging.getLogger("holdfast")

T = TypeVar("T")

_UNCACHED = {"skip_instance_cache": True}  # each backend gets its own connections

# Schemes that are not supported, because they are read-only or wrap another address.
_WRAPPERS = re.compile(r"https?|file|local|data|dir|zip|tar|libarchive|generic|async_wrapper|reference|\w*cache\w*")
# Object stores, which replace objects atomically.
_WHOLE = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "oci", "r2", "memory"})
_REPLACING = frozenset({"sftp", "ssh"})  # file systems whose rename replaces an existing file atomically
# File systems with an atomic rename that never replaces an existing file.
_RENAMING = frozenset({"hdfs", "arrow_hdfs", "webhdfs", "viewfs", "smb"})

# Names of options that hold secrets.
_SECRET = re.compile(r"pass|pwd|secret|key|token|cred|^auth$|authorization|sas|connection_string", re.IGNORECASE)

_ADDRESS = re.compile(r"\\x00address \d+")  # memory address of a class or function in a file system's description

_MISSING = re.compile("NotFound|NoSuch")
_CLASSES: tuple[tuple[re.Pattern[str], type[HoldfastError]], ...] = (  # matched against exception class names
    (_MISSING, ObjectNotFoundError),
    (re.compile("Auth|Permission|Credential|Forbidden|BadHostKey"), StoragePermissionError),
    (re.compile("Time|Connect|SSHException|EOFError|Unavailable|gaierror"), StorageUnavailableError),
)


class _TimedOutError(Exception):
    """A timeout raised by the file system's library, as opposed to holdfast's own time limit."""


_given: dict[str, FsspecBackend] = {}  # backends of file systems that the program has created, keyed by URL scheme
_given_lock = Lock()


def open_fsspec(scheme: str, authority: str, shown: str) -> FsspecBackend:
    """Return the backend for a URL. Calls with equal settings return the same object."""
    if "+" in scheme:
        if scheme in _given:
            return _given[scheme]
        raise InvalidLocationError(
            f"{shown!r} names a file system object that this process does not have: pass it, as in as_location(path, "
            "filesystem=...)"
        )
    unknown = f"{shown!r} has an unknown scheme, {scheme!r}"
    if _WRAPPERS.fullmatch(scheme):
        raise InvalidLocationError(f"{unknown}: expected {KNOWN_PLACES}")
    if importlib.util.find_spec("fsspec") is None:
        needed = install_command("fsspec")
        raise InvalidLocationError(f"{unknown}, which needs fsspec ({needed}): expected {KNOWN_PLACES}")
    import fsspec

    if ":" in authority.rpartition("@")[0]:
        raise InvalidLocationError(
            f"{shown!r} contains a password; write it to a configuration file of fsspec, ~/.config/fsspec/*.json, or "
            "pass a file system: as_location(path, filesystem=...)"
        )
    try:
        fsspec.get_filesystem_class(scheme)
    except ValueError:
        raise InvalidLocationError(f"{unknown}: expected {KNOWN_PLACES}") from None
    except ImportError as error:
        raise OptionError(f"{shown!r} needs another package for fsspec: {error}") from error
    settings = tuple(sorted((name, value) for name, value in os.environ.items() if name.startswith("FSSPEC_")))
    return _open_fsspec(scheme, authority, settings)


@functools.lru_cache(maxsize=64)
def _open_fsspec(scheme: str, authority: str, settings: object) -> FsspecBackend:  # noqa: ARG001 - in the key
    def connect() -> tuple[Any, str]:
        import fsspec

        filesystem, path = fsspec.core.url_to_fs(f"{scheme}://{authority}/x", **_UNCACHED)
        return filesystem, path.removesuffix("x")

    return FsspecBackend(f"{scheme}://{authority or '/'}", scheme, connect)


def open_filesystem(filesystem: Any, path: str) -> tuple[FsspecBackend, str] | str:
    """Return the backend and key of a path in an fsspec or pyarrow file system, or just the path if it is local."""
    if importlib.util.find_spec("fsspec") is None:
        raise OptionError(f"filesystem= needs fsspec: {install_command('fsspec')}")
    import fsspec
    from fsspec.implementations.arrow import ArrowFSWrapper
    from fsspec.implementations.local import LocalFileSystem

    while getattr(filesystem, "type_name", "") == "subtree":
        path, filesystem = f"{filesystem.base_path.rstrip('/')}/{path.lstrip('/')}", filesystem.base_fs
    if hasattr(filesystem, "handler") and hasattr(filesystem.handler, "fs"):
        filesystem = filesystem.handler.fs  # pyarrow's wrapper around an fsspec file system
    cls = type(filesystem)
    if cls.__module__.split(".")[0] == "pyarrow" and hasattr(filesystem, "type_name"):
        if filesystem.type_name == "local":
            return path
        wrapped, protocol = ArrowFSWrapper(filesystem, **_UNCACHED), str(filesystem.type_name).split("::")[-1]
    elif isinstance(filesystem, fsspec.AbstractFileSystem):
        if cls is LocalFileSystem:
            return str(filesystem._strip_protocol(path))
        names = filesystem.protocol
        wrapped, protocol = filesystem, names if isinstance(names, str) else names[0]
    else:
        raise OptionError(
            f"filesystem={cls.__module__}.{cls.__qualname__} is neither an fsspec nor a pyarrow file system"
        )
    inner = str(wrapped._strip_protocol(path))
    key = "/".join(part for part in inner.split("/") if part)
    if any(part in (".", "..") for part in key.split("/")):
        raise InvalidLocationError(f"{hidden_address(path)!r} contains '.' or '..', which are not resolved there")
    prefix = "/" if inner.startswith("/") else ""
    with _given_lock:
        name, description = _names_of(filesystem, prefix)
        for backend in _given.values():
            if backend.prefix == prefix and (backend.given is filesystem or backend.description == description):
                return backend, key
        scheme = f"{re.sub('[^a-z0-9]', '', protocol.lower())}+{name}"
        while scheme in _given:  # a different file system has the same name
            scheme += "a"
        _given[scheme] = backend = FsspecBackend(
            f"{scheme}://", protocol, lambda: (_of_this_process(wrapped), prefix), filesystem, prefix, description
        )
        return backend, key


def _names_of(filesystem: Any, prefix: str) -> tuple[str, str]:
    """Return a name for a file system and a description that only equal file systems share."""
    # If the options contain no secrets, the name is the same in all processes. Otherwise, the name is random: a hash of
    # the secrets could reveal them, and a hash of the other options alone could name a different file system elsewhere.
    secrets: list[str] = []
    try:
        description = repr((_described(filesystem, secrets), prefix))
    except Exception:  # file systems that cannot be pickled have no description
        return uuid.uuid4().hex[:8], f"{id(filesystem)} {prefix}"
    if secrets:
        return uuid.uuid4().hex[:8], description
    return hashlib.sha256(_ADDRESS.sub("", description).encode()).hexdigest()[:8], description


def _described(value: Any, secrets: list[str]) -> Any:
    """Return the state that pickle would store for a value, and append the names of secret options to ``secrets``."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, Mapping):
        secrets += [str(name) for name, inner in value.items() if inner and _SECRET.search(str(name))]
        return sorted((str(name), _described(inner, secrets)) for name, inner in value.items())
    if isinstance(value, list | tuple):
        return [_described(inner, secrets) for inner in value]
    if isinstance(value, set | frozenset):
        return sorted(repr(_described(inner, secrets)) for inner in value)
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__} \0address {id(value)}"
    reduced = value.__reduce_ex__(2)
    return reduced if isinstance(reduced, str) else [_described(part, secrets) for part in reduced]


def _is_arrow(filesystem: Any) -> bool:
    """Return whether a file system is fsspec's wrapper around a pyarrow file system."""
    return type(filesystem).__name__ == "ArrowFSWrapper"


def _of_this_process(filesystem: Any) -> Any:
    """Return the file system, or a new one with equal options if it was opened before this process was forked."""
    if getattr(filesystem, "_pid", os.getpid()) == os.getpid():
        return filesystem
    if _is_arrow(filesystem):
        raise StorageError(
            "this process was forked from one that had used a pyarrow file system, which does not work in both; "
            "start processes with the method 'spawn' or 'forkserver' of multiprocessing"
        )
    return type(filesystem)(*filesystem.storage_args, **{**filesystem.storage_options, **_UNCACHED})


class FsspecBackend(ObjectStoreBackend):
    """An fsspec file system. ``connect`` returns the file system and the path prefix that precedes every key."""

    def __init__(
        self,
        root: str,
        protocol: str,
        connect: Callable[[], tuple[Any, str]],
        given: Any = None,
        prefix: str = "",
        description: str = "",
    ) -> None:
        super().__init__(root, is_remote=True)
        self.given = given
        self.prefix = prefix
        self.description = description  # the same for all equal file systems
        self._connect = connect
        self._whole = protocol in _WHOLE
        self._replaces = protocol in _REPLACING
        self._renames = protocol in _RENAMING or self._replaces
        self._connected: tuple[int, Any, str, Any] | None = None  # process ID, file system, prefix and lock
        self._connecting = Lock()
        in_one_step = self._whole or self._replaces
        risks = {  # each risk, and whether the file system avoids it
            "concurrent saves to one path are not kept apart": False,
            "what was written may be lost if the machines that keep it lose power": self._whole,
            "a crash may leave half a commit record, and readers may see it": self._whole or self._renames,
            "a crash while a checkpoint is replaced may leave neither the old nor the new one": in_one_step,
        }
        missing = "; ".join(risk for risk, is_avoided in risks.items() if not is_avoided)
        _logger.warning("%s is reached through fsspec (%s), which promises less: %s", root, protocol, missing)

    def object_size(self, key: str) -> int:
        info = self._do(key, "access", lambda fs, path: fs.info(path))
        if info["type"] != "file":
            raise ObjectNotFoundError(f"cannot access {self.url(key)}: there is no such file")
        size = info.get("size")
        return len(self.read_range(key, None)) if size is None else int(size)

    def read_range(self, key: str, byte_range: slice | None) -> bytes:
        if byte_range is None:
            return bytes(self._do(key, "read", lambda fs, path: fs.cat_file(path), UNKNOWN_SIZE))
        start, stop = byte_range.start, byte_range.stop
        size = self.object_size(key)  # file systems differ in how they handle a range beyond the end of a file
        if start >= size and stop > start:
            raise truncated(self.url(key), size, start, stop - start)
        if start == stop:
            return b""

        def read(fs: Any, path: str) -> Any:
            options = {"seekable": True} if _is_arrow(fs) else {}
            return fs.cat_file(path, start=start, end=min(stop, size), **options)

        return bytes(self._do(key, "read", read, stop - start))

    def write_bytes(self, key: str, data: bytes, *, atomic: bool) -> None:
        def write(fs: Any, path: str) -> None:
            folder, _, name = path.rpartition("/")
            if not self._whole:
                fs.makedirs(folder or "/", exist_ok=True)
            if not atomic or not self._renames:
                fs.pipe_file(path, data)
                return
            temporary = f"{folder}/{TEMPORARY_PREFIX}{name}.{uuid.uuid4().hex[:8]}"
            try:
                fs.pipe_file(temporary, data)
                if not self._replaces and fs.exists(path):
                    fs.rm_file(path)
                fs.mv(temporary, path)
            except BaseException:
                with contextlib.suppress(Exception):
                    fs.rm_file(temporary)
                raise

        self._do(key, "write", write, len(data))

    def write_data(self, key: str, size: int, segments: Sequence[Segment]) -> None:
        def write(fs: Any, path: str) -> None:
            if not self._whole:
                fs.makedirs(path.rpartition("/")[0] or "/", exist_ok=True)
            try:
                with fs.open(path, "wb") as file:
                    for part in parts:
                        file.write(part.data)
            except BaseException:
                with contextlib.suppress(Exception):
                    fs.rm_file(path)
                raise

        with failing_parts(file_parts(size, segments)) as parts:
            self._do(key, "write", write, size)
        stored = self.object_size(key)
        if stored != size:
            self.remove(key)
            raise StorageError(
                f"cannot write {self.url(key)}: {size} bytes were sent, but {stored} were stored; try again"
            )

    def remove(self, key: str) -> None:
        try:
            self._do(key, "remove", lambda fs, path: fs.rm_file(path))
        except StorageError:
            if self.has_object(key):
                raise

    def remove_tree(self, key: str, first: str | None, last: str | None) -> None:
        super().remove_tree(key, first, last)

        def remove_folders(fs: Any, path: str) -> None:
            if not key or self._whole or not _is_folder(fs, path):
                return
            if self._listing is None:
                with _unless_gone(fs, path):
                    fs.rm(path, recursive=True)
                return
            if _is_arrow(fs):  # pyarrow's rmdir would also delete files that another process has just written
                return
            # Remove only empty folders, to keep files that have been written since the listing.
            for folder in reversed([folder for folder, _, _ in fs.walk(path)]):
                with _unless_gone(fs, folder, or_filled=True):
                    if not fs.ls(folder, detail=False):
                        fs.rmdir(folder)

        self._do(key, "remove", remove_folders)

    def is_directory(self, key: str) -> bool:
        if self._listing is not None:
            return super().is_directory(key)
        return not key or next((True for name in self._walk(key) if name != key), False)

    def list_objects(self, key: str, *, itself: bool) -> list[str]:
        return sorted(self._walk(key))

    def _walk(self, key: str) -> Iterator[str]:
        """Yield the keys of all files at or below a key; raise errors, which fsspec's find and walk would hide."""
        folders = [key]
        while folders:
            folder = folders.pop()
            try:
                entries = self._do(folder, "list", self._entries)
            except ObjectNotFoundError:
                continue
            except StorageError:
                if folder != key or not self.has_object(key):
                    raise
                entries = [(key, False)]  # some file systems cannot list a single file
            for name, is_directory in entries:
                if not is_directory:
                    yield name
                elif name != folder:
                    folders.append(name)

    def _entries(self, fs: Any, path: str) -> list[tuple[str, bool]]:
        prefix = self._filesystem()[1]
        entries = []
        for entry in fs.ls(path or prefix, detail=True):
            name = str(fs._strip_protocol(entry["name"]))
            if prefix.startswith("/") != name.startswith("/"):
                name = f"/{name}" if prefix.startswith("/") else name.lstrip("/")
            entries.append((name.removeprefix(prefix).rstrip("/"), entry["type"] == "directory"))
        return entries

    # ---- calls

    def _do(self, key: str, action: str, call: Callable[[Any, str], T], nbytes: int = 0) -> T:
        """Run a call in a new thread, so that Ctrl-C or the time limit can end the wait for its result."""

        def begin() -> Future[T]:
            answer: Future[T] = Future()
            answer.set_running_or_notify_cancel()  # the call cannot be cancelled, but a late result is ignored

            def run() -> None:
                try:
                    fs, prefix, lock = self._filesystem()
                    with lock:
                        fs.invalidate_cache()  # cached listings may be stale if other processes have written files
                        answer.set_result(call(fs, (prefix + key).rstrip("/") or prefix))
                except TimeoutError as error:  # the caller must not mistake this for holdfast's own time limit
                    answer.set_exception(_TimedOutError(str(error)))
                except BaseException as error:
                    answer.set_exception(error)

            threading.Thread(target=run, name="fsspec-request", daemon=True).start()
            return answer

        return self.request(key, action, begin, nbytes)

    def _filesystem(self) -> tuple[Any, str, Any]:
        with self._connecting:
            # A forked child cannot use the fsspec connections and threads of its parent.
            if self._connected is None or self._connected[0] != os.getpid():
                fs, prefix = self._connect()
                # Only asynchronous file systems and pyarrow's may be used by several threads at once.
                together = getattr(fs, "async_impl", False) or _is_arrow(fs)
                lock: Any = contextlib.nullcontext() if together else threading.Lock()
                self._connected = (os.getpid(), fs, prefix, lock)
            return self._connected[1:]

    def failures(self) -> tuple[type[Exception], ...]:
        return (Exception,)  # each library raises its own exceptions

    def explained(self, error: Exception, key: str, action: str) -> HoldfastError:
        text = " ".join(self._hidden(str(error)).split())
        is_builtin = type(error).__module__ == "builtins"
        if isinstance(error, OSError) and (error.errno in OS_ERRORS or (is_builtin and error.errno is not None)):
            mapped = map_os_error(error, self.url(key), action)
            return type(mapped)(self._hidden(str(mapped)))
        names = " ".join(base.__name__ for base in type(error).__mro__ if base not in (OSError, Exception))
        cls = next((cls for pattern, cls in _CLASSES if pattern.search(names)), StorageError)
        if isinstance(error, EOFError | ConnectionError):
            cls = StorageUnavailableError
        return explain_failure(cls, action, self.url(key), f"{type(error).__name__}: {text}" if text else names)

    def shown_cause(self, error: Exception) -> Exception | None:
        return None if self._hidden(str(error)) != str(error) else super().shown_cause(error)

    def _hidden(self, text: str) -> str:
        """Mask the secrets in the file system's options wherever they occur in ``text``."""
        options = getattr(self.given, "storage_options", None) or {}
        if self._connected is not None:
            options = {**options, **(getattr(self._connected[1], "storage_options", None) or {})}
        for secret in sorted(_secrets(options), key=len, reverse=True):  # a long secret may contain a shorter one
            for form in (secret, quote(secret, safe=""), quote_plus(secret), repr(secret)[1:-1]):
                text = text.replace(form, "***")
        return text


@contextlib.contextmanager
def _unless_gone(fs: Any, folder: str, *, or_filled: bool = False) -> Iterator[None]:
    """Suppress a deletion error if another process has deleted the folder or (with ``or_filled``) added files to it."""
    try:
        yield
    except Exception as error:  # each library raises its own exceptions
        fs.invalidate_cache()
        try:
            if not _is_folder(fs, folder) or (or_filled and fs.ls(folder, detail=False)):
                return
        except Exception as answer:
            if _says_gone(answer):
                return
            raise error from None
        raise


def _is_folder(fs: Any, path: str) -> bool:
    """Return whether a folder exists. Unlike fsspec's isdir, raise an error if the connection is lost."""
    try:
        return bool(fs.info(path)["type"] == "directory")
    except Exception as error:
        if _says_gone(error):
            return False
        raise


def _says_gone(error: Exception) -> bool:
    """Return whether the errno or the class name of an error means that a path does not exist."""
    if isinstance(error, OSError) and error.errno in (errno.ENOENT, errno.ENOTDIR):
        return True
    return any(_MISSING.search(base.__name__) for base in type(error).__mro__)


def _secrets(value: Any, *, is_secret: bool = False) -> Iterator[str]:
    """Yield the secrets in options: the values of options whose names suggest secrets, and the passwords in URLs."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _secrets(inner, is_secret=is_secret or _SECRET.search(str(name)) is not None)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _secrets(inner, is_secret=is_secret)
    elif isinstance(value, bytes):
        yield from _secrets(value.decode(errors="replace"), is_secret=is_secret)
    elif isinstance(value, str) and value.strip():
        if is_secret:
            yield value
        elif (password := re.search(r"://[^/:@]*:(.+)@", value, re.DOTALL)) is not None:
            yield password[1]
