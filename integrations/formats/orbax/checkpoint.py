"""Recognise Orbax checkpoints by their files, and list their items and steps."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ....engine.arrays import TreeSource
from ....engine.errors import CheckpointNotFoundError, DamagedCheckpointError, OptionError
from ....engine.forks import cached_property
from ....engine.format import ITEM
from ....engine.sources import (
    JSON,
    METRICS,
    TREE,
    CheckpointSource,
    FoundSteps,
    read_json,
    read_object,
    read_optional,
    total_bytes,
)
from ....engine.storage import Entry, Location, max_concurrency, parallel_map
from ..flax import looks_like_msgpack
from .tree import AGGREGATE_FILE, ARRAYS_FOLDER, CHECKPOINT_FILE, PROCESS_FOLDER, SHARDING_FILE, TREE_FILE, OrbaxTree

UNFINISHED = ".orbax-checkpoint-tmp"  # part of a directory's name until its save has finished
# On Google Cloud Storage, where directories cannot be renamed, this file marks a finished save.
COMMITTED = "commit_success.txt"

_STEP = re.compile(r"(?:(.+)_)?([0-9]{1,18})")
_JSON_FILES = ("metadata", "data.json")
METRICS_FOLDER = "metrics"
ONLY_ITEM = "default"  # item name if a manager saves a single item
_KEYS = ("jax_random_key", "np_random_key")
_BESIDE_ARRAYS = frozenset({TREE_FILE, SHARDING_FILE, ARRAYS_FOLDER})
# Managers that save to the local disk of each host write this item, which lists the devices of every process.
_PROCESSES = "process_metadata"
RUN_METADATA = "metadata"  # folder next to the steps that holds the run's custom metadata
RUN_METADATA_FILE = "_ROOT_METADATA"
_SEARCHED = 32  # maximum number of directories to search for items if there is no metadata


class _Item(NamedTuple):
    kind: str
    folder: Location
    bare: bool = False
    file: str = ""


class OrbaxCheckpoint(CheckpointSource):
    """One finished Orbax checkpoint."""

    format = "Orbax"
    unnamed = ONLY_ITEM

    def __init__(self, location: Location, names: frozenset[str]) -> None:
        self.location = location
        self._metadata = read_optional(location / CHECKPOINT_FILE) if CHECKPOINT_FILE in names else {}
        handlers = self._metadata.get("item_handlers")
        self._items: dict[str, _Item] = {}
        if isinstance(handlers, str) or _is_tree(location, names):
            only = _item(location, handlers if isinstance(handlers, str) else "", listed=True)
            self._items = {} if only is None else {ITEM: only}
        else:
            handlers_by_item: Mapping[str, Any] = handlers if isinstance(handlers, dict) else {}
            folders = [entry.name for entry in location.entries() if entry.is_directory and _may_be_item(entry.name)]
            # Item names come from an untrusted file, so ignore names that would refer to files outside the directory.
            noted = {name for name in handlers_by_item if name not in ("", ".", "..") and not {"/", "\0"} & {*name}}
            for name in sorted({*folders, *noted}):
                item = _item(location / name, str(handlers_by_item.get(name, "")), listed=name in folders)
                if item is not None:
                    self._items[name] = item
        self._processes = 0  # number of processes, if each saved to the local disk of its host; otherwise 0
        if self._items.pop(_PROCESSES, None) is not None:
            file = location / _PROCESSES / "global_process_metadata.json"
            listed = read_json(file)
            if not isinstance(listed, list) or not listed:
                problem = f"expected a list with an entry for each process, found {type(listed).__name__}"
                raise DamagedCheckpointError(f"{file} is damaged: {problem}")
            self._processes = len(listed)
        if not self._items:
            raise DamagedCheckpointError(f"{location}: this Orbax checkpoint has no items: only its directory is left")
        match = _STEP.fullmatch(location.name)
        self.step = int(match[2]) if match is not None else None
        self.items = {name: item.kind for name, item in self._items.items()}
        nanoseconds = self._metadata.get("commit_timestamp_nsecs")
        self.time = nanoseconds / 1e9 if isinstance(nanoseconds, int) else None
        custom = self._metadata.get("custom_metadata", self._metadata.get("custom"))
        self.custom_metadata = custom if isinstance(custom, dict) and custom else None

    @cached_property
    def metrics(self) -> Mapping[str, Any] | None:
        names = [name for name, item in self._items.items() if item.kind == METRICS]
        metrics = self.value(names[0]) if names else self._metadata.get("metrics") or None
        return metrics if isinstance(metrics, dict) else None

    @cached_property
    def nbytes(self) -> int:
        return total_bytes(self.location)

    def tree(self, item: str) -> TreeSource:
        described = self._items[item]
        typed = False
        if described.folder.name == _KEYS[0]:
            folder = described.folder.parent / f"{described.folder.name}_metadata"
            typed = read_optional(folder / _JSON_FILES[0]).get("typed") is True
        return OrbaxTree(described.folder, bare=described.bare, typed_key=typed, processes=self._processes)

    def value(self, item: str) -> Any:
        described = self._items[item]
        if described.kind not in (JSON, METRICS):
            raise OptionError(
                f"{self.location}: only Orbax reads item {item!r} ({described.kind}); holdfast reads trees of arrays "
                "and JSON"
            )
        return read_json(described.folder / described.file)


def recognise(location: Location, names: frozenset[str]) -> CheckpointSource | None:
    if not _is_checkpoint(location, names):
        return None
    if not is_finished(location, names):
        raise CheckpointNotFoundError(
            f"{location}: Orbax never finished saving this checkpoint; load another step, or rename the directory "
            "if you know that it is complete"
        )
    return OrbaxCheckpoint(location, names)


def recognise_steps(location: Location, entries: Sequence[Entry]) -> FoundSteps:
    """Find directories named ``<step>`` or ``<prefix>_<step>``, considering only the most common prefix."""
    folders = [entry.name for entry in entries if entry.is_directory]
    named = [(match, location / name) for name in folders if (match := _STEP.fullmatch(name))]

    def is_step(named: tuple[re.Match[str], Location]) -> bool:
        names = frozenset(entry.name for entry in named[1].entries())
        return bool(names) and _is_checkpoint(named[1], names) and is_finished(named[1], names)

    are_steps = parallel_map(is_step, named, max_concurrency(location))
    by_prefix: dict[str, dict[int, Location]] = {}
    for (match, directory), is_one in zip(named, are_steps, strict=True):
        if is_one:
            by_prefix.setdefault(match[1] or "", {}).setdefault(int(match[2]), directory)
    prefix = max(sorted(by_prefix), key=lambda candidate: len(by_prefix[candidate]), default="")
    return FoundSteps.of(OrbaxCheckpoint.format, by_prefix.get(prefix, {}), metadata=lambda: _run_metadata(location))


def _run_metadata(location: Location) -> Mapping[str, Any] | None:
    """Return the run's custom metadata, which is a member of a JSON file or, in early versions, the entire file."""
    folder = location / RUN_METADATA
    for name in (RUN_METADATA_FILE, "metadata"):
        if (folder / name).is_there():
            document = read_object(folder / name)
            custom = document.get("custom_metadata") if name == RUN_METADATA_FILE else document
            return custom if isinstance(custom, dict) and custom else None
    return None


