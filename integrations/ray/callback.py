"""The checkpoint callback for training loops in Ray Train workers."""

from __future__ import annotations

import logging
import signal
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Never

from ...engine.errors import StateError
from ...engine.manager import copy_checkpoint
from ...engine.steps import list_steps, series_of
from ...engine.storage import Location
from ..loop import CheckpointCallback as LoopCallback
from ..loop import PreemptionSignal, StepOutcome
from .worker import DRAINED, Worker, WorkerSignal, current_worker

logger = logging.getLogger("holdfast")


class PreemptedError(RuntimeError):
    """Raised in a worker after SIGTERM, once the step is saved, to make Ray restart the training function."""


class CheckpointCallback(LoopCallback):
    """A :class:`holdfast.CheckpointCallback` for the training functions of ``TorchTrainer`` and ``JaxTrainer``.

    ::

        def train(config):
            ...
            with CheckpointCallback(run_directory(), save_interval_steps=100) as checkpoint:
                state, step = checkpoint.restore_or_initialize({"model": model, "optimizer": optimizer})
                while step < total_steps:
                    ...
                    step += 1
                    if checkpoint.on_step(step, state, metrics={"loss": loss}).should_stop:
                        break

    It takes the same options and, outside of Ray Train, behaves identically. In a worker, the following also applies:

    - Every saved step is reported to Ray after it has become durable. ``ray.train.report`` receives the step's metrics
      and a reference to its checkpoint, which is not copied. Because a report waits for all workers, a step is reported
      only when the next step is saved, after a preemption signal, or at the end.
    - Ray owns the reported checkpoints and deletes them according to ``CheckpointConfig(num_to_keep=...)``. With
      ``max_to_keep`` or another retention option, the callback deletes checkpoints and reports only metrics, because
      Ray does not restart a run whose reported checkpoints were deleted. ``Result`` then contains neither checkpoints
      nor metrics, because Ray stores metrics with checkpoints.
    - SIGTERM is handled even though the loop does not run in the main thread. All workers save the same step and stop.
      Leaving the ``with`` block then raises :class:`PreemptedError`, because Ray would consider the run finished if the
      function returned. This counts as a failure in ``FailureConfig(max_failures=...)``.
    - When Ray announces that it will remove a node, all workers save the same step and continue until Ray stops them.
      This counts toward ``max_preemption_failures``.
    - A run resumes from the newest step in ``directory``, whether or not it has been reported. If the directory
      has no step, the run resumes from a copy of the checkpoint that ``ray.train.get_checkpoint()`` returns.
    """

    _worker: Worker | None = None
    _unreported: int | None = None  # saved step that has not been reported, and may not be durable yet
    _reported_step: int | None = None
    _has_stopped = False

    @property
    def preempted(self) -> bool:
        """True if SIGTERM has arrived or Ray has announced that it will remove a node."""
        return super().preempted

    def restore_or_initialize(self, state: Any, *, like: Any = None, **extras: Any) -> tuple[Any, int]:
        """Restore the newest complete checkpoint from ``directory`` or from Ray; start fresh if there is none.

        The arguments, the result, and the errors are the same as for
        :meth:`holdfast.CheckpointCallback.restore_or_initialize`.

        Raises:
            StateError: Ray has started several workers that are not connected to each other.
        """
        worker = self._worker
        if worker is None:
            return super().restore_or_initialize(state, like=like, **extras)
        if worker.count > 1 and self.manager.processes.alone:
            raise StateError(
                f"Ray has started {worker.count} workers that are not connected, so each would save the whole state "
                f"to {self.manager.directory}: TorchTrainer connects its workers; with JaxTrainer on CPUs, call "
                "jax.distributed.initialize() in every worker first"
            )
        reported = worker.checkpoint()
        self._fetch(reported)
        state, step = super().restore_or_initialize(state, like=like, **extras)
        location = self._location_of(step)
        if location is not None and (reported is None or reported.url != location.url):
            self._unreported = step  # an earlier run saved this step, but ended before reporting it
        return state, step

    def on_step(
        self,
        step: int,
        state: Any,
        *unknown: Never,
        metrics: Mapping[str, Any] | None = None,
        batch: Any = None,
        epoch: Any = None,
        **extras: Any,
    ) -> StepOutcome:
        """Record a finished update and save if a save is due, as :meth:`holdfast.CheckpointCallback.on_step` does.

        All workers must call this method for every step, because its reports to Ray wait for all workers.
        """
        return self._after(
            step, super().on_step(step, state, *unknown, metrics=metrics, batch=batch, epoch=epoch, **extras)
        )

    def on_eval(self, step: int, metrics: Mapping[str, Any]) -> StepOutcome:
        """Record metrics that were computed after the step, as :meth:`holdfast.CheckpointCallback.on_eval` does."""
        return self._after(step, super().on_eval(step, metrics))

    def _hand_on(self) -> None:
        if self._worker is None:
            super()._hand_on()
        self._after_signal.left = 0  # makes leaving the with block raise PreemptedError

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)
        if self._worker is None or error is not None:
            return
        last = self._last_step
        self._report()
        if last is not None and last != self._reported_step and last in self.manager.all_steps():  # saved by close()
            self._unreported = last
            self._report()
        if self.should_stop and self._preemption.number != DRAINED:
            raise PreemptedError(
                f"SIGTERM: step {last} is saved in {self.manager.directory}; Ray should restart the run"
            )

    def _signal(self, signals: Sequence[signal.Signals]) -> PreemptionSignal:
        self._worker = current_worker()
        return super()._signal(signals) if self._worker is None else WorkerSignal(signals)

    def _fetch(self, reported: Location | None) -> None:
        """Copy the last checkpoint that Ray knows of into the directory if the directory has no checkpoint."""
        directory = self.manager.directory
        if reported is None or reported.url.startswith(f"{directory.url}/") or self._options.resume == "never":
            return
        if self.manager.latest_step() is None:
            logger.info("copying %s, the last checkpoint that Ray knows of", reported)
            copy_checkpoint(reported.url, (directory / reported.name).url)

    def _after(self, step: int, outcome: StepOutcome) -> StepOutcome:
        """After a save, report the previously saved step, which is durable because saves wait for the previous save."""
        if self._worker is None:
            return outcome
        if outcome.saved:
            self._report()
            self._unreported = step
        if outcome.should_stop and not self._has_stopped:
            self._has_stopped = True
            self._report()  # report now: this step is durable, and later steps may not be
        if outcome.should_stop and self._preemption.number == DRAINED:
            return StepOutcome(outcome.saved, outcome.reason, should_stop=False)
        return outcome

    def _report(self) -> None:
        step, self._unreported = self._unreported, None
        if step is None or self._worker is None:
            return
        location = self._location_of(step)
        metrics = None if location is None else self.manager.metrics(step)
        # Ray can register only checkpoints that are in its own storage and that the callback does not delete.
        inside = self.manager.directory.url.startswith(f"{self._worker.root().url}/")
        registered = location if inside and self._options.max_to_keep is None else None
        self._worker.report({**(metrics or {}), "step": step}, registered)
        self._reported_step = step

    def _location_of(self, step: int) -> Location | None:
        entries = list_steps(self.manager.directory, series_of(self._options.step_prefix))
        return next((entry.location for entry in entries if entry.step == step), None)
