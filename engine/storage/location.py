"""Locations, a common representation of local paths and object store URLs.

All calls to the backends go through ``Location``, which checks arguments, joins names and documents the guarantees.
"""

from __future__ import annotations

import fnmatch
import functools
import io
import os
import re
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any

from ..errors import DamagedCheckpointError, InvalidLocationError, OptionError
from ..observer import Observer, check_write, process_observer
from . import local
from .backend import KNOWN_PLACES, DataFile, DataReader, Entry, FileIdentity, Segment
from .buffers import PAGE
from .local import LocalBackend
from .object_store import ObjectStoreBackend
from .parallel import REQUESTS, UPLOADS, parallel_map
from .status import hidden_address

if TYPE_CHECKING:
    import pathlib

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+._-]*)://(.*)", re.DOTALL)  # some fsspec schemes contain underscores
_CHAIN = re.compile(r"[A-Za-z][A-Za-z0-9+._-]*::.*://", re.DOTALL)
_CLOUDS = "s3a?|gs|gcs|az|abfss?"
_COLLAPSED = re.compile(rf"({_CLOUDS}|file|memory|https?|(?:web|arrow_)?hdfs|sftp|ssh|ftp|smb)(:/?|//)", re.IGNORECASE)
_WINDOWS = re.compile(r"[A-Za-z]:")
_NO_MARK = re.compile(rf"(?:{_CLOUDS})/", re.IGNORECASE)
_SYNONYMS = {"gcs": "gs", "s3a": "s3"}

Backend = LocalBackend | ObjectStoreBackend

_local = LocalBackend()


def as_location(
    place: Place, *, filesystem: Any = None, writes: bool = False, observer: Observer | None = None
) -> Location:
    """Convert a path or URL to a location.

    A relative path is resolved against the current directory at the time of this call. ``~`` and ``~name`` at the start
    of a path are expanded to home directories, as in a shell. Percent escapes in URLs, such as ``%20``, are decoded.

    Args:
        place: A path, or a URL that starts with ``file:///``, ``memory://``, ``s3://bucket/``, ``gs://bucket/`` or
            ``az://container/``, or with another scheme that fsspec knows, such as ``sftp://host/`` or ``hdfs://host/``.
        filesystem: The fsspec or pyarrow file system that contains the path ``place``. Processes that pass equal file
            systems get the same URL, and each of them can open it. The URL is valid only in this process if the file
            system cannot be pickled, or if its options contain secrets.
        writes: Whether the caller is going to write to the location.
        observer: The observer to notify, which may replace the location; None means the observer of this process.

    Raises:
        InvalidLocationError: ``place`` is neither a path nor a URL, or the scheme of the URL is unknown.
        OptionError: A required package is not installed, or ``filesystem`` is not a supported file system.

    >>> as_location("memory://runs/x") / "1200"
    Location('memory://runs/x/1200')
    """
    if filesystem is not None:
        from .fsspec_store import open_filesystem

        if isinstance(place, Location) and not place.is_local:
            raise OptionError(f"{place} is not a path in filesystem={filesystem!r}; leave filesystem= out")
        opened = open_filesystem(filesystem, os.fspath(place))
        place = opened if isinstance(opened, str) else Location(*opened)
    location = place if isinstance(place, Location) else _parsed(place)
    target = (observer or process_observer()).place(location.url, writes=writes)
    return location if target == location.url else _parsed(target)


