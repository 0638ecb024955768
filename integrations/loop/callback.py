"""The callback of a training loop: saves, keeps, resumes.

:class:`LoopCallback` knows no framework: its :class:`StateAdapter` knows the states.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, ClassVar, Self

from ...engine.checkpoint import AsyncCheckpointer, Checkpointer, Place
from ...engine.clock import Clock
from ...engine.errors import StateError
from ...engine.handlers import PerProcessCheckpointHandler
from ...engine.manager import CheckpointManager, documentation, documented
from ..options import CallbackOptions, takes
from .announce import announce
from .preemption import PreemptionSignal
from .resuming import all_steps, check_resume, restore
from .states import Extras, StateAdapter, missing_extras
from .steps import StepSaver, check_metrics

logger = logging.getLogger("holdfast")


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a call of ``on_step`` or ``on_eval`` did, and what the loop should do next.

    Attributes:
        saved: Whether this call saved the step. The files are written in the background, except after a preemption,
            when they are durable already.
        reason: Why it was saved, or why not, for people.
        should_stop: Whether to leave the loop now.
    """

    saved: bool
    reason: str
    should_stop: bool


_NOTHING_DUE = StepOutcome(saved=False, reason="nothing is due", should_stop=False)


@documented
@dataclass(frozen=True, kw_only=True)
class LoopArguments(CallbackOptions):
    """The arguments of a callback for training loops."""

    directory: Place = field(kw_only=False, metadata=documentation("Where the checkpoints go: a path or a URL."))
    clock: Clock | None = field(default=None, metadata=documentation("Where the time comes from, for tests."))
    metadata: Mapping[str, Any] | None = field(
        default=None,
        metadata=documentation("JSON about the run, such as its configuration, stored with the checkpoints."),
    )