def is_finished(location: Location, names: frozenset[str]) -> bool:
    """True if Orbax has finished saving a directory."""
    if any(UNFINISHED in part for part in location.url.split("/")):
        return False
    if not location.url.startswith("gs://"):
        return True
    return COMMITTED in names or (location.parent / COMMITTED).exists()


def _is_checkpoint(location: Location, names: frozenset[str]) -> bool:
    return CHECKPOINT_FILE in names or _is_tree(location, names) or _holds_items(location)


def _is_tree(location: Location, names: frozenset[str]) -> bool:
    """True if a directory contains a tree (or at least the metadata files of a tree) rather than items."""
    if names & _BESIDE_ARRAYS or any(name.startswith(PROCESS_FOLDER) for name in names):
        return True
    file = location / AGGREGATE_FILE
    return AGGREGATE_FILE in names and not file.is_directory() and looks_like_msgpack(file)


def _holds_items(location: Location) -> bool:
    """True if a directory without metadata contains items, as in checkpoints from early versions of Orbax."""
    folders = sorted(entry.name for entry in location.entries() if entry.is_directory)
    names = [name for name in folders if _may_be_item(name) and not _STEP.fullmatch(name) and "." not in name]
    for name in names[:_SEARCHED]:
        inside = frozenset(entry.name for entry in (location / name).entries())
        if inside and _is_tree(location / name, inside):
            return True
    return False


def _may_be_item(name: str) -> bool:
    return name not in (ARRAYS_FOLDER, "d") and UNFINISHED not in name and not name.startswith(("ocdbt.", "."))


def _item(folder: Location, handler: str, *, listed: bool) -> _Item | None:
    """Return the kind and the files of an item; None if the folder is not an item."""
    entries = {entry.name: entry.is_directory for entry in folder.entries()} if listed else {}
    for name in _KEYS:
        if entries.get(name):
            return _Item(TREE, folder / name, bare=name == _KEYS[0])
    if _is_tree(folder, frozenset(entries)):
        return _Item(TREE, folder, bare=handler.endswith("ArrayCheckpointHandler"))
    if folder.name == METRICS_FOLDER and entries.get(METRICS_FOLDER) is False:
        return _Item(METRICS, folder, file=METRICS_FOLDER)
    for name in _JSON_FILES:
        if entries.get(name) is False:
            return _Item(JSON, folder, file=name)
    if not handler and not entries:
        return None
    # Keep a recorded item even if its files were deleted, so that reading it raises an error about the missing file.
    if "Json" in handler:
        return _Item(JSON, folder, file=_JSON_FILES[0])
    if any(text in handler for text in ("PyTree", "Standard", "Array", "RandomKey")):
        return _Item(TREE, folder)
    return _Item(handler.rpartition(".")[2] or "files", folder)
