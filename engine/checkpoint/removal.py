"""List the contents of checkpoint directories, delete checkpoints, and clean up after interrupted operations.

A deletion first renames the record to a marker, which makes the checkpoint invalid immediately. A directory with a
marker but no record may be removed; a directory with neither is never changed. If the marker's name is taken by a
directory, pipe or socket, an unfinished step is renamed to ``<step>.unreadable``, and a committed step is kept.
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

_ARCHIVE_LIMIT = 4 << 20  # maximum size, in bytes, of a holdfast archive, which contains at most 256 KiB of arrays
_OUR_ARCHIVE = re.compile(rf".+\.[0-9a-f]{{8}}\{ARCHIVE}")  # names that holdfast gives to archives in object stores


class CommitParts:
    """Hooks that extend the commit protocol to other kinds of checkpoints. By default, items are folders at the root.

    Checkpoints whose parts have their own directories use a subclass. Only the record at the root is authoritative. The
    documents in the parts' directories are derived from the record. They never contradict the record, because they are
    removed before the record changes (:meth:`withdraw`) and rewritten later (:meth:`publish`, the next save or sweep).
    """

    def __init__(self, location: Location) -> None:
        self.location = location

    def folder(self, item: str) -> str:
        """Return the preferred path of an item's folder, relative to the checkpoint's directory."""
        return item

    def owns(self, folder: str) -> bool:
        """Return True if saving this kind of checkpoint could create ``folder``; used to check paths in a marker."""
        return "/" not in folder

    def check_replaceable(self, record: CheckpointRecord | None) -> None:
        """Raise an error unless this kind of checkpoint may replace the one with this record (None if damaged)."""

    def withdraw(self, record: CheckpointRecord) -> None:
        """Remove the documents derived from a record, before the record is replaced."""

    def publish(self, record: CheckpointRecord, *, replaces: bool) -> None:
        """Durably write the documents derived from a record that has just been committed."""

    def repair(self, record: CheckpointRecord) -> None:
        """Write missing documents that are derived from a record."""

    def remove(self, folder: str, record: CheckpointRecord | None) -> None:
        """Remove an item's folder and, if a record is passed, the documents of a part that the record does not list."""
        (self.location / folder).remove_tree()


def names_in(location: Location) -> set[str]:
    """Return the names in a directory."""
    return {entry.name for entry in location.entries()}


def folders_of(record: CheckpointRecord | None) -> set[str]:
    """Return the paths of all item folders and archives in a record."""
    return set() if record is None else {item.folder for item in record.items.values()}


def parents_of(path: str) -> list[str]:
    """Return all parent directories of a path."""
    names = path.split("/")
    return ["/".join(names[:length]) for length in range(1, len(names))]


def remove_folders(parts: CommitParts, folders: Iterable[str], record: CheckpointRecord) -> None:
    """Remove folders unless the record lists them or one of their parents; skip paths outside the directory."""
    live = folders_of(record)
    for folder in sorted(folders, key=len, reverse=True):
        if live.isdisjoint([folder, *parents_of(folder)]):
            with contextlib.suppress(InvalidLocationError):
                parts.remove(folder, record)


def left_archives(location: Location, names: Iterable[str]) -> set[str]:
    """Return the names of archives left over from saves to this object store."""
    return {name for name in names if is_left_archive(location / name)}


def is_left_archive(location: Location) -> bool:
    """Return True if an object's name and contents show that it is an archive written by a save."""
    if not (location.is_remote and _OUR_ARCHIVE.fullmatch(location.name)):
        return False
    try:
        return is_our_archive(location.read_bytes(limit=_ARCHIVE_LIMIT))
    except (ObjectNotFoundError, DamagedCheckpointError):  # deleted, or larger than any holdfast archive
        return False


def marker_content(token: str, folders: Iterable[str], **facts: str | None) -> bytes:
    """Encode the marker of a save or deletion, which lists the folders to clean up after an interruption."""
    return json.dumps({"format": "holdfast", "token": token, "folders": [*folders], **facts}).encode()


