"""Where what lies in the directory of a tree of components, and the records that say so.

The root's commit record has an item for every component: ``state`` for the root's own state, and the path of the
component for all others (``learner/p0``, in the folder ``learner/p0/state``).
"""

from __future__ import annotations

from dataclasses import replace

from ..commit import read_record
from ..errors import CheckpointNotFoundError, DamagedCheckpointError, FormatVersionError, StorageError
from ..record import COMPONENT, TREES, CheckpointRecord, ItemRecord
from ..storage import Location
from .names import OWN, Path

METADATA = "metadata.json"
"""What people read about a component; a copy of what is in its state's folder."""
KIND = TREES
"""Kind of the items of a tree of components."""
DATA = "d"
"""The folder for arrays in a state's folder: made beforehand, so that the names of both become durable at once."""
_LEVELS = 32  # directories above a path that are searched for the tree it belongs to

__all__ = [
    "DATA",
    "KIND",
    "METADATA",
    "OWN",
    "below",
    "folders_of",
    "item_name",
    "part_records",
    "parts_of",
    "whole_around",
]


def item_name(path: Path) -> str:
    """Returns the name of a component's item in the record."""
    return "/".join(path) or OWN


def below(root: Location, path: Path) -> Location:
    """Returns the directory of a component."""
    return root / "/".join(path) if path else root


def parts_of(record: CheckpointRecord) -> dict[Path, ItemRecord]:
    """Returns the items of a record that are components, by their paths."""
    found = {}
    for name, item in record.items.items():
        path = () if name == OWN else tuple(name.split("/"))
        parent, _, folder = item.folder.rpartition("/")
        in_place = parent == "/".join(path) and (folder == OWN or folder.startswith(f"{OWN}."))
        if in_place and item.kind == KIND and COMPONENT in item.files:
            found[path] = item
    return found


def folders_of(record: CheckpointRecord) -> list[str]:
    """Returns the folders of all items."""
    return [item.folder for item in record.items.values()]


def part_records(record: CheckpointRecord) -> dict[Path, CheckpointRecord]:
    """Returns the records of all parts by their paths: what the whole says of each and of what is below it.

    Args:
        record: The record of the whole.
    """
    parts = parts_of(record)
    items: dict[Path, dict[str, ItemRecord]] = {path: {} for path in parts}
    for path, item in parts.items():
        for length in range(len(path) + 1):
            if path[:length] in items:
                folder = item.folder.removeprefix("/".join(path[:length]) + "/") if length else item.folder
                items[path[:length]][item_name(path[length:])] = replace(item, folder=folder)
    return {path: replace(record, items=found, replaced=()) for path, found in items.items()}


def whole_around(location: Location) -> tuple[Location, CheckpointRecord, Path] | None:
    """Finds the tree that a directory lies in.

    Args:
        location: The directory; a tree that begins right here does not count.

    Returns:
        The nearest tree's directory, its record, and the path from there; None if there is none.
    """
    names: tuple[str, ...] = ()
    place = location
    for _ in range(_LEVELS):
        if place.parent == place or not place.name:
            return None
        names = (place.name, *names)
        place = place.parent
        try:
            record = read_record(place)
        except (CheckpointNotFoundError, DamagedCheckpointError, FormatVersionError, StorageError):
            continue
        return (place, record, names) if () in parts_of(record) else None
    return None
