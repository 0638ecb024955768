"""The commit protocol: how a checkpoint of any kind comes to exist, is replaced, and is deleted.

A save puts a marker into the checkpoint's directory, writes its items into folders of their own, makes all of it
durable, and writes the commit record last, in one atomic step. A crash before that leaves what was there before. Where
an object store has conditional writes, the record is only written while nothing, or the replaced record, is there; so
of saves that run at the same time exactly one is committed, and nothing of another save is removed before that. To
replace a checkpoint, the new items go into folders with new names beside the old ones; the record decides which count.
To delete one, its record is renamed to a marker first. A directory with a marker and no record may be removed; one
with neither belongs to something else and is never touched.

A sweep may meet a save that is alive, where no lock tells. It first leaves the marker of a deletion, which says what
record it has seen, and takes the marker of the save; it removes nothing if the record has changed by then. The save
looks for its marker after it has written its record. So one of them sees the other, and gives way (:func:`sweep`).

Where an object store has conditional writes, a new checkpoint whose items are zip files needs no marker: such a file
says itself that a save of holdfast has left it (:func:`_is_left`), the record decides between saves, and a save that
has written its record looks whether its files are still there.

:class:`CommitParts` extends this for checkpoints whose parts have directories of their own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    FormatVersionError,
    InvalidLocationError,
    ObjectNotFoundError,
    OwnershipError,
    StorageConflictError,
    StorageError,
    StoragePermissionError,
    StorageUnavailableError,
)
from ..format import (
    ARCHIVE,
    DELETED,
    OWNER,
    PARTIAL,
    RECORD,
    STEP_FOLDER,
    WITNESSES,
    CheckpointRecord,
    is_our_archive,
    unsynced,
)
from ..steps import RECORD_LIMIT, has_record, read_record
from ..storage import (
    TEMPORARY_PREFIX,
    FileLock,
    Location,
    SaveLock,
    as_location,
    is_strange,
    locked_elsewhere,
)

_logger = logging.getLogger("holdfast")

_LEFT_LIMIT = 4 << 20  # bytes of a zip file of a save, whose arrays have up to 256 KiB; foreign ones may be large
_UNIQUE = re.compile(r".+\.[0-9a-f]{8}")  # names that saves to object stores give to the folders of items
_ARCHIVE = re.compile(rf".+\.[0-9a-f]{{8}}\{ARCHIVE}")  # names that they give to zip files in their place


def write_record(location: Location, record: CheckpointRecord, *, before: Sequence[Location] = ()) -> None:
    """Write or replace the commit record, atomically and durably; make durable first what is to be ``before``."""
    content = record.encode()
    with _answered(location, content):
        (location / RECORD).write_bytes(content, before=before)


def write_record_if(location: Location, record: CheckpointRecord, old: bytes | None) -> bool:
    """Write the commit record only while it is ``old``, or missing if that is None; return whether that was done."""
    content = record.encode()
    with _answered(location, content):
        return (location / RECORD).write_bytes_if(content, old)
    return True


@contextlib.contextmanager
def _answered(location: Location, content: bytes) -> Iterator[None]:
    """Suppress the error of a request without an answer that has written the record."""
    try:
        yield
    except StorageUnavailableError:
        if not location.is_remote:
            raise
        with contextlib.suppress(StorageError, DamagedCheckpointError):
            if (location / RECORD).read_bytes(limit=RECORD_LIMIT) == content:
                return
        raise


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


class PendingCheckpoint:
    """A checkpoint that is being written and does not exist yet."""

    def __init__(
        self,
        location: Location,
        items: Iterable[str],
        *,
        overwrite: bool,
        owned: bool = False,
        parts: CommitParts | None = None,
        copies: str | None = None,
    ) -> None:
        self.location = location
        # Whether the caller alone may write here, and checks that right before the commit. In an object store, the
        # marker of another save then belongs to a superseded run, which will not commit.
        self._owned = owned and location.is_remote
        self.continues = False  # whether an interrupted copy of the same checkpoint continues, with the files it has
        self._copies = copies  # the fingerprint of the original of this copy
        self._parts = parts or CommitParts(location)
        self._old_record: bytes | None = None
        self._old: CheckpointRecord | None = None
        if location.is_local and location.is_there() and not location.is_directory():
            raise CheckpointExistsError(f"{location}: a file is there; choose another path")
        if not owned:
            _check_not_of_another(location)
        names = {entry.name for entry in location.entries()}
        untouched = not {PARTIAL, DELETED} & names
        self._lock = SaveLock(location / PARTIAL)
        # Read before the record: a save that begins after the record was replaced may yet be committed.
        marked = self._lock.folders() if PARTIAL in names and location.is_remote else []
        # What to remove once this save is committed: here, files of saves that had no marker.
        self._leftovers = self._find_replaceable(names, overwrite=overwrite, owned=owned)
        # Whether there is nothing here that a marker would have to explain.
        self._is_plain = untouched and parts is None and copies is None and not self._leftovers and RECORD not in names
        items, folders = list(items), []
        if not untouched:
            try:
                if PARTIAL in names and not self._lock.take_over():
                    raise self._lock.conflict()
                folders = self._left_by_copy(items, names)
                self.continues = bool(folders)
                self._leftovers -= {*folders}  # the copy takes them
                if not self.continues and PARTIAL in names and location.is_remote:
                    # They may belong to a save that is alive and commits before this one.
                    found = {*marked, *(() if self._old is None else self._old.replaced)}
                    if RECORD not in names:
                        found |= names
                    self._leftovers |= {*filter(self._parts.owns, found)} - {PARTIAL, DELETED}
                elif not self.continues:
                    sweep(location, parts, self._lock if PARTIAL in names else None)
                    if (
                        PARTIAL in names and not self._lock.tells
                    ):  # the marker beside a damaged record, which is about to be replaced
                        (location / PARTIAL).remove()
            finally:
                if not self.continues:
                    self._lock.release()
            names = {entry.name for entry in location.entries()}
        self.token = os.urandom(16).hex()  # distinguishes this save from all others
        # The sweep may have removed the marker of a save that is still alive, which must not write into the folders of
        # this one. In an object store, such a save, or a late request of one, is always possible.
        plain = untouched and not location.is_remote
        taken = self._taken = names | _folders(self._old)
        self.paths: dict[str, str] = {}
        for item in items:
            path = self._parts.folder(item)
            self.paths[item] = path if plain and path not in taken else f"{path}.{self.token[:8]}"
        if self.continues:
            self.paths = dict(zip(items, folders, strict=True))
        self.folders = {item: location / path for item, path in self.paths.items()}
        self._deletion = _deletion(location) if DELETED in names else None  # as it was before this save
        self._stale: list[str] = []  # folders that the old checkpoint had replaced, and a power failure brought back
        self._marker_size: int | None = None
        self._begun = False
        self._claimed = False
        self._marked = False
        self._unmarked = False  # whether this save needs no marker
        self._withdrawn = False  # whether it has left the marker of a deletion
        self._stays = False
        self._conditional = False
        self._lost = False  # whether another save was committed first

    @property
    def replaces(self) -> bool:
        """Whether there is a checkpoint that the commit replaces."""
        return self._old_record is not None

    def begin(self, archives: Collection[str] = ()) -> None:
        """Make the folders, and mark the directory so that a crash leaves nothing unexplained; done once.

        The items in ``archives`` become zip files, which need no folders.
        """
        if self._begun:
            return
        self._begun = True
        for item in () if self.continues else archives:
            path = f"{self.paths[item]}{ARCHIVE}"
            self.paths[item] = f"{self.paths[item]}.{self.token[:8]}{ARCHIVE}" if path in self._taken else path
        self.folders = {item: self.location / path for item, path in self.paths.items()}
        if self._is_plain and self.location.is_remote and self.paths.keys() == {*archives}:
            self._unmarked = self._conditional = (self.location / PARTIAL).honours_conditions(None)
            if self._unmarked:
                return
        self.location.parent.make_directory()
        self.location.make_directory(sync=False)  # the commit makes its name durable
        is_new = self.location.is_local and not self.continues
        if is_new:
            self._lock.make()
            self._check_unchanged()
        self._claimed = True
        written = [*self.paths.values(), *sorted(self._leftovers)]
        content = {"format": "holdfast", "token": self.token, "folders": written}
        if self._copies is not None:
            content["copies"] = self._copies
        marker = json.dumps(content).encode()
        self._marker_size = len(marker)
        # Of a new checkpoint, its presence says enough after a power cut: everything beside it is removed.
        sync = self._old_record is not None or self._copies is not None
        if is_new:
            self._lock.write(marker, sync=sync)
        else:
            (self.location / PARTIAL).write_bytes(marker, atomic=False, sync=sync)
        self._marked = True
        self._conditional = self.location.is_remote and (self.location / PARTIAL).honours_conditions(marker)
        self.location.sync_directory()  # the marker is durable before anything else
        if self._old is not None and self.location.is_local and not self.continues:
            # The last save removed these and then its marker: a power failure may bring back folders alone.
            self._stale = [folder for folder in self._old.replaced if _lies_in(self.location, folder)]
            _remove_folders(self._parts, self._stale, self._old)
        for item, folder in self.folders.items():
            if item not in archives:
                folder.make_directory(sync=False)

    def _left_by_copy(self, items: list[str], names: set[str]) -> list[str]:
        """Return the folders of an interrupted copy of the same checkpoint, in the order of the items; or nothing."""
        if self._copies is None or DELETED in names or self._lock.content().get("copies") != self._copies:
            return []
        found = self._lock.folders()
        expected = [re.escape(self._parts.folder(item)) for item in items]
        fits = len(found) == len(items) and all(
            re.fullmatch(rf"{name}(\.[0-9a-f]{{8}})?(\{ARCHIVE})?", folder)
            for name, folder in zip(expected, found, strict=True)
        )
        return found if fits and not _folders(self._old).intersection(found) else []

    def _check_unchanged(self) -> None:
        """Raise StorageConflictError if another save has been committed since this one was made."""
        names = {entry.name for entry in self.location.entries()}
        record = (self.location / RECORD).read_bytes(limit=RECORD_LIMIT) if RECORD in names else None
        if record != self._old_record or names.intersection(self.paths.values()):
            (self.location / PARTIAL).remove()
            raise self._lock.conflict()

    def _find_replaceable(self, names: set[str], *, overwrite: bool, owned: bool) -> set[str]:
        """Read the checkpoint that will be replaced; return the files of saves that had no marker.

        Something else that is there raises CheckpointExistsError.
        """
        if RECORD in names:
            if not overwrite:
                raise CheckpointExistsError(
                    f"{self.location}: a checkpoint is there already; choose another path, or replace it "
                    "(overwrite=True, or force=True with a Checkpointer or a CheckpointManager)"
                )
            self._old_record = (self.location / RECORD).read_bytes(limit=RECORD_LIMIT)
            try:
                self._old = CheckpointRecord.decode(self._old_record, source=str(self.location / RECORD))
            except DamagedCheckpointError:
                self._old = None  # its folders are unknown
            self._parts.check_replaceable(self._old)
            if self._old is not None and self._old.step is not None:  # it is the step of another run
                self.location.check_not_link()
            return self._left_of(names - _folders(self._old))
        left = self._left_of(names)
        if self.location.is_remote:  # late requests leave such a folder without a record or a marker
            names = {one for one in names - left if not _UNIQUE.fullmatch(one)}
        if owned:  # a witness that was written while the step was deleted is of no checkpoint any more
            names = {one for one in names if not WITNESSES.fullmatch(one)}
        if names and not {PARTIAL, DELETED} & names:
            raise CheckpointExistsError(
                f"{self.location}: the directory is not empty and is not a checkpoint (it holds {min(names)!r}); "
                "choose another path"
            )
        return left

    def _left_of(self, names: Iterable[str]) -> set[str]:
        return {name for name in names if _is_left(self.location / name)}

    def commit(self, record: CheckpointRecord) -> None:
        """Make the items durable, and then the checkpoint exist."""
        if not (self._owned or self._unmarked) and not self._lock.is_own(self.token, self._marker_size):
            raise self._lock.conflict()
        if self._old is not None:
            self._parts.withdraw(self._old)
        record = dataclasses.replace(record, replaced=tuple(sorted(_folders(self._old) - {*self.paths.values()})))
        self._stays = True  # from here on, its data may be the only copy
        try:
            if not self._conditional:
                write_record(self.location, record, before=self._unsynced(record))
            elif not write_record_if(self.location, record, self._old_record):
                self._stays, self._lost = False, True
                raise self._lock.conflict()
            if self._unmarked:
                self._check_listed(record)
            overtaken = not self._unmarked and not self._lock.is_own(self.token, self._marker_size)
            alone = self._old_record is None and not self._conditional and not self._owned
            # A copy that continues has its marker anew, but a sweep may have listed the files that it goes on with.
            doubtful = overtaken or (self.continues and not self._lock.tells)
            if doubtful and ((overtaken and alone) or self._is_swept(record) or not self._is_whole(record)):
                # Another save began at the same time, or a run that removes what an interrupted one has left.
                raise self._lock.conflict()
        except BaseException as error:
            if self._lost:
                raise
            if isinstance(error, StorageUnavailableError) and not self.location.is_local:
                # A request without an answer may still arrive, even after others: then its data must be there.
                error.add_note(
                    f"{self.location}: the next run removes what was written, or finds it committed and whole"
                )
                raise
            self._take_back(record.encode())
            if self._stays:
                error.add_note(
                    f"{self.location}: the record is in place and could not be taken back: although its save has "
                    "failed, this checkpoint is listed as long as the storage keeps it. It is whole; to be sure of it, "
                    "save it again, replacing it, or delete it"
                )
            raise
        if overtaken and not self._owned:  # the other save replaces this one, or finds this record and fails
            self._lock.release()
            return
        with _leftover(self.location):
            self._parts.publish(record, replaces=self._old is not None)
            _remove_folders(self._parts, {*record.replaced, *self._leftovers}, record)
            for name in filter(WITNESSES.fullmatch, self._taken):  # it is about the checkpoint that was here
                with contextlib.suppress(StorageError):
                    (self.location / name).remove()
            if overtaken:  # the other save is that of a superseded run, which fails
                sweep(self.location, self._parts)
            if self._deletion is not None:
                (self.location / DELETED).remove()
            if not (self._unmarked or overtaken):  # last: the marker tells the next run that something may be left
                (self.location / PARTIAL).remove()
        self._lock.release()

    def _unsynced(self, record: CheckpointRecord) -> list[Location]:
        """Return what may not be durable yet: files, and the directories with names that were made or removed."""
        if not self.location.is_local:
            return []
        items = record.items.values()
        found = {f"{item.folder}/{path}".rstrip("/") for item in items for path in unsynced(item.files)}
        folders = {parent for path in (*found, *self.paths.values()) for parent in _parents(path)}
        old = {parent for path in (*_folders(self._old), *self._stale) for parent in _parents(path)}
        folders |= {path for path in old if (self.location / path).is_directory()}  # one of them may be missing
        return [*(self.location / path for path in found | folders), self.location, self.location.parent]

    def _check_listed(self, record: CheckpointRecord) -> None:
        """Raise StorageConflictError if a run has removed files of this save, which had no marker, before its record.

        Saves that have begun meanwhile will not be committed. A marker explains what they may leave.
        """
        names = {entry.name for entry in self.location.entries()}
        if DELETED in names or not _folders(record) <= names:
            raise self._lock.conflict()
        others = self._left_of(names - _folders(record))
        if others and PARTIAL not in names:
            content = {"format": "holdfast", "token": self.token, "folders": sorted(others)}
            (self.location / PARTIAL).write_bytes(json.dumps(content).encode(), atomic=False)

    def _is_swept(self, record: CheckpointRecord) -> bool:
        """Whether a run that has not seen the record may be removing the files of this save."""
        found = _deletion(self.location)
        return found is not None and found != self._deletion and found.get("record") != record.identity

    def _is_whole(self, record: CheckpointRecord) -> bool:
        """Whether all files are there; asked only where another save may have removed some."""
        try:
            return all(
                (self.location / path).has_size(file.size)
                for item in record.items.values()
                for path, file in item.paths.items()
            )
        except ObjectNotFoundError:
            return False

    def _take_back(self, content: bytes) -> None:
        """Undo a commit that failed after the record was renamed, before its name was durable."""
        with contextlib.suppress(StorageError):
            if not self._is_visible():
                self._stays = False
                return
            place = self.location / RECORD
            if self._conditional and self._old_record is None:
                self._withdrawn = True
                (self.location / DELETED).write_bytes(content)
                place.remove_if(content)
            elif self._conditional:
                place.write_bytes_if(self._old_record or b"", content)
            elif self._old_record is None:
                place.rename(DELETED)
            else:
                place.write_bytes(self._old_record)
        # If even that fails, the data stays: the record must not be left without it.
        self._stays = self._is_visible()

    def _is_visible(self) -> bool:
        """Whether the record that is in place is the one that this save wrote, as far as can be told."""
        try:
            found = read_record(self.location)
        except CheckpointNotFoundError:
            return False
        except (StorageError, DamagedCheckpointError):
            return self._old_record is None
        return _folders(found) <= {*self.paths.values()}

    def abort(self, error: BaseException | None = None) -> None:
        """Remove what was written; the checkpoint that was to be replaced stays as it was.

        A storage error becomes a StorageConflictError if another save has taken the path over.
        """
        try:
            ours = self._remove(late=isinstance(error, StorageUnavailableError) and not self.location.is_local)
        finally:
            self._lock.release()
        if not ours and isinstance(error, StorageError) and not isinstance(error, StorageConflictError):
            raise self._lock.conflict() from error

    def leave(self) -> None:
        """Release the lock, and leave the files to the next run, which removes them."""
        self._lock.release()

    def _remove(self, *, late: bool) -> bool:
        """Remove the files of this save; return whether the path still belonged to it."""
        if not self._begun or self._stays:
            return True
        if self.location.is_local and not self._claimed:
            # Only an empty directory can be of this save.
            with contextlib.suppress(OSError):
                os.rmdir(self.location)
            return True
        ours = True
        with _leftover(self.location):
            ours = not self._marked or self._lock.is_own(self.token, self._marker_size)
            paths = {*self.paths.values()}
            if not ours and not self.location.is_local and not self.location.is_remote:
                # Two saves that begin at once use the same names here: only a record tells the other one's folders.
                names = {entry.name for entry in self.location.entries()}
                if PARTIAL in names or RECORD not in names:
                    return ours
                paths -= _folders(read_record(self.location))
            elif self._lost:  # the other save may be a copy into the same folders
                with contextlib.suppress(CheckpointNotFoundError):
                    paths -= _folders(read_record(self.location))
            for path in sorted(paths, key=len, reverse=True):
                self._parts.remove(path, self._old if ours and not late and not self._lost else None)
            if not ours or late:
                return ours
            if self._unmarked:  # a marker that is here belongs to another save
                if self._withdrawn:
                    (self.location / DELETED).remove()
                return ours
            if self.location.is_remote:
                # Another save may be alive here; the marker names what is left of earlier ones. What this one has found
                # is of saves that began before it: they were committed before the one that came first, or never will.
                if self._lost and has_record(self.location):
                    record = read_record(self.location)
                    _remove_folders(self._parts, {*record.replaced, *self._leftovers}, record)
                    self._parts.repair(record)
                elif self._leftovers:
                    return ours
                elif self._old is not None and not self._lost:
                    self._parts.repair(self._old)
                (self.location / DELETED).remove()
                (self.location / PARTIAL).remove()
                return ours
            if any(entry.name == RECORD for entry in self.location.entries()):
                if self._old is not None:
                    self._parts.repair(self._old)
                (self.location / PARTIAL).remove()
            else:
                self.location.remove_tree(last=PARTIAL)
        return ours


def _check_not_of_another(location: Location) -> None:
    """Raise OwnershipError for a step's name in a directory whose run, in another process, ranks and deletes steps."""
    if not location.is_local:
        return
    folder, name = os.path.split(os.path.realpath(location))
    run = as_location(folder)
    if STEP_FOLDER.fullmatch(name) and locked_elsewhere(run / OWNER):
        found = FileLock(run / OWNER).content()
        raise OwnershipError(
            f"{location}: a run is writing to {run} (process {found.get('pid', '?')} on {found.get('host', '?')}), and "
            f"{name!r} is the name of a step there. Save to another place, or wait for the run to end"
        )


