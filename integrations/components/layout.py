"""The directory layout of a component tree, and the files that a commit adds to it.

The commit record of the root has an item for each component. The item of the root is named ``state``, and every
other item is named after its component's path: ``learner/p0`` is stored in the folder ``learner/p0/state``. The
directory of each component has a record derived from the root's, so that the component can be loaded, verified and
copied on its own. Each state folder has a component description, ``component.json``.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...engine.checkpoint import CommitParts, remove_temporary, write_record
from ...engine.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    FormatVersionError,
    StorageError,
    UnsupportedLeafError,
)
from ...engine.format import (
    COMPONENT,
    DOCUMENT_LIMIT,
    RECORD,
    TREES,
    CheckpointRecord,
    ItemRecord,
    decode_document,
    encode_document,
)
from ...engine.pytree import unescape_key
from ...engine.steps import read_record
from ...engine.storage import Location
from ..graph import Path, as_list
from .constructor_spec import as_text, check_spec
from .names import STATE

# The layout version to write, as (major, minor); any reader of the same major version can read it.
VERSION = (1, 0)
_DOCUMENT = "component"
METADATA = "metadata.json"  # a copy of the state folder's description file, for human readers
# Array folder in a state folder. Both folders are created before any files, so their names become durable together.
DATA = "d"
_LEVELS = 32  # maximum number of parent directories to search for the tree that contains a path


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """The description of a single component."""

    type: str  # import path of the class: ``"module:qualified.name"``
    constructor: Mapping[str, Any] | None  # ``{"args": [...], "kwargs": {...}}``; None if unknown
    obstacle: str = ""  # why the constructor arguments are unknown
    path: Path = ()  # path from the root of the saved tree
    components: tuple[Path, ...] = ()  # relative paths of the child components
    # For child components that are saved elsewhere in the tree: maps relative paths to paths from the root.
    same: Mapping[Path, Path] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)  # for human readers; nothing depends on it

    def encode(self) -> bytes:
        body = {
            "layout": ".".join(map(str, VERSION)),
            "class": self.type,
            "constructor": None if self.constructor is None else dict(self.constructor),
            **({"no_constructor": self.obstacle} if self.obstacle else {}),
            "path": "/".join(self.path),
            "components": ["/".join(path) for path in self.components],
            "same": {"/".join(path): "/".join(target) for path, target in self.same.items()},
            "metadata": dict(self.metadata),
        }
        try:
            content = encode_document(_DOCUMENT, body)
        except (ValueError, TypeError) as error:
            raise UnsupportedLeafError(f"{self.type} cannot be described: {error}; nothing was written") from error
        return (json.dumps(json.loads(content), indent=1) + "\n").encode("ascii")

    @classmethod
    def decode(cls, content: bytes, *, source: str) -> Description:
        """Decode the untrusted contents of a file; error messages refer to the file as ``source``."""
        body = decode_document(content, _DOCUMENT, source=source)
        version = body.get("layout")
        match = re.fullmatch(r"([0-9]{1,9})\.[0-9]{1,9}", version) if isinstance(version, str) else None
        if match is None:
            raise DamagedCheckpointError(f"{source}: {version!r:.80} is not a layout version")
        if int(match[1]) > VERSION[0]:
            raise FormatVersionError(
                f"{source}: the component has layout version {version}, but this holdfast reads up to version "
                f"{VERSION[0]}.x; upgrade holdfast to read it"
            )
        try:
            metadata = body["metadata"]
            if not isinstance(metadata, dict):
                raise TypeError(f"metadata {metadata!r:.80}")
            return cls(
                type=as_text(body["class"]),
                constructor=None if body["constructor"] is None else check_spec(body["constructor"]),
                obstacle=as_text(body.get("no_constructor", "")),
                path=_path(body["path"]),
                components=tuple(_below(name) for name in as_list(body["components"])),
                same={_below(name): _path(target) for name, target in body["same"].items()},
                metadata=metadata,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamagedCheckpointError(f"{source} does not describe a component: {error!r:.200}") from error


def _below(name: Any) -> Path:
    path = _path(name)
    if not path:
        raise ValueError("a component below it has no name")
    return path


def _path(name: Any) -> Path:
    segments = tuple(as_text(name).split("/")) if name != "" else ()
    for segment in segments:
        unescape_key(segment)
    return segments


def item_name(path: Path) -> str:
    return "/".join(path) or STATE


def below(root: Location, path: Path) -> Location:
    return root / "/".join(path) if path else root


def parts_of(record: CheckpointRecord) -> dict[Path, ItemRecord]:
    """Return the items of a record that are components, keyed by path."""
    parts = {}
    for name, item in record.items.items():
        path = _path_of(name)
        parent, _, folder = item.folder.rpartition("/")
        if parent == "/".join(path) and _is_own(folder) and item.kind == TREES and COMPONENT in item.files:
            parts[path] = item
    return parts


def part_records(record: CheckpointRecord) -> dict[Path, CheckpointRecord]:
    """Return a record for each component, keyed by path, with items for the component and all components below it."""
    parts = parts_of(record)
    items: dict[Path, dict[str, ItemRecord]] = {path: {} for path in parts}
    for path, item in parts.items():
        for length in range(len(path) + 1):
            if path[:length] in items:
                folder = item.folder.removeprefix("/".join(path[:length]) + "/") if length else item.folder
                items[path[:length]][item_name(path[length:])] = item._replace(folder=folder)
    return {path: replace(record, items=inside, replaced=()) for path, inside in items.items()}


def whole_around(location: Location) -> tuple[Location, CheckpointRecord, Path] | None:
    """Find the tree that contains a directory; return the tree's root and record, and the directory's relative path."""
    names: tuple[str, ...] = ()
    directory = location
    for _ in range(_LEVELS):
        if directory.parent == directory or not directory.name:
            break
        directory, names = directory.parent, (directory.name, *names)
        if (record := record_at(directory)) is not None:
            return (directory, record, names) if () in parts_of(record) else None
    return None


def record_at(directory: Location) -> CheckpointRecord | None:
    with contextlib.suppress(CheckpointNotFoundError, DamagedCheckpointError, FormatVersionError, StorageError):
        return read_record(directory)
    return None


class ComponentParts(CommitParts):
    """Writes and removes the records and metadata of components during a commit."""

    def __init__(self, location: Location, descriptions: Mapping[Path, bytes]) -> None:
        super().__init__(location)
        self._descriptions = descriptions
        whole = whole_around(location)
        if whole is not None and whole[2] in parts_of(whole[1]):
            raise CheckpointExistsError(
                f"{location} is a part of the tree at {whole[0]}, which this save would break; save to another "
                "path, or save the whole tree again"
            )
        around = record_at(location.parent)
        if around is not None and location.name in {item.folder for item in around.items.values()}:
            raise CheckpointExistsError(
                f"{location} is an item of the checkpoint at {location.parent}, which this save would break; "
                "save to another path"
            )

    def folder(self, item: str) -> str:
        return "/".join((*_path_of(item), STATE))

    def owns(self, folder: str) -> bool:
        return _is_own(folder.rpartition("/")[2])

    def check_replaceable(self, record: CheckpointRecord | None) -> None:
        if record is None:
            raise DamagedCheckpointError(
                f"{self.location}: the commit record of the tree there is damaged, so its files are unknown; "
                "choose another path, or remove the directory"
            )
        if parts_of(record).keys() != set(map(_path_of, record.items)):
            raise CheckpointExistsError(
                f"{self.location}: the checkpoint there is not a tree of components; choose another path"
            )

    def withdraw(self, record: CheckpointRecord) -> None:
        for path in filter(None, parts_of(record)):
            (below(self.location, path) / RECORD).remove()

    def publish(self, record: CheckpointRecord, *, replaces: bool) -> None:
        for path, part in part_records(record).items():
            directory = below(self.location, path)
            (directory / METADATA).write_bytes(self._descriptions[path], atomic=replaces)
            if path:
                write_record(directory, part)  # also syncs the directory, to make the record and metadata.json durable
        self.location.sync_directory()

    def repair(self, record: CheckpointRecord) -> None:
        for path, part in part_records(record).items():
            directory = below(self.location, path)
            if directory.is_local:
                remove_temporary(directory, [entry.name for entry in directory.entries()])
            if path and (directory / RECORD).exists():
                continue
            described = self.location / record.items[item_name(path)].folder / COMPONENT
            with contextlib.suppress(StorageError, DamagedCheckpointError):  # metadata.json is for human readers only
                (directory / METADATA).write_bytes(described.read_bytes(limit=DOCUMENT_LIMIT))
            if path:
                write_record(directory, part)

    def remove(self, folder: str, record: CheckpointRecord | None) -> None:
        super().remove(folder, record)
        if record is None:
            return
        path = tuple(folder.split("/")[:-1])
        if path not in parts_of(record):
            (below(self.location, path) / METADATA).remove()
            (below(self.location, path) / RECORD).remove()
        for length in range(len(path), 0, -1):
            directory = below(self.location, path[:length])
            if directory.is_local and directory.is_directory() and not directory.entries():
                directory.remove_tree()


def _path_of(item: str) -> Path:
    return () if item == STATE else tuple(item.split("/"))


def _is_own(name: str) -> bool:
    return name == STATE or name.startswith(f"{STATE}.")