def _parsed(place: str | os.PathLike[str]) -> Location:
    try:
        text = os.fspath(place)
    except TypeError:
        raise InvalidLocationError(
            f"an object of type {type(place).__name__} is not a location: expected {KNOWN_PLACES}; the path comes "
            "first, as in hf.save(path, tree)"
        ) from None
    if not isinstance(text, str) or not text or "\0" in text:
        shown = hidden_address(text) if isinstance(text, str) else text
        raise InvalidLocationError(f"{shown!r} is not a location: expected {KNOWN_PLACES}")
    if (match := _SCHEME.match(text)) is None:
        return Location(_local, os.path.abspath(os.path.expanduser(_checked_path(text))))
    scheme, rest, shown = match.group(1).lower(), match.group(2), hidden_address(text)
    for mark in "?#|":
        if mark in rest:
            raise InvalidLocationError(f"{shown!r} contains {mark!r}; write %{ord(mark):02X} if it is part of the name")
    from urllib.parse import unquote  # imported lazily because local paths do not need it

    path = unquote(rest, errors="surrogateescape")
    if "\0" in path:
        raise InvalidLocationError(f"{shown!r} contains a NUL character")
    if scheme == "file":
        if not path.startswith("/"):
            raise InvalidLocationError(f"{shown!r} does not name an absolute path: write file:///path")
        return Location(_local, os.path.abspath(path))
    backend, path = _opened(_SYNONYMS.get(scheme, scheme), path, shown)
    segments = [segment for segment in path.split("/") if segment]
    if not {".", ".."}.isdisjoint(segments):
        raise InvalidLocationError(f"{shown!r} contains '.' or '..', which object stores do not resolve")
    return Location(backend, "/".join(segments))


def _checked_path(text: str) -> str:
    """Return ``text`` if it is a local path; raise InvalidLocationError for a broken URL or a Windows path."""
    if _CHAIN.match(text):
        raise InvalidLocationError(
            f"{hidden_address(text)!r} chains fsspec file systems, which an address cannot express here; pass the "
            "file system: as_location(path, filesystem=...)"
        )
    if match := _COLLAPSED.match(text):
        url = f"{match[1]}://{'/' if match[1].lower() == 'file' else ''}{text[match.end() :].lstrip('/')}"
        lost = "lacks a colon" if match[2] == "//" else "lost a slash; pathlib removes it, so pass URLs as str"
        shown = hidden_address(url).replace(f"{match[1]}://", match[1] + match[2], 1)
        raise InvalidLocationError(f"{shown!r} looks like a URL that {lost}: {hidden_address(url)!r}")
    if _WINDOWS.match(text):
        there = f"/mnt/{text[0].lower()}/" + text[2:].replace("\\", "/").lstrip("/")
        raise InvalidLocationError(f"{text!r} is a Windows path; in WSL it is {there!r}")
    if _NO_MARK.match(text) and not os.path.isdir(text.partition("/")[0]):
        url = hidden_address(text.replace("/", "://", 1))
        folder = url.replace("://", "/", 1)
        raise InvalidLocationError(f"{folder!r} looks like the URL {url!r}; as a folder, write {f'./{folder}'!r}")
    return text


def folder_in_memory(location: Location, files: dict[str, bytes]) -> Location:
    """Return an in-memory folder backed by ``files``; its error messages refer to ``location``."""
    from .folders import FolderInMemory

    return Location(FolderInMemory(location.url, files), "")


def _opened(scheme: str, path: str, shown: str) -> tuple[ObjectStoreBackend, str]:
    """Return the backend for a URL and the path inside it. Backends are imported only when they are needed."""
    if scheme == "memory":
        from .folders import open_memory

        return open_memory(), path
    authority, _, inside = path.partition("/")
    if scheme in ("s3", "gs"):
        if "@" in authority or (":" in authority and "@" in inside):  # a password may contain slashes
            raise InvalidLocationError(
                f"{shown!r} contains a user or a password; credentials come from the environment, and the address is "
                f"{scheme}://bucket/name"
            )
        if not authority:
            raise InvalidLocationError(f"{shown!r} names no bucket: write {scheme}://bucket/name")
        from .cloud import open_cloud
        from .services import S3, Google

        return open_cloud(S3 if scheme == "s3" else Google, f"{scheme}://{authority}"), inside
    if scheme in ("az", "abfs", "abfss", "https"):
        from .cloud import open_cloud
        from .services import Azure, azure_root

        if (address := azure_root(scheme, authority, inside)) is not None:
            return open_cloud(Azure, address[0]), address[1]
    from .fsspec_store import open_fsspec

    if "+" in scheme:  # the scheme of a file system passed by the program
        authority, inside = "", path
    elif "@" in inside and re.search(r"^[^\[]*:(?!\d*$)", authority):  # a password with slashes, not a port
        authority, inside = path, ""
    return open_fsspec(scheme, authority, shown), inside