def copy_left(location: Location) -> str | None:
    """Return the fingerprint of the checkpoint of which an interrupted copy lies here, or None."""
    found = SaveLock(location / PARTIAL).content().get("copies")
    return found if isinstance(found, str) else None


def delete_checkpoint(location: Location, record: CheckpointRecord | None = None) -> None:
    """Delete a checkpoint, whose record may be known: the record first, so that it is gone at once, then its data."""
    if location.is_remote and record is not None and all(item.is_archive for item in record.items.values()):
        names = {entry.name for entry in location.entries()} | _folders(record)
        witnesses = {*filter(WITNESSES.fullmatch, names)}
        archives = names - {RECORD} - witnesses
        if all(map(_ARCHIVE.fullmatch, archives)):  # they say themselves what they are
            for name in (*witnesses, RECORD, *archives):
                (location / name).remove()
            return
    if not location.is_local:
        (location / DELETED).write_bytes(b"{}")  # the marker needs no content, and so no request for the record
        # Without the files of saves that begin later, and with those that are known and that a listing may lack.
        items = () if record is None else record.items.values()
        known = {RECORD, DELETED}.union(*(item.paths for item in items))
        location.snapshot(known).remove_tree(first=RECORD, last=DELETED)
        return
    if location.is_link():  # only the link itself is removed
        location.remove_tree()
        return
    marker = location / DELETED
    if marker.is_link() or marker.is_directory():  # a crash of the file system may leave it so; neither can be locked
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
    """Release the locks of markers that may be gone: NFS keeps one there, as .nfs0123, until it is closed."""
    kept: list[str] = []
    try:
        with contextlib.suppress(StorageError):  # which must not hide an error of the caller
            kept = [entry.name for entry in location.entries()] if location.is_local else []
    finally:
        for lock in locks:
            lock.release()
    if kept and all(name.startswith(".nfs") for name in kept):
        with contextlib.suppress(OSError):
            os.rmdir(location)


