"""The commit protocol for object stores, which relies on the order of requests instead of locks and renames.

With conditional writes, a store accepts a record only if no record exists, or if the record to be replaced has not
changed. Thus, exactly one of several concurrent saves is committed; until then, no save removes another save's files.
In other stores, a save fails if it finds another save's token in the marker right before or after the commit.

A sweep may run concurrently with a save. The sweep first writes a deletion marker that names the current record, and
removes the marker of the save; if the record has changed by then, the sweep removes no other files. The save checks its
marker after it has written its record. At least one of the two therefore detects the other and gives way.

If a store supports conditional writes, and all items of a new checkpoint are archives, the save omits the marker, which
avoids two requests. Leftover archives are recognizable by name and contents, the conditional write of the record
selects the winning save, and after writing its record, the save checks that its files still exist.

The effects of a crash, and the subsequent clean-up:

============================  ===================================================  ================================
after a crash in ...          the prefix has ...                                   removed by ...
============================  ===================================================  ================================
WRITING                       the marker and objects, and any old record with its  the next save after its commit,
                              objects                                              or a sweep
WRITING, without a marker     archives                                             the same, or a sweep of the run
RECORDED                      either of the above, or the new record               as above, or as for COMMITTED
COMMITTED, during clean-up    the new record, old objects, and any marker          the next save, or a sweep
late requests of a dead save  folders with the token of the save                   the next sweep, from a listing
============================  ===================================================  ================================
"""

from __future__ import annotations

import re
from collections.abc import Collection

from ..format import DELETED, PARTIAL, RECORD, CheckpointRecord
from ..steps import has_record, read_record
from .commit import Guard, PendingCheckpoint, Phase, answered, write_record
from .removal import CommitParts, folders_of, left_archives, marker_content, names_in, remove_folders, sweep

_UNIQUE = re.compile(r".+\.[0-9a-f]{8}")  # item folder names with a token, which saves to object stores use


class StoreCommit(PendingCheckpoint):
    """A checkpoint that is being written to an object store."""

    def _plan(self, items: list[str], *, overwrite: bool) -> None:
        location = self.location
        names = names_in(location)
        is_untouched = not {PARTIAL, DELETED} & names
        # Read the marker before the record, because a marker read later might belong to a newer, uncommitted save.
        marked = self._lock.folders() if PARTIAL in names else []
        self._read_old(names, overwrite=overwrite)
        # Archives of saves without a marker, to be removed after this save has been committed.
        self._leftovers = left_archives(location, names - folders_of(self._old))
        # Late requests may have left folders with unique names but without a record or marker.
        self._check_free({name for name in names - self._leftovers if not _UNIQUE.fullmatch(name)})
        is_free = not (self._leftovers or {PARTIAL, DELETED, RECORD} & names)
        if is_free and type(self._parts) is CommitParts and self._copies is None:
            self._guard = Guard.ARCHIVES  # the directory has no files that require a marker
        left = [] if is_untouched else self._left_by_copy(items, names)
        self._leftovers -= {*left}  # the resumed copy reuses these archives
        if not left and PARTIAL in names:
            # These files may belong to a running save that commits first, so remove them only after this save's commit.
            others = {*marked, *(() if self._old is None else self._old.replaced)}
            if RECORD not in names:
                others |= names
            self._leftovers |= {*filter(self._parts.owns, others)} - {PARTIAL, DELETED}
        elif not (left or is_untouched):
            sweep(location, self._parts)
            names = names_in(location)
        # Unique names prevent late requests, and saves whose marker was swept, from writing into these folders.
        self._choose_paths(items, names, left, unique=True)

    def _begin(self, archives: Collection[str]) -> None:
        self._phase, marker = Phase.CLAIMED, self.location / PARTIAL
        are_archives = self.paths.keys() == {*archives}
        if not (self._guard is Guard.ARCHIVES and are_archives and marker.honours_conditions(None)):
            self._guard, content = Guard.MARKER, self._marker()
            marker.write_bytes(content, atomic=False)
            self._guard = Guard.CONDITION if marker.honours_conditions(content) else Guard.MARKER
        self._phase = Phase.WRITING

    def _write(self, record: CheckpointRecord) -> None:
        if self._guard is Guard.MARKER:
            write_record(self.location, record)
            return
        content, is_written = record.encode(), True
        with answered(self.location, content):
            is_written = (self.location / RECORD).write_bytes_if(content, self._old_record)
        if not is_written:
            self._phase = Phase.LOST
            raise self._lock.conflict()
        if self._guard is Guard.ARCHIVES:
            self._check_listed(record)

    def _check_listed(self, record: CheckpointRecord) -> None:
        """Raise an error if another run has removed files of this save; write a marker if archives are left over."""
        names = names_in(self.location)
        if DELETED in names or not folders_of(record) <= names:
            raise self._lock.conflict()
        others = left_archives(self.location, names - folders_of(record))
        if others and PARTIAL not in names:
            (self.location / PARTIAL).write_bytes(marker_content(self.token, sorted(others)), atomic=False)

    def _clear(self) -> None:
        if self._guard is Guard.ARCHIVES:  # any marker here belongs to another save
            if self._phase is Phase.WITHDRAWN:
                (self.location / DELETED).remove()
            return
        # Another save may be running here. The leftovers that the marker lists can nevertheless be removed, because
        # their saves either were committed before the winning save or will never be committed.
        is_lost = self._phase is Phase.LOST
        if is_lost and has_record(self.location):
            record = read_record(self.location)
            remove_folders(self._parts, {*record.replaced, *self._leftovers}, record)
            self._parts.repair(record)
        elif self._leftovers:
            return
        elif self._old is not None and not is_lost:
            self._parts.repair(self._old)
        (self.location / DELETED).remove()
        (self.location / PARTIAL).remove()
