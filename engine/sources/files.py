"""Helpers that read and replace files in checkpoints of other libraries."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

from ..arrays import TreeSource, read_checked
from ..errors import CheckpointExistsError, DamagedCheckpointError, ObjectNotFoundError, UnsupportedLeafError, itemized
from ..storage import TEMPORARY_PREFIX, Entry, Location
from .protocol import CheckpointSource

_JSON_LIMIT = 512 << 20  # maximum size of a JSON file in bytes


def read_json(location: Location, content: bytes | None = None) -> Any:
    """Parse a JSON file, or its ``content`` if it has already been read."""
    content = read_checked(location, None, limit=_JSON_LIMIT) if content is None else content
    try:
        return json.loads(content.decode("utf-8"))
    except RecursionError as error:
        raise DamagedCheckpointError(f"{location} is damaged: it is nested too deeply") from error
    except ValueError as error:
        raise DamagedCheckpointError(f"{location} is damaged: it is not JSON ({error})") from error


def read_object(location: Location, content: bytes | None = None) -> dict[str, Any]:
    """Parse a JSON file that must contain an object, or its ``content`` if it has already been read."""
    document = read_json(location, content)
    if not isinstance(document, dict):
        raise DamagedCheckpointError(f"{location} is damaged: expected a JSON object, found {type(document).__name__}")
    return document


def read_optional(location: Location) -> dict[str, Any]:
    """Parse a JSON file that must contain an object, or return ``{}`` if it is missing or empty."""
    try:
        content = location.read_bytes(limit=_JSON_LIMIT)
    except ObjectNotFoundError:
        return {}
    return read_object(location, content) if content else {}


def total_bytes(location: Location) -> int:
    """Return the total size in bytes of a file or directory tree, or 0 in object stores, where listing is slow."""
    if not location.is_local:
        return 0
    if not location.is_directory():
        return _size(os.fspath(location))
    sizes = {}  # keyed by the device and inode of the folder
    for folder, folders, files in os.walk(location, followlinks=True):
        status = os.stat(folder)
        if (identity := (status.st_dev, status.st_ino)) in sizes:  # symlinks may form a cycle
            folders.clear()
        else:
            sizes[identity] = sum(_size(os.path.join(folder, file)) for file in files)
    return sum(sizes.values())


def entry_size(folder: Location, entry: Entry) -> int:
    """Return the size of a file in bytes, opening the file if the listing has no size; 0 for a directory."""
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


def tree_to_convert(checkpoint: CheckpointSource, item: str) -> TreeSource:
    """Open a tree; raise DamagedCheckpointError if a file fails a checksum, even one that loading does not verify."""
    tree = checkpoint.tree(item)
    if damage := [f"{problem.file}: {problem.what}" for problem in tree.check_files()]:
        raise DamagedCheckpointError(itemized(f"{checkpoint.location} is damaged; convert another checkpoint:", damage))
    return tree


def refuse_leaves(source: TreeSource, target: str, problems: Sequence[str]) -> None:
    """Raise UnsupportedLeafError, with one line per problem, if another format cannot store some leaves."""
    if problems:
        headline = f"{source.location} cannot be stored in {target}; nothing was written:"
        raise UnsupportedLeafError("\n  ".join([headline, *problems]))


def check_destination(destination: Location, *, overwrite: bool) -> None:
    """Raise CheckpointExistsError if the destination is a directory, or if it exists and ``overwrite`` is false."""
    if destination.is_directory():
        raise CheckpointExistsError(f"{destination} is a directory; give the name of a file, which may be inside it")
    if destination.exists() and not overwrite:
        raise CheckpointExistsError(f"{destination} already exists; choose another name, or pass overwrite=True")


@contextlib.contextmanager
def replacing(destination: Location) -> Iterator[Location]:
    """Yield a temporary location in the same folder, and rename it to ``destination`` if the block succeeds."""
    destination.parent.make_directory()
    if not destination.is_local:  # writing an object is a single request, which is atomic
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
    except OSError:  # the symlink is broken, or another program is replacing the file
        return 0