@contextlib.contextmanager
def deleted_on_interrupt(directory: Location, made: Sequence[Location]) -> Iterator[None]:
    """Delete the checkpoints that were made in a directory if Ctrl-C ends the work, and the directory if it is new."""
    is_new = not directory.exists()
    try:
        yield
    except KeyboardInterrupt:
        for location in made:
            location.remove_tree(first=RECORD)  # those of other formats have none
        if is_new and directory.exists() and not directory.entries():
            directory.remove_tree()
        raise


def sweep(location: Location, parts: CommitParts | None = None, lock: SaveLock | None = None) -> bool:
    """Remove what interrupted saves and deletions left in a checkpoint's directory; return whether it is gone.

    Without a lock that tells whether a save is alive, the order of requests decides. This leaves the marker of a
    deletion, takes the marker of the save, and looks whether the record is still the one that the deletion notes. A
    save whose record was not seen finds its marker missing, and then either that deletion or its files missing.

    The marker of a deletion is locked, too: a save that begins sweeps first, and a deletion that is under way holds it.
    The caller may have taken the ``lock`` of the marker of a save over.

    StorageConflictError: a save is alive, or another process sweeps or deletes. StoragePermissionError: that is
    unknown.
    """
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
    names = {entry.name for entry in listing.entries()}
    # A save or a deletion may have begun since this looked for its marker.
    if location.is_local and any(mark in names and not lock.is_current() for mark, lock in locks.items()):
        return False
    tells = all(lock.tells for lock in locks.values())
    if RECORD in names:
        remove_temporary(location, names)
    marks = {PARTIAL, DELETED} & names
    unnamed = [name for name in names if not (location.is_remote and WITNESSES.fullmatch(name))]
    if not marks and (RECORD in names or not names or not all(_is_left(location / name) for name in unnamed)):
        return False
    folders = [folder for mark in sorted(marks) for folder in SaveLock(location / mark).folders()]
    record = None
    try:
        record = read_record(location) if RECORD in names else None
    except (CheckpointNotFoundError, FormatVersionError):  # not found: it was deleted meanwhile
        return False
    except DamagedCheckpointError:  # its data stays, as a user may want to inspect it
        if tells and PARTIAL in names:  # elsewhere, it may be that of a save which is alive
            (location / PARTIAL).remove()
        return False
    if not tells:
        _announce(location, record, folders)
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
        for name in names - {PARTIAL, DELETED}:  # a marker that is here now is that of a save which began since
            (listing / name).remove_tree()
        (location / DELETED).remove()
        return True
    left = {*filter(parts.owns, folders), *record.replaced}
    # The listing of a store may lack a name.
    there = [folder for folder in left if location.is_remote or "/" in folder or folder in names]
    _remove_folders(parts, there, record)
    parts.repair(record)
    if DELETED in marks:  # otherwise, one that is here now is that of a deletion which began since
        (location / DELETED).remove()
    if tells and PARTIAL in names:  # otherwise, one that is here now is that of a save which began since
        (location / PARTIAL).remove()
    return False


