"""How one checkpoint comes into being, is replaced, and goes: the commit protocol.

A save puts a marker into the checkpoint's directory, writes its items into folders of their own, makes all of it
durable, and writes the commit record last, in one atomic step. A crash before that leaves what was there before. To
replace a checkpoint, the new items go into folders with new names beside the old ones; the record decides which count.
To delete one, its record is turned into a marker first. Whatever carries a marker and no record may be removed;
directories without either are somebody else's and are never touched.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
import uuid
from collections.abc import Iterable, Iterator

from .errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    FormatVersionError,
    ObjectNotFoundError,
    StorageError,
    StorageUnavailableError,
)
from .marks import Mark
from .record import DELETED, PARTIAL, RECORD, CheckpointRecord
from .storage import TEMPORARY_PREFIX, Location

_logger = logging.getLogger("holdfast")

_UNIQUE = re.compile(r".+\.[0-9a-f]{8}")  # folders of items, as saves to object stores name them
_RECORD_LIMIT = 256 << 20  # bytes; a record names files, not leaves


def read_record(location: Location) -> CheckpointRecord:
    """Reads the commit record of a checkpoint.

    Args:
        location: The checkpoint's directory.

    Returns:
        The record.

    Raises:
        CheckpointNotFoundError: There is none: nothing was committed here.
        DamagedCheckpointError: It does not verify.
        FormatVersionError: A newer version of holdfast wrote it.
    """
    place = location / RECORD
    try:
        data = place.read_bytes(limit=_RECORD_LIMIT)
    except ObjectNotFoundError as error:
        raise CheckpointNotFoundError(f"{location}: no checkpoint here (there is no {RECORD})") from error
    return CheckpointRecord.decode(data, source=str(place))


def write_record(location: Location, record: CheckpointRecord) -> None:
    """Writes or replaces the commit record, atomically and durably.

    Args:
        location: The checkpoint's directory.
        record: The record.

    Raises:
        StorageUnavailableError: An object store did not say whether it is written, and it is not there, or not yet.
    """
    content = record.encode()
    try:
        (location / RECORD).write_bytes(content)
    except StorageUnavailableError:
        if not location.is_remote:
            raise
        with contextlib.suppress(StorageError, DamagedCheckpointError):
            if (location / RECORD).read_bytes(limit=_RECORD_LIMIT) == content:
                return
        raise


class PendingCheckpoint:
    """A checkpoint that is being written and does not exist yet.

    Args:
        location: Its directory.
        items: Names of its items.
        overwrite: Whether a checkpoint that is there may be replaced.

    Raises:
        CheckpointExistsError: A checkpoint is there and must not be replaced, or the directory holds something else.
        StorageConflictError: Another save to this directory is under way.

    Attributes:
        folders: The folder of every item, by the item's name.
        token: What tells this save from all others.
    """

    def __init__(self, location: Location, items: Iterable[str], *, overwrite: bool) -> None:
        self.location = location
        self._old_record: bytes | None = None
        if location.is_local and location.exists() and not location.is_directory():
            raise CheckpointExistsError(f"{location}: a file is there; choose another path")
        taken = {entry.name for entry in location.entries()}
        self._old = self._replaceable(taken, overwrite=overwrite)
        untouched = not {PARTIAL, DELETED} & taken
        if not untouched:
            left = Mark(location / PARTIAL)
            if PARTIAL in taken and not left.take_over():
                raise left.conflict()
            try:
                sweep(location)
            finally:
                left.release()
            taken = {entry.name for entry in location.entries()}
        unique = uuid.uuid4().hex[:8]
        self.token = uuid.uuid4().hex
        self._mark = Mark(location / PARTIAL)
        # What was swept may be of a save that is still alive somewhere: it must not write into the folders of this one.
        # In an object store nobody can be sure that there is none, or that none of its requests is still on its way.
        plain = untouched and not location.is_remote
        self.folders = {
            name: location / (name if plain and name not in taken else f"{name}.{unique}") for name in items
        }
        self._deleted = DELETED in taken
        self._marker_size: int | None = None
        self._begun = False
        self._claimed = False
        self._marked = False
        self._stays = False

    def begin(self) -> None:
        """Makes the folders, and marks the directory so that a crash leaves nothing unexplained; done once."""
        if self._begun:
            return
        self._begun = True
        self.location.make_directory()
        if self.location.is_local:
            self._mark.make()
            self._check_unchanged()
        self._claimed = True
        folders = [folder.name for folder in self.folders.values()]
        marker = json.dumps({"format": "holdfast", "token": self.token, "folders": folders}).encode()
        self._marker_size = len(marker)
        (self.location / PARTIAL).write_bytes(marker, atomic=False)
        self._marked = True
        for folder in self.folders.values():
            folder.make_directory()

    def _check_unchanged(self) -> None:
        """Raises StorageConflictError if another save has been committed since this one was made."""
        names = {entry.name for entry in self.location.entries()}
        record = (self.location / RECORD).read_bytes(limit=_RECORD_LIMIT) if RECORD in names else None
        if record != self._old_record or names.intersection(folder.name for folder in self.folders.values()):
            (self.location / PARTIAL).remove()
            raise self._mark.conflict()

    def _is_claimed(self) -> bool:
        """Tells whether the mark is still that of this save."""
        return self._mark.content(self._marker_size).get("token") == self.token

    def _replaceable(self, taken: set[str], *, overwrite: bool) -> frozenset[str]:
        """Returns the folders of the checkpoint that will be replaced."""
        if RECORD in taken:
            if not overwrite:
                raise CheckpointExistsError(
                    f"{self.location}: a checkpoint is there already; choose another path, or replace it "
                    "(hf.save(..., overwrite=True), or force=True)"
                )
            self._old_record = (self.location / RECORD).read_bytes(limit=_RECORD_LIMIT)
            try:
                old = CheckpointRecord.decode(self._old_record, source=str(self.location / RECORD))
            except DamagedCheckpointError:
                return frozenset()  # which folders were its own is not known any more
            return frozenset({item.folder for item in old.items.values()} | set(old.replaced))
        if self.location.is_remote:  # such a folder without a record or a mark holds what has arrived late
            taken = {name for name in taken if not _UNIQUE.fullmatch(name)}
        if taken and not {PARTIAL, DELETED} & taken:
            raise CheckpointExistsError(
                f"{self.location}: the directory is not empty and is not a checkpoint (it holds {min(taken)!r}); "
                "choose another path"
            )
        return frozenset()

    def commit(self, record: CheckpointRecord) -> None:
        """Makes the checkpoint exist; its items must be durable.

        Args:
            record: What it holds; this adds which folders it replaces.
        """
        if not self._is_claimed():
            raise self._mark.conflict()
        self.location.sync_directory()
        self.location.parent.sync_directory()
        replaced = tuple(sorted(self._old - {folder.name for folder in self.folders.values()}))
        self._stays = True  # from here on its data may be all that there is, also where a person interrupts
        try:
            write_record(self.location, dataclasses.replace(record, replaced=replaced))
            if not self._is_claimed():
                # In this very moment; what was found without a record was swept.
                raise self._mark.conflict()
        except BaseException as error:
            if isinstance(error, StorageUnavailableError) and not self.location.is_local:
                # A request that has no answer may still arrive, even after others: its data has to be there then.
                error.add_note(
                    f"{self.location}: the next run removes what was written, or finds it committed and whole"
                )
                raise
            self._take_back()
            if self._stays:
                error.add_note(
                    f"{self.location}: the record is in place and could not be taken back: although its save has "
                    "failed, this checkpoint is listed as long as the storage keeps it. It is whole; to be sure of it, "
                    "save it again, replacing it, or delete it"
                )
            raise
        with _leftover(self.location):
            for folder in replaced:
                (self.location / folder).remove_tree()
            if self._deleted:
                (self.location / DELETED).remove()
            (self.location / PARTIAL).remove()  # last: it tells the next run that something may be left
        self._mark.release()

    def _take_back(self) -> None:
        """Undoes a commit that failed half-way: the record was renamed, and making its name durable failed."""
        with contextlib.suppress(StorageError):
            if not self._is_visible():
                self._stays = False
                return
            if self._old_record is None:
                (self.location / RECORD).rename(DELETED)
            else:
                (self.location / RECORD).write_bytes(self._old_record)
        # Should even that fail, the record must not be left without its data.
        self._stays = self._is_visible()

    def _is_visible(self) -> bool:
        """Tells whether the record that is in place is the one that this save wrote, as far as can be told."""
        try:
            found = read_record(self.location)
        except CheckpointNotFoundError:
            return False
        except (StorageError, DamagedCheckpointError):
            return self._old_record is None
        return {item.folder for item in found.items.values()} <= {folder.name for folder in self.folders.values()}

    def abort(self, error: BaseException | None = None) -> None:
        """Removes what was written; the checkpoint that was to be replaced, if any, stays as it was.

        Args:
            error: Why. A request that an object store did not answer may still arrive: the mark stays then, so that
                what comes late is known for what it is.
        """
        late = isinstance(error, StorageUnavailableError) and not self.location.is_local
        try:
            self._remove(late=late)
        finally:
            self._mark.release()

    def leave(self) -> None:
        """Leaves what was written where it is: the next run removes it."""
        self._mark.release()

    def _remove(self, *, late: bool) -> None:
        if not self._begun or self._stays:
            return
        if self.location.is_local and not self._claimed:
            # Whatever is there is not of this save, except perhaps the empty directory.
            with contextlib.suppress(OSError):
                os.rmdir(self.location)
            return
        with _leftover(self.location):
            ours = not self._marked or self._is_claimed()
            if not ours and not self.location.is_local and not self.location.is_remote:
                return  # what lies in these folders may be of the other save, as nobody can be sure to be the first
            for folder in self.folders.values():
                folder.remove_tree()
            if not ours or late:
                return
            if any(entry.name == RECORD for entry in self.location.entries()):
                (self.location / PARTIAL).remove()
            else:
                self.location.remove_tree(last=PARTIAL)


def delete_checkpoint(location: Location) -> None:
    """Deletes a checkpoint: its record first, so that it is gone at once, then its data.

    Args:
        location: The checkpoint's directory.
    """
    with contextlib.suppress(ObjectNotFoundError):
        (location / RECORD).rename(DELETED)
    location.remove_tree(last=DELETED)


def sweep(location: Location) -> bool:
    """Removes what interrupted saves and deletions have left in a checkpoint's directory.

    Args:
        location: The checkpoint's directory.

    Returns:
        Whether the directory is gone, as no committed checkpoint was in it.
    """
    names = {entry.name for entry in location.entries()}
    if RECORD in names:
        remove_temporary(location, names)
    if not {PARTIAL, DELETED} & names:
        return False
    if RECORD not in names:
        _logger.info("%s: removing what an interrupted save or deletion has left", location)
        location.remove_tree(last=DELETED if DELETED in names else PARTIAL)
        return True
    try:
        record = read_record(location)
    except (DamagedCheckpointError, FormatVersionError):
        return False  # nothing is removed beside a record that cannot be read: a person may want to look
    live = {item.folder for item in record.items.values()}
    for folder in ({*Mark(location / PARTIAL).folders(), *record.replaced} & names) - live:
        (location / folder).remove_tree()
    (location / PARTIAL).remove()
    (location / DELETED).remove()
    return False


def remove_temporary(location: Location, names: Iterable[str]) -> None:
    """Removes the files of atomic writes that were interrupted.

    Args:
        location: A directory that is ours.
        names: What it holds.
    """
    for name in names:
        if name.startswith(TEMPORARY_PREFIX):
            (location / name).remove()


@contextlib.contextmanager
def _leftover(location: Location) -> Iterator[None]:
    """Tidying up after the fact must not turn a success, or the real error, into another error."""
    try:
        yield
    except StorageError as error:
        _logger.warning("%s: could not tidy up, the next run will: %s", location, error)
