"""The index of one series of steps, with their commit records, folders and detected damage."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from ..checkpoint import OtherItems, OwnItems, StoredItems
from ..errors import CheckpointNotFoundError, DamagedCheckpointError, FormatVersionError, shortened_steps
from ..forks import Lock
from ..format import OWNER, PADDED, CheckpointRecord
from ..sources import check_unclaimed, described_steps, find_steps, open_at
from ..steps import (
    LATE,
    METADATA,
    LateMetrics,
    StepEntry,
    attempts_at,
    left_behind,
    list_steps,
    read_entry,
    series_and_step,
    series_of,
    step_folder,
    step_folders,
    stored_metadata,
    was_left,
    with_late,
)
from ..storage import Entry, Location
from .events import EVENTS, ROTATED
from .options import CheckpointManagerOptions
from .ownership import OPTIONS, stored_options
from .places import StepPlace
from .retention import StepInfo, info_of

OLD_INDEX = "steps.log"  # index of commit records that earlier versions wrote to local directories
_SHOWN = "Orbax"  # the only other library whose steps are listed, because it names steps as holdfast does


@dataclass(frozen=True, slots=True)
class IndexedStep:
    record: CheckpointRecord | None = None  # None if the record is unreadable
    error: DamagedCheckpointError | FormatVersionError | None = None  # why the step is damaged
    info: StepInfo | None = None  # the step as seen by retention rules; None if it is damaged


_NO_STEP = IndexedStep()


def _committed(step: int, record: CheckpointRecord) -> IndexedStep:
    return IndexedStep(record, info=info_of(step, record))


class StepIndex:
    """A thread-safe index of one series of steps, read once and then updated with this writer's changes."""

    def __init__(self, location: Location, options: CheckpointManagerOptions, places: Sequence[StepPlace] = ()) -> None:
        self.location = location
        # Folders and commit records of steps read from other storage tiers. The mapping is replaced, never mutated.
        self.borrowed: Mapping[int, tuple[Location, CheckpointRecord]] = {}
        self._places = places  # storage tiers that may have steps that the directory lacks
        self._options = options
        self._series = series_of(options.step_prefix)
        self._late = LateMetrics(location)
        self._lock = Lock()  # guards the attributes below
        self._index: dict[int, IndexedStep] = {}
        self._strays: set[int] = set()  # step numbers of folders that contain no checkpoint
        self._folders: dict[int, Location] = {}  # the step folders found in the last directory listing
        self._is_foreign = False  # whether the steps were written by another library
        self._width: int | None = None  # minimum number of digits in new folder names; None until known
        self._infos: tuple[StepInfo, ...] | None = None  # committed steps in ascending order; None after a change
        self._left: tuple[tuple[StepInfo, ...] | None, frozenset[int]] = None, frozenset()  # see `left_behind`
        names = self.reload()
        is_new, begun = names <= {OWNER, OPTIONS, OLD_INDEX, METADATA, LATE, EVENTS, ROTATED}, OWNER in names
        # Do not start a run among another library's steps; reread the directory if holdfast steps have since appeared.
        if not (options.read_only or self._index or is_new or check_unclaimed(location, self._series, begun=begun)):
            self.reload()

    def step_location(self, step: int) -> Location:
        """Return the folder of a step, whether or not it exists."""
        return self._folders.get(step) or self.location / step_folder(self._series, step, self._width)

    def _indexed(self, step: int) -> IndexedStep:
        return self._index.get(step, _NO_STEP)

    def stored_metadata(self) -> Mapping[str, Any] | None:
        metadata = stored_metadata(self.location)
        return find_steps(self.location).metadata() if metadata is None and self._is_foreign else metadata

    def _list_others(self, names: frozenset[str]) -> list[StepEntry]:
        """Return the Orbax steps in the directory if the manager is read-only."""
        if not (self._options.read_only and any(name[-1:].isdecimal() for name in names)):
            return []
        described = described_steps(self.location)
        series = "" if self._options.step_prefix is None else self._series
        entries = described.entries if described.format == _SHOWN else ()
        return [entry for entry in entries if entry.location.name.startswith(series)]

    def reload(self, content: Sequence[Entry] | None = None, *, forget: bool = False) -> frozenset[str]:
        """Rebuild the index from a directory listing, and return the listed names. ``forget`` discards known damage."""
        content = self.location.entries() if content is None else content
        entries = list_steps(self.location, self._series, content, late=self._late)
        names = frozenset(entry.name for entry in content)
        others = [] if entries else self._list_others(names)
        folders = step_folders(self.location, self._series, content)
        self._folders = {entry.step: entry.location for entry in (*folders, *entries, *others)}
        self._is_foreign = bool(others)
        if self._width is None and not self._options.read_only:
            stored = stored_options(self.location) if PADDED in names else None
            chosen = stored if entries or OPTIONS in names else self._options
            self._width = (chosen and chosen.step_name_width) or 0
        index: dict[int, IndexedStep] = {}
        for entry in entries or others:
            if entry.record is not None:
                index[entry.step] = _committed(entry.step, entry.record)
            elif entry.error is not None:
                index[entry.step] = IndexedStep(error=entry.error)
        with self._lock:
            for step, before in self._index.items():
                now = index.get(step)
                if now and now.record and before.error and before.record and not forget:  # keep known damage
                    index[step] = before if now.record.identity == before.record.identity else now
            self._index, self._infos = index, None
            self._strays -= index.keys()
        return names

    def add(self, step: int, record: CheckpointRecord | None) -> None:
        """Record that a step has been committed, changed or, if ``record`` is None, deleted."""
        with self._lock:
            late = self._late.of(self.step_location(step).name)
            self._put(step, None if record is None else _committed(step, with_late(record, late)))

    def add_strays(self, steps: Iterable[int]) -> None:
        with self._lock:
            self._strays.update(steps)

    def _put(self, step: int, indexed: IndexedStep | None) -> None:
        self._infos = None
        self._strays.discard(step)
        self._index.pop(step, None)
        if indexed is not None:
            self._index[step] = indexed

    def mark_damaged(self, step: int, damage: str, *, unreadable: bool) -> None:
        """Record that a step's data is damaged, so it is no longer listed and may be replaced."""
        error = DamagedCheckpointError(damage, unreadable=unreadable)
        with self._lock:
            self._put(step, replace(self._indexed(step), error=error, info=None))

    def add_late_metrics(self) -> None:
        """Add metrics that other programs have recorded since the directory was last read."""
        for folder in self._late.refresh(lambda folder: self._step_of(folder) in self):
            step, added = self._step_of(folder), self._late.of(folder)
            with self._lock:
                record = self.known_record(step)
                if record is not None and added and (changed := with_late(record, added)) != record:
                    self._put(step, _committed(step, changed))

    def _step_of(self, folder: str) -> int:
        """Return the step number in a folder's name; -1 if the folder does not belong to this series."""
        named = series_and_step(folder)
        return named[1] if named and named[0] == self._series else -1

    def infos(self) -> tuple[StepInfo, ...]:
        """Return the committed steps as seen by retention rules, in ascending order."""
        if (infos := self._infos) is not None:  # fast path: called at every step, but changes are rare
            return infos
        with self._lock:
            changed = (indexed.info for indexed in self._index.values() if indexed.info is not None)
            self._infos = tuple(sorted(changed, key=attrgetter("step")))
            return self._infos

    def known_record(self, step: int) -> CheckpointRecord | None:
        """Return a step's commit record from the index; None if the step is missing or damaged."""
        indexed = self._indexed(step)
        return None if indexed.info is None else indexed.record

    def has_copy(self, record: CheckpointRecord) -> bool:
        """Return whether this directory has the checkpoint that a record describes, or a copy of it."""
        here = None if record.step is None else self.known_record(record.step)
        return here is not None and here.fingerprint == record.fingerprint

    def steps(self) -> list[int]:
        """Return the committed steps with an intact commit record, in ascending order."""
        return [info.step for info in self.infos()]

    def left_behind(self) -> frozenset[int]:
        """Return the steps that the run abandoned when it resumed from an earlier step."""
        infos = self.infos()
        if self._left[0] is not infos:  # cached, because every `latest_step` call needs the result
            records = {step: record for step in self.steps() if (record := self.known_record(step)) is not None}
            marks = left_behind(records.values())
            self._left = infos, frozenset(step for step, record in records.items() if was_left(step, record, marks))
        return self._left[1]

    def steps_after(self, step: int) -> list[int]:
        return [later for later in self.steps() if later > step]

    def steps_and_damaged(self) -> list[int]:
        with self._lock:
            return sorted(self._index)

    def is_damaged(self, step: int) -> bool:
        return self._indexed(step).error is not None

    def is_stray(self, step: int) -> bool:
        return step in self._strays

    def __contains__(self, step: Any) -> bool:
        return self._indexed(step).info is not None

    def open_step(self, step: int) -> StoredItems:
        if (borrowed := self.borrowed.get(step)) is not None:
            return OwnItems(*borrowed)
        record = self.record(step)
        location = self.step_location(step)
        return OtherItems(open_at(location)) if self._is_foreign else OwnItems(location, record)

    def may_read_again(self, step: int, stored: StoredItems, attempts: int) -> bool:
        """Return whether to reread a damaged step: it may have been replaced, or the network may be at fault."""
        if not isinstance(stored, OwnItems) or step in self.borrowed:
            return False
        entry = self._read_entry(step)
        if entry is None or (entry.record is not None and entry.record.identity != stored.record.identity):
            self.add(step, entry and entry.record)  # open_step() raises an error if the step has been deleted
            return True
        return attempts < attempts_at(self.location)

    def _read_entry(self, step: int) -> StepEntry | None:
        return read_entry(StepEntry(step, self.step_location(step), self._series))

    def _update(self, step: int) -> None:
        """Reread a step's commit record; raise an error if it is damaged."""
        entry = self._read_entry(step)
        if entry is not None and entry.error is not None:
            raise entry.error
        if entry is not None or not self.is_stray(step):
            self.add(step, entry and entry.record)

    def record(self, step: int) -> CheckpointRecord:
        """Return a step's full commit record, including the list of files."""
        if self.stored_record(step).summarizes is not None:
            self._update(step)
        return self.stored_record(step)

    def listed_record(self, step: int) -> CheckpointRecord:
        """Return a step's commit record or summary, from another storage tier if the directory lacks the step."""
        borrowed = None if step in self else self.borrowed.get(step)
        return self.stored_record(step) if borrowed is None else borrowed[1]

    def stored_record(self, step: int) -> CheckpointRecord:
        """Return the commit record of a step in the directory; processes other than 0 may have only its summary."""
        if step not in self._index:  # another program may have saved the step since the last listing
            self._update(step)
        indexed = self._indexed(step)
        if indexed.error is not None:
            raise copy.copy(indexed.error)
        if indexed.record is not None:
            return indexed.record
        steps = self.steps()
        there = f"there are {shortened_steps(steps)}" if steps else "there is none at all"
        raise CheckpointNotFoundError(f"{self.location}: no checkpoint of step {step}; {there}{self.elsewhere(step)}")

    def elsewhere(self, step: object) -> str:
        return "".join(place.elsewhere(step) for place in self._places)
