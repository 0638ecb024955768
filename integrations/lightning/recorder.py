"""Follow a new or resumed ``fit`` until it ends, and save at points where its state is consistent."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from enum import Enum
from typing import Any, NoReturn

import torch

from ...engine.errors import SaveFailedError, StateError
from ...engine.manager import event_scalars, guarded
from ...engine.sources import Misfits
from ..loop import StepsAfterSignal, Stop, unfinished_neighbour, warn_of_misfits
from . import private_api
from .fitting import Fitting
from .io import ResumePath
from .private_api import LoopHooks
from .replay import EpochReplay, Point
from .saving import PREEMPTED, StepWriter
from .steps import Fit, FitWitness
from .stopping import FitStop
from .trees import POSITION

logger = logging.getLogger("holdfast")


class Stage(Enum):
    """The progress of a ``fit``."""

    SET_UP = 0
    LOADED = 1  # state has been loaded from a checkpoint
    TRAINING = 2


class FitRecorder:
    """Follows one ``fit`` from ``setup`` until it ends, and decides after each batch and each epoch whether to save."""

    # The state is consistent when the next batch begins or, after the last batch, when the epoch ends: the batch and
    # the work that follows it (the module's own hook, validation, and the schedulers) are then complete. The exception
    # is a batch after which gradients are still being accumulated. After a signal, a step is also saved before
    # validation, and the resumed run then begins with validation.

    def __init__(self, fit: Fit, stop: Stop, callback: Any, replay: EpochReplay | None = None) -> None:
        self.fit = fit
        self._stage = Stage.SET_UP
        self._stop = FitStop(fit, stop, StepsAfterSignal(fit.options, fit.store.manager, fit.preemption))
        self._callback = weakref.proxy(callback)
        self._log = guarded(_log_event, "that passes events to the trainer's loggers")
        # The hooks pause during the trials of a Tuner, which removes all callbacks but uses the same loops.
        self._hooks = LoopHooks(lambda: any(present is callback for present in fit.trainer.callbacks))
        misfits = None if fit.options.partial is None else Misfits()
        self.witness = FitWitness(fit, misfits)
        self.replay = replay or EpochReplay(fit, self._hooks)
        self.replay.until_restored.callback(self.witness.resume)
        self.fitting = Fitting(fit.trainer, misfits, fit.options.hyperparameters, self._hooks)
        self.writer = StepWriter(fit, self.replay, self.fitting, self.witness)
        self._considered = fit.step  # the last step considered for a save
        self._in_batch = False  # whether a batch has run but the work that follows it is still unfinished
        self._hooks.place(fit.trainer.fit_loop.epoch_loop, "advance", self._batch)
        self._hooks.place(fit.trainer.fit_loop, "on_advance_end", self._epoch_ends)
        self._hooks.place(private_api.checkpoint_connector(fit.trainer), "restore_training_state", self._restore_state)
        for finder in private_api.callbacks_of(fit.trainer, *private_api.FINDERS):
            self._hooks.place(finder, "on_fit_start", self._search)

    @property
    def has_started(self) -> bool:
        """True if the ``fit`` has started training or has loaded a checkpoint that leaves nothing to do."""
        return self._stage is not Stage.SET_UP

    def begin(self) -> None:
        """Start recording; raise StateError if the directory has checkpoints but the trainer has loaded none."""
        before, self._stage = self._stage, Stage.TRAINING
        self._stop.points.begin()
        self.replay.begin()
        self.fitting.begin()
        if before is Stage.LOADED:
            self._warn_of_misfits()
            return
        directory = self.fit.store.directory
        if steps := self.fit.store.manager.all_steps():
            raise StateError(
                f"{directory} holds checkpoints up to step {steps[-1]}, but the trainer did not load one. Pass "
                "one as fit(ckpt_path=...), or choose another directory"
            )
        self.fit.say("started fresh: no checkpoint in %s%s", directory, unfinished_neighbour(directory))
        self.witness.begin()

    def finish(self) -> None:
        """If the run was already complete, announce it and restore the trainer's metrics from the last step."""
        self.replay.fit_ends()
        if self._stage is not Stage.LOADED:
            return
        self._warn_of_misfits()
        step = self.fit.step
        asked = f"; it was asked to stop there; fit(ckpt_path={self.fit.store.path_of(step)!r}) continues it"
        why = asked if self.fit.trainer.should_stop else ""
        self.fit.say("nothing left to do after step %d in %s%s", step, self.fit.store.directory, why)
        stored = self.writer.stored_metrics(step) or {}
        self.fit.trainer.callback_metrics.update({name: torch.tensor(value) for name, value in stored.items()})

    def detach(self, *, orderly: bool) -> None:
        """Remove all hooks and stop recording; ``orderly`` is False if training ends with an exception."""
        self.witness.run.close()
        self._hooks.remove()
        self._stop.points.end(orderly=orderly)

    # ---- resuming from a checkpoint

    def resume_from(self, checkpoint: dict[str, Any]) -> None:
        """Resume from a Lightning checkpoint dictionary, and remove the data position from it."""
        path = self.fit.trainer.ckpt_path
        if position := checkpoint.pop(POSITION, None):  # the first callback of the trainer takes it
            self.replay.resume(position, self.fit.store.processes)
        saved, is_cut_off = self.replay.resumed
        step = int(checkpoint["global_step"]) + saved.get("batches_as_steps", 0)
        self._stage = Stage.LOADED
        manager = self.fit.store.manager
        facts = manager.custom_metadata(step) if step in manager.all_steps() else None
        self.fitting.take(saved.get("optimizers"), checkpoint.get("callbacks", {}), facts or {})
        self.writer.resume(step, saved.get("callback_metrics", {}), is_cut_off=is_cut_off)
        self._considered = -1 if is_cut_off else step
        if getattr(path, "directory", self.fit.store.directory) == self.fit.store.directory:
            self.fit.say("resumed from step %d in %s", step, format(path))

    def _restore_state(self, original: Callable[[], None]) -> None:
        """Restore loops, optimizers and schedulers, even if the run has completed more than ``max_epochs`` epochs."""
        # A run can exceed this limit if a program calls fit twice and is restarted during the second call.
        if private_api.is_search_file(self.fit.trainer.ckpt_path):
            original()
            return
        loop, checkpoint = self.fit.trainer.fit_loop, private_api.loaded_checkpoint(self.fit.trainer)
        limit = loop.max_epochs
        if isinstance(self.fit.trainer.ckpt_path, ResumePath):
            loop.max_epochs = -1
        try:
            with self.fitting.loading(checkpoint):
                original()
        finally:
            loop.max_epochs = limit
        self.replay.state_restored()

    def _search(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Run a search for the learning rate or batch size, except in a resumed run."""
        if self._stage is not Stage.LOADED:
            original(*args, **kwargs)
            return
        logger.warning(
            "the run resumes, so its %s does not search again: the optimizers keep their saved options, "
            "and the program must set the values that were found for the module and its data",
            type(getattr(original, "__self__", None)).__name__,
        )

    # ---- the points at which the state is consistent

    def begin_batch(self, batch: Any) -> None:
        self._stop.steps.note_step()
        self.witness.begin_batch(batch)

    def _batch(self, original: Callable[[Any], None], fetcher: Any) -> None:
        self._batch_ends()
        original(fetcher)
        self._in_batch = True
        if private_api.validates_next(self.fit.trainer.fit_loop, fetcher):
            self._before_validation()

    def _batch_ends(self) -> None:
        """Decide whether to save. Called when a batch and all the work that follows it are complete."""
        if not self._in_batch:
            return
        self._in_batch = False
        step, loop = self.fit.step, self.fit.trainer.fit_loop
        self.fit.store.observer.reached("batch", step)
        self.witness.end_batch()
        if self._stop.steps.left is not None:
            if self._stop.steps.count() == 0 or loop.epoch_loop.done or private_api.has_done_all_batches(loop):
                self._leave()
            return
        stop = self._stop.points.after_batch()
        if step == self._considered and not stop:
            return
        if stop and self.writer.newest.is_complete(step):
            self._leave()
        holds_gradients = private_api.is_accumulating(loop) or self.fit.counts.holds_gradients
        if holds_gradients or private_api.has_done_all_batches(loop):
            return
        self._considered = step
        self._consider(step, "batch", stop=stop, ended=loop.epoch_loop.done)

    def _epoch_ends(self, original: Callable[[], None]) -> None:
        self._batch_ends()
        if self._stop.steps.left is not None:  # the epoch ended during the steps after a signal
            self._leave()
        complete = private_api.has_done_all_batches(self.fit.trainer.fit_loop) or self.replay.fetcher.done
        if self.writer.newest.is_cut_off and not complete:
            # The resumed run had only the end of the epoch left to do. Save, so that another resume does not repeat it.
            self.writer.save(self.fit.step, "batch", "at the end")
        original()
        step, stop = self.fit.step, self._stop.points.after_batch()
        self._considered = step
        self.writer.note_metrics(step)
        if self.writer.newest.is_complete(step) or not complete:
            if stop:
                self._leave()
            return
        self._consider(step, "epoch", stop=stop, ended=private_api.is_over(self.fit.trainer.fit_loop))

    def _before_validation(self) -> None:
        if self._stop.steps.left is not None:
            self._leave()
        step, loop = self.fit.step, self.fit.trainer.fit_loop
        if self.writer.newest.holds(step) or private_api.is_accumulating(loop):
            return
        # Reset these counters before saving, as Lightning does when validation begins.
        loop.epoch_loop.val_loop.batch_progress.reset_on_run()
        self.writer.hold(step, "validation")
        if self._stop.points.in_validation():
            self._save_at_signal(step, "validation")

    def during_validation(self) -> None:
        """Abort validation after a preemption signal, because nothing can be saved until validation ends."""
        # Callbacks may have replaced the weights with an average, and modules may change state during validation.
        # If gradients are being accumulated, let validation continue, and save after the next update.
        if not self._stop.points.in_validation():
            return
        step, newest = self.fit.step, self.writer.newest
        if not newest.holds(step):
            if private_api.is_accumulating(self.fit.trainer.fit_loop):
                return
            if self.writer.held is None:  # otherwise, on_exception saves the copy in host memory
                logger.warning(
                    "preempted during validation after step %d, which is not saved: the run resumes from step %s",
                    step,
                    0 if newest.metrics is None else newest.step,
                )
        self._leave()

    def _consider(self, step: int, point: Point, *, stop: bool, ended: bool) -> None:
        self.announce()
        if stop:
            self._save_at_signal(step, point)
        else:
            self.writer.consider(step, point, ended=ended)

    def _save_at_signal(self, step: int, point: Point) -> None:
        """Save a step and end the run, either at once or after recording a few more batches for comparison."""
        try:
            self.writer.save(step, point, PREEMPTED)
        except SaveFailedError:
            # The previous save failed. The process is about to end, so the failure must be logged now.
            logger.exception("an earlier save failed; step %d is being saved", step)
        if point != "batch" or self.fit.trainer.fit_loop.epoch_loop.done or not self._stop.let_steps_follow():
            self._leave()
        left = self._stop.steps.left
        batches = f"{left} more batch{'' if left == 1 else 'es'}"
        text = "preempted: step %d is saved in %s; stopping after at most %s, which the resume is compared with"
        self.fit.say(text, step, self.fit.store.directory, batches)

    def _leave(self) -> NoReturn:
        self._stop.leave(self.fit.step if self._stop.steps.left is None else self.writer.newest.step)

    def _warn_of_misfits(self) -> None:
        if self.fit.trainer.is_global_zero:
            warn_of_misfits(self.fitting.misfits, f"step {self.fit.step}", "state")

    # ---- the loggers of the trainer

    def announce(self) -> None:
        """Pass new events and committed checkpoints to the loggers. Called on the trainer's thread."""
        events = self.fit.store.take_events()
        for event in events:
            for listener in self.fit.trainer.loggers:
                self._log((listener, event))
        names = {event["event"] for event in events}
        if names & {"saved", "metrics"}:
            self.fit.store.publish(self.fit.options)
        if "saved" in names:
            for listener in self.fit.trainer.loggers:
                listener.after_save_checkpoint(self._callback)


def _log_event(event_for: tuple[Any, dict[str, Any]]) -> None:
    listener, event = event_for
    if (numbers := event_scalars(event)) and event.get("step") is not None:
        listener.log_metrics(numbers, step=event["step"])
