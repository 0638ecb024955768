"""Stores and saves the last step that a loop has reported."""

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
from ...engine.handlers import check_savable, fresh_types
from ...engine.loaders import without_generators
from ...engine.manager import CheckpointManager, part_of_save, plain_metrics
from ...engine.pytree import is_plain
from ...engine.stateful import is_actor, state_of
from ...engine.witness import Seen
from .extras import (
    CHECKSUMS,
    GLOBAL_GENERATORS,
    changes_in_place,
    check_replicated,
    checksum_of,
    is_object,
    is_own,
    loaders_of,
    moves,
    templates_of,
    tree_of,
    warn_of_unrestored,
)
from .first_steps import FirstSteps, compare_processes
from .initial import HYPERPARAMETERS, Hyperparameters
from .objects import VersionCounters, is_versioned, sharded_modules
from .states import STATE, Start, StateAdapter, is_deleted, located
from .trees import refused_by
from .witnessing import Witness

if TYPE_CHECKING:
    from ...engine.manager import Decision

logger = logging.getLogger("holdfast")

_SLOW = 1e-3  # snapshot time per step, in seconds, above which the step counts as slow
_SAMPLES = 3  # number of consecutive slow steps before a warning, which reports the shortest snapshot time


@dataclass(frozen=True, slots=True)
class Report:
    """The arguments of ``on_step``. The extras include the global generators."""

    step: int
    state: Any
    metrics: Mapping[str, Any] | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)
    batch: Any = None
    epoch: int | None = None

    @property
    def epochs(self) -> tuple[int, ...]:
        """The epochs of the loaders and of the report. The witness records the first step of each epoch."""
        shown = [loader.epoch for loader in loaders_of(self.extras).values()]
        return (*shown, -1 if self.epoch is None else self.epoch)

    @property
    def left_in_epoch(self) -> int | None:
        """The number of batches left in the epoch, or None if it is unknown."""
        left = [loader.left for loader in loaders_of(self.extras).values()]
        return min((count for count in left if count is not None), default=None)

    def seen(self, positions: Mapping[str, Any]) -> Seen:
        """Return the values that the witness records. ``positions`` holds snapshots of the extras at this step."""
        extras = self.extras
        generators = {
            name: positions[name] if name in positions else state_of(extra)
            for name, extra in extras.items()
            if is_generator(extra) and not isinstance(extra, SystemRandom)
        }
        if GLOBAL_GENERATORS in extras:
            generators |= positions.get(GLOBAL_GENERATORS) or capture()
        moving = {name for name, extra in extras.items() if moves(extra)}
        fixed = {name: extra for name, extra in extras.items() if name not in moving}
        moving -= {GLOBAL_GENERATORS}
        counters = {"step": self.step} | ({} if self.epoch is None else {"epoch": self.epoch})
        counters |= {name: extra for name, extra in fixed.items() if name in ("batch", "epoch") and type(extra) is int}
        return Seen(
            step=self.step,
            root={STATE: self.state, **fixed},
            objects={name: extras[name] for name in sorted(moving)},
            generators=generators,
            positions={name: positions[name] for name in moving if name in positions},
            batch=self.batch,
            checksums={
                name: loader.checksum for name, loader in loaders_of(extras).items() if loader.checksum is not None
            },
            metrics=self.metrics,
            counters=counters,
        )


_NO_STEP = Report(step=-1, state=None)


