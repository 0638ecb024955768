"""Files of checkpoints of other libraries: JSON, first and last bytes, sizes, and replacement in one step."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

from ..arrays import TreeSource, read_checked
from ..errors import CheckpointExistsError, DamagedCheckpointError, ObjectNotFoundError, UnsupportedLeafError
from ..storage import TEMPORARY_PREFIX, Entry, Location

_JSON_LIMIT = 512 << 20  # bytes


def read_json(place: Location, content: bytes | None = None) -> Any:
    """Read a JSON file; ``content`` is its content if the caller has read it."""
    content = read_checked(place, None, limit=_JSON_LIMIT) if content is None else content
    try:
        return json.loads(content.decode("utf-8"))
    except RecursionError as error:
        raise DamagedCheckpointError(f"{place} is damaged: it is nested too deeply") from error
    except ValueError as error:
        raise DamagedCheckpointError(f"{place} is damaged: it is not JSON ({error})") from error


def read_object(place: Location, content: bytes | None = None) -> dict[str, Any]:
    """Read a JSON file that holds an object."""
    document = read_json(place, content)
    if not isinstance(document, dict):
        raise DamagedCheckpointError(f"{place} is damaged: expected a JSON object, found {type(document).__name__}")
    return document


def read_optional(place: Location) -> dict[str, Any]:
    """Read a JSON file that holds an object; one that is missing or empty is ``{}``."""
    try:
        content = place.read_bytes(limit=_JSON_LIMIT)
    except ObjectNotFoundError:
        return {}
    return read_object(place, content) if content else {}


def total_bytes(location: Location) -> int:
    """Return the bytes of a file, or of all files below a directory; 0 in object stores, whose listings are slow."""
    if not location.is_local:
        return 0
    if not location.is_directory():
        return _size(os.fspath(location))
    sizes = {}  # by the identity of the folder
    for folder, folders, files in os.walk(location, followlinks=True):
        status = os.stat(folder)
        if (identity := (status.st_dev, status.st_ino)) in sizes:  # links may form a circle
            folders.clear()
        else:
            sizes[identity] = sum(_size(os.path.join(folder, file)) for file in files)
    return sum(sizes.values())


def entry_size(folder: Location, entry: Entry) -> int:
    """Return the size of a file in bytes, even if an object store does not list it; 0 for a directory."""
    if entry.is_directory or entry.size is not None:
        return entry.size or 0
    with (folder / entry.name).open_data() as file:
        return file.size


def first_bytes(place: Location, count: int) -> bytes:
    """Return the first ``count`` bytes of a file, or all if it is shorter."""
    with place.open_data() as file:
        return file.read(0, min(count, file.size)).tobytes()


def last_bytes(place: Location, count: int) -> bytes:
    """Return the last ``count`` bytes of a file, or all if it is shorter."""
    with place.open_data() as file:
        start = max(0, file.size - count)
        return file.read(start, file.size - start).tobytes()


def refuse_leaves(source: TreeSource, target: str, problems: Sequence[str]) -> None:
    """Raise an error with a line for each leaf that another format cannot store, if there are any."""
    if problems:
        headline = f"{source.location} cannot be stored in {target}; nothing was written:"
        raise UnsupportedLeafError("\n  ".join([headline, *problems]))


def check_destination(destination: Location, *, overwrite: bool) -> None:
    """Refuse a directory, and a file that must not be overwritten."""
    if destination.is_directory():
        raise CheckpointExistsError(f"{destination} is a directory; give the name of a file, which may lie in it")
    if destination.exists() and not overwrite:
        raise CheckpointExistsError(f"{destination} exists already; choose another name, or pass overwrite=True")


@contextlib.contextmanager
def replacing(destination: Location) -> Iterator[Location]:
    """Yield a temporary name in the same folder, which is renamed to ``destination`` at the end."""
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
    except OSError:  # a broken link, or another program replaces the file
        return 0