def sync_all(locations: Sequence[Location]) -> None:
    """Sync local files and directories to disk. Objects in a store are skipped, because they are already durable."""
    local.sync_all([os.fspath(location) for location in locations if location.is_local])


def max_concurrency(location: Location) -> int:
    """Return how many small requests to run concurrently: 1 on a local disk, which has no latency to hide."""
    return 1 if location.is_local else REQUESTS


class Location:
    """A file, object or directory on a local disk or in an object store. Use ``as_location`` to create one.

    Locations are immutable, comparable and hashable, and they need not exist. Methods raise only errors from
    ``holdfast.engine.errors``, mostly subclasses of ``StorageError``, with the path in the message. Methods that
    also exist in ``pathlib.Path`` raise the same errors as ``pathlib``, so handlers for local paths work as well.

    In a rehearsal (``holdfast drill``), methods that modify data raise StateError unless the location was returned by
    ``as_location(place, writes=True)``.
    """

    __slots__ = ("_backend", "_key")
    _backend: Backend
    _key: str

    def __init__(self, backend: Backend, key: str) -> None:
        object.__setattr__(self, "_backend", backend)
        object.__setattr__(self, "_key", key)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"locations are immutable: cannot set {name!r}")

    def _writing(self) -> Backend:
        """Check that this location may be modified, and return its backend."""
        check_write(self.url)
        return self._backend

    def _object_store(self) -> ObjectStoreBackend:
        backend = self._writing()
        assert isinstance(backend, ObjectStoreBackend)
        return backend

    @property
    def url(self) -> str:
        """The URL, or the plain path of a local location. ``as_location`` converts it back to this location."""
        return self._backend.url(self._key)

    @property
    def name(self) -> str:
        """The last path segment; empty for a root."""
        return self._key.rpartition("/")[2]

    @property
    def parent(self) -> Location:
        """The directory that contains this location; a root is its own parent."""
        return Location(self._backend, os.path.dirname(self._key) if self.is_local else self._key.rpartition("/")[0])

    def overlaps(self, other: Location) -> bool:
        """Return whether the two locations are equal or one is inside the other."""
        ours, theirs = os.path.join(self._key, ""), os.path.join(other._key, "")
        same = self._backend == other._backend or self._backend.url("") == other._backend.url("")
        return same and (ours.startswith(theirs) or theirs.startswith(ours))

    @property
    def is_local(self) -> bool:
        """Whether this is a local path."""
        return self._backend.is_local

    @property
    def is_remote(self) -> bool:
        """Whether requests cross a network. Such requests may arrive after the sender has given up."""
        return self._backend.is_remote

    @property
    def path(self) -> pathlib.Path:
        """The local path as a ``pathlib.Path``.

        Raises:
            TypeError: The location is not local.
        """
        import pathlib  # imported lazily because few callers need pathlib, which has many imports

        return pathlib.Path(self.__fspath__())

    def without_links(self) -> Location:
        """Resolve the symlinks in a local path, but keep the name of a file, which may indicate the format."""
        if not self.is_local:
            return self
        if os.path.isdir(self._key):
            return Location(self._backend, os.path.realpath(self._key))
        folder, name = os.path.split(self._key)
        return Location(self._backend, os.path.join(os.path.realpath(folder), name))

    def __fspath__(self) -> str:
        if not self.is_local:
            raise TypeError(f"{self.url} is not a path on this machine; use its methods, or copy it to a disk first")
        return self._key

    def __truediv__(self, name: str) -> Location:
        """Return a location below this one."""
        if "\0" in name or not {"", ".", ".."}.isdisjoint(name.split("/")):
            raise InvalidLocationError(f"{name!r} is not a valid name inside {self.url}")
        separator = "" if not self._key or self._key.endswith("/") else "/"
        return Location(self._backend, f"{self._key}{separator}{name}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Location) and self._backend == other._backend and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __str__(self) -> str:
        return self.url

    def __repr__(self) -> str:
        return f"Location({self.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        if isinstance(self._backend, ObjectStoreBackend) and self._backend.given is not None:
            return functools.partial(as_location, filesystem=self._backend.given), (self._backend.prefix + self._key,)
        return as_location, (self.url,)

    # ---- methods of pathlib

    def joinpath(self, *names: str | os.PathLike[str]) -> Location:
        """Return a location below this one."""
        return functools.reduce(Location.__truediv__, (os.fspath(name) for name in names), self)

    def is_file(self) -> bool:
        """Return whether this is a file or an object."""
        return os.path.isfile(self._key) if self.is_local else self.is_there()

    def is_dir(self) -> bool:
        """Return whether this is a directory; in an object store, whether there are objects below it."""
        return self.is_directory()

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        """Create this directory. This is a no-op in object stores, which have no directories."""
        if self.is_local:
            self._writing()
            self.path.mkdir(mode, parents, exist_ok)

    def iterdir(self) -> Iterator[Location]:
        """Yield the location of each entry of this directory, sorted by name."""
        return (self / entry.name for entry in self.entries())

    def glob(self, pattern: str) -> Iterator[Location]:
        """Yield the locations that match a pattern such as ``"*.npz"`` or ``"**/*.json"``, sorted per directory.

        ``**`` does not follow symlinks.
        """
        return iter(dict.fromkeys(self._matching(pattern.split("/"))))

    def _matching(self, pattern: Sequence[str]) -> Iterator[Location]:
        first, *rest = pattern
        if first == "**":
            yield from self._matching(rest) if rest else (self,)
        for entry in self.entries():
            inside = self / entry.name
            if first == "**":
                if entry.is_directory and not inside.is_link():
                    yield from inside._matching(pattern)
            elif fnmatch.fnmatchcase(entry.name, first):
                if not rest:
                    yield inside
                elif entry.is_directory:
                    yield from inside._matching(rest)

    def open(
        self,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
    ) -> IO[Any]:
        """Open the file or object. An object is buffered in memory and uploaded when the file is closed.

        Text is encoded in UTF-8 unless another encoding is given.
        """
        text = {"encoding": encoding, "errors": errors, "newline": newline}
        if not self.is_local:
            return _open_object(self, mode, **text)
        if not set(mode) <= set("rbt"):
            self._writing()
        if "b" not in mode:
            text["encoding"] = encoding or "utf-8"
        return open(self._key, mode, buffering, **text)  # type: ignore[call-overload,no-any-return]

    def read_text(self, encoding: str | None = None, errors: str | None = None) -> str:
        """Return the contents as text, decoded as UTF-8 unless another encoding is given."""
        with self.open(encoding=encoding, errors=errors) as file:
            return str(file.read())

    def write_text(
        self, data: str, encoding: str | None = None, errors: str | None = None, newline: str | None = None
    ) -> int:
        """Write text, encoded as UTF-8 unless another encoding is given; return the number of characters written."""
        with self.open("w", encoding=encoding, errors=errors, newline=newline) as file:
            return int(file.write(data))

    def snapshot(self, known: Collection[str] = ()) -> Location:
        """Return this location with a frozen listing of the objects below it; local locations are returned unchanged.

        Reads through the snapshot return current contents, but objects written through the snapshot may not be listed.
        The listing always includes ``known``, the relative paths of objects that the store may not list yet.
        """
        if isinstance(self._backend, ObjectStoreBackend):
            return Location(self._backend.snapshot(self._key, known), self._key)
        return self

    def exists(self) -> bool:
        """Return whether there is a file, object or directory at this location."""
        return self._backend.is_there(self._key) or self._backend.is_directory(self._key)

    def is_there(self) -> bool:
        """Like ``exists``, but ignore directories in object stores, which saves a request."""
        return self._backend.is_there(self._key)

    def is_directory(self) -> bool:
        """Return whether this is a directory; in an object store, whether there are objects below it."""
        return self._backend.is_directory(self._key)

    def entries(self) -> list[Entry]:
        """Return the entries of this directory except lock files, sorted by name; none if the directory is missing."""
        return self._backend.entries(self._key)

    def read_bytes(self, limit: int | None = None, *, size: int | None = None) -> bytes:
        """Return the entire contents.

        Args:
            limit: The maximum number of bytes to accept; None for no limit.
            size: The expected length, if known. Passing it saves a request to an object store, and limits the read.

        Raises:
            ObjectNotFoundError: There is no such file or object.
            DamagedCheckpointError: The contents are longer than ``limit``; this is checked before reading.
        """
        return self._backend.read_bytes(self._key, limit, size)

    def read_own(self, limit: int, *, size: int | None = None) -> bytes:
        """Return the contents of a file that controls a run. Refuse symlinks: they may lead to another run's file.

        Raises:
            DamagedCheckpointError: This is not a regular file, or the contents are longer than ``limit``.
        """
        if self.is_link():
            raise DamagedCheckpointError(f"{self} should be a file, but is a symbolic link, which is not followed")
        return self.read_bytes(limit, size=size)

    def is_link(self) -> bool:
        """Return whether this is a symbolic link. Its target may be read, but must not be modified."""
        return self.is_local and os.path.islink(self._key)

    def check_not_link(self) -> None:
        """Raise InvalidLocationError if this is a symbolic link, because a write would modify its target."""
        if self.is_link():
            raise InvalidLocationError(
                f"{self}: this is a symbolic link to {os.path.realpath(self._key)}, which can be read but not changed "
                "through the link; change it at its own path, or replace the link with a copy (holdfast cp)"
            )

    def has_size(self, size: int) -> bool:
        """Return whether the length is exactly ``size`` bytes. Reads the object only if the store reports no sizes.

        Raises:
            ObjectNotFoundError: There is no such file or object.
        """
        return self._backend.has_size(self._key, size)

    def write_bytes(
        self, data: bytes, *, atomic: bool = True, sync: bool = True, before: Sequence[Location] = ()
    ) -> None:
        """Write a small file or object, replacing any existing one. The contents are durable on return.

        Args:
            data: The contents.
            atomic: Whether the write is atomic: readers see either the old or the new contents, even after a crash, and
                the name is durable as well. Non-atomic writes are cheaper; use them in uncommitted directories, where
                all names are synced together at the end.
            sync: Whether to sync the contents. A non-atomic write may leave this to a later :func:`sync_all`.
            before: Files and directories on the same disk that must be durable before the new contents become visible.
                They are synced together with the contents.
        """
        backend = self._writing()
        if isinstance(backend, LocalBackend):
            backend.write_bytes(self._key, data, atomic=atomic, sync=sync, before=[path._key for path in before])
        else:
            backend.write_bytes(self._key, bytes(data), atomic=atomic)

    def honours_conditions(self, data: bytes | None) -> bool:
        """Return whether ``write_bytes_if`` is atomic here, that is, whether the store honours conditional writes.

        Args:
            data: The current contents of this object, which may be rewritten to test the service. If None, nothing is
                written, and the result is False unless the service is known to support conditional writes.
        """
        return not self.is_local and self._object_store().honours_conditions(self._key, data)

    def write_bytes_if(self, data: bytes, expected: bytes | None) -> bool:
        """Write a small object if its contents equal ``expected`` or, for ``expected=None``, if it does not exist.

        Returns:
            Whether the object now has the new contents, even if another process wrote them.
        """
        return self._object_store().write_bytes_if(self._key, data, expected)

    def remove_if(self, expected: bytes) -> None:
        """Delete a small object if its contents equal ``expected``. A write between check and deletion is lost."""
        self._object_store().remove_if(self._key, expected)

    def make_directory(self, *, sync: bool = True) -> bool:
        """Create this directory and its missing parents. This is a no-op in object stores.

        Args:
            sync: Whether the new directories must be durable on return.

        Returns:
            Whether this call created the directory.
        """
        return self._writing().make_directory(self._key, sync=sync)

    def sync_directory(self) -> None:
        """Sync this directory to make the names of its entries durable."""
        self._backend.sync_directory(self._key)

    def rename(self, name: str) -> Location:
        """Rename this file, object or directory within its parent. The new name is durable on return.

        On a local disk, the rename is atomic and replaces an existing file or empty directory. In an object store, the
        objects are copied one by one and then deleted.

        Args:
            name: The new name, a single path segment.

        Returns:
            The new location.
        """
        if "/" in name:
            raise InvalidLocationError(f"{name!r} is not a name next to {self.url}: it contains a slash")
        target = self.parent / name
        self._writing().rename(self._key, target._key)
        return target

    def remove(self) -> None:
        """Delete this file or object if it exists."""
        self._writing().remove(self._key)

    def remove_tree(self, last: str | None = None, *, first: str | None = None) -> None:
        """Delete this directory, if it exists, and everything in it. Symlinks are deleted, not followed.

        In a snapshot of an object store, only the listed objects are deleted.

        Args:
            last: The name of a file in this directory to delete last. The file remains if the deletion is interrupted.
            first: The name of a file in this directory to delete first.
        """
        self._writing().remove_tree(self._key, first, last)

    def write_data(
        self, size: int, segments: Sequence[Segment], awaited: threading.Event | None = None, *, sync: bool = True
    ) -> None:
        """Write a bulk data file, replacing any existing one. On return, the contents are durable, but the name is not.

        Args:
            size: File length in bytes.
            segments: The contents of the file, sorted by offset; gaps are filled with zeros. Several threads may
                produce segments at the same time.
            awaited: An event that is set when a training loop starts to wait for this call. Until then, fewer threads
                write to a disk. None means that no training loop runs during this call.
            sync: Whether to sync the contents. If False, this is left to a later :func:`sync_all`.

        Raises:
            StorageError: The write failed; no file is left behind.
            ValueError: The segments do not fit into the file, or the parts of a segment do not add up to its size.
        """
        self.parent.write_data_files([DataFile(self.name, size, segments)], awaited, sync=sync)

    def write_data_files(
        self, files: Sequence[DataFile], awaited: threading.Event | None = None, *, sync: bool = True
    ) -> None:
        """Write bulk data files below this directory, each as :meth:`write_data` does.

        On a disk, all threads write to one file at a time. In an object store, several files are uploaded at once.

        Args:
            files: The files to write.
            awaited: See :meth:`write_data`.
            sync: See :meth:`write_data`.
        """
        backend = self._writing()
        for file in files:
            _check_segments(file.size, file.segments)
        keyed = [((self / file.name)._key, file.size, file.segments) for file in files]
        if isinstance(backend, LocalBackend):
            for key, size, segments in keyed:
                with backend.new_data(key, size, sync=sync) as writer:
                    parallel_map(
                        writer.write,
                        [segment for segment in segments if segment.size],
                        local.THREADS,
                        beside=local.THREADS_BESIDE,
                        awaited=awaited,
                        name="holdfast-write",
                        stop=writer.stop,
                    )
        else:
            parallel_map(lambda file: backend.write_data(*file), keyed, UPLOADS, name="holdfast-upload")

    def open_data(self, *, size: int | None = None, cached: bool | None = False) -> DataReader:
        """Open a bulk data file for reading. Use the reader as a context manager, or close it.

        Args:
            size: The expected length, if known. Passing it saves a request to an object store, but then only the first
                read reports a missing object (ObjectNotFoundError). Bytes beyond this length are never requested.
            cached: Whether to read from a disk through the page cache, which pays off if several processes read the
                same bytes. None means that reads switch to the page cache when another reader with ``cached=None``
                opens the file.

        Raises:
            ObjectNotFoundError: There is no such file or object.
        """
        return self._backend.open_data(self._key, size, cached=cached)

    def can_share(self) -> bool:
        """Return whether :meth:`share` is supported: always on disks, and in stores with server-side copies."""
        return self._backend.can_share()

    def identity(self) -> FileIdentity:
        """Return the identity by which :meth:`share` recognises this data file; raise OSError if there is no file.

        Objects are recognised by name, because no two data files ever have the same name.
        """
        return self._backend.identity(self._key)

    def share(self, target: Location, known: FileIdentity) -> FileIdentity:
        """Give this data file a second name in the same storage system, without transferring its bytes.

        On a disk, this is a hard link or, failing that, a clone. In an object store, it is a server-side copy, which
        takes up space.

        Args:
            target: The location of the new name.
            known: The identity that the file had when it was written.

        Returns:
            The identity of the file under its new name.

        Raises:
            OSError: The request failed, or the file has changed (ESTALE). On a disk, this leaves no new name behind.
        """
        assert type(self._backend) is type(target._backend)
        return target._writing().share(self._key, target._key, known)


def _check_segments(size: int, segments: Sequence[Segment]) -> None:
    """Raise ValueError unless the segments are aligned, in order, disjoint and within ``size`` bytes."""
    end = 0
    for segment in segments:
        if segment.offset % PAGE:
            raise ValueError(f"the segment at offset {segment.offset} does not start at a multiple of {PAGE}")
        if segment.size < 0 or segment.offset < end:
            raise ValueError(f"the segment at offset {segment.offset} begins before offset {end}, where the last ends")
        end = segment.offset + segment.size
    if end > size:
        raise ValueError(f"the last segment ends at {end}, past the end of the file ({size})")


# ---- objects opened as files: downloaded when opened, and uploaded when closed


class _Upload(io.BytesIO):
    """An in-memory file that uploads its contents when it is closed."""

    def __init__(self, send: Callable[[bytes], None], content: bytes) -> None:
        super().__init__()
        self.write(content)
        self._send = send

    def close(self) -> None:
        if self.closed:
            return
        content = self.getvalue()
        super().close()
        self._send(content)


def _open_object(location: Location, mode: str, **text: Any) -> IO[Any]:
    """Open an object like a file; ``text`` holds the keyword arguments for text mode."""
    action = "".join(sorted(mode)).replace("t", "", 1).replace("b", "", 1)
    if action not in ("r", "w", "x", "a"):
        raise OptionError(f"{location}: mode={mode!r} opens no object in a store: read it (r), or write it (w, x, a)")
    exists = action in "xa" and location.is_there()
    if action == "x" and exists:
        raise FileExistsError(f"{location} exists")
    content = location.read_bytes() if action == "r" or (action == "a" and exists) else b""
    raw = io.BytesIO(content) if action == "r" else _Upload(location.write_bytes, content)
    return raw if "b" in mode else io.TextIOWrapper(raw, **{**text, "encoding": text.get("encoding") or "utf-8"})


# A path, a URL (``file://``, ``memory://``, ``s3://``, ``gs://``, ``az://``, ...), or a
# :class:`~holdfast.storage.Location`.
Place = str | os.PathLike[str] | Location
