"""The last step that a loop has reported, and how it is saved."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from random import SystemRandom
from typing import TYPE_CHECKING, Any

from ...engine.errors import CheckpointNotFoundError, OptionError, SaveFailedError, StateError, shortened
from ...engine.generators import GlobalGenerators, capture, is_generator
from ...engine.handlers import check_savable
from ...engine.loaders import without_generators
from ...engine.manager import CheckpointManager, part_of_save, plain_metrics
from ...engine.pytree import FreshTypes
from ...engine.stateful import is_actor, state_of
from ...engine.witness import Seen
from .extras import (
    CHECKSUMS,
    GLOBAL_GENERATORS,
    changes_in_place,
    check_replicated,
    checksum_of,
    is_own,
    loaders_of,
    moves,
    tree_of,
)
from .first_steps import FirstSteps
from .objects import VersionCounters, is_versioned
from .states import STATE, StateAdapter, is_deleted
from .witnessing import Witness

if TYPE_CHECKING:
    from ...engine.manager import Decision

logger = logging.getLogger("holdfast")

_SLOW = 1e-3  # seconds a step; a warning follows if taking the positions takes longer
_SAMPLES = 3  # slow steps in a row before the warning, of which the fastest counts: the machine may be busy


@dataclass(frozen=True, slots=True)
class Report:
    """The arguments of ``on_step``, with the global generators among the extras."""

    step: int
    state: Any
    metrics: Mapping[str, Any] | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)
    batch: Any = None
    epoch: int | None = None

    @property
    def epochs(self) -> tuple[int, ...]:
        """The epochs of the step, as far as the program shows them: another one begins a record of the witness."""
        shown = [loader.epoch for loader in loaders_of(self.extras).values()]
        return (*shown, -1 if self.epoch is None else self.epoch)

    @property
    def left_in_epoch(self) -> int | None:
        """How many batches of the epoch are left, as far as loaders tell it."""
        left = [loader.left for loader in loaders_of(self.extras).values()]
        return min((one for one in left if one is not None), default=None)

    def seen(self, positions: Mapping[str, Any]) -> Seen:
        """Return what the step shows to the witness; ``positions`` are snapshots of the extras that move."""
        extras = self.extras
        generators = {
            name: positions[name] if name in positions else state_of(extra)
            for name, extra in extras.items()
            if is_generator(extra) and not isinstance(extra, SystemRandom)
        }
        if GLOBAL_GENERATORS in extras:
            generators |= positions.get(GLOBAL_GENERATORS) or capture()
        moving = {name for name, extra in extras.items() if moves(extra)} - {GLOBAL_GENERATORS}
        counters = {"step": self.step} | ({} if self.epoch is None else {"epoch": self.epoch})
        counters |= {name: extra for name, extra in extras.items() if name in ("batch", "epoch") and type(extra) is int}
        fixed = {name: extra for name, extra in extras.items() if name not in moving and name != GLOBAL_GENERATORS}
        return Seen(
            step=self.step,
            root={STATE: self.state, **fixed},
            objects={name: extras[name] for name in sorted(moving)},
            generators=generators,
            positions={name: positions[name] for name in moving if name in positions},
            batch=self.batch,
            checksums={name: one.checksum for name, one in loaders_of(extras).items() if one.checksum is not None},
            metrics=self.metrics,
            counters=counters,
        )


_NO_STEP = Report(step=-1, state=None)


class LastStep:
    """References to the last arguments of ``on_step``, so that leaving the loop can still save the step.

    Arrays of jax never change, so a reference is enough. Data iterators do change, and a loop may draw one more batch
    before it ends; so every step takes their positions, at any cost.
    """

    def __init__(self, adapter: StateAdapter, versions: VersionCounters, replicated: Collection[str]) -> None:
        self.report = _NO_STEP
        self._adapter = adapter
        self._replicated = replicated
        self._versions = versions  # for extras that are torch modules or optimizers
        self._positions: dict[str, Any] = {}
        self._slow: list[float] | None = []  # the seconds of slow steps in a row; None after the warning
        self._passed: list[tuple[str, type]] = []
        self._moving: Mapping[str, Callable[[Any], Any]] = {}
        self._clock = time.thread_time
        self._watched: list[str] = []
        self._has_warned = False

    @property
    def step(self) -> int | None:
        """The last step that was reported, or None."""
        return None if self.report is _NO_STEP else self.report.step

    def update(self, report: Report) -> None:
        """Note a step that the loop has finished, without its batch, whose memory the next one may need."""
        self.report = report if report.batch is None else replace(report, batch=None)
        self._adapter.note(report.state)
        if report.extras or self._positions:
            self._take_positions()

    def seen(self, batch: Any = None) -> Seen:
        """Return what the step shows to the witness."""
        return replace(self.report, batch=batch).seen(self._positions)

    def items(self, *, alone: bool) -> dict[str, Any]:
        """Return the items of a checkpoint of this step; each process has its own extras, except arrays."""
        given = self.report.extras
        found = {STATE: self._adapter.to_tree(self.report.state)}
        extras = {name: self._tree_of(name, extra) for name, extra in given.items()}
        own = {}
        if not alone:
            kept = self._replicated
            own = {name: extras.pop(name) for name, extra in given.items() if is_own(name, extra, kept)}
            extras = {name: without_generators(given.get(name), tree) for name, tree in extras.items()}
            sums = {name: checksum_of(tree) for name, tree in extras.items() if changes_in_place(given[name])}
            if sums := {name: found for name, found in sums.items() if found is not None}:
                extras[CHECKSUMS] = sums
        if extras or not self._adapter.is_component_tree:
            found["extras"] = extras
        return {**found, "process": own} if own else found

    def check_savable(self) -> None:
        """Raise OptionError if a replicated extra is missing, UnsupportedLeafError if a save of the step would."""
        check_replicated(self._replicated, self.report.extras, "on_step")
        self._adapter.check_savable(self.report.state)
        extras = {name: self._tree_of(name, extra) for name, extra in self.report.extras.items()}
        check_savable(extras)

    def why_lost(self) -> str | None:
        """Return why the step cannot be saved any more, or None when it can."""
        if self.step is None:
            return None
        if (lost := self._adapter.why_lost(self.step, self.report.state)) is not None:
            return lost
        if is_deleted([extra for name, extra in self.report.extras.items() if name not in self._positions]):
            return "arrays of its extras were donated since; call on_step after every update"
        return self._versions.why_lost()

    def warn_of_gradients(self) -> None:
        """Warn once of gradients that no optimizer has used; they are not saved. Each save calls this."""
        if self._has_warned or self._adapter.has_updated or self._versions.has_updated:
            return
        if gradients := [*self._adapter.new_gradients(), *self._versions.new_gradients()]:
            self._has_warned = True
            logger.warning(
                "step %d is saved without the gradients of %d parameters (%s), which no optimizer has used yet: a "
                "resume from it continues without them. Call on_step after optimizer.step(), not for each micro-batch",
                self.step,
                len(gradients),
                shortened(gradients),
            )

    def _tree_of(self, name: str, extra: Any) -> Any:
        if name not in self._positions:
            return tree_of(extra)
        taken = self._positions[name]
        return extra.state_of(taken) if isinstance(extra, GlobalGenerators) else taken

    def _take_positions(self) -> None:
        moving = self._moving_extras()
        begin = self._clock()
        self._positions = {name: take(self.report.extras[name]) for name, take in moving.items()}
        if self._watched:
            self._versions.note({name: self.report.extras[name] for name in self._watched})
        names = [f"{name}=" for name in moving if name != GLOBAL_GENERATORS]
        if self._slow is None or not names:
            return
        cost = self._clock() - begin
        self._slow = [*self._slow, cost] if cost > _SLOW else []
        if len(self._slow) == _SAMPLES:
            least, self._slow = min(self._slow), None
            logger.warning(
                "taking the state of %s costs %.1f ms at every step: what is saved with a step must be its state at "
                "that step, even if the loop draws more before it ends. An object with a smaller state costs less",
                ", ".join(names),
                1e3 * least,
            )

    def _moving_extras(self) -> Mapping[str, Callable[[Any], Any]]:
        """Return the function that takes the state of each extra that moves; computed only when the extras change."""
        passed = [(name, type(extra)) for name, extra in self.report.extras.items()]
        if passed != self._passed:
            self._passed = passed
            self._moving = {name: _taking(extra) for name, extra in self.report.extras.items() if moves(extra)}
            self._watched = [name for name, extra in self.report.extras.items() if is_versioned(extra)]
            # Only the wait for an actor is a cost of the extra: threads of a busy program wait for each other, too.
            has_actors = any(is_actor(self.report.extras[name]) for name in self._moving)
            self._clock = time.perf_counter if has_actors else time.thread_time
        return self._moving


def _taking(extra: Any) -> Callable[[Any], Any]:
    """Return the function that takes the state of an extra that moves."""
    if isinstance(extra, GlobalGenerators):
        return lambda _: capture()  # It becomes a tree only if the step is saved.
    return state_of if changes_in_place(extra) else tree_of


class StepSaver:
    """Saves the last step that the loop has reported."""

    def __init__(
        self,
        manager: CheckpointManager,
        adapter: StateAdapter,
        replicated: Collection[str],
        witness: Witness,
        *,
        step_offset: int,
        fresh_extras: FreshTypes | None,
    ) -> None:
        self._manager = manager
        self._witness = witness
        self._adapter = adapter
        self._saved: int | None = None
        self._fresh_extras = fresh_extras  # the types of the extras at the start of the run
        self._extra_versions = VersionCounters()
        self._step_offset = step_offset  # updates that are in a state beyond the number of its step
        self._first_steps: FirstSteps | None = None
        self._last = LastStep(adapter, self._extra_versions, replicated)

    @property
    def step(self) -> int | None:
        """The last step that was reported, or None."""
        return self._last.step

    @property
    def is_saved(self) -> bool:
        """Whether the last step is saved, or no step was reported."""
        return self.step is None or self.holds(self.step)

    def watch(self, state: Any, extras: Mapping[str, Any], last: int | None, *, grows: bool) -> None:
        """Begin to watch the state before the first step; ``last`` is the number of the step before, if it is known."""
        first = self._first_steps = FirstSteps(self._adapter)
        self._ask(lambda: first.begin(state, last, extras, grows=grows))
        self._adapter.watch(state)
        self._extra_versions.watch({name: extra for name, extra in extras.items() if is_versioned(extra)})

    def _ask(self, look: Callable[[], bool | None]) -> None:
        """Let the first steps look until they have nothing more to say; another error than theirs ends no run."""
        try:
            self._first_steps = None if look() else self._first_steps
        except StateError:
            raise
        except Exception:
            self._first_steps = None
            logger.info("the first steps of the loop are not checked", exc_info=True)

    def update(self, report: Report) -> None:
        """Note a step that the loop has finished, and compare it with that of before the stop."""
        if (first := self._first_steps) is not None:
            self._ask(lambda: first.report(report.step, report.state, report.extras))
        is_first = self.step is None
        self._last.update(report)
        if is_first:
            self._last.check_savable()  # The first save may be an hour away.
        if self._witness.watches:
            self._witness.note(lambda: self._last.seen(report.batch), report.epochs)

    def show(self, report: Report) -> None:
        """Let the witness record a step that is never saved, as it follows the save of a preemption."""
        positions = {name: _taking(extra)(extra) for name, extra in report.extras.items() if moves(extra)}
        self._witness.note(lambda: report.seen(positions), report.epochs)

    def reconsider(self, step: int, metrics: Mapping[str, Any]) -> Decision | None:
        """Add metrics to the last step, and return whether to save it now; None if ``step`` is not the last one."""
        report = self._last.report
        if report.step != step:
            return None
        self._last.report = replace(report, metrics={**(report.metrics or {}), **metrics})
        return self._manager.decide(step, metrics=self._last.report.metrics)

    def why_lost(self) -> str | None:
        """Return why the last step cannot be saved any more, or None when it can."""
        return self._last.why_lost()

    def save(self, reason: str) -> bool:
        """Save the last step in the background, also if the save before it has failed, which then raises an error.

        Return False if the step has a folder that is no checkpoint.
        """
        last, step = self._last, self._last.step
        assert step is not None
        with part_of_save(self._manager, step):
            last.warn_of_gradients()
            taken = self._taken()
            self._witness.save(step, last.seen)
            if (first := self._first_steps) is not None:
                metrics, is_live = taken["metrics"] or {}, self._adapter.may_have_gradients
                self._ask(lambda: first.save(step, last.report.state, metrics, is_live=is_live))
        try:
            if not self._manager.save(step, force=True, reason=reason, **taken):
                return False
        except SaveFailedError:  # The save before this one has failed.
            self._saved = step
            raise
        self._saved = step
        return True

    def save_locally(self) -> None:
        """Save the last step in the local places of the hosts, if that is due."""
        assert self.step is not None
        if self._manager.local_due(self.step):
            with part_of_save(self._manager, self.step, locally=True):
                taken = self._taken()
                self._witness.save(self.step, self._last.seen)
                self._manager.save_locally(self.step, **taken)

    def _taken(self) -> dict[str, Any]:
        """Return what is saved of the last step, as arguments of the manager."""
        last = self._last
        metrics = None if last.report.metrics is None else host_metrics(last.report.metrics)
        items = last.items(alone=self._manager.processes.alone)
        arguments: dict[str, Any] = {STATE: self._adapter.save_kwargs()}
        if self._fresh_extras is not None and "extras" in items:
            arguments["extras"] = {"fresh": self._fresh_extras}
        kept = {"step_offset": self._step_offset} if self._step_offset else None
        return {"items": items, "metrics": metrics, "save_kwargs": arguments, "custom_metadata": kept}

    def save_at_end(self) -> None:
        """Save the last step if that is still possible, and log a warning if it is not.

        Raises:
            SaveFailedError: The folder of the step is no checkpoint.
        """
        lost = self.why_lost()
        if lost is not None:
            logger.warning("step %d is not saved at the end: %s", self.step, lost)
        elif not self.save("at the end"):
            where = self._manager.directory
            raise SaveFailedError(
                f"step {self.step} is not saved at the end: its folder in {where} is no checkpoint. Move it away, or "
                f"delete it with `holdfast rm {where} {self.step}`, and start again",
                self.step,
            )

    def holds(self, step: int) -> bool:
        """Return whether a step is saved, or being saved."""
        return step == self._saved or step in self._manager.all_steps()


def check_metrics(metrics: object) -> None:
    """Raise OptionError if metrics are not a mapping."""
    if not isinstance(metrics, Mapping):
        raise OptionError(
            f"metrics must be a mapping of names to numbers, such as {{'loss': 0.5}}, not {type(metrics).__name__}"
        )


def record_metrics(manager: CheckpointManager, step: int, metrics: Mapping[str, Any]) -> None:
    """Store metrics with the checkpoint of a step."""
    try:
        manager.record_metrics(step, host_metrics(metrics))
    except CheckpointNotFoundError:
        manager.wait_until_finished()  # This raises if the save has failed.
        raise


def host_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics as Python numbers and lists of them, without others, such as images or text.

    All copies from a device are started before the first one is awaited.
    """

    def omitted(name: str, error: Exception) -> None:
        if isinstance(error, RuntimeError):  # The computation failed, or the value was donated.
            logger.warning("the metric %s cannot be read, and is not stored: %s", name, error)

    _start_copies(metrics)
    return plain_metrics(metrics, omitted=omitted)


def _start_copies(metrics: Mapping[str, Any]) -> None:
    for value in metrics.values():
        if isinstance(value, Mapping):
            _start_copies(value)
        elif (start := getattr(value, "copy_to_host_async", None)) is not None:
            with contextlib.suppress(RuntimeError):  # It is reported when the value is read.
                start()
