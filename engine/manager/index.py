"""The steps of one series: which there are, where each is read, and what is known of it."""

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

OLD_INDEX = "steps.log"  # an index of records that earlier versions kept in local directories
_SHOWN = "Orbax"  # the library whose managers have steps like ours; a run of ours may have files of other libraries


@dataclass(frozen=True, slots=True)
class IndexedStep:
    """What is known of one step of the directory, which may be damaged."""

    record: CheckpointRecord | None = None  # None if it cannot be read
    error: DamagedCheckpointError | FormatVersionError | None = None  # why the step is damaged
    info: StepInfo | None = None  # the step as retention rules see it, if it is committed
    location: Location | None = None  # its folder, if another library wrote it

    @property
    def is_none(self) -> bool:
        """True if there is no checkpoint, not even a damaged one."""
        return self.error is None and self.info is None


_NO_STEP = IndexedStep()  # also the entry of a folder that has the name of a step, and files that are no checkpoint


def _indexed(step: int, record: CheckpointRecord, location: Location | None = None) -> IndexedStep:
    return IndexedStep(record, info=info_of(step, record), location=location)


class StepIndex:
    """The steps of one series, read once and then kept up to date with the changes of this writer, by any thread."""

    def __init__(self, location: Location, options: CheckpointManagerOptions, places: Sequence[StepPlace] = ()) -> None:
        self.location = location
        # The steps that are read from other places, with their folders and commit records; replaced as a whole.
        self.borrowed: Mapping[int, tuple[Location, CheckpointRecord]] = {}
        self._places = places  # the places that have further steps
        self._options = options
        self._series = series_of(options.step_prefix)
        self._late = LateMetrics(location)
        self._lock = Lock()  # guards the attributes below
        self._index: dict[int, IndexedStep] = {}
        self._names: dict[int, str] = {}  # of the folders of steps, as they were last read
        self._width: int | None = None  # digits in the names of new ones, once it is known
        self._infos: tuple[StepInfo, ...] | None = None  # the committed steps in ascending order; None after a change
        names = self.reload()
        if not (options.read_only or self._index or self._is_unclaimed(names)):
            self.reload()

    def step_location(self, step: int) -> Location:
        """Return the folder of a step, whether it exists or not."""
        name = self._names.get(step) or step_folder(self._series, step, self._width)
        return self._known(step).location or self.location / name

    def _known(self, step: int) -> IndexedStep:
        return self._index.get(step, _NO_STEP)

    def stored_metadata(self) -> Mapping[str, Any] | None:
        found = stored_metadata(self.location)
        with self._lock:
            is_foreign = any(known.location is not None for known in self._index.values())
        return find_steps(self.location).metadata() if found is None and is_foreign else found

    def _list_others(self, names: frozenset[str]) -> list[StepEntry]:
        """Return the steps of Orbax, for a manager that only reads and finds no others."""
        if not (self._options.read_only and any(name[-1:].isdecimal() for name in names)):
            return []
        found = described_steps(self.location)
        if found.format != _SHOWN:
            return []
        series = "" if self._options.step_prefix is None else self._series
        return [entry for entry in found.entries if entry.location.name.startswith(series)]

    def _is_unclaimed(self, names: frozenset[str]) -> bool:
        """Refuse to begin a run in a directory with steps of others; return False if its own steps are there now."""
        known = {OWNER, OPTIONS, OLD_INDEX, METADATA, LATE, EVENTS, ROTATED}
        return names <= known or check_unclaimed(self.location, self._series, begun=OWNER in names)

    def reload(self, content: Sequence[Entry] | None = None, *, forget: bool = False) -> frozenset[str]:
        """Read the directory, or a listing of it, and return the names; ``forget`` clears the known damage of data."""
        content = self.location.entries() if content is None else content
        entries = list_steps(self.location, self._series, content, late=self._late)
        names = frozenset(entry.name for entry in content)
        others = [] if entries else self._list_others(names)
        folders = step_folders(self.location, self._series, content)
        self._names = {one.step: one.location.name for one in (*folders, *entries)}
        if self._width is None and not self._options.read_only:
            stored = stored_options(self.location) if PADDED in names else None
            is_new = not entries and OPTIONS not in names
            chosen = self._options if is_new else stored
            self._width = (chosen and chosen.step_name_width) or 0
        index: dict[int, IndexedStep] = {}
        for entry in entries or others:
            location = entry.location if others else None
            if entry.record is not None:
                index[entry.step] = _indexed(entry.step, entry.record, location)
            elif entry.error is not None:
                index[entry.step] = IndexedStep(error=entry.error, location=location)
        with self._lock:
            for step, known in self._index.items():
                found = index.get(step)
                if found is None and known.is_none:
                    index[step] = known
                elif found and found.record and known.error and known.record and not forget:  # its data was damaged
                    index[step] = known if found.record.identity == known.record.identity else found
            self._index, self._infos = index, None
        return names

    def add(self, step: int, record: CheckpointRecord | None) -> None:
        """Note that a step was committed, or its record replaced; None means that it was deleted."""
        with self._lock:
            late = self._late.of(self.step_location(step).name)
            self._put(step, None if record is None else _indexed(step, with_late(record, late)))

    def add_strays(self, steps: Iterable[int]) -> None:
        with self._lock:
            for step in steps:
                self._put(step, _NO_STEP)

    def _put(self, step: int, known: IndexedStep | None) -> None:
        self._infos = None
        if known is not None:
            self._index[step] = known
        else:
            self._index.pop(step, None)

    def mark_damaged(self, step: int, damage: str, *, unreadable: bool) -> None:
        """Note that the data of a step is damaged: the step is not listed any more, and may be replaced."""
        error = DamagedCheckpointError(damage, unreadable=unreadable)
        with self._lock:
            self._put(step, replace(self._known(step), error=error, info=None))

    def add_late_metrics(self) -> None:
        """Add the metrics that other programs have recorded since the directory was read."""
        for folder in self._late.refresh(lambda folder: self._step_of(folder) in self):
            step, added = self._step_of(folder), self._late.of(folder)
            with self._lock:
                record = self.known_record(step)
                if record is not None and added and (found := with_late(record, added)) != record:
                    self._put(step, _indexed(step, found))

    def _step_of(self, folder: str) -> int:
        """Return the step whose folder has this name; -1 if it is no step of this series."""
        named = series_and_step(folder)
        return named[1] if named and named[0] == self._series else -1

    def infos(self) -> tuple[StepInfo, ...]:
        """Return the committed steps as retention rules see them, in ascending order."""
        if (found := self._infos) is not None:  # Each step asks, and nearly always nothing has changed.
            return found
        with self._lock:
            infos = (known.info for known in self._index.values() if known.info is not None)
            self._infos = tuple(sorted(infos, key=attrgetter("step")))
            return self._infos

    def known_record(self, step: int) -> CheckpointRecord | None:
        """Return the commit record of a step as it was last read; None if it is not there, or damaged."""
        known = self._known(step)
        return None if known.info is None else known.record

    def has_copy(self, record: CheckpointRecord) -> bool:
        """Whether the step of a record, or a copy of it, is in this directory."""
        known = None if record.step is None else self.known_record(record.step)
        return known is not None and known.fingerprint == record.fingerprint

    def has_item(self, item: str, step: int) -> bool:
        record = self.known_record(step)
        return record is not None and item in record.items

    def steps(self) -> list[int]:
        """Return the committed steps whose record verifies, in ascending order."""
        return [info.step for info in self.infos()]

    def left_behind(self) -> set[int]:
        """Return the steps that the run has left for an earlier one; they do not count as its newest."""
        records = {step: record for step in self.steps() if (record := self.known_record(step)) is not None}
        left = left_behind(records.values())
        return {step for step, record in records.items() if was_left(step, record, left)}

    def steps_after(self, step: int) -> list[int]:
        """Return the committed steps after one, in ascending order."""
        return [info.step for info in self.infos() if info.step > step]

    def steps_and_damaged(self) -> list[int]:
        """Return the committed steps and the damaged ones, in ascending order."""
        with self._lock:
            return sorted(step for step, known in self._index.items() if not known.is_none)

    def is_damaged(self, step: int) -> bool:
        return self._known(step).error is not None

    def is_stray(self, step: int) -> bool:
        return step in self._index and self._known(step).is_none

    def __contains__(self, step: Any) -> bool:
        return self._known(step).info is not None

    def open_step(self, step: int) -> StoredItems:
        """Return the items of a step, of another place or of the directory."""
        if (borrowed := self.borrowed.get(step)) is not None:
            return OwnItems(*borrowed)
        record = self.record(step)
        if (place := self._known(step).location) is not None:
            return OtherItems(open_at(place))
        return OwnItems(self.step_location(step), record)

    def may_read_again(self, step: int, stored: StoredItems, attempts: int) -> bool:
        """Return whether to read a damaged step once more, as another process has replaced it, or a network may err."""
        if not isinstance(stored, OwnItems) or step in self.borrowed:
            return False
        found = self._look(step)
        if found is None or (found.record is not None and found.record.identity != stored.record.identity):
            self.add(step, None if found is None else found.record)  # then open_step() raises that it is not there
            return True
        return attempts < attempts_at(self.location)

    def _look(self, step: int) -> StepEntry | None:
        return read_entry(StepEntry(step, self.step_location(step), self._series))

    def _look_again(self, step: int) -> None:
        """Read the commit record of a step again; raise the error if it is damaged."""
        found = self._look(step)
        if found is not None and found.error is not None:
            raise found.error
        if found is not None or not self.is_stray(step):
            self.add(step, None if found is None else found.record)

    def record(self, step: int) -> CheckpointRecord:
        """Return the commit record of a step with its files."""
        if self.stored_record(step).summarizes is not None:
            self._look_again(step)
        return self.stored_record(step)

    def listed_record(self, step: int) -> CheckpointRecord:
        """Return the commit record of a step, or its summary; of another place, if the directory has none."""
        borrowed = None if step in self else self.borrowed.get(step)
        return self.stored_record(step) if borrowed is None else borrowed[1]

    def stored_record(self, step: int) -> CheckpointRecord:
        """Return the commit record of a step of the directory, or the summary that processes other than 0 know."""
        if self._known(step).is_none:  # another program may have saved it since
            self._look_again(step)
        known = self._known(step)
        if known.error is not None:
            raise copy.copy(known.error)
        if known.record is not None:
            return known.record
        steps = self.steps()
        there = f"there are {shortened_steps(steps)}" if steps else "there is none at all"
        raise CheckpointNotFoundError(f"{self.location}: no checkpoint of step {step}; {there}{self.elsewhere(step)}")

    def elsewhere(self, step: object) -> str:
        """Return the end of a sentence that says which place has a step that the run cannot read; or ""."""
        return "".join(place.elsewhere(step) for place in self._places)
