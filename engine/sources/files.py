"""Helpers for files of other libraries' checkpoints: JSON, first and last bytes, sizes, and atomic replacement."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

from ..arrays import TreeSource, read_checked
from ..errors import CheckpointExistsError, DamagedCheckpointError, ObjectNotFoundError, UnsupportedLeafError
from ..storage import TEMPORARY_PREFIX, Entry, Location

_JSON_LIMIT = 512 << 20  # maximum size of a JSON file in bytes


def read_json(location: Location, content: bytes | None = None) -> Any:
    """Read a JSON file; ``content`` is its content if the caller has already read it."""
    content = read_checked(location, None, limit=_JSON_LIMIT) if content is None else content
    try:
        return json.loads(content.decode("utf-8"))
    except RecursionError as error:
        raise DamagedCheckpointError(f"{location} is damaged: it is nested too deeply") from error
    except ValueError as error:
        raise DamagedCheckpointError(f"{location} is damaged: it is not JSON ({error})") from error


def read_object(location: Location, content: bytes | None = None) -> dict[str, Any]:
    """Read a JSON file that contains an object."""
    document = read_json(location, content)
    if not isinstance(document, dict):
        raise DamagedCheckpointError(f"{location} is damaged: expected a JSON object, found {type(document).__name__}")
    return document


def read_optional(location: Location) -> dict[str, Any]:
    """Read a JSON file that contains an object; return ``{}`` if it is missing or empty."""
    try:
        content = location.read_bytes(limit=_JSON_LIMIT)
    except ObjectNotFoundError:
        return {}
    return read_object(location, content) if content else {}


def total_bytes(location: Location) -> int:
    """Return the total size in bytes of a file or directory tree; 0 in object stores, where listing is slow."""
    if not location.is_local:
        return 0
    if not location.is_directory():
        return _size(os.fspath(location))
    sizes = {}  # keyed by folder identity (device and inode)
    for folder, folders, files in os.walk(location, followlinks=True):
        status = os.stat(folder)
        if (identity := (status.st_dev, status.st_ino)) in sizes:  # symlinks may form a cycle
            folders.clear()
        else:
            sizes[identity] = sum(_size(os.path.join(folder, file)) for file in files)
    return sum(sizes.values())


def entry_size(folder: Location, entry: Entry) -> int:
    """Return a file's size in bytes, even if an object store's listing lacks it; 0 for a directory."""
    if entry.is_directory or entry.size is not None:
        return entry.size or 0
    with (folder / entry.name).open_data() as file:
        return file.size


def first_bytes(location: Location, count: int) -> bytes:
    """Return the first ``count`` bytes of a file, or the whole file if it is shorter."""
    with location.open_data() as file:
        return file.read(0, min(count, file.size)).tobytes()


def last_bytes(location: Location, count: int) -> bytes:
    """Return the last ``count`` bytes of a file, or the whole file if it is shorter."""
    with location.open_data() as file:
        start = max(0, file.size - count)
        return file.read(start, file.size - start).tobytes()


def refuse_leaves(source: TreeSource, target: str, problems: Sequence[str]) -> None:
    """Raise an error with one line for each leaf that another format cannot store, if there are any."""
    if problems:
        headline = f"{source.location} cannot be stored in {target}; nothing was written:"
        raise UnsupportedLeafError("\n  ".join([headline, *problems]))


def check_destination(destination: Location, *, overwrite: bool) -> None:
    """Raise CheckpointExistsError for a directory, or for an existing file without ``overwrite``."""
    if destination.is_directory():
        raise CheckpointExistsError(f"{destination} is a directory; give the name of a file, which may lie in it")
    if destination.exists() and not overwrite:
        raise CheckpointExistsError(f"{destination} exists already; choose another name, or pass overwrite=True")


@contextlib.contextmanager
def replacing(destination: Location) -> Iterator[Location]:
    """Yield a temporary location in the same folder, and rename it to ``destination`` at the end."""
    destination.parent.make_directory()
    if not destination.is_local:  # a single request is atomic
        yield destination
        return
    partial = destination.parent / f"{TEMPORARY_PREFIX}{os.urandom(8).hex()}"
    try:
        yield partial
        partial.rename(destination.name)
    except BaseException:
        partial.remove_tree()
        raise


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:  # a broken symlink, or another program is replacing the file
        return 0
