"""Checkpoints that Orbax wrote: which directories are, and what is in them."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..checkpointer import ITEM
from ..errors import CheckpointNotFoundError, DamagedCheckpointError, OptionError
from ..storage import Location
from .files import read_json, read_optional, total_bytes
from .flax_msgpack import looks_like_msgpack
from .orbax_metadata import ARRAYS_FOLDER, CHECKPOINT_FILE, SHARDING_FILE, TREE_FILE
from .orbax_tree import AGGREGATE_FILE, OrbaxTree
from .source import JSON, METRICS, TREE, CheckpointSource, StepDirectories, TreeSource

FORMAT = "Orbax"
UNFINISHED = ".orbax-checkpoint-tmp"
"""Part of the names of directories whose save has not been finished."""
COMMITTED = "commit_success.txt"
"""On Google Cloud Storage, where directories cannot be renamed, says that a save has been finished."""

_STEP = re.compile(r"(?:(.+)_)?([0-9]{1,18})")
_JSON_FILES = ("metadata", "data.json")
_METRICS = "metrics"
_KEYS = ("jax_random_key", "np_random_key")
_ARRAY_HANDLER = "ArrayCheckpointHandler"
_TREE_HANDLERS = ("PyTree", "Standard", "Array", "RandomKey")
_BESIDE_ARRAYS = frozenset({TREE_FILE, SHARDING_FILE, ARRAYS_FOLDER})
_PROCESS = "ocdbt.process_"
_LOOKED_INTO = 32  # directories that are looked into where nothing else says that this is a checkpoint
_NEVER_ITEMS = frozenset({ARRAYS_FOLDER, "d"})


class _Item(NamedTuple):
    kind: str
    folder: Location
    bare: tuple[str, ...] | None = None
    file: str = ""
    is_key: bool = False


def recognise(location: Location, names: frozenset[str]) -> CheckpointSource | None:
    """Opens an Orbax checkpoint; see :class:`~holdfast.engine.interop.source.Format`.

    Raises:
        CheckpointNotFoundError: It is one whose save was never finished.
        DamagedCheckpointError: It is one, and nothing of it is left.
    """
    if CHECKPOINT_FILE not in names and not _is_tree(location, names) and not _holds_items(location):
        return None
    if not is_finished(location, names):
        raise CheckpointNotFoundError(
            f"{location}: Orbax never finished saving this checkpoint; load another step, or rename the directory "
            "if you know better"
        )
    return OrbaxCheckpoint(location, names)


def recognise_steps(location: Location, names: frozenset[str]) -> StepDirectories | None:
    """Finds the steps of an Orbax manager; see :class:`~holdfast.engine.interop.source.Format`.

    Steps are called ``<step>`` or ``<prefix>_<step>``, the number perhaps with zeros in front. Where there are several
    prefixes, those of the most steps count.
    """
    found: dict[str, dict[int, Location]] = {}
    for name in sorted(names):
        match = _STEP.fullmatch(name)
        if match is not None and (location / name).is_directory() and _is_step(location / name):
            found.setdefault(match[1] or "", {}).setdefault(int(match[2]), location / name)
    if not found:
        return None
    prefix = max(sorted(found), key=lambda one: len(found[one]))
    return StepDirectories(FORMAT, dict(sorted(found[prefix].items())))


class OrbaxCheckpoint:
    """One finished checkpoint.

    Args:
        location: Its directory.
        names: What lies directly inside.

    Raises:
        DamagedCheckpointError: It holds no item at all.

    Attributes:
        location: Its directory.
        items: The kind of every item.
    """

    format = FORMAT

    def __init__(self, location: Location, names: frozenset[str]) -> None:
        self.location = location
        self._metadata = read_optional(location / CHECKPOINT_FILE) if CHECKPOINT_FILE in names else {}
        handlers = self._metadata.get("item_handlers")
        self._items: dict[str, _Item] = {}
        if isinstance(handlers, str) or _is_tree(location, names):
            only = _item(location, handlers if isinstance(handlers, str) else "", listed=True)
            self._items = {} if only is None else {ITEM: only}
        else:
            known: Mapping[str, Any] = handlers if isinstance(handlers, dict) else {}
            folders = [entry.name for entry in location.entries() if entry.is_directory and _may_be_item(entry.name)]
            for name in sorted({*folders, *(name for name in known if _is_segment(name))}):
                item = _item(location / name, str(known.get(name, "")), listed=name in folders)
                if item is not None:
                    self._items[name] = item
        if not self._items:
            raise DamagedCheckpointError(f"{location}: nothing is left of this Orbax checkpoint but its directory")
        self.items: Mapping[str, str] = {name: item.kind for name, item in self._items.items()}

    @property
    def step(self) -> int | None:
        """The step that the directory's name says."""
        match = _STEP.fullmatch(self.location.name)
        return int(match[2]) if match is not None else None

    @property
    def time(self) -> float | None:
        """When it was committed, in seconds since 1970-01-01 UTC, if that was noted."""
        nanoseconds = self._metadata.get("commit_timestamp_nsecs")
        return nanoseconds / 1e9 if isinstance(nanoseconds, int) else None

    @functools.cached_property
    def metrics(self) -> Mapping[str, Any] | None:
        """The metrics stored with it, or None."""
        for name, item in self._items.items():
            if item.kind == METRICS:
                found = self.value(name)
                return found if isinstance(found, dict) else None
        noted = self._metadata.get("metrics")
        return noted if isinstance(noted, dict) and noted else None

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of all its files."""
        return total_bytes(self.location)

    def tree(self, item: str) -> TreeSource:
        """Opens an item that is a tree."""
        found = self._items[item]
        typed = False
        if found.is_key:
            folder = found.folder.parent / f"{found.folder.name}_metadata"
            typed = read_optional(folder / _JSON_FILES[0]).get("typed") is True
        return OrbaxTree(found.folder, bare=found.bare, typed_key=typed)

    def value(self, item: str) -> Any:
        """Reads an item that is JSON."""
        found = self._items[item]
        if found.kind not in (JSON, METRICS):
            raise OptionError(
                f"{self.location}: item {item!r} ({found.kind}) is of a kind that only Orbax reads; holdfast reads "
                "trees of arrays and JSON"
            )
        return read_json(found.folder / found.file)


def is_finished(location: Location, names: frozenset[str]) -> bool:
    """Whether Orbax has finished saving what lies in a directory.

    Args:
        location: The directory.
        names: What lies directly inside.
    """
    if any(UNFINISHED in part for part in location.url.split("/")):
        return False
    if not location.url.startswith("gs://"):
        return True
    return COMMITTED in names or (location.parent / COMMITTED).exists()


def _is_tree(location: Location, names: frozenset[str]) -> bool:
    """Whether a directory is itself a tree of arrays, without items; or was, as what lies beside the arrays tells."""
    if names & _BESIDE_ARRAYS or any(name.startswith(_PROCESS) for name in names):
        return True
    place = location / AGGREGATE_FILE
    return AGGREGATE_FILE in names and not place.is_directory() and looks_like_msgpack(place)


def _holds_items(location: Location) -> bool:
    """Whether a directory without metadata of its own holds items, as those of early versions do."""
    looked = 0
    for name in sorted(entry.name for entry in location.entries() if entry.is_directory):
        if not _may_be_item(name) or _STEP.fullmatch(name) or "." in name:
            continue
        looked += 1
        if looked > _LOOKED_INTO:
            return False
        inside = frozenset(entry.name for entry in (location / name).entries())
        if inside and _is_tree(location / name, inside):
            return True
    return False


def _is_step(location: Location) -> bool:
    names = frozenset(entry.name for entry in location.entries())
    is_one = CHECKPOINT_FILE in names or (names and (_is_tree(location, names) or _holds_items(location)))
    return bool(is_one) and is_finished(location, names)


def _may_be_item(name: str) -> bool:
    return name not in _NEVER_ITEMS and UNFINISHED not in name and not name.startswith(("ocdbt.", "."))


def _is_segment(name: Any) -> bool:
    return isinstance(name, str) and bool(name) and name not in (".", "..") and "/" not in name and "\0" not in name


def _item(folder: Location, handler: str, *, listed: bool) -> _Item | None:
    """Finds out of what kind an item is; None if the folder is none.

    Args:
        folder: The item's folder.
        handler: The class that saved it, as far as that is known.
        listed: Whether there is a folder.
    """
    entries = {entry.name: entry.is_directory for entry in folder.entries()} if listed else {}
    for name in _KEYS:
        if entries.get(name):
            is_key = name == _KEYS[0]
            return _Item(TREE, folder / name, (AGGREGATE_FILE,) if is_key else None, is_key=is_key)
    if _is_tree(folder, frozenset(entries)):
        return _Item(TREE, folder, (AGGREGATE_FILE,) if handler.endswith(_ARRAY_HANDLER) else None)
    if folder.name == _METRICS and entries.get(_METRICS) is False:
        return _Item(METRICS, folder, file=_METRICS)
    for name in _JSON_FILES:
        if entries.get(name) is False:
            return _Item(JSON, folder, file=name)
    if not handler and not entries:
        return None
    # Orbax notes only what it saved: where that is not there any more, reading it says what is missing.
    if "Json" in handler:
        return _Item(JSON, folder, file=_JSON_FILES[0])
    if any(text in handler for text in _TREE_HANDLERS):
        return _Item(TREE, folder)
    return _Item(handler.rpartition(".")[2] or "files", folder)
