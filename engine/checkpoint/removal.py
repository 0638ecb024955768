"""The contents of a checkpoint's directory, deletion, and the removal of interrupted saves and deletions.

A deletion renames the record to a marker first, so the checkpoint is gone at once. A directory with a marker and no
record may be removed; one with neither belongs to something else and is never touched. If a marker's name belongs to a
directory, a pipe or a socket, an unfinished step is renamed to ``<step>.unreadable`` and a committed step stays.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..errors import (
    CheckpointNotFoundError,
    DamagedCheckpointError,
    FormatVersionError,
    InvalidLocationError,
    ObjectNotFoundError,
    StorageConflictError,
    StorageError,
    StoragePermissionError,
)
from ..format import ARCHIVE, DELETED, PARTIAL, RECORD, WITNESSES, CheckpointRecord, is_our_archive
from ..steps import read_record
from ..storage import TEMPORARY_PREFIX, FileLock, Location, SaveLock, is_strange

_logger = logging.getLogger("holdfast")

_ARCHIVE_LIMIT = 4 << 20  # bytes of an archive, whose arrays have up to 256 KiB; foreign files may be large
_OUR_ARCHIVE = re.compile(rf".+\.[0-9a-f]{{8}}\{ARCHIVE}")  # names that saves to object stores give to archives


class CommitParts:
    """What a kind of checkpoint adds to the commit; this class adds nothing, and its items are folders at the root.

    Checkpoints whose parts have their own directories use a subclass. The record at the root alone decides; the
    documents of parts are derived from it, removed before the record changes (:meth:`withdraw`) and written after it
    (:meth:`publish`), so that they never contradict the record. The next save or sweep writes missing documents.
    """

    def __init__(self, location: Location) -> None:
        self.location = location

    def folder(self, item: str) -> str:
        """Return the path of an item's folder in the checkpoint's directory, if that path is free."""
        return item

    def owns(self, folder: str) -> bool:
        """Return True if a save of this kind may have made a folder of this path; a marker is not trusted."""
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
        """Remove the folder of an item and, given a record, the documents of parts that the record does not have."""
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
    """Remove folders that are not part of a record, nor inside such a folder; skip paths that leave the directory."""
    live = folders_of(record)
    for folder in sorted(folders, key=len, reverse=True):
        if live.isdisjoint([folder, *parents_of(folder)]):
            with contextlib.suppress(InvalidLocationError):
                parts.remove(folder, record)


def left_archives(location: Location, names: Iterable[str]) -> set[str]:
    """Return the archives among these names that a save to this object store has left."""
    return {name for name in names if is_left_archive(location / name)}


def is_left_archive(location: Location) -> bool:
    """Return True if an object is an archive of a save: its name carries a token, and its content verifies."""
    if not (location.is_remote and _OUR_ARCHIVE.fullmatch(location.name)):
        return False
    try:
        return is_our_archive(location.read_bytes(limit=_ARCHIVE_LIMIT))
    except (ObjectNotFoundError, DamagedCheckpointError):  # it is gone, or longer than any archive of ours
        return False


def marker_content(token: str, folders: Iterable[str], **facts: str | None) -> bytes:
    """Return the content of the marker of a save or of a deletion, with the folders that it explains."""
    return json.dumps({"format": "holdfast", "token": token, "folders": [*folders], **facts}).encode()


def deletion_at(location: Location) -> dict[str, Any] | None:
    """Return the content of the marker of a deletion; None without one."""
    return FileLock(location / DELETED).content() or None


def copy_left(location: Location) -> str | None:
    """Return the fingerprint of the checkpoint that an interrupted copy has left here in part, or None."""
    fingerprint = SaveLock(location / PARTIAL).content().get("copies")
    return fingerprint if isinstance(fingerprint, str) else None


@contextlib.contextmanager
def only_logged(location: Location) -> Iterator[None]:
    """Log an error of a clean-up, which must neither turn a success into a failure nor hide the real error."""
    try:
        yield
    except (StorageError, DamagedCheckpointError, FormatVersionError) as error:
        _logger.warning("%s: could not tidy up, the next run will: %s", location, error)


def remove_empty(location: Location) -> None:
    """Remove a local directory if it is empty."""
    with contextlib.suppress(OSError):
        os.rmdir(location)


# ---- deletion, and what interrupted saves and deletions have left


def delete_checkpoint(location: Location, record: CheckpointRecord | None = None) -> None:
    """Delete a checkpoint, whose record may be known: the record first, so that it is gone at once, then its data."""
    items = () if record is None else record.items.values()
    if location.is_remote and record is not None and all(item.is_archive for item in items):
        names = names_in(location) | folders_of(record)
        witnesses = {*filter(WITNESSES.fullmatch, names)}
        archives = names - {RECORD} - witnesses
        if all(map(_OUR_ARCHIVE.fullmatch, archives)):  # their names and contents identify them
            for name in (*witnesses, RECORD, *archives):
                (location / name).remove()
            return
    if not location.is_local:
        (location / DELETED).write_bytes(b"{}")  # the marker needs no content, and so no request for the record
        # Without the files of saves that begin later, and with the recorded files, which a listing may lack.
        recorded = {RECORD, DELETED}.union(*(item.paths for item in items))
        location.snapshot(recorded).remove_tree(first=RECORD, last=DELETED)
        return
    if location.is_link():  # only the link itself is removed
        location.remove_tree()
        return
    marker = location / DELETED
    if marker.is_link() or marker.is_directory():  # as a crash of the file system may leave it; neither can be locked
        with contextlib.suppress(StoragePermissionError):
            marker.remove_tree()
    with contextlib.suppress(ObjectNotFoundError):
        # A directory of another user stays, and marks the deletion, too.
        (location / RECORD).remove() if marker.is_directory() else (location / RECORD).rename(DELETED)
    lock = SaveLock(location / DELETED)
    try:  # a save that begins meanwhile finds it locked
        if not lock.take_over():  # another process has removed the rest, and a save may have begun since
            return
    except StorageConflictError:  # another process has found the marker, and removes the rest
        return
    except StorageError as error:  # only a regular file can be locked
        if not is_strange(error):
            raise
    try:
        location.remove_tree(last=DELETED)
    finally:
        _release(location, lock)


def _release(location: Location, *locks: SaveLock) -> None:
    """Release the locks of markers that may be removed: NFS keeps such a file, as .nfs0123, until it is closed."""
    kept: set[str] = set()
    try:
        with contextlib.suppress(StorageError):  # it must not hide an error of the caller
            kept = names_in(location) if location.is_local else set()
    finally:
        for lock in locks:
            lock.release()
    if kept and all(name.startswith(".nfs") for name in kept):
        remove_empty(location)


@contextlib.contextmanager
def deleted_on_interrupt(directory: Location, made: Sequence[Location]) -> Iterator[None]:
    """Delete the checkpoints that were made in a directory if Ctrl-C ends the work, and the directory if it is new."""
    is_new = not directory.exists()
    try:
        yield
    except KeyboardInterrupt:
        for location in made:
            location.remove_tree(first=RECORD)  # checkpoints of other formats have no record
        if is_new and directory.exists() and not directory.entries():
            directory.remove_tree()
        raise


def sweep(location: Location, parts: CommitParts | None = None, lock: SaveLock | None = None) -> bool:
    """Remove the files of interrupted saves and deletions; return True if the directory is gone."""
    # StorageConflictError: a save is alive, or another process sweeps or deletes; StoragePermissionError: it may be.
    # The caller may hold the ``lock`` of a save's marker. A save that begins sweeps first, and waits for a deletion.
    save, deletion = lock or SaveLock(location / PARTIAL), SaveLock(location / DELETED)
    try:
        if lock is None:
            save.take_over()
        deletion.take_over()
        return _sweep(location, parts or CommitParts(location), {PARTIAL: save, DELETED: deletion})
    finally:
        _release(location, deletion, *([save] if lock is None else []))


def _sweep(location: Location, parts: CommitParts, locks: Mapping[str, SaveLock]) -> bool:
    """Sweep with the locks of the markers that are there."""
    listing = location.snapshot()
    names = names_in(listing)
    # A save or a deletion may have begun since the locks were taken.
    if location.is_local and any(mark in names and not lock.is_current() for mark, lock in locks.items()):
        return False
    tells = all(lock.shows_life for lock in locks.values())
    if RECORD in names:
        remove_temporary(location, names)
    marks = {PARTIAL, DELETED} & names
    unnamed = [name for name in names if not (location.is_remote and WITNESSES.fullmatch(name))]
    if not marks and (RECORD in names or not names or not all(is_left_archive(location / name) for name in unnamed)):
        return False
    folders = [folder for mark in sorted(marks) for folder in SaveLock(location / mark).folders()]
    record = None
    try:
        record = read_record(location) if RECORD in names else None
    except (CheckpointNotFoundError, FormatVersionError):  # not found: it was deleted meanwhile
        return False
    except DamagedCheckpointError:  # its data stays, as a user may want to inspect it
        if tells and PARTIAL in names:  # without a lock, the save may be alive
            (location / PARTIAL).remove()
        return False
    if not tells:
        # The order of requests decides, as `store_commit.py` explains: a save whose record this sweep has not seen
        # finds that its marker is missing, and then this deletion, or that its files are missing. The marker names the
        # record that is kept and the folders that are removed.
        kept = None if record is None else record.identity
        (location / DELETED).write_bytes(marker_content(os.urandom(16).hex(), folders, record=kept))
        if PARTIAL in names:
            (location / PARTIAL).remove()
        if _has_changed(location, record):  # a save was committed meanwhile
            if not marks:
                (location / DELETED).remove()
            return False
        marks = {DELETED}
    if record is None:
        _logger.info("%s: removing what an interrupted save or deletion has left", location)
        if location.is_local:
            location.remove_tree(last=PARTIAL if PARTIAL in marks else DELETED)
            return True
        for name in names - {PARTIAL, DELETED}:  # a save that has begun since may have written the marker
            (listing / name).remove_tree()
        (location / DELETED).remove()
        return True
    left = {*filter(parts.owns, folders), *record.replaced}
    # The listing of a store may lack a name.
    there = [folder for folder in left if location.is_remote or "/" in folder or folder in names]
    remove_folders(parts, there, record)
    parts.repair(record)
    if DELETED in marks:  # otherwise, a deletion that has begun since has written it
        (location / DELETED).remove()
    if tells and PARTIAL in names:  # otherwise, a save that has begun since has written it
        (location / PARTIAL).remove()
    return False


def _has_changed(location: Location, record: CheckpointRecord | None) -> bool:
    try:
        current = read_record(location)
    except CheckpointNotFoundError:
        return record is not None
    except (DamagedCheckpointError, FormatVersionError):
        return True
    return record is None or current.identity != record.identity


def sweep_stray(location: Location, listed: Collection[str], record: CheckpointRecord) -> None:
    """Remove zip files of saves that lost, or arrived late; the listing may be old, so it only nominates them."""
    if RECORD not in listed or {PARTIAL, DELETED} & {*listed}:
        return
    archives = left_archives(location, {*listed} - folders_of(record))
    # A save that replaces the checkpoint has written its marker before its archive, and its record before the end.
    if archives and not {PARTIAL, DELETED} & names_in(location):
        for name in archives - folders_of(read_record(location)):
            (location / name).remove()


def is_swept(names: Collection[str]) -> bool:
    """Return True if the names in a checkpoint's directory show that :func:`sweep` has nothing to remove."""
    left = any(name in {PARTIAL, DELETED} or name.startswith(TEMPORARY_PREFIX) for name in names)
    return RECORD in names and not left


def remove_temporary(location: Location, names: Iterable[str]) -> None:
    """Remove the files of atomic writes that were interrupted."""
    for name in names:
        if name.startswith(TEMPORARY_PREFIX):
            with only_logged(location):  # a directory is not ours, and a file may be another user's
                (location / name).remove()
