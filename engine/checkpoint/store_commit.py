"""The commit protocol for object stores, which have neither locks nor renames: the order of requests decides.

A store with conditional writes accepts the record only if there is none yet, or still the one to replace. So exactly
one of several concurrent saves is committed, and nothing of another save is removed before that. In a store without
conditional writes, a save gives way if its marker has another token right before or right after the commit.

A sweep may meet a save that is still running. It first writes a deletion marker, which names the record that it has
seen, and removes the marker of the save; it removes nothing else if the record has changed by then. The save looks for
its marker after it has written its record. So at least one of them sees the other and gives way.

If a store has conditional writes, and all items of a new checkpoint are archives, the save needs no marker, which
saves two requests: an archive shows that a holdfast save wrote it, the record decides between saves, and the save
checks that its files are still there after it has written its record.

What a crash leaves, and what removes it:

============================  ===================================================  ================================
after the crash in ...        the prefix has ...                                   what removes it
============================  ===================================================  ================================
WRITING                       the marker and objects; the old record and its       the next save, once it is
                              objects, if there was one                            committed; a sweep
WRITING, without a marker     archives                                             the same; a sweep of the run
RECORDED                      either of the two, or the new record                 the record decides: the same
COMMITTED, while old data go  the new record, old objects, and the marker, if any  the next save; a sweep
late requests of a dead save  folders with the token of the save                   the next sweep, by the listing
============================  ===================================================  ================================
"""

from __future__ import annotations

import re
from collections.abc import Collection

from ..format import DELETED, PARTIAL, RECORD, CheckpointRecord
from ..steps import has_record, read_record
from .commit import Guard, PendingCheckpoint, Phase, answered, write_record
from .removal import CommitParts, folders_of, left_archives, marker_content, names_in, remove_folders, sweep

_UNIQUE = re.compile(r".+\.[0-9a-f]{8}")  # item folder names with a token, as used by saves to object stores


class StoreCommit(PendingCheckpoint):
    """A checkpoint that is being written to an object store."""

    def _plan(self, items: list[str], *, overwrite: bool) -> None:
        location = self.location
        names = names_in(location)
        is_untouched = not {PARTIAL, DELETED} & names
        # Read the marker before the record: a save that begins after the record was replaced may still be committed.
        marked = self._lock.folders() if PARTIAL in names else []
        self._read_old(names, overwrite=overwrite)
        # To be removed once this save is committed; so far, archives of saves without a marker.
        self._leftovers = left_archives(location, names - folders_of(self._old))
        # Late requests may leave folders with unique names, without a record or marker.
        self._check_free({name for name in names - self._leftovers if not _UNIQUE.fullmatch(name)})
        is_free = not (self._leftovers or {PARTIAL, DELETED, RECORD} & names)
        if is_free and type(self._parts) is CommitParts and self._copies is None:
            self._guard = Guard.ARCHIVES  # no files here need a marker
        left = [] if is_untouched else self._left_by_copy(items, names)
        self._leftovers -= {*left}  # the continued copy reuses them
        if not left and PARTIAL in names:
            # These may belong to a running save that commits before this one.
            others = {*marked, *(() if self._old is None else self._old.replaced)}
            if RECORD not in names:
                others |= names
            self._leftovers |= {*filter(self._parts.owns, others)} - {PARTIAL, DELETED}
        elif not (left or is_untouched):
            sweep(location, self._parts)
            names = names_in(location)
        # Unique names, so that a save whose marker was swept, or its late requests, cannot write into these folders.
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
        """Raise an error if another run has removed files of this unmarked save; mark leftover archives."""
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
        # Another save may be running here; the marker lists what earlier saves have left. The leftovers that this save
        # found belong to earlier saves, which were committed before the winning save, or never will be.
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
