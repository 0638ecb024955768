"""The commit protocol, which atomically creates or replaces a checkpoint of any kind.

A save writes a marker into the checkpoint's directory, writes each item into a folder, makes everything durable, and
writes the commit record last, in one atomic step. A crash before this step leaves the previous state intact. To replace
a checkpoint, a save writes new folders next to the old ones, and its record lists the folders that are valid.

:class:`LocalCommit` is for file systems and memory, and ``StoreCommit`` (``store_commit.py``) for object stores; both
are subclasses of :class:`PendingCheckpoint`. :class:`CommitParts` extends the protocol to checkpoints whose parts have
their own directories.

The effects of a crash on a file system, and the subsequent clean-up:

===============================  ============================================  =====================================
after a crash in ...             the directory has ...                         the next save or sweep ...
===============================  ============================================  =====================================
BEGUN, before the marker         no files, or the previous files               finds no trace of the save
CLAIMED and WRITING              the marker and new folders, and any old       removes the folders that the marker
                                 record with its folders                       lists, or all if there is no record
RECORDED, before the rename      the same                                      the same
RECORDED, after the rename       the new record, old folders and the marker    removes the old folders, which the
                                                                               record lists as replaced
COMMITTED, during the clean-up   the same                                      the same
===============================  ============================================  =====================================

The record is renamed into place after all files that it lists are durable, and the marker is removed last. After a
power failure, there is therefore either no record, or a record whose files are complete. The marker is locked while the
save is running. On a file system without locks, a save also fails if it finds another save's token in the marker right
before or after the commit, so that the later of two concurrent saves wins.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from enum import Enum, auto

from ..errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    ObjectNotFoundError,
    OwnershipError,
    StorageConflictError,
    StorageError,
    StorageUnavailableError,
)
from ..format import ARCHIVE, DELETED, OWNER, PARTIAL, RECORD, STEP_FOLDER, WITNESSES, CheckpointRecord, unsynced
from ..steps import RECORD_LIMIT, read_record
from ..storage import FileLock, Location, SaveLock, as_location, locked_elsewhere
from .removal import (
    CommitParts,
    deletion_at,
    folders_of,
    marker_content,
    names_in,
    only_logged,
    parents_of,
    remove_empty,
    remove_folders,
    sweep,
)


def write_record(location: Location, record: CheckpointRecord, *, before: Sequence[Location] = ()) -> None:
    """Atomically and durably write or replace the commit record, after syncing the paths in ``before``."""
    content = record.encode()
    with answered(location, content):
        (location / RECORD).write_bytes(content, before=before)


@contextlib.contextmanager
def answered(location: Location, content: bytes) -> Iterator[None]:
    """Suppress the error of a request that received no response but has written the record anyway."""
    try:
        yield
    except StorageUnavailableError:
        if not location.is_remote:
            raise
        with contextlib.suppress(StorageError, DamagedCheckpointError):
            if (location / RECORD).read_bytes(limit=RECORD_LIMIT) == content:
                return
        raise


class Phase(Enum):
    """The progress of a save. It determines which files may be removed if the save is aborted."""

    PLANNED = auto()  # nothing has been written
    BEGUN = auto()  # the directory may exist, but any marker in it belongs to another save
    CLAIMED = auto()  # the marker belongs to this save, but may be incomplete
    WRITING = auto()  # the marker, if there is one, is complete
    WITHDRAWN = auto()  # the record has been removed again, and a deletion marker has been written
    LOST = auto()  # another save was committed first
    RECORDED = auto()  # the record may be in place, so the data must not be removed
    OVERTAKEN = auto()  # committed, but another save has started since
    COMMITTED = auto()


class Guard(Enum):
    """The method that protects concurrent saves to one path from each other."""

    MARKER = auto()  # the marker alone, so that the later of two saves wins
    CONDITION = auto()  # a marker and a conditional write, which is rejected if another save has written a record
    ARCHIVES = auto()  # a conditional write without a marker, because archives are recognizable by name and contents


_REMOVABLE = {Phase.BEGUN, Phase.CLAIMED, Phase.WRITING, Phase.WITHDRAWN, Phase.LOST}


class PendingCheckpoint(ABC):
    """A checkpoint that is being written and has not been committed. No files are written before :meth:`begin`.

    Args:
        location: The checkpoint's directory.
        items: The names of the checkpoint's items.
        overwrite: Whether an existing checkpoint may be replaced.
        owned: Whether the caller owns the directory, and verifies its ownership right before the commit. If so, another
            save's marker in an object store belongs to a superseded run, which will not commit.
        parts: The commit hooks for this kind of checkpoint.
        copies: The fingerprint of the original, if this checkpoint is a copy.

    Attributes:
        token: A random token that identifies this save.
        paths: The relative paths of the item folders and archives, keyed by item.
        folders: The locations of these folders and archives, keyed by item; empty before :meth:`begin`.
        continues: Whether this copy resumes an interrupted copy of the same checkpoint and reuses its files.
    """

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
        self.token = os.urandom(16).hex()
        self.paths: dict[str, str] = {}
        self.folders: dict[str, Location] = {}
        self.continues = False
        self._owned = owned
        self._parts = parts or CommitParts(location)
        self._copies = copies
        self._lock = SaveLock(location / PARTIAL)
        self._phase = Phase.PLANNED
        self._guard = Guard.MARKER
        self._old_record: bytes | None = None
        self._old: CheckpointRecord | None = None
        self._leftovers: set[str] = set()  # paths to remove once this save is committed
        self._plan(list(items), overwrite=overwrite)

    @property
    def replaces(self) -> bool:
        """True if the commit replaces a checkpoint."""
        return self._old_record is not None

    def begin(self, archives: Collection[str] = ()) -> None:
        """Write the marker that makes a crashed save detectable, and create folders for items not in ``archives``."""
        if self._phase is not Phase.PLANNED:
            return
        self._phase = Phase.BEGUN
        for item in () if self.continues else archives:
            path = f"{self.paths[item]}{ARCHIVE}"
            self.paths[item] = f"{self.paths[item]}.{self.token[:8]}{ARCHIVE}" if path in self._taken else path
        self.folders = {item: self.location / path for item, path in self.paths.items()}
        self._begin(archives)

    def commit(self, record: CheckpointRecord) -> None:
        """Make the items durable, and then write the record, which makes the checkpoint valid."""
        if not (self._is_alone or self._holds_path()):
            raise self._lock.conflict()
        if self._old is not None:
            self._parts.withdraw(self._old)
        record = dataclasses.replace(record, replaced=tuple(sorted(folders_of(self._old) - {*self.paths.values()})))
        self._phase = Phase.RECORDED
        try:
            self._write(record)
            self._confirm(record)
        except BaseException as error:
            if self._phase is Phase.RECORDED:
                self._revert(record, error)
            raise
        self._tidy(record)
        self._lock.release()

    def abort(self, error: BaseException | None = None) -> None:
        """Remove the written files; convert a StorageError to a StorageConflictError if another save has taken over."""
        ours = True
        try:
            if self._phase in _REMOVABLE:
                ours = self._remove(error)
        finally:
            self._lock.release()
        if not ours and isinstance(error, StorageError) and not isinstance(error, StorageConflictError):
            raise self._lock.conflict() from error

    def leave(self) -> None:
        """Release the lock, but leave the files for the next run to reuse or remove."""
        self._lock.release()

    # ---- the steps that differ between file systems and object stores

    @abstractmethod
    def _plan(self, items: list[str], *, overwrite: bool) -> None:
        """Inspect the directory, remove leftovers of an interrupted save, and choose the item paths."""

    @abstractmethod
    def _begin(self, archives: Collection[str]) -> None:
        """Write the marker, and create the folders."""

    @abstractmethod
    def _write(self, record: CheckpointRecord) -> None:
        """Write the record."""

    @abstractmethod
    def _clear(self) -> None:
        """Remove the remaining files of an aborted save after its folders have been removed."""

    # ---- the steps that file systems and object stores share

    def _read_old(self, names: set[str], *, overwrite: bool) -> None:
        """Read the record of an existing checkpoint, if any; raise CheckpointExistsError if it must not be replaced."""
        if RECORD not in names:
            return
        if not overwrite:
            raise CheckpointExistsError(
                f"{self.location}: a checkpoint is there already; choose another path, or replace it "
                "(overwrite=True, or force=True with a Checkpointer or a CheckpointManager)"
            )
        self._old_record = (self.location / RECORD).read_bytes(limit=RECORD_LIMIT)
        with contextlib.suppress(DamagedCheckpointError):  # if the record is damaged, its folders are unknown
            self._old = CheckpointRecord.decode(self._old_record, source=str(self.location / RECORD))
        self._parts.check_replaceable(self._old)
        if self._old is not None and self._old.step is not None:  # refuse a link, which may lead to another run's step
            self.location.check_not_link()

    def _check_free(self, names: set[str]) -> None:
        """Raise CheckpointExistsError if the directory contains files that are not from a checkpoint or a save."""
        if self._owned:  # a witness file that was written while the step was deleted may remain
            names = {name for name in names if not WITNESSES.fullmatch(name)}
        if names and not {PARTIAL, DELETED, RECORD} & names:
            raise CheckpointExistsError(
                f"{self.location}: the directory is not empty and is not a checkpoint (it holds {min(names)!r}); "
                "choose another path"
            )

    def _left_by_copy(self, items: list[str], names: set[str]) -> list[str]:
        """Return the folders of an interrupted copy of the same checkpoint, in item order; [] if there are none."""
        if self._copies is None or DELETED in names or self._lock.content().get("copies") != self._copies:
            return []
        left = self._lock.folders()
        expected = [re.escape(self._parts.folder(item)) for item in items]
        fits = len(left) == len(items) and all(
            re.fullmatch(rf"{name}(\.[0-9a-f]{{8}})?(\{ARCHIVE})?", folder)
            for name, folder in zip(expected, left, strict=True)
        )
        return left if fits and not folders_of(self._old).intersection(left) else []

    def _choose_paths(self, items: list[str], names: set[str], left: list[str], *, unique: bool) -> None:
        """Choose the item paths: the paths ``left`` by an interrupted copy, or unused paths."""
        self.continues = bool(left)
        self._taken = names | folders_of(self._old)
        for item, path in zip(items, left or map(self._parts.folder, items), strict=True):
            is_free = left or not (unique or path in self._taken)
            self.paths[item] = path if is_free else f"{path}.{self.token[:8]}"
        self._deletion = deletion_at(self.location) if DELETED in names else None  # marker of an earlier deletion

    def _marker(self) -> bytes:
        copies = {} if self._copies is None else {"copies": self._copies}
        return marker_content(self.token, [*self.paths.values(), *sorted(self._leftovers)], **copies)

    @property
    def _is_alone(self) -> bool:
        """True if this is an owned directory in an object store, where no other save can commit."""
        return self._owned and self.location.is_remote

    def _holds_path(self) -> bool:
        """Return True if the path still belongs to this save, or if this save has no complete marker."""
        is_unmarked = self._guard is Guard.ARCHIVES or self._phase is Phase.CLAIMED
        return is_unmarked or self._lock.is_own(self.token)

    def _confirm(self, record: CheckpointRecord) -> None:
        """Confirm the commit; raise an error if another save takes precedence or files have been removed."""
        is_overtaken = not self._holds_path()
        gives_way = is_overtaken and not self.replaces and self._guard is Guard.MARKER and not self._is_alone
        # A resumed copy writes a new marker, but a concurrent sweep may already be removing files that the copy reuses.
        is_doubtful = is_overtaken or (self.continues and not self._lock.shows_life)
        if is_doubtful and (gives_way or not self._is_intact(record)):
            raise self._lock.conflict()
        self._phase = Phase.OVERTAKEN if is_overtaken else Phase.COMMITTED

    def _revert(self, record: CheckpointRecord, error: BaseException) -> None:
        """Remove the record of a failed commit; if this also fails, keep the data."""
        if self.location.is_remote and isinstance(error, StorageUnavailableError):
            # A request without a response may still take effect, even after later requests, so keep the data.
            error.add_note(f"{self.location}: the next run removes what was written, or finds it committed and whole")
            return
        self._phase = self._take_back(record.encode())
        if self._phase is Phase.RECORDED:
            error.add_note(
                f"{self.location}: the record is in place and could not be taken back: although its save has "
                "failed, this checkpoint is listed as long as the storage keeps it. It is whole; to be sure of it, "
                "save it again, replacing it, or delete it"
            )

    def _take_back(self, content: bytes) -> Phase:
        """Remove the record of a failed commit, or restore the old record; return the resulting phase."""
        phase, record = Phase.WRITING, self.location / RECORD
        is_conditional = self._guard is not Guard.MARKER
        with contextlib.suppress(StorageError):
            if not self._is_visible():
                return phase
            if self._old_record is not None and is_conditional:
                record.write_bytes_if(self._old_record, content)
            elif self._old_record is not None:
                record.write_bytes(self._old_record)
            elif is_conditional:
                phase = Phase.WITHDRAWN
                (self.location / DELETED).write_bytes(content)
                record.remove_if(content)
            else:
                record.rename(DELETED)
        return Phase.RECORDED if self._is_visible() else phase

    def _is_visible(self) -> bool:
        """Return True if the current record is the one that this save wrote."""
        try:
            record = read_record(self.location)
        except CheckpointNotFoundError:
            return False
        except (StorageError, DamagedCheckpointError):
            return self._old_record is None
        return folders_of(record) <= {*self.paths.values()}

    def _is_intact(self, record: CheckpointRecord) -> bool:
        """Return True if this save's files exist, and any new deletion marker says to keep this save's record."""
        deletion = deletion_at(self.location)
        if deletion is not None and deletion != self._deletion and deletion.get("record") != record.identity:
            return False
        try:
            return all(
                (self.location / path).has_size(file.size)
                for item in record.items.values()
                for path, file in item.paths.items()
            )
        except ObjectNotFoundError:
            return False

    def _tidy(self, record: CheckpointRecord) -> None:
        """Remove the files that the committed checkpoint does not need; remove the marker last."""
        is_overtaken = self._phase is Phase.OVERTAKEN
        if is_overtaken and not self._is_alone:  # the other save will replace this one, or fail because of this record
            return
        with only_logged(self.location):
            self._parts.publish(record, replaces=self._old is not None)
            remove_folders(self._parts, {*record.replaced, *self._leftovers}, record)
            for name in filter(WITNESSES.fullmatch, self._taken):  # the replaced checkpoint's witness files
                with contextlib.suppress(StorageError):
                    (self.location / name).remove()
            if is_overtaken:  # the other save belongs to a superseded run and will fail
                sweep(self.location, self._parts)
            if self._deletion is not None:
                (self.location / DELETED).remove()
            if self._guard is not Guard.ARCHIVES and not is_overtaken:
                (self.location / PARTIAL).remove()  # last, so that the next run cleans up after an interruption

    def _remove(self, error: BaseException | None) -> bool:
        """Remove the files of an aborted save; return True if the path still belonged to this save."""
        ours, is_lost = True, self._phase is Phase.LOST
        is_late = self.location.is_remote and isinstance(error, StorageUnavailableError)
        with only_logged(self.location):
            ours = self._holds_path()
            paths = {*self.paths.values()}
            if is_lost:  # keep the folders of the committed save, which may be a copy into the same folders
                with contextlib.suppress(CheckpointNotFoundError):
                    paths -= folders_of(read_record(self.location))
            for path in sorted(paths, key=len, reverse=True):
                self._parts.remove(path, self._old if ours and not (is_late or is_lost) else None)
            if ours and not is_late:
                self._clear()
        return ours


class LocalCommit(PendingCheckpoint):
    """A checkpoint that is being written to a file system or to this process's memory."""

    def _plan(self, items: list[str], *, overwrite: bool) -> None:
        if self.location.is_local and self.location.is_there() and not self.location.is_directory():
            raise CheckpointExistsError(f"{self.location}: a file is there; choose another path")
        if self.location.is_local and not self._owned:
            _check_not_of_another(self.location)
        names = names_in(self.location)
        self._read_old(names, overwrite=overwrite)
        self._check_free(names)
        is_untouched, left = not {PARTIAL, DELETED} & names, []
        if not is_untouched:
            try:
                if PARTIAL in names and not self._lock.take_over():
                    raise self._lock.conflict()
                left = self._left_by_copy(items, names)
                if not left:
                    sweep(self.location, self._parts, self._lock if PARTIAL in names else None)
                    if PARTIAL in names and not self._lock.shows_life:  # kept by the sweep, as the record is damaged
                        (self.location / PARTIAL).remove()
            finally:
                if not left:
                    self._lock.release()
            names = names_in(self.location)
        # Without file locks, the sweep may have removed the marker of a save that is still running. Unique names
        # prevent that save from writing into this save's folders.
        self._choose_paths(items, names, left, unique=not is_untouched)

    def _begin(self, archives: Collection[str]) -> None:
        self.location.parent.make_directory()
        self.location.make_directory(sync=False)  # the commit syncs the parent directory
        if not self.continues:
            self._lock.make()
            names = names_in(self.location)
            record = (self.location / RECORD).read_bytes(limit=RECORD_LIMIT) if RECORD in names else None
            if record != self._old_record or names.intersection(self.paths.values()):  # another save has been committed
                (self.location / PARTIAL).remove()
                raise self._lock.conflict()
        self._phase, marker = Phase.CLAIMED, self._marker()
        # A new checkpoint's marker need not be synced: even an empty marker permits a clean-up after a power failure.
        sync = self._old_record is not None or self._copies is not None
        if self.continues:
            (self.location / PARTIAL).write_bytes(marker, atomic=False, sync=sync)
        else:
            self._lock.write(marker, sync=sync)
        self._phase = Phase.WRITING
        self.location.sync_directory()  # the marker must be durable before anything else is written
        if self._old is not None and not self.continues:
            # The last save removed these folders before its marker, but a power failure may have restored the folders.
            remove_folders(self._parts, self._old.replaced, self._old)
        for item, folder in self.folders.items():
            if item not in archives:
                folder.make_directory(sync=False)

    def _write(self, record: CheckpointRecord) -> None:
        write_record(self.location, record, before=self._unsynced(record))

    def _unsynced(self, record: CheckpointRecord) -> list[Location]:
        """Return the files that may not be durable yet, and the directories whose entries have changed."""
        if not self.location.is_local:
            return []
        items = record.items.values()
        files = {f"{item.folder}/{path}".rstrip("/") for item in items for path in unsynced(item.files)}
        folders = {parent for path in (*files, *self.paths.values()) for parent in parents_of(path)}
        removed = () if self._old is None else (*folders_of(self._old), *self._old.replaced)
        parents = {parent for path in removed for parent in parents_of(path)}
        folders |= {path for path in parents if os.path.isdir(self.location / path)}  # old folders may be missing
        return [*(self.location / path for path in files | folders), self.location, self.location.parent]

    def _remove(self, error: BaseException | None) -> bool:
        if self._phase is not Phase.BEGUN:
            return super()._remove(error)
        if self.location.is_local:
            remove_empty(self.location)
        return True

    def _clear(self) -> None:
        if RECORD not in names_in(self.location):
            self.location.remove_tree(last=PARTIAL)
            return
        if self._old is not None:
            self._parts.repair(self._old)
        (self.location / PARTIAL).remove()


def _check_not_of_another(location: Location) -> None:
    """Raise OwnershipError if the path is a step in a directory that belongs to a run in another process."""
    folder, name = os.path.split(os.path.realpath(location))
    run = as_location(folder)
    if STEP_FOLDER.fullmatch(name) and locked_elsewhere(run / OWNER):
        owner = FileLock(run / OWNER).content()
        raise OwnershipError(
            f"{location}: a run is writing to {run} (process {owner.get('pid', '?')} on {owner.get('host', '?')}), and "
            f"{name!r} is the name of a step there. Save to another place, or wait for the run to end"
        )