def deletion_at(location: Location) -> dict[str, Any] | None:
    """Return the contents of the deletion marker, or None if there is no marker."""
    return FileLock(location / DELETED).content() or None


def copy_left(location: Location) -> str | None:
    """If a copy was interrupted, return the fingerprint of its original; otherwise, return None."""
    fingerprint = SaveLock(location / PARTIAL).content().get("copies")
    return fingerprint if isinstance(fingerprint, str) else None


@contextlib.contextmanager
def only_logged(location: Location) -> Iterator[None]:
    """Log clean-up errors, which must neither turn a success into a failure nor hide the original error."""
    try:
        yield
    except (StorageError, DamagedCheckpointError, FormatVersionError) as error:
        _logger.warning("%s: could not tidy up, the next run will: %s", location, error)


def remove_empty(location: Location) -> None:
    """Remove a local directory if it is empty."""
    with contextlib.suppress(OSError):
        os.rmdir(location)


# ---- deletion, and clean-up after interrupted saves and deletions


def delete_checkpoint(location: Location, record: CheckpointRecord | None = None) -> None:
    """Delete a checkpoint, starting with its record so that it is invalid immediately. Pass the record if known."""
    items = () if record is None else record.items.values()
    if location.is_remote and record is not None and all(item.is_archive for item in items):
        names = names_in(location) | folders_of(record)
        witnesses = {*filter(WITNESSES.fullmatch, names)}
        archives = names - {RECORD} - witnesses
        if all(map(_OUR_ARCHIVE.fullmatch, archives)):  # archives with these names need no marker to be recognized
            for name in (*witnesses, RECORD, *archives):
                (location / name).remove()
            return
    if not location.is_local:
        (location / DELETED).write_bytes(b"{}")  # an empty marker suffices, and avoids a request to read the record
        # A snapshot excludes the files of later saves. Add all recorded files, because the listing may be incomplete.
        recorded = {RECORD, DELETED}.union(*(item.paths for item in items))
        location.snapshot(recorded).remove_tree(first=RECORD, last=DELETED)
        return
    if location.is_link():  # remove only the link itself
        location.remove_tree()
        return
    marker = location / DELETED
    if marker.is_link() or marker.is_directory():  # a file system crash may leave them behind; neither can be locked
        with contextlib.suppress(StoragePermissionError):
            marker.remove_tree()
    with contextlib.suppress(ObjectNotFoundError):
        # Another user's directory with the marker's name cannot be removed, but it marks the deletion just as well.
        (location / RECORD).remove() if marker.is_directory() else (location / RECORD).rename(DELETED)
    lock = SaveLock(location / DELETED)
    try:  # hold the lock, so that no save starts during the removal
        if not lock.take_over():  # another process has finished the removal, and a save may have started since
            return
    except StorageConflictError:  # another process has found the marker and is finishing the removal
        return
    except StorageError as error:  # only a regular file can be locked
        if not is_strange(error):
            raise
    try:
        location.remove_tree(last=DELETED)
    finally:
        _release(location, lock)


def _release(location: Location, *locks: SaveLock) -> None:
    """Release the locks of removed markers. Until then, NFS keeps each marker as a file such as .nfs0123."""
    kept: set[str] = set()
    try:
        with contextlib.suppress(StorageError):  # must not hide the caller's error
            kept = names_in(location) if location.is_local else set()
    finally:
        for lock in locks:
            lock.release()
    if kept and all(name.startswith(".nfs") for name in kept):
        remove_empty(location)


@contextlib.contextmanager
def deleted_on_interrupt(directory: Location, made: Sequence[Location]) -> Iterator[None]:
    """If Ctrl-C interrupts the block, delete the checkpoints in ``made``, and their directory if it is new."""
    is_new = not directory.exists()
    try:
        yield
    except KeyboardInterrupt:
        for location in made:
            location.remove_tree(first=RECORD)  # checkpoints of other formats have no `RECORD`
        if is_new and directory.exists() and not directory.entries():
            directory.remove_tree()
        raise