def _announce(location: Location, record: CheckpointRecord | None, folders: Sequence[str]) -> None:
    """Leave the marker of a deletion, with the record that it keeps and the folders that it removes."""
    noted = {"token": os.urandom(16).hex(), "record": None if record is None else record.identity}
    (location / DELETED).write_bytes(json.dumps({"format": "holdfast", **noted, "folders": folders}).encode())


def _deletion(location: Location) -> dict[str, Any] | None:
    """Return the content of the marker of a deletion; None without one."""
    return FileLock(location / DELETED).content() or None


def _has_changed(location: Location, record: CheckpointRecord | None) -> bool:
    try:
        found = read_record(location)
    except CheckpointNotFoundError:
        return record is not None
    except (DamagedCheckpointError, FormatVersionError):
        return True
    return record is None or found.identity != record.identity


def _is_left(place: Location) -> bool:
    """Whether an object is a zip file of a save: by its name, which no other save gives, and by what is in it."""
    if not (place.is_remote and _ARCHIVE.fullmatch(place.name)):
        return False
    try:
        return is_our_archive(place.read_bytes(limit=_LEFT_LIMIT))
    except (ObjectNotFoundError, DamagedCheckpointError):  # it is gone, or longer than any of ours
        return False


def sweep_stray(location: Location, listed: Collection[str], record: CheckpointRecord) -> None:
    """Remove zip files of saves that lost against the one of a record, or arrived late; from a listing of a run.

    A listing has several pages, and may be older at its beginning than at its end: it only nominates files.
    """
    if RECORD not in listed or {PARTIAL, DELETED} & {*listed}:
        return
    found = [name for name in {*listed} - _folders(record) if _is_left(location / name)]
    # A save that replaces the checkpoint has written its marker before its zip file, and its record before the end.
    if found and not {PARTIAL, DELETED} & {entry.name for entry in location.entries()}:
        for name in {*found} - _folders(read_record(location)):
            (location / name).remove()