class Positions:
    """Takes snapshots of extras such as data iterators, because the loop may advance them before they are saved."""

    def __init__(self, plain: list[str]) -> None:
        self.taken: dict[str, Any] = {}
        self.watched: list[str] = []  # names of extras that are torch modules or optimizers
        self.plain = plain  # names of extras that were plain data before the first step
        self._passed: list[tuple[str, type]] = []
        self._moving: Mapping[str, Callable[[Any], Any]] = {}
        self._slow: list[float] | None = []  # durations of consecutive slow steps, in seconds; None after the warning
        self._clock = time.thread_time

    def take_states(self, extras: Mapping[str, Any]) -> None:
        passed = [(name, type(extra)) for name, extra in extras.items()]
        if passed != self._passed:
            self._passed = passed
            self._moving = {name: _taking(extra) for name, extra in extras.items() if moves(extra)}
            self.watched = [name for name, extra in extras.items() if is_versioned(extra)]
            objects = {name: extras[name] for name in self.plain if is_object(extras.get(name))}
            warn_of_unrestored(objects, ())  # a resume returns the states of these objects, not the objects themselves
            self.plain = [name for name in self.plain if name not in objects]
            # Thread time excludes delays caused by other threads, but misses work in actors; use wall time for these.
            has_actors = any(is_actor(extras[name]) for name in self._moving)
            self._clock = time.perf_counter if has_actors else time.thread_time
        begin = self._clock()
        self.taken = {name: take(extras[name]) for name, take in self._moving.items()}
        names = [f"{name}=" for name in self._moving if name != GLOBAL_GENERATORS]
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

    def tree_of(self, name: str, extra: Any) -> Any:
        """Return the tree to save for an extra, using its snapshot if there is one."""
        if name not in self.taken:
            return tree_of(extra, was_plain=name in self.plain)
        taken = self.taken[name]
        return extra.state_of(taken) if isinstance(extra, GlobalGenerators) else taken


def _taking(extra: Any) -> Callable[[Any], Any]:
    """Return the function that takes a snapshot of an extra."""
    if isinstance(extra, GlobalGenerators):
        return lambda _: capture()  # converted to a tree only if the step is saved
    return state_of if changes_in_place(extra) else tree_of