def sweep(location: Location, parts: CommitParts | None = None, lock: SaveLock | None = None) -> bool:
    """Clean up after interrupted saves and deletions; return True if the directory was removed."""
    # Raises StorageConflictError if another process is saving, sweeping or deleting, and StoragePermissionError if
    # this cannot be determined. ``lock`` is the save marker's lock if the caller holds it. A new save sweeps first.
    save, deletion = lock or SaveLock(location / PARTIAL), SaveLock(location / DELETED)
    try:
        if lock is None:
            save.take_over()
        deletion.take_over()
        return _sweep(location, parts or CommitParts(location), {PARTIAL: save, DELETED: deletion})
    finally:
        _release(location, deletion, *([save] if lock is None else []))


def _sweep(location: Location, parts: CommitParts, locks: Mapping[str, SaveLock]) -> bool:
    listing = location.snapshot()
    names = names_in(listing)
    # Check that no other save or deletion has started since the locks were acquired.
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
    try:
        record = read_record(location) if RECORD in names else None
    except (CheckpointNotFoundError, FormatVersionError):  # deleted in the meantime, or of an unsupported version
        return False
    except DamagedCheckpointError:  # keep the data, so that the user can inspect it
        if tells and PARTIAL in names:  # only if locks prove that the save has ended
            (location / PARTIAL).remove()
        return False
    if not tells:
        # The order of requests is essential (see `store_commit.py`). If this sweep has not seen the record of a save,
        # the save finds that its marker is missing, and then finds a deletion marker, or that some files are missing.
        # The deletion marker names the record to keep and the folders to remove.
        kept = None if record is None else record.identity
        (location / DELETED).write_bytes(marker_content(os.urandom(16).hex(), folders, record=kept))
        if PARTIAL in names:
            (location / PARTIAL).remove()
        if _has_changed(location, kept):  # a save has been committed since
            if not marks:
                (location / DELETED).remove()
            return False
        marks = {DELETED}
    if record is None:
        _logger.info("%s: removing what an interrupted save or deletion has left", location)
        if location.is_local:
            location.remove_tree(last=PARTIAL if PARTIAL in marks else DELETED)
            return True
        for name in names - {PARTIAL, DELETED}:  # the marker may belong to a save that has started since
            (listing / name).remove_tree()
        (location / DELETED).remove()
        return True
    left = {*filter(parts.owns, folders), *record.replaced}
    # In an object store, include folders that are not listed, because the listing may be incomplete.
    there = [folder for folder in left if location.is_remote or "/" in folder or folder in names]
    remove_folders(parts, there, record)
    parts.repair(record)
    if DELETED in marks:  # otherwise, the marker belongs to a deletion that has started since
        (location / DELETED).remove()
    if tells and PARTIAL in names:  # otherwise, the marker belongs to a save that has started since
        (location / PARTIAL).remove()
    return False


def _has_changed(location: Location, identity: str | None) -> bool:
    try:
        return read_record(location).identity != identity
    except CheckpointNotFoundError:
        return identity is not None
    except (DamagedCheckpointError, FormatVersionError):
        return True


def sweep_stray(location: Location, listed: Collection[str], record: CheckpointRecord) -> None:
    """Remove archives of superseded saves. Check each archive again, because ``listed`` may be outdated."""
    if RECORD not in listed or {PARTIAL, DELETED} & {*listed}:
        return
    archives = left_archives(location, {*listed} - folders_of(record))
    # A save writes its marker before its archives, and its record before it ends, so check marker and record again.
    if archives and not {PARTIAL, DELETED} & names_in(location):
        for name in archives - folders_of(read_record(location)):
            (location / name).remove()


def is_swept(names: Collection[str]) -> bool:
    """Return True if the names in a checkpoint's directory show that :func:`sweep` has nothing to remove."""
    left = any(name in {PARTIAL, DELETED} or name.startswith(TEMPORARY_PREFIX) for name in names)
    return RECORD in names and not left


def remove_temporary(location: Location, names: Iterable[str]) -> None:
    """Remove the temporary files of interrupted atomic writes."""
    for name in names:
        if name.startswith(TEMPORARY_PREFIX):
            with only_logged(location):  # removal fails for a directory or another user's file
                (location / name).remove()
