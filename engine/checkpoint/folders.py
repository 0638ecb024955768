"""What a checkpoint's directory holds: the folders of its items, markers, and what interrupted saves have left."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from ..errors import (
    DamagedCheckpointError,
    FormatVersionError,
    InvalidLocationError,
    ObjectNotFoundError,
    StorageError,
)
from ..format import ARCHIVE, DELETED, PARTIAL, CheckpointRecord, is_our_archive
from ..storage import FileLock, Location, SaveLock

_logger = logging.getLogger("holdfast")

_ARCHIVE_LIMIT = 4 << 20  # bytes of an archive, whose arrays have up to 256 KiB; foreign files may be large
_OUR_ARCHIVE = re.compile(rf".+\.[0-9a-f]{{8}}\{ARCHIVE}")  # names that saves to object stores give to archives


class CommitParts:
    """What a kind of checkpoint adds to the commit; this one adds nothing, and its items are folders directly inside.

    A checkpoint whose parts have directories of their own derives from it. The record at the root alone decides; what
    describes a part is derived from it, removed before the record changes (:meth:`withdraw`) and written after it
    (:meth:`publish`), so that it never contradicts the record. The next save or sweep writes what is missing.
    """

    def __init__(self, location: Location) -> None:
        self.location = location

    def folder(self, item: str) -> str:
        """Return the path of an item's folder in the checkpoint's directory, where that name is free."""
        return item

    def owns(self, folder: str) -> bool:
        """Whether a save of this kind may have made a folder of this path; a marker is not trusted."""
        return "/" not in folder

    def check_replaceable(self, record: CheckpointRecord | None) -> None:
        """Raise an error if a save of this kind must not replace a checkpoint; None stands for a damaged one."""

    def withdraw(self, record: CheckpointRecord) -> None:
        """Remove what is derived from a record that is about to be replaced."""

    def publish(self, record: CheckpointRecord, *, replaces: bool) -> None:
        """Write what is derived from the record that was just committed, durably."""

    def repair(self, record: CheckpointRecord) -> None:
        """Write what is derived from a record and missing."""

    def remove(self, folder: str, record: CheckpointRecord | None) -> None:
        """Remove the folder of an item and, where a record is given, what else was there for parts it does not have."""
        (self.location / folder).remove_tree()


def names_in(location: Location) -> set[str]:
    """Return the names in a directory."""
    return {entry.name for entry in location.entries()}


def folders_of(record: CheckpointRecord | None) -> set[str]:
    """Return the folders and archives of the items of a record."""
    return set() if record is None else {item.folder for item in record.items.values()}


def parents_of(path: str) -> list[str]:
    """Return the directories that a path leads through."""
    names = path.split("/")
    return ["/".join(names[:length]) for length in range(1, len(names))]


def remove_folders(parts: CommitParts, folders: Iterable[str], record: CheckpointRecord) -> None:
    """Remove folders that neither belong to a record nor lie inside one that does; skip those that lead elsewhere."""
    live = folders_of(record)
    for folder in sorted(folders, key=len, reverse=True):
        if live.isdisjoint([folder, *parents_of(folder)]):
            with contextlib.suppress(InvalidLocationError):
                parts.remove(folder, record)


def left_archives(location: Location, names: Iterable[str]) -> set[str]:
    """Return the archives among these names that a save to this object store has left."""
    return {name for name in names if is_left_archive(location / name)}


def is_left_archive(place: Location) -> bool:
    """Return True if an object is an archive of a save: its name carries a token, and its content verifies."""
    if not (place.is_remote and _OUR_ARCHIVE.fullmatch(place.name)):
        return False
    try:
        return is_our_archive(place.read_bytes(limit=_ARCHIVE_LIMIT))
    except (ObjectNotFoundError, DamagedCheckpointError):  # it is gone, or longer than any of ours
        return False


def have_archive_names(names: Collection[str]) -> bool:
    """Return whether only saves to object stores give such names, to archives."""
    return all(map(_OUR_ARCHIVE.fullmatch, names))


def marker_content(token: str, folders: Iterable[str], **facts: str | None) -> bytes:
    """Return the content of the marker of a save or of a deletion: what wrote it, and the folders that it explains."""
    return json.dumps({"format": "holdfast", "token": token, "folders": [*folders], **facts}).encode()


def deletion_at(location: Location) -> dict[str, Any] | None:
    """Return the content of the marker of a deletion; None without one."""
    return FileLock(location / DELETED).content() or None


def copy_left(location: Location) -> str | None:
    """Return the fingerprint of the checkpoint of which an interrupted copy lies here, or None."""
    found = SaveLock(location / PARTIAL).content().get("copies")
    return found if isinstance(found, str) else None


@contextlib.contextmanager
def only_logged(location: Location) -> Iterator[None]:
    """Log an error of a clean-up, which must neither turn a success into a failure nor hide the real error."""
    try:
        yield
    except (StorageError, DamagedCheckpointError, FormatVersionError) as error:
        _logger.warning("%s: could not tidy up, the next run will: %s", location, error)


def remove_empty(location: Location) -> None:
    """Remove a local directory, if nothing is in it."""
    with contextlib.suppress(OSError):
        os.rmdir(location)
