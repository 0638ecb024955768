"""The callback of a JAX or Flax training loop: saves, keeps, resumes."""

from __future__ import annotations

import logging
import operator
from collections.abc import Collection, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ...engine.checkpointer import AsyncCheckpointer, Place
from ...engine.errors import StateError
from ...engine.handlers import PerProcessCheckpointHandler
from ...engine.manager import CheckpointManager
from ..options import BestFn, BestMode, CallbackOptions, Resume
from ..preemption import PreemptionSignal
from .checks import check_extras, check_metrics, check_step, missing_extras
from .initialization import with_weights
from .outcome import StepOutcome
from .resuming import check_resume, restore
from .saver import StepSaver

if TYPE_CHECKING:
    from ...engine.clock import Clock
    from ...engine.durations import Duration

logger = logging.getLogger("holdfast")

_NOTHING_DUE = StepOutcome(saved=False, reason="nothing is due", should_stop=False)


class CheckpointCallback:
    """Saves a training loop's state, keeps the right checkpoints, and brings the loop back where it was.

    ::

        with CheckpointCallback("runs/digits/checkpoints", save_interval_steps=100, max_to_keep=3) as checkpoint:
            state, start = checkpoint.restore_or_initialize(state, data=batches)
            for step in range(start, total_steps):
                state, metrics = train_step(state, next(batches))
                if checkpoint.on_step(step + 1, state, metrics=metrics, data=batches).should_stop:
                    break

    Step N means that N optimizer updates are in the state, so ``on_step(step + 1, ...)`` comes after the update. A run
    that is interrupted anywhere and resumed ends bit for bit where the uninterrupted run does, provided that whatever
    the loop depends on is in the state or among the extras.

    The state is a ``TrainState`` or any other pytree, which is never changed, or an nnx object or dicts, lists and
    tuples of nnx objects, which are updated in place.

    Extras are named as you like, and are any of these:

    - an object with ``get_state`` and ``set_state``, or ``state_dict`` and ``load_state_dict``, a numpy ``Generator``
      or a ``random.Random``: restored in place;
    - nnx objects, such as ``nnx.Rngs``: restored in place;
    - pytrees with arrays or typed PRNG keys: ``checkpoint.extras[name]`` is the restored value, with the types, dtypes
      and shardings of what was passed;
    - plain data (None, numbers, strings, bytes, and dicts, lists and tuples of them): ``checkpoint.extras[name]`` is
      the restored value as it was saved, whatever was passed.

    SIGTERM only sets a flag. The next ``on_step`` saves, waits until the files are durable, and asks to stop. Leaving
    the ``with`` block saves the last step if it is not saved yet, waits for the files and closes. Leaving it by an
    exception saves nothing more, but lets a save that is under way finish.

    In a program of several processes (``jax.distributed``), each makes a callback and calls it at every step. Arrays
    are saved together; of the other extras, such as data iterators, each process saves and restores its own.

    Args:
        directory: Where the checkpoints go: a path or a URL.
        save_interval_steps: Save every so many steps.
        save_interval_secs: Save when so much time has passed since the last save: seconds, or ``"15m"``, ``"1h"``.
            Without any of the three triggers, every 15 minutes.
        save_on_best: Save when the metric is better than at every checkpoint so far; needs ``best_fn``. The metric is
            then fetched from the device at every step that reports it.
        save_at_end: Save the last step when the block is left.
        best_fn: Name of the metric that tells which step is best, or a function of the metrics.
        best_mode: Whether the best value is the largest or the smallest.
        max_to_keep: Keep so many checkpoints: the best ones with ``best_fn``, the newest without; None for all.
        keep_latest: Keep so many of the newest checkpoints, best or not.
        keep_period: Keep every checkpoint whose step is a multiple of this.
        keep_time_interval: Keep one checkpoint in every such span of time.
        keep_steps: Keep these steps.
        resume: ``"auto"`` resumes if there is something to resume from, ``"must"`` raises if there is not, and
            ``"never"`` raises if there is.
        init_from: Where a fresh start takes its parameters from: any checkpoint that ``hf.load`` reads, of holdfast or
            of another library, or a directory of steps. Names, shapes and dtypes must be those of the state's
            parameters; all else, such as the optimizer and the step, starts fresh. A run that resumes ignores it.
        compression: Compress arrays with zstd at this level, 1 to 22. It takes longer than a fast disk; None does not.
        clock: Where the time comes from, for tests.
        metadata: JSON about the run, such as its configuration, stored with the checkpoints.

    Attributes:
        extras: The extras by name as they were restored; as they were passed, after a fresh start.

    Raises:
        OptionError: An option has a value that makes no sense.
    """

    def __init__(
        self,
        directory: Place,
        *,
        save_interval_steps: int | None = None,
        save_interval_secs: Duration | None = None,
        save_on_best: bool = False,
        save_at_end: bool = True,
        best_fn: BestFn | None = None,
        best_mode: BestMode = "max",
        max_to_keep: int | None = None,
        keep_latest: int | None = None,
        keep_period: int | None = None,
        keep_time_interval: Duration | None = None,
        keep_steps: Collection[int] = (),
        resume: Resume = "auto",
        init_from: Place | None = None,
        compression: int | None = None,
        clock: Clock | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        self._options = CallbackOptions(
            save_interval_steps=save_interval_steps,
            save_interval_secs=save_interval_secs,
            save_on_best=save_on_best,
            save_at_end=save_at_end,
            best_fn=best_fn,
            best_mode=best_mode,
            max_to_keep=max_to_keep,
            keep_latest=keep_latest,
            keep_period=keep_period,
            keep_time_interval=keep_time_interval,
            keep_steps=keep_steps,
            resume=resume,
            init_from=init_from,
            compression=compression,
        )
        self._manager = CheckpointManager(
            directory,
            {
                "state": AsyncCheckpointer(self._options.tree_handler()),
                "extras": AsyncCheckpointer(self._options.tree_handler()),
                "process": AsyncCheckpointer(PerProcessCheckpointHandler()),
            },
            self._options.manager_options(),
            metadata=metadata,
            clock=clock,
        )
        self._saver = StepSaver(self._manager)
        self._preemption = PreemptionSignal()
        self._names: frozenset[str] = frozenset()
        self._begun = False
        self._closed = False
        self._should_stop = False
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
        """Restores the newest whole checkpoint, or leaves everything as it is when there is none.

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
        place = self._options.init_from
        check_extras(extras)
        check_resume(self._manager, self._options.resume)
        self._begin()
        self._manager.acquire()
        self._names = frozenset(extras)
        restored = None if self._options.resume == "never" else restore(self._manager, state, extras)
        if restored is None:
            logger.info("started fresh: no checkpoint in %s", self._manager.directory)
            self.extras = dict(extras)
            return (state if place is None else with_weights(state, place)), 0
        if place is not None:
            logger.info("init_from=%s is ignored, as the run resumes", place)
        self.extras = restored.extras
        return restored.state, restored.step

    def on_step(self, step: int, state: Any, *, metrics: Mapping[str, Any] | None = None, **extras: Any) -> StepOutcome:
        """Tells that an update is done; saves if a save is due. Call it after every update.

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
        check_step(step, state, metrics)
        if not self._names <= extras.keys():
            raise StateError(missing_extras(self._names - extras.keys()))
        self._saver.see(step, state, metrics, extras)
        decision = self._manager.decide(step, metrics=metrics)
        if self._preemption.reached(step):
            return self._on_preemption(decision.save, decision.reason)
        if not decision.save:
            return _NOTHING_DUE
        self._saver.save(decision.reason)
        return StepOutcome(True, decision.reason, should_stop=False)

    def on_eval(self, step: int, metrics: Mapping[str, Any]) -> StepOutcome:
        """Takes metrics that were found out after the step, such as those of an evaluation.

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
        """Saves the last step if it is not saved yet, waits for the files, and closes; the ``with`` block does it.

        Raises:
            SaveFailedError: A save failed in the background.
        """
        if self._closed:
            return
        self._closed = True
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
        logger.info("preempted: step %d is saved in %s; stopping", self._saver.step, self._manager.directory)
        return StepOutcome(save, "preempted", should_stop=True)
