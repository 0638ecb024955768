"""One ``fit``: when it saves, what it saves, and how it goes on from what was saved."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from typing import Any, NoReturn

from ...engine.errors import SaveFailedError, StateError
from ..options import CallbackOptions
from .loops import Taps
from .metrics import MetricsLedger
from .position import Point, Position
from .stopping import Stop
from .store import Intent, RunStore
from .strategies import release_children
from .trees import POSITION

logger = logging.getLogger("holdfast")

_TUNER_FILES = (".lr_find", ".scale_batch_size")  # what the tuner goes back to after its trials


class Preempted(SystemExit):
    """The run was asked to end, has saved, and ends the process with the status that SIGTERM stands for."""

    def __init__(self) -> None:
        super().__init__(143)


class FitSaver:
    """Watches one ``fit`` from ``setup`` to its end.

    Saves are considered at two points only: after a training batch with everything that belongs to it (the module's
    own hook, the validation, the schedulers) unless gradients are still being accumulated, and after an epoch with
    everything that belongs to that. The last batch of an epoch is left to the end of the epoch.

    Args:
        trainer: The trainer.
        store: The run's checkpoints, open for writing.
        options: What the callback was told.
        stop: Tells when to leave because the process is to end.
        attached: Tells whether the callback is among those of the trainer: the tuner takes them all away for its
            trials, which run in the same loops.
        announce: Called in the trainer's thread after checkpoints have been committed.

    Raises:
        StateError: The trainer cannot be followed.
    """

    def __init__(
        self,
        trainer: Any,
        store: RunStore,
        options: CallbackOptions,
        stop: Stop,
        attached: Callable[[], bool],
        announce: Callable[[], None],
    ) -> None:
        self._trainer = trainer
        self._fit = trainer.fit_loop
        self._store = store
        self._options = options
        self._stop = stop
        self._announce = announce
        self._ledger = MetricsLedger()
        self._taps = Taps(attached)
        self._position = Position(trainer, self._taps)
        self._taps.place(self._fit.epoch_loop, "on_advance_end", self._after_batch)
        self._taps.place(self._fit, "on_advance_end", self._after_epoch)
        self._point: Point | None = None
        self._seen: int = trainer.global_step
        self._saved: int | None = trainer.global_step
        self._recorded: dict[int, dict[str, float]] = {}  # of the newest checkpoint, by step
        self._outdated: set[int] = set()
        self._new_metrics = False
        self._resumed = False

    def begin(self) -> None:
        """Notes that training starts.

        Raises:
            StateError: The directory holds checkpoints, but the trainer was not given any.
        """
        self._stop.begin()
        if self._resumed:
            return
        if steps := self._store.manager.all_steps():
            raise StateError(
                f"{self._store.directory} holds checkpoints up to step {steps[-1]}, but the trainer does not begin "
                "with one. Name one with fit(ckpt_path=...), or choose another directory"
            )
        logger.info("started fresh: no checkpoint in %s", self._store.directory)

    def detach(self, *, orderly: bool) -> None:
        """Stops watching.

        Args:
            orderly: Whether training has come to its end, rather than to an exception.
        """
        self._taps.remove()
        self._stop.end(orderly=orderly)

    # ---- going on from a checkpoint

    def add_to(self, checkpoint: dict[str, Any]) -> None:
        """Adds the position to a checkpoint, if it is one of this saver's own.

        Args:
            checkpoint: Lightning's dictionary.
        """
        if self._point is not None:
            checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)  # the position holds it
            checkpoint[POSITION] = self._position.capture(self._point)

    def go_on_from(self, checkpoint: dict[str, Any]) -> None:
        """Takes the position out of a checkpoint that was loaded.

        Args:
            checkpoint: Lightning's dictionary.
        """
        path = self._trainer.ckpt_path
        if os.path.basename(str(path)).startswith(_TUNER_FILES):
            return
        step, saved = int(checkpoint["global_step"]), checkpoint.pop(POSITION, None)
        steps = self._store.manager.all_steps()
        self._resumed = True
        self._saved = self._seen = step
        self._recorded = {step: {}} if step in steps else {}
        self._outdated = {later for later in steps if later > step}
        automatic = saved is not None and saved.get("automatic", False)
        if saved is not None:
            self._ledger.observe(-1, saved["callback_metrics"])  # of some step before
            self._position.resume(saved)
            if saved["point"] == "validation":
                self._saved = None  # there is still something to do in this step
        if automatic and saved["should_stop"]:
            logger.info("the run had been told to stop after step %d; name a ckpt_path to go on from there", step)
            self._trainer.should_stop = True
        logger.info("resumed from step %d in %s", step, format(path))
        if self._outdated and not automatic:
            logger.warning(
                "this run starts from step %d, but %s holds later steps (%s): they are replaced when it gets there, "
                "and until then count as the newest for what is kept and for an automatic resume. Use another "
                "directory to keep both",
                step,
                self._store.directory,
                ", ".join(map(str, sorted(self._outdated))),
            )

    # ---- the points at which nothing is half done

    def _after_batch(self, original: Callable[[Any], None], fetcher: Any) -> None:
        original(fetcher)
        step, stop = self._trainer.global_step, self._stop.after_batch()
        if step == self._seen and not stop:
            return
        if stop and step == self._saved:
            self._leave()
        loop = self._fit.epoch_loop
        if loop._should_accumulate() or loop._num_ready_batches_reached():
            return
        self._seen = step
        self._consider(step, "batch", stop=stop, ended=loop.done)

    def _after_epoch(self, original: Callable[[], None]) -> None:
        original()
        step, stop = self._trainer.global_step, self._stop.after_batch()
        self._seen = step
        self.notice_metrics()
        complete = self._fit.epoch_loop._num_ready_batches_reached() or self._fit._data_fetcher.done
        if step == self._saved or not complete:
            if stop:
                self._leave()
            return
        self._consider(step, "epoch", stop=stop, ended=self._is_over())

    def during_validation(self) -> None:
        """Saves in the middle of a validation if the process is to end: it may take longer than the time left."""
        if not self._position.in_validation or not self._stop.in_validation():
            return
        step = self._trainer.global_step
        if step != self._saved:
            if self._fit._should_accumulate():
                return
            self._save_and_leave(step, "validation")
        self._leave()

    def notice_metrics(self) -> None:
        """Looks at metrics that may be new, and stores those that came after their step was saved."""
        step = self._trainer.global_step
        self._ledger.observe(step, self._trainer.callback_metrics)
        self._new_metrics = True
        known = self._recorded.get(step)
        if known is None:
            return
        late = {name: value for name, value in self._ledger.of(step).items() if not _same(known, name, value)}
        known.update(self._store.record_metrics(step, late))

    # ---- saving

    def _consider(self, step: int, point: Point, *, stop: bool, ended: bool) -> None:
        self._announce()
        if stop:
            self._save_and_leave(step, point)
        metrics = None
        if self._options.save_on_best and self._new_metrics:
            self._ledger.observe(step, self._trainer.callback_metrics)
            metrics = self._ledger.of(step)
        self._new_metrics = False
        decision = self._store.manager.decide(step, metrics=metrics)
        if decision.save:
            self._save(step, point, decision.reason)
        elif ended and self._options.save_at_end:
            self._save(step, point, "at the end")
        elif step in self._outdated:
            self._save(step, point, "replaces the step of an earlier run")

    def _save(self, step: int, point: Point, reason: str) -> None:
        self._ledger.observe(step, self._trainer.callback_metrics)
        metrics = self._ledger.of(step)
        self._point, self._store.intent = point, Intent(reason, metrics)
        try:
            self._trainer.save_checkpoint(self._store.path_of(step), weights_only=False)
        finally:
            self._point = self._store.intent = None
        self._saved, self._recorded = step, {step: metrics}
        self._outdated.discard(step)

    def _save_and_leave(self, step: int, point: Point) -> NoReturn:
        try:
            self._save(step, point, "preempted")
        except SaveFailedError:
            # It is the save before this one that failed. There is no time to tell it in any other way.
            logger.exception("an earlier save failed; step %d is being saved", step)
        self._leave()

    def _leave(self) -> NoReturn:
        try:
            self._store.manager.wait_until_finished()
        finally:
            self._store.part()
        logger.info("preempted: stopping after step %d", self._trainer.global_step)
        release_children(self._trainer)
        raise Preempted

    def _is_over(self) -> bool:
        """Returns whether no epoch will follow; what the loop says itself, but it says so aloud."""
        fit = self._fit
        return (
            _reached(fit.epoch_loop.global_step, fit.max_steps)
            or _reached(fit.epoch_progress.current.processed, fit.max_epochs)
            or (self._trainer.should_stop and fit._can_stop_early)
        )


def _reached(count: int, limit: int | None) -> bool:
    return limit is not None and limit != -1 and count >= limit


def _same(known: dict[str, float], name: str, value: float) -> bool:
    return name in known and (known[name] == value or (math.isnan(known[name]) and math.isnan(value)))
