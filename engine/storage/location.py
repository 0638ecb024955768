"""Where something is stored, as one value: a path of this machine or a URL of an object store."""

from __future__ import annotations

import os
import pathlib
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from ..errors import InvalidLocationError
from .kvstore import KvStoreBackend, open_backend
from .local import LocalBackend
from .several import REQUESTS, UPLOADS, several
from .snapshot import KvStoreSnapshot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .backend import Backend, Entry
    from .bulk import DataFile, DataReader, Segment

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_COLLAPSED = re.compile(r"(?:file|memory|s3|gs|gcs|https?|az|abfs|hdfs):/", re.IGNORECASE)
_KNOWN = "a path, file:///path, memory://name, s3://bucket/name or gs://bucket/name"

_local = LocalBackend()


def as_location(place: str | os.PathLike[str] | Location) -> Location:
    """Returns the location that a path or URL stands for.

    A relative path counts from the current directory at the time of this call. ``~`` is an ordinary name. In URLs,
    ``%20`` and its like stand for the characters they encode.

    Args:
        place: A path, or a URL that starts with ``file:///``, ``memory://``, ``s3://bucket/`` or ``gs://bucket/``.

    Raises:
        InvalidLocationError: It is neither, or the URL's scheme is not one of these.

    >>> as_location("memory://runs/x") / "1200"
    Location('memory://runs/x/1200')
    """
    if isinstance(place, Location):
        return place
    try:
        text = os.fspath(place)
    except TypeError:
        raise InvalidLocationError(
            f"an object of type {type(place).__name__} is not a location: expected {_KNOWN}; the path comes first, as "
            "in hf.save(path, tree)"
        ) from None
    if not isinstance(text, str) or not text or "\0" in text:
        raise InvalidLocationError(f"{place!r} is not a location: expected {_KNOWN}")
    match = _SCHEME.match(text)
    if match is None:
        if _COLLAPSED.match(text):
            raise InvalidLocationError(
                f"{text!r} looks like a URL that lost a slash; pathlib does that, so pass URLs as str"
            )
        return Location(_local, os.path.abspath(text))
    scheme, rest = match.group(1).lower(), match.group(2)
    for mark in "?#|":
        if mark in rest:
            raise InvalidLocationError(f"{text!r} holds {mark!r}; write %{ord(mark):02X} if it belongs to the name")
    path = unquote(rest, errors="surrogateescape")
    if "\0" in path:
        raise InvalidLocationError(f"{text!r} holds a NUL character")
    if scheme == "file":
        if not path.startswith("/"):
            raise InvalidLocationError(f"{text!r} does not name an absolute path: write file:///path")
        return Location(_local, os.path.abspath(path))
    if scheme == "memory":
        return Location(open_backend("memory", ""), _object_key(text, path))
    if scheme in ("s3", "gs"):
        bucket, _, path = path.partition("/")
        if not bucket:
            raise InvalidLocationError(f"{text!r} names no bucket: write {scheme}://bucket/name")
        return Location(open_backend(scheme, bucket), _object_key(text, path))
    raise InvalidLocationError(f"{text!r} has an unknown scheme, {scheme!r}: expected {_KNOWN}")


def at_once(place: Location) -> int:
    """Returns how many small things are done at a time there: one on a disk, as that does not wait for a network."""
    return 1 if place.is_local else REQUESTS


def _object_key(text: str, path: str) -> str:
    segments = [segment for segment in path.split("/") if segment]
    if any(segment in (".", "..") for segment in segments):
        raise InvalidLocationError(f"{text!r} holds '.' or '..', which object stores do not resolve")
    return "/".join(segments)