class LoopCallback:
    """Saves a training loop's state, keeps the right checkpoints, and brings the loop back where it was.

    Classes for a framework derive from it and name their adapter.
    """

    _adapter_type: ClassVar[type[StateAdapter]] = StateAdapter

    @takes(LoopArguments)
    def __init__(self, options: LoopArguments) -> None:
        self._options = options
        self._adapter = self._adapter_type()
        self._extras = Extras(self._adapter)
        items: dict[str, Checkpointer] = {self._adapter.item: AsyncCheckpointer(self._adapter.handler(options))}
        if self._adapter.takes_extras:
            extras = options.tree_handler()
            extras.optional = True  # a run that was imported has none
            items["extras"] = AsyncCheckpointer(extras)
            items["process"] = AsyncCheckpointer(PerProcessCheckpointHandler())
        self._manager = CheckpointManager(
            options.directory, items, options.manager_options(), metadata=options.metadata, clock=options.clock
        )
        self._saver = StepSaver(self._manager, self._adapter)
        self._preemption = PreemptionSignal()
        self._names: frozenset[str] = frozenset()
        self._begun = False
        self._closed = False
        self._should_stop = False
        self._restored: int | None = None
        self.extras: dict[str, Any] = {}

    @property
    def manager(self) -> CheckpointManager:
        """The manager of the checkpoints, for everything beyond the loop: listing, metrics, pinning."""
        return self._manager

    @property
    def preempted(self) -> bool:
        """Whether SIGTERM has arrived. It costs next to nothing, so evaluation loops may ask it as well."""
        return self._preemption.received

    @property
    def should_stop(self) -> bool:
        """Whether ``on_step`` has saved because of a preemption and asked to stop."""
        return self._should_stop

    def restore_or_initialize(self, state: Any, **extras: Any) -> tuple[Any, int]:
        """Restore the newest whole checkpoint, or leaves everything as it is when there is none.

        Args:
            state: The freshly initialized state: the template for what is restored.
            **extras: What else to restore. Each of them must be passed to every ``on_step``, too.

        Returns:
            The state and the number of updates that are in it, which is the index of the next update to do.

        Raises:
            CheckpointNotFoundError: ``resume="must"``, and there is no checkpoint.
            CheckpointExistsError: ``resume="never"``, and there are checkpoints.
            TreeMismatchError: The state or the extras differ in structure, shapes or dtypes from the checkpoint, or
                the parameters from those of ``init_from``.
            NoWholeCheckpointError: There are checkpoints, but all of them are damaged.
            OwnershipError: Another live run writes to the directory.
            OptionError: An extra is an iterator or a loader whose state can be neither saved nor restored.
        """
        resume, place = self._options.resume, self._options.init_from
        if extras and not self._adapter.takes_extras:
            raise StateError(self._no_extras(extras))
        self._extras.check(extras)
        if resume != "auto":
            check_resume(resume, all_steps(self._manager.directory), self._manager.directory)
        self._begin()
        self._manager.acquire()
        self._names = frozenset(extras)
        restored = None if resume == "never" else restore(self._manager, self._adapter, state, extras)
        if restored is None:
            self._announce("started fresh: no checkpoint in %s", self._manager.directory)
            self.extras = dict(extras)
            if place is not None:
                state, taken = self._adapter.with_weights(state, place)
                logger.info("took the weights from %s; everything else starts fresh", taken)
            return state, 0
        if place is not None:
            logger.info("init_from=%s is ignored, as the run resumes", place)
        self.extras = restored.extras
        self._restored = restored.step
        return restored.state, restored.step

    def on_step(self, step: int, state: Any, *, metrics: Mapping[str, Any] | None = None, **extras: Any) -> StepOutcome:
        """Report that an update is done, and save if a save is due. Call it after every update.

        When nothing is due it takes some microseconds and never waits for the device.

        Args:
            step: The number of updates that are in the state.
            state: The state after the update.
            metrics: Metrics of this step by name: numbers or scalars still on the device, which are fetched only if a
                save needs them.
            **extras: Everything that was passed to ``restore_or_initialize``, and more if you like.

        Returns:
            Whether the step was saved, why, and whether to leave the loop now.

        Raises:
            SaveFailedError: An earlier save failed in the background; this step is saved nevertheless.
            StateError: The callback is closed, or the directory holds checkpoints that were not restored.
        """
        if type(step) is not int:
            step = operator.index(step)
        if not self._begun or self._closed:
            self._begin_without_restore()
        if metrics is not None:
            check_metrics(metrics)
        self._adapter.check_step(step, state)
        if extras and not self._adapter.takes_extras:
            raise StateError(self._no_extras(extras))
        if not self._names <= extras.keys():
            raise StateError(missing_extras(self._names - extras.keys()))
        self._saver.update(step, state, metrics, extras)
        decision = self._manager.decide(step, metrics=metrics)
        if self._preemption.reached(step):
            return self._on_preemption(decision.save, decision.reason)
        if not decision.save:
            return _NOTHING_DUE
        self._saver.save(decision.reason)
        return StepOutcome(True, decision.reason, should_stop=False)

    def on_eval(self, step: int, metrics: Mapping[str, Any]) -> StepOutcome:
        """Report metrics that became known after the step, such as those of an evaluation.

        Args:
            step: The step that was evaluated.
            metrics: Its metrics, by name. They are stored with the checkpoint of the step, if there is one. With
                ``save_on_best``, the step is saved now if the metric is the best so far and the step is the last one
                that ``on_step`` has seen.

        Returns:
            Whether the step was saved by this call, why, and whether to leave the loop now.
        """
        check_metrics(metrics)
        step = operator.index(step)
        if self._saver.record(step, metrics):
            return StepOutcome(False, f"metrics recorded with step {step}", self._should_stop)
        decision = self._saver.reconsider(step, metrics)
        if decision is None:
            return StepOutcome(False, f"step {step} is not saved, so its metrics are not kept", self._should_stop)
        if not decision.save or self._saver.why_lost() is not None:
            return StepOutcome(False, decision.reason, self._should_stop)
        self._saver.save(decision.reason)
        return StepOutcome(True, decision.reason, self._should_stop)

    def close(self) -> None:
        """Save the last step if it is not saved yet, wait for the files, and close; the ``with`` block does it.

        Raises:
            SaveFailedError: A save failed in the background.
        """
        if self._closed:
            return
        self._closed = True
        if self._saver.step is None and self._restored is not None and not self.preempted:
            self._announce("nothing left to do after step %d in %s", self._restored, self._manager.directory)
        try:
            if not self._saver.is_saved and (self._options.save_at_end or self.preempted):
                self._saver.save_at_end()
        finally:
            try:
                self._manager.close()
            finally:
                self._preemption.restore()

    def __enter__(self) -> Self:
        self._preemption.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        self._closed = True
        try:
            self._manager.close()
        except Exception:
            # The exception under way matters more; this one must not take its place.
            logger.exception("a save failed while the training loop was ending with %s", type(error).__name__)
        finally:
            self._preemption.restore()

    def _announce(self, text: str, *args: object) -> None:
        announce(text, *args, shown=self._manager.process_index == 0)

    def _no_extras(self, extras: Mapping[str, Any]) -> str:
        return f"{type(self).__name__} saves no extras; found {', '.join(extras)}"

    def _begin(self) -> None:
        if self._closed:
            raise StateError(f"the callback for {self._manager.directory} is closed; make a new one")
        self._preemption.install()
        self._begun = True

    def _begin_without_restore(self) -> None:
        if self._options.init_from is not None and not self._closed:
            raise StateError("init_from= takes effect in restore_or_initialize: call it before the loop")
        self._begin()
        newest = self._manager.latest_step()
        if newest is not None:
            self._begun = False
            raise StateError(
                f"{self._manager.directory} holds checkpoints up to step {newest} that this run has not restored; call "
                "restore_or_initialize before the loop, or choose another directory"
            )

    def _on_preemption(self, due: bool, why: str) -> StepOutcome:
        if self._should_stop:  # asked before, and the loop goes on: save by the ordinary rules
            if due:
                self._saver.save(why)
            return StepOutcome(due, why, should_stop=True)
        save = not self._saver.is_saved
        if save:
            self._saver.save("preempted")
        self._manager.wait_until_finished()
        self._should_stop = True
        self._announce("preempted: step %d is saved in %s; stopping", self._saver.step, self._manager.directory)
        return StepOutcome(save, "preempted", should_stop=True)