def is_swept(names: Iterable[str]) -> bool:
    """Whether the names in a checkpoint's directory say that it is whole and holds nothing for :func:`sweep`."""
    found = set(names)
    return RECORD in found and not found & {PARTIAL, DELETED} and not any(map(_is_temporary, found))


def _is_temporary(name: str) -> bool:
    return name.startswith(TEMPORARY_PREFIX)


def remove_temporary(location: Location, names: Iterable[str]) -> None:
    """Remove the files of atomic writes that were interrupted."""
    for name in filter(_is_temporary, names):
        with _leftover(location):  # a directory is not ours, and a file may be another user's
            (location / name).remove()


def _remove_folders(parts: CommitParts, folders: Iterable[str], record: CheckpointRecord) -> None:
    """Remove folders that neither belong to a record nor lie inside one that does; skip those that lead elsewhere."""
    live = _folders(record)
    for folder in sorted(folders, key=len, reverse=True):
        if live.isdisjoint([folder, *_parents(folder)]):
            with contextlib.suppress(InvalidLocationError):
                parts.remove(folder, record)


def _lies_in(location: Location, folder: str) -> bool:
    with contextlib.suppress(InvalidLocationError):
        return (location / folder).exists()
    return False


def _folders(record: CheckpointRecord | None) -> set[str]:
    return set() if record is None else {item.folder for item in record.items.values()}


def _parents(path: str) -> list[str]:
    """Return the directories that a path leads through."""
    names = path.split("/")
    return ["/".join(names[:length]) for length in range(1, len(names))]


@contextlib.contextmanager
def _leftover(location: Location) -> Iterator[None]:
    """Log an error of a clean-up, which must neither turn a success into a failure nor hide the real error."""
    try:
        yield
    except (StorageError, DamagedCheckpointError, FormatVersionError) as error:
        _logger.warning("%s: could not tidy up, the next run will: %s", location, error)