class Location:
    """A file, an object or a directory, wherever it lives; made by ``as_location``.

    Locations are immutable, can be compared and hashed, and need not exist. All methods raise only errors of
    ``holdfast.engine.errors``, most of them kinds of ``StorageError``, with the path in the message.
    """

    __slots__ = ("_backend", "_key")
    _backend: Backend
    _key: str

    def __init__(self, backend: Backend, key: str) -> None:
        object.__setattr__(self, "_backend", backend)
        object.__setattr__(self, "_key", key)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"locations are immutable: cannot set {name!r}")

    @property
    def url(self) -> str:
        """The text that ``as_location`` turns back into this location: a plain path if it is local."""
        return self._backend.url(self._key)

    @property
    def name(self) -> str:
        """The last segment; empty for a root."""
        return self._key.rpartition("/")[2]

    @property
    def parent(self) -> Location:
        """The directory around this; the parent of a root is itself."""
        if self.is_local:
            return Location(self._backend, os.path.dirname(self._key))
        return Location(self._backend, self._key.rpartition("/")[0])

    @property
    def is_local(self) -> bool:
        """Whether this is a path of this machine."""
        return self._backend.is_local

    @property
    def is_remote(self) -> bool:
        """Whether this is reached over a network, by requests that may arrive when nobody waits for them any more."""
        return self._backend.is_remote

    @property
    def path(self) -> pathlib.Path:
        """The path, for local locations.

        Raises:
            TypeError: The location is not local.
        """
        return pathlib.Path(self.__fspath__())

    def __fspath__(self) -> str:
        if not self.is_local:
            raise TypeError(f"{self.url} is not a path of this machine; use its methods, or copy it to a disk first")
        return self._key

    def __truediv__(self, name: str) -> Location:
        """Returns a location below this one.

        Args:
            name: One or more segments, separated by ``/``.

        Raises:
            InvalidLocationError: The name is absolute or empty, or a segment is empty, ``.`` or ``..``.
        """
        if "\0" in name or any(segment in ("", ".", "..") for segment in name.split("/")):
            raise InvalidLocationError(f"{name!r} is not a name that can lie inside {self.url}")
        if not self._key or self._key.endswith("/"):
            return Location(self._backend, self._key + name)
        return Location(self._backend, f"{self._key}/{name}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Location) and self._backend is other._backend and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __str__(self) -> str:
        return self.url

    def __repr__(self) -> str:
        return f"Location({self.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return as_location, (self.url,)

    def snapshot(self) -> Location:
        """Returns this place for looking around: what lies below is listed once, now, where listing takes requests.

        What is read through it is read as it is; what is written through it may not be listed.
        """
        if isinstance(self._backend, KvStoreBackend):
            return Location(KvStoreSnapshot(self._backend, self._key), self._key)
        return self

    def exists(self) -> bool:
        """Returns whether there is a file, an object or a directory here."""
        return self._backend.exists(self._key)

    def is_there(self) -> bool:
        """Like :meth:`exists`, for what is no directory: in an object store that takes one request instead of two."""
        return self._backend.is_there(self._key)

    def is_directory(self) -> bool:
        """Returns whether this is a directory; in object stores, whether any object lies below."""
        return self._backend.is_directory(self._key)

    def entries(self) -> list[Entry]:
        """Returns what lies directly inside, sorted by name, without lock files; nothing if this is missing."""
        return self._backend.entries(self._key)

    def read_bytes(self, limit: int | None = None, *, size: int | None = None) -> bytes:
        """Returns the whole content.

        Args:
            limit: The most bytes that are sensible; None for no limit.
            size: The length that it should have, if that is known: an object store is asked once then, and not twice.
                What an object holds behind that is left away.

        Raises:
            ObjectNotFoundError: There is no such file or object.
            DamagedCheckpointError: It is longer than ``limit``; found out before it is read.
        """
        return self._backend.read_bytes(self._key, limit, size)

    def has_size(self, size: int) -> bool:
        """Returns whether this has just so many bytes; reads none of them where the store says it otherwise.

        Raises:
            ObjectNotFoundError: There is no such file or object.
        """
        return self._backend.has_size(self._key, size)

    def write_bytes(self, data: bytes, *, atomic: bool = True) -> None:
        """Writes a small file or object, replacing what is there; its content is durable on return.

        Args:
            data: The content.
            atomic: Whether readers, and a crash at any instant, see the old content or the new, never less, and the
                name is durable, too. Without it, writing is cheaper; it is meant for directories that are not
                committed yet, whose names are synced together in the end.
        """
        self._backend.write_bytes(self._key, data, atomic=atomic)

    def make_directory(self, *, sync: bool = True) -> None:
        """Creates this directory and its parents; one that exists is fine. Object stores need none.

        Args:
            sync: Whether the new names are durable on return.
        """
        self._backend.make_directory(self._key, sync=sync)

    def sync_directory(self) -> None:
        """Makes the names inside this directory durable."""
        self._backend.sync_directory(self._key)

    def rename(self, name: str) -> Location:
        """Moves this to another name in the same directory; the move is durable on return.

        On a local disk it happens in one step and replaces a file, or an empty directory. In an object store the
        objects are copied and then deleted, one by one.

        Args:
            name: The new name, one segment.

        Returns:
            The new location.
        """
        if "/" in name:
            raise InvalidLocationError(f"{name!r} is not a name beside {self.url}: it holds a slash")
        target = self.parent / name
        self._backend.rename(self._key, target._key)
        return target

    def remove(self) -> None:
        """Deletes this file or object; missing is fine."""
        self._backend.remove(self._key)

    def remove_tree(self, last: str | None = None) -> None:
        """Deletes this directory and everything below; missing is fine. Links are deleted, never followed.

        Args:
            last: The name of a file directly inside that goes last of all, so that it marks what is left of an
                interrupted deletion.
        """
        self._backend.remove_tree(self._key, last)

    def write_data(self, size: int, segments: Sequence[Segment]) -> None:
        """Writes one bulk data file, replacing what is there; its content is durable on return, its name is not yet.

        Args:
            size: Length of the file in bytes.
            segments: Its content, in ascending order; gaps are zero. The segments may be produced by several threads.

        Raises:
            StorageError: The system refused; nothing is left behind.
            ValueError: The segments do not fit, or the parts of one are not as long as it says.
        """
        self._backend.write_data(self._key, size, segments)

    def write_data_files(self, files: Sequence[DataFile]) -> None:
        """Writes bulk data files below this directory, as :meth:`write_data` does each of them.

        In an object store several are written at a time.

        Args:
            files: What to write.
        """
        several(
            lambda file: (self / file.name).write_data(file.size, file.segments), files, 1 if self.is_local else UPLOADS
        )

    def open_data(self, *, size: int | None = None) -> DataReader:
        """Opens a bulk data file for reading; use it as a context manager, or close it.

        Args:
            size: The length that it should have, if that is known: an object store is not asked then before something
                is read, nor for anything behind that, and reading is what shows that there is no such object.

        Raises:
            ObjectNotFoundError: There is no such file or object.
        """
        return self._backend.open_data(self._key, size)
