"""Restore the step from which a run resumes: the newest step, in any storage tier, that is intact on all processes."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from ..arrays import SharedReads
from ..errors import (
    CheckpointNotFoundError,
    DamagedCheckpointError,
    NoWholeCheckpointError,
    PeerFailedError,
    itemized,
)
from ..steps import MOST_CHANGES, read_again
from .decisions import AbandonedSteps, SaveDecisions
from .items import ItemSet
from .places import StepPlace
from .retention import newest_with
from .run import Run

_logger = logging.getLogger("holdfast")


@dataclass(frozen=True, slots=True)
class Restored:
    """A restored checkpoint.

    Attributes:
        step: The step of the checkpoint.
        items: The restored item, or a dictionary of items if the manager has several.
        skipped: The newer steps, including host-local steps, that are damaged or unused, each with the reason.
    """

    step: int
    items: Any
    skipped: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Peek:
    """A preview of the checkpoint that a restore would load, without its state.

    Attributes:
        step: The step; None for a checkpoint without a step number.
        extras: The values saved along with the state, by name, loaded without a template. For a
            ``holdfast.graph`` checkpoint, these are its numbers and strings by path.
        metrics: The metrics stored with the checkpoint, or None.
        metadata: The metadata of the run that is stored with its checkpoints, or None.
        custom_metadata: The ``custom_metadata`` that was saved with the step, or None.
    """

    step: int | None
    extras: Mapping[str, Any]
    metrics: Any = None
    metadata: Mapping[str, Any] | None = None
    custom_metadata: Mapping[str, Any] | None = None


class _Damage(NamedTuple):
    """Why a step could not be restored, and on which process."""

    reason: str
    unreadable: bool = False
    deleted: bool = False
    process: int = 0


@dataclass(frozen=True, slots=True)
class StepRestorer:
    """Restores steps, and informs the manager's other components which step the run resumes from."""

    run: Run
    items: ItemSet
    decisions: SaveDecisions
    abandoned: AbandonedSteps

    def restore_step(self, step: int, items: Any, kwargs: Mapping[str, Any]) -> Any:
        began = time.perf_counter()
        self._fetch_missing(step)
        # Share reads only if the options require it, because a program may restore a step on a single process.
        with self._shared_reads(together=False) as shared:
            try:
                values = self._read(step, items, kwargs, shared)
            except BaseException as error:
                if shared is not None:
                    shared.fail(error)
                if not isinstance(error, DamagedCheckpointError):
                    raise
                self.items.damage_found()
                if not self._stands_in_alone(step, error):
                    raise
                values = self._read(step, items, kwargs, None)
        self.resumes_from(step, began=began)
        return values

    def resume(self, step: int, values: Any, damaged: Collection[tuple[int, _Damage]], *, began: float) -> Restored:
        """Resume from the step that :meth:`newest_whole` has read; warn about newer, damaged steps."""
        unused = {newer: why for place in self.run.places for newer, why in place.unused.items() if newer > step}
        skipped = dict(sorted({**unused, **{n: damage.reason for n, damage in damaged}}.items(), reverse=True))
        if damaged:
            headline = f"{self.run.steps.location}: going back to step {step}, the newest whole checkpoint. Newer ones:"
            _logger.warning("%s", itemized(headline, [f"step {newer}: {why}" for newer, why in skipped.items()]))
        for newer, damage in damaged:
            self.run.steps.mark_damaged(newer, damage.reason, unreadable=damage.unreadable)
        self.resumes_from(step, skipped=skipped, began=began)
        return Restored(step, values, tuple(skipped.items()))

    def peek(self, items: Collection[str], step: int | None) -> tuple[int, Any] | None:
        """Return the step that a restore would load, and the requested items."""
        if step is not None:
            self._fetch_missing(step)
        whole = self.newest_whole(dict.fromkeys(items), {}, step, peeks=True)
        return None if whole is None else whole[:2]

    def newest_whole(
        self, items: Any, kwargs: Mapping[str, Any], named: int | None = None, *, peeks: bool = False
    ) -> tuple[int, Any, list[tuple[int, _Damage]]] | None:
        """Return the given or newest step that is intact on all processes, its items, and damaged newer steps."""
        directory = self.run.steps.location
        damaged: list[tuple[int, _Damage]] = []
        missing: set[int] = set()
        replaced: set[int] = set()  # damaged steps that were replaced from another storage tier
        steps = self._newest_first(named)
        while steps:
            step, is_here = steps.pop(0)
            if not is_here and not self.run.fetch(step):
                continue
            if peeks and not items:
                return step, {}, damaged
            with self._read_by_all(step) as (shared, damages):
                values = self._read(step, items, kwargs, shared)
            if not damages:
                return step, values, damaged
            (damage,) = damages
            if step in replaced:
                replaced.remove(step)
                self._drop(step, damage)
            elif step in self.run.steps.borrowed:
                text = "%s: the local step %d is damaged and passed over, on process %d: %s"
                _logger.warning(text, directory, step, damage.process, damage.reason)
                self._drop(step, damage)
                damaged.clear()
                steps = self._newest_first(named)
                continue
            elif is_here and not damage.deleted and (place := self.run.fetch(step, overwrite=True)) is not None:
                self._stands_in(place, step, damage)
                replaced.add(step)
                steps.insert(0, (step, True))
                continue
            if damage.deleted:  # the run that owns this directory has deleted the step and saved newer ones
                if step in missing:
                    if named is not None:
                        self.run.steps.stored_record(step)  # raises an error that lists the existing steps
                    raise CheckpointNotFoundError(
                        f"{directory}: process 0 sees step {step}, and process {damage.process} does not, also when it "
                        "looks again; all processes must see the same directory: is it a disk that they "
                        "share, mounted at the same path?"
                    )
                missing.add(step)
                damaged.clear()
                self.run.steps.reload()
                steps = self._newest_first(named)
                continue
            if not peeks:  # logged immediately, because reading the next step may raise an error
                _logger.warning("%s: step %d is damaged and passed over: %s", directory, step, damage.reason)
            damaged.append((step, damage))
        if damaged:
            lines = [f"step {step}: {damage.reason}" for step, damage in damaged]
            none = "every checkpoint is damaged. Look with `holdfast verify`; to start over, use another directory"
            headline = "nothing can be read:" if peeks else none
            raise NoWholeCheckpointError(itemized(f"{directory}: {headline}", lines))
        return None

    def resumes_from(
        self, step: int, *, skipped: Mapping[int, str] | None = None, began: float | None = None
    ) -> list[int]:
        """Record that the run resumes from a step; return the later steps."""
        facts: dict[str, Any] = {}
        for place in self.run.places:
            facts.update(place.restored(step))
        if began is not None or step != self.abandoned.resumed_from:
            if facts:
                _logger.info("%s: step %d comes from the local places of the hosts", self.run.steps.location, step)
            self.run.events.write(
                "restored",
                step=step,
                seconds=None if began is None else round(time.perf_counter() - began, 6),
                skipped=[{"step": n, "damage": damage} for n, damage in (skipped or {}).items()],
                **facts,
            )
        self.run.observer.reached("restored", step)
        self.decisions.restored(step)
        later = self.run.steps.steps_after(step)
        self.abandoned.restored(step, later)
        return later

    def _drop(self, step: int, damage: _Damage) -> None:
        for place in self.run.places:
            place.drop(step, damage.reason)

    def _stands_in_alone(self, step: int, error: DamagedCheckpointError) -> bool:
        """Replace a damaged step with a host-local one if this is the only process; return whether this succeeded."""
        places = [place for place in self.run.places if not place.writes_directory and step in place.steps()]
        if not places:
            return False
        if self.run.processes.alone:
            fetched = next((place for place in places if place.fetch(step, False)), None)
            if fetched is not None:
                self._stands_in(fetched, step, _Damage(str(error), error.unreadable))
            return fetched is not None
        folder = self.run.steps.step_location(step)
        error.add_note(
            f"The hosts have step {step} in {places[0].url}, too. A restore without a number, such as resume='auto', "
            f"takes it from there unless a newer step is whole. To name the step, rename {folder} to "
            f"{folder.name}.damaged, and start the program again"
        )
        return False

    def _stands_in(self, place: StepPlace, step: int, damage: _Damage) -> None:
        """Warn that a damaged step in the directory is replaced by the copy in another storage tier."""
        text = "%s: step %d was damaged, and is that of %s now: %s"
        _logger.warning(text, self.run.steps.location, step, place.shown, damage.reason)
        if not place.writes_directory:
            self.run.steps.mark_damaged(step, damage.reason, unreadable=damage.unreadable)

    def _fetch_missing(self, step: int) -> None:
        """Fetch a step that the directory lacks, if another tier may have it; all processes must call this method."""
        here = step in self.run.steps
        # Only process 0 lists the mirror. All processes know the local steps, so other steps need no joint look-up.
        if any(place.writes_directory or (step in place.steps() and not here) for place in self.run.places):
            self.run.fetch_missing(step)

    @contextlib.contextmanager
    def _shared_reads(self, *, together: bool) -> Iterator[SharedReads | None]:
        """Yield shared reads if all processes restore ``together`` or an option requires it; otherwise, yield None."""
        option, processes = self.run.options.load_and_broadcast, self.run.processes
        transport = processes.transport() if option or (option is None and together) else None
        rendezvous = None if transport is None else processes.rendezvous("restore: shared reads")
        if transport is None or rendezvous is None:
            yield None
            return
        with contextlib.closing(SharedReads(rendezvous, transport, processes.timeout, always=option is True)) as shared:
            yield shared

    def _newest_first(self, named: int | None) -> list[tuple[int, bool]]:
        """Return all steps, newest first, or only the given step, as pairs (step, readable without a fetch)."""
        if named is not None:
            return [(named, True)]
        steps: list[tuple[int, bool]] = self.run.processes.decide("steps", self.run.steps_everywhere)
        return steps[::-1]

    def structure(self, step: int) -> Any:
        steps = self.run.steps
        changed = partial(steps.may_read_again, step, attempts=MOST_CHANGES)
        return read_again(steps.location, partial(steps.open_step, step), self.items.structure, changed)

    def _read(
        self, step: int, items: Any, kwargs: Mapping[str, Any], shared: SharedReads | None, attempt: int = 1
    ) -> Any:
        stored = self.run.steps.open_step(step)
        for item in self.items.left_out(stored, items):
            before = newest_with(item, self.run.steps.infos(), step)
            where = "nor was a step before it" if before is None else f"step {before} has it, of an earlier moment"
            _logger.warning("%s: step %d was saved without %s; %s", self.run.steps.location, step, item, where)
        values = {}
        try:
            for name, wanted in self.items.to_restore(stored, items, kwargs, shared).items():
                values[name] = stored.restore(*wanted)
        except DamagedCheckpointError:
            if not self.run.steps.may_read_again(step, stored, attempt):
                raise
            if shared is not None:  # the other processes do not necessarily reread the step
                shared.leave()
            return self._read(step, items, kwargs, None, attempt + 1)
        if shared is not None:
            shared.leave()
        return self.items.as_given(values)

    @contextlib.contextmanager
    def _read_by_all(self, step: int) -> Iterator[tuple[SharedReads | None, list[_Damage]]]:
        """Run the block, which reads a step on all processes; then append the first damage that any process found."""
        damage = broken = None
        damages: list[_Damage] = []
        with self._shared_reads(together=True) as shared:
            try:
                yield shared, damages
            except PeerFailedError as error:  # the actual cause, damage or a fatal error, is determined below
                broken = error
            except BaseException as error:
                if shared is not None:
                    shared.fail(error)
                if isinstance(error, DamagedCheckpointError):
                    damage = _Damage(str(error), unreadable=error.unreadable)
                elif isinstance(error, CheckpointNotFoundError) and step not in self.run.steps.steps_and_damaged():
                    damage = _Damage("it was deleted meanwhile", deleted=True)
                else:
                    self.run.processes.fail("restored", error)
                    raise
            if (found := self.run.processes.first("restored", damage)) is not None:
                self.items.damage_found()
                process, fields = found
                damages.append(_Damage(*fields)._replace(process=process))
            elif broken is not None:
                raise broken