class StepSaver:
    """Holds the last arguments of ``on_step``, and can save them even after the loop has ended."""

    def __init__(
        self,
        manager: CheckpointManager,
        adapter: StateAdapter,
        replicated: Collection[str],
        witness: Witness,
        hyperparameters: Hyperparameters,
        extras: Mapping[str, Any],
    ) -> None:
        """Record the types of the ``extras`` that are templates, before a restore updates them in place."""
        self._manager = manager
        self._adapter = adapter
        self._replicated = replicated
        self._witness = witness
        self._hyperparameters = hyperparameters
        templates = templates_of(extras)
        self._templates = list(templates)
        self._fresh_extras = fresh_types(templates, self._templates) if templates else None
        self._report = _NO_STEP
        self._positions = Positions([name for name, extra in extras.items() if is_plain(extra)])
        self._versions = VersionCounters()  # versions of the state and of extras that are torch modules or optimizers
        self._saved: int | None = None
        self._first_steps: FirstSteps | None = FirstSteps(adapter)
        self._has_warned = self._differs = False  # warned of gradients; values differ between processes
        self._saves = 0
        self._sharded: list[Any] = []

    @property
    def step(self) -> int | None:
        """The last reported step, or None."""
        return None if self._report is _NO_STEP else self._report.step

    @property
    def is_saved(self) -> bool:
        """True if the last step is saved or no step has been reported."""
        return self.step is None or self.holds(self.step)

    def begin(self, start: Start, *, grows: bool) -> None:
        """Start watching the state. If ``grows`` is true, the state may differ in structure from a fresh state."""
        self._step_offset = start.offset
        self._ask(lambda first: first.look_at_start(start, grows=grows))
        versioned = {name: extra for name, extra in start.extras.items() if is_versioned(extra)}
        self._sharded = sharded_modules({STATE: start.state, **versioned})
        self._versions.watch(self._live(start.state, versioned))

    def _live(self, state: Any, extras: Mapping[str, Any]) -> dict[str, Any]:
        return {STATE: state, **extras} if self._adapter.is_live else {**extras}

    def _ask(self, look: Callable[[FirstSteps], bool | None]) -> None:
        """Run a check of the first steps. Propagate a StateError; log any other exception and stop checking."""
        try:
            if self._first_steps is not None and look(self._first_steps):
                self._first_steps = None
        except StateError:
            raise
        except Exception:
            self._first_steps = None
            logger.info("the first steps of the loop are not checked", exc_info=True)

    def update(self, report: Report) -> None:
        """Record a step that the loop has completed. In a resumed run, compare the step with its earlier record."""
        for module in self._sharded:
            module.reshard()
        self._ask(lambda first: first.look_at_report(report.step, report.state, report.extras))
        is_first = self.step is None
        # Drop the batch, because the next batch may need its memory.
        self._report = report if report.batch is None else replace(report, batch=None)
        self._adapter.note_step(report.state)
        self._positions.take_states(report.extras)
        if live := self._live(report.state, {name: report.extras[name] for name in self._positions.watched}):
            self._versions.note_step(live)
        if is_first:  # fail now, because the first save may be an hour away
            check_replicated(self._replicated, report.extras, "on_step")
            self._adapter.check_savable(report.state)
            check_savable({name: self._positions.tree_of(name, extra) for name, extra in report.extras.items()})
        if self._witness.watches:
            self._witness.note(lambda: report.seen(self._positions.taken), report.epochs)

    def show(self, report: Report) -> None:
        """Let the witness record a step that follows the save at a preemption. The step itself is not saved."""
        for module in self._sharded:
            module.reshard()
        positions = {name: _taking(extra)(extra) for name, extra in report.extras.items() if moves(extra)}
        if self._witness.watches:
            self._witness.note(lambda: report.seen(positions), report.epochs)

    def reconsider(self, step: int, metrics: Mapping[str, Any]) -> Decision | None:
        """If ``step`` is the last step, add metrics to it and decide whether to save it now; otherwise, return None."""
        if self._report.step != step:
            return None
        self._report = replace(self._report, metrics={**(self._report.metrics or {}), **metrics})
        return self._manager.decide(step, metrics=self._report.metrics)

    def why_lost(self) -> str | None:
        """Return why the last step can no longer be saved, or None if it can."""
        if (lost := self._versions.why_lost() or self._adapter.why_lost(self._report.state)) is not None:
            return lost
        if is_deleted([extra for name, extra in self._report.extras.items() if name not in self._positions.taken]):
            return "arrays of its extras were donated since; call on_step after every update"
        return None

    def save(self, reason: str, *, reported: bool = False) -> bool:
        """Save the last step in the background; return False if its folder exists but is not a checkpoint."""
        assert self.step is not None
        with part_of_save(self._manager, self.step):
            self._saves += 1
            if self._saves.bit_count() == 1:  # compare before anything else, so that all processes take part
                shared = {name: self._report.extras.get(name) for name in self._templates}
                args = self._manager.processes, self._report.state, shared, self.step
                self._differs |= compare_processes(*args, warns=not self._differs)
            self._warn_of_gradients()
            taken = self._taken(reported=reported)
            step, state, metrics = self._report.step, self._report.state, taken["metrics"] or {}
            self._ask(lambda first: first.look_at_save(step, state, metrics, self._refused))
        try:
            if not self._manager.save(self.step, force=True, reason=reason, **taken):
                return False
        except SaveFailedError:  # the previous save has failed; the new save is in progress
            self._saved = self.step
            raise
        self._saved = self.step
        return True

    def _refused(self) -> list[str]:
        """Return one message for each reason why a resume from the last step would fail."""
        refused = self._adapter.refused(self._report.state)
        if self._fresh_extras is not None:
            extras = {name: self._report.extras[name] for name in self._templates}
            refused += refused_by(self._fresh_extras, extras)
        return refused

    def save_locally(self) -> None:
        """Save the last step to the local storage of the hosts if a host-local save is due."""
        assert self.step is not None
        if self._manager.local_due(self.step):
            with part_of_save(self._manager, self.step, locally=True):
                self._manager.save_locally(self.step, **self._taken())

    def _taken(self, *, reported: bool = False) -> dict[str, Any]:
        """Let the witness record the last step, and return the arguments for the manager's save."""
        report = self._report
        metrics = None if report.metrics is None else host_metrics(report.metrics)
        items = self._items(report)
        arguments: dict[str, Any] = {STATE: self._adapter.save_kwargs()}
        if self._fresh_extras is not None and "extras" in items:
            arguments["extras"] = {"fresh": self._fresh_extras}
        metadata: dict[str, Any] = {"step_offset": self._step_offset} if self._step_offset else {}
        if changed := self._hyperparameters.changed(report.state):
            metadata[HYPERPARAMETERS] = changed
        self._witness.save(report.step, lambda: report.seen(self._positions.taken), reported=reported)
        return {"items": items, "metrics": metrics, "save_kwargs": arguments, "custom_metadata": metadata or None}

    def _items(self, report: Report) -> dict[str, Any]:
        """Return the checkpoint items, with a separate item for extras that differ between processes."""
        given, per_process = report.extras, {}
        items = {STATE: self._adapter.to_tree(report.state)}
        extras = {name: self._positions.tree_of(name, extra) for name, extra in given.items()}
        if not self._manager.processes.alone:
            per_process = {
                name: extras.pop(name) for name, extra in given.items() if is_own(name, extra, self._replicated)
            }
            extras = {name: without_generators(given.get(name), tree) for name, tree in extras.items()}
            sums = {name: checksum_of(tree) for name, tree in extras.items() if changes_in_place(given[name])}
            if sums := {name: checksum for name, checksum in sums.items() if checksum is not None}:
                extras[CHECKSUMS] = sums
        if extras or not self._adapter.is_component_tree:
            items["extras"] = extras
        return {**items, "process": per_process} if per_process else items

    def _warn_of_gradients(self) -> None:
        """Warn once about gradients that no optimizer has used, because they are not saved."""
        if not (self._has_warned or self._versions.has_updated) and (gradients := self._versions.new_gradients()):
            self._has_warned = True
            logger.warning(
                "step %d is saved without the gradients of %d parameters (%s), which no optimizer has used yet: a "
                "resume from it continues without them. Call on_step after optimizer.step(), not for each micro-batch",
                self.step,
                len(gradients),
                shortened([name.removeprefix(f"{STATE}.") for name in gradients]),
            )

    def save_at_end(self) -> None:
        """Save the last step, or log a warning if that is no longer possible."""
        if (lost := self.why_lost()) is not None:
            logger.warning("step %d is not saved at the end: %s", self.step, lost)
        elif not self.save("at the end"):
            where = self._manager.directory
            raise SaveFailedError(
                f"step {self.step} is not saved at the end: its folder in {where} is no checkpoint. Move it away, or "
                f"delete it with `holdfast rm {where} {self.step}`, and start again",
                self.step,
            )

    def holds(self, step: int) -> bool:
        """Return whether a step is saved or is being saved."""
        return step == self._saved or step in self._manager.all_steps()


def check_metrics(metrics: object) -> None:
    if not isinstance(metrics, Mapping):
        raise OptionError(
            f"metrics must be a mapping of names to numbers, such as {{'loss': 0.5}}, not {type(metrics).__name__}"
        )


def record_metrics(manager: CheckpointManager, step: int, metrics: Mapping[str, Any]) -> None:
    try:
        manager.record_metrics(step, host_metrics(metrics))
    except CheckpointNotFoundError:
        manager.wait_until_finished()  # raises if the save has failed
        raise


def host_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics as Python numbers and lists of numbers. Omit other metrics, such as images or text."""

    def omitted(name: str, error: Exception) -> None:
        if isinstance(error, RuntimeError):  # the computation failed, or the value was donated
            logger.warning("the metric %s cannot be read, and is not stored: %s", name, error)

    for _, value in located({**metrics}, lambda metric: hasattr(metric, "copy_to_host_async")):
        with contextlib.suppress(RuntimeError):  # reading the value raises the error again
            value.copy_to_host_async()  # start all copies before waiting for the first
    return plain_metrics(metrics, omitted=omitted)
