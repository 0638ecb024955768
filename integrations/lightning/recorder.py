"""One ``fit``: when it saves, what it saves, and how it resumes."""

from __future__ import annotations

import logging
import math
import os
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

import torch

from ...engine.errors import SaveFailedError, StateError, shortened
from ...engine.manager import event_scalars, guarded, note_resume
from ...engine.sources import Misfits
from ...engine.witness import Seen
from ..loop import (
    PreemptionSignal,
    StepsAfterSignal,
    Stop,
    Witness,
    announce,
    barrier_exit,
    unfinished_neighbour,
    warn_of_misfits,
    why_not_comparable,
)
from ..options import epoch_reason
from . import private_api
from .fitting import Fitting
from .io import ResumePath
from .loader_states import capture_generators
from .private_api import LoopHooks
from .replay import EpochReplay, Point
from .resharding import share_of
from .stopping import Copies, leave
from .store import CallbackArguments, RunStore
from .trees import POSITION

logger = logging.getLogger("holdfast")

_NOTHING: Any = object()
_PREEMPTED = "preempted"  # the reason of a save after a signal


class FitRecorder:
    """Watches one ``fit`` from ``setup`` to its end, and considers saves after each batch and each epoch."""

    # A batch ends with everything that belongs to it (the module's own hook, the validation, the schedulers), unless
    # gradients are still being accumulated; after the last batch of an epoch, the end of the epoch is the next point.
    # After a signal, a step is saved before a validation as well, which the resumed run begins with.

    def __init__(
        self,
        trainer: Any,
        store: RunStore,
        options: CallbackArguments,
        preemption: PreemptionSignal,
        stop: Stop,
        callback: Any,
    ) -> None:
        self._trainer = trainer
        self._fit = trainer.fit_loop
        self._store = store
        self._options = options
        self._preemption = preemption
        self._stop = stop
        self._callback = weakref.proxy(callback)
        self._log = guarded(_log_event, "that passes events to the trainer's loggers")
        self._ledger = MetricsLedger()
        # The tuner takes all callbacks away for its trials in the same loops.
        self._hooks = LoopHooks(lambda: any(one is callback for one in trainer.callbacks))
        self._replay = EpochReplay(trainer, self._hooks, self._compare_restored, options.replicated)
        self.fitting = Fitting(trainer, None if options.partial is None else Misfits(), self._hooks)
        self._hooks.place(self._fit.epoch_loop, "on_advance_end", self._after_batch)
        self._hooks.place(self._fit, "on_advance_end", self._after_epoch)
        self._hooks.place(private_api.checkpoint_connector(trainer), "restore_training_state", self._restore_state)
        for finder in private_api.finders_of(trainer):
            self._hooks.place(finder, "on_fit_start", self._search)
        self._copies = Copies() if options.save_on_exception else None
        self._held: tuple[int, dict[str, Any]] | None = None
        self._seen: int = self.step
        self._saved: int | None = self.step
        self._recorded: dict[int, dict[str, float]] = {}  # the step of the newest checkpoint and its metrics
        self._outdated: set[int] = set()
        self._new_metrics = False
        self._resumed = False
        self._begun = False
        self._metrics: Mapping[str, Any] = {}  # those of the checkpoint that the run resumes from
        self._is_pruned = False
        self.witness = Witness(store.manager, enabled=options.witness, on_inexact=options.on_inexact)
        self._batch: Any = _NOTHING  # the batch that is under way, for the witness
        self._after_signal = StepsAfterSignal(options, store.manager, preemption)

    @property
    def has_started(self) -> bool:
        """Whether the ``fit`` has begun to train, or found that there was nothing left to do."""
        return self._begun or self._resumed

    @property
    def step(self) -> int:
        """The number of the step that the run has finished."""
        return self._replay.steps.step

    def begin(self) -> None:
        """Begin to watch; refuse a directory with checkpoints if the trainer has loaded none."""
        self._stop.begin()
        self._begun = True
        self._replay.begin()
        self.fitting.begin(self._options.hyperparameters)
        if self._resumed:
            self._warn_of_misfits()
            return
        directory = self._store.directory
        if steps := self._store.manager.all_steps():
            raise StateError(
                f"{directory} holds checkpoints up to step {steps[-1]}, but the trainer does not begin with one. Name "
                "one with fit(ckpt_path=...), or choose another directory"
            )
        self._say("started fresh: no checkpoint in %s%s", directory, unfinished_neighbour(directory))
        self.witness.begin(self._shown())

    def finish(self) -> None:
        """Announce that there was nothing left to do, if so, and give the trainer the metrics of the run's end."""
        self._replay.fit_ends()
        if self._begun or not self._resumed:
            return
        self._warn_of_misfits()
        step = self.step
        why = "; it was asked to stop there, and continues with fit(ckpt_path=...)" if self._trainer.should_stop else ""
        self._say("nothing left to do after step %d in %s%s", step, self._store.directory, why)
        stored = {name: torch.tensor(value) for name, value in self._stored_metrics(step).items()}
        self._trainer.callback_metrics.update({**self._metrics, **stored})

    def _stored_metrics(self, step: int) -> dict[str, float]:
        manager = self._store.manager
        stored = manager.metrics(step) if step in manager.all_steps() else None
        return {name: value for name, value in (stored or {}).items() if isinstance(value, int | float)}

    def detach(self, *, orderly: bool) -> None:
        """Stop watching; ``orderly`` is False when training ends with an exception."""
        self.witness.close()
        self._hooks.remove()
        self._stop.end(orderly=orderly)

    def announce(self) -> None:
        """Inform loggers about new events and committed checkpoints, from the trainer's thread."""
        events = self._store.take_events()
        if not self._trainer.is_global_zero:
            return
        for event in events:
            for listener in self._trainer.loggers:
                self._log((listener, event))
        names = {event["event"] for event in events}
        if names & {"saved", "metrics"}:
            self._store.publish(self._options)
        if "saved" in names:
            for listener in self._trainer.loggers:
                listener.after_save_checkpoint(self._callback)

    # ---- resuming from a checkpoint

    def resume_from(self, checkpoint: dict[str, Any]) -> None:
        """Take the position out of Lightning's dictionary after it was loaded."""
        path = self._trainer.ckpt_path
        saved = checkpoint.pop(POSITION, None)
        step = int(checkpoint["global_step"]) + (saved or {}).get("batches_as_steps", 0)
        self._resumed = True
        self._saved = self._seen = step
        if step in self._store.manager.all_steps():
            self._recorded = {step: self._stored_metrics(step)}
        self._outdated = set(note_resume(self._store.manager, step))
        self.fitting.take((saved or {}).get("optimizers"), checkpoint.get("callbacks", {}))
        if saved is not None:
            self._metrics = saved["callback_metrics"]
            self._ledger.observe(-1, self._metrics)  # They belong to an earlier step.
            options, processes = self._options, self._store.processes
            position = share_of(saved, self._trainer, options.replicated, options.reshard, processes)
            self._replay.resume(position)
            if position.is_cut_off:
                self._saved, self._seen = None, -1  # The step is not finished.
        self._say("resumed from step %d in %s", step, format(path))

    def _restore_state(self, original: Callable[[], None]) -> None:
        """Restore loops, optimizers and schedulers, also for a ``fit`` with fewer epochs than the run has done."""
        # The first of two calls in one program is such a fit, when the program is started again during the second.
        checkpoint, limit = private_api.loaded_checkpoint(self._trainer), self._fit.max_epochs
        if private_api.is_search_file(self._trainer.ckpt_path):
            original()
            return
        if isinstance(self._trainer.ckpt_path, ResumePath):
            self._fit.max_epochs = -1
        try:
            with self.fitting.loading(checkpoint):
                original()
        finally:
            self._fit.max_epochs = limit
        self._replay.state_restored()

    def _search(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Let a run search for a learning rate or a batch size unless it begins with a checkpoint."""
        if not self._resumed:
            original(*args, **kwargs)
            return
        logger.warning(
            "the run resumes, so that its %s does not search again: the optimizers continue with their saved options, "
            "and the program has to give the module and its data what was found for them",
            type(getattr(original, "__self__", None)).__name__,
        )

    # ---- what the witness sees

    def begin_batch(self, batch: Any) -> None:
        """Note the batch of a step that begins, if the witness compares it."""
        self._after_signal.note_step()
        self._batch = batch if self.witness.watches else _NOTHING

    def _shown(self, batch: Any = None) -> Seen:
        trainer, loaders = self._trainer, private_api.loaders_of(self._fit)
        generators = capture_generators(loaders)
        own = {f"loader {name}": state for name, state in generators.pop("loaders").items()}
        counters = {"batch": self._fit.epoch_loop.batch_idx, "epoch": trainer.current_epoch}
        return Seen(
            step=self.step,
            root={"module": trainer.lightning_module, "optimizers": [*trainer.optimizers]},
            objects={"loaders": loaders},
            generators={**generators, **own},
            batch=batch,
            metrics=dict(trainer.callback_metrics),
            counters={**counters, "step": self.step},
        )

    def _compare_restored(self) -> None:
        path, why = self._trainer.ckpt_path, why_not_comparable(self._options, self.fitting.misfits)
        if not isinstance(path, ResumePath) and not os.path.abspath(path).startswith(str(self._store.directory)):
            why = f"the run resumed from {path}"
        self.witness.resume(self.step, self._shown(), why)

    # ---- the points at which the state is consistent

    def _after_batch(self, original: Callable[[Any], None], fetcher: Any) -> None:
        if private_api.validates_next(self._fit, fetcher):
            self._before_validation()
        original(fetcher)
        self._store.observer.reached("batch", self.step)
        batch, self._batch = self._batch, _NOTHING
        if batch is not _NOTHING:
            self.witness.note(lambda: self._shown(batch), self._trainer.current_epoch)
        loop = self._fit.epoch_loop
        if self._after_signal.left is not None:
            if self._after_signal.count() == 0 or loop.done or private_api.has_done_all_batches(self._fit):
                self._leave()
            return
        step, stop = self.step, self._stop.after_batch()
        if step == self._seen and not stop:
            return
        if stop and step == self._saved:
            self._leave()
        holds_gradients = private_api.is_accumulating(self._fit) or self._replay.steps.holds_gradients
        if holds_gradients or private_api.has_done_all_batches(self._fit):
            return
        self._seen = step
        self._consider(step, "batch", stop=stop, ended=loop.done)

    def _after_epoch(self, original: Callable[[], None]) -> None:
        if self._after_signal.left is not None:  # The trainer was asked to stop.
            self._leave()
        complete = private_api.has_done_all_batches(self._fit) or self._replay.fetcher.done
        if self._saved is None and not complete:  # Only the ends were left to do: the next start leaves them out.
            self._save(self.step, "batch", "at the end")
        original()
        step, stop = self.step, self._stop.after_batch()
        self._seen = step
        self.notice_metrics()
        if step == self._saved or not complete:
            if stop:
                self._leave()
            return
        self._consider(step, "epoch", stop=stop, ended=self._is_over())

    def _before_validation(self) -> None:
        if self._after_signal.left is not None:
            self._leave()
        step = self.step
        if self._is_unsaved(step) and not private_api.is_accumulating(self._fit):
            # Lightning sets the counters to 0 a moment later.
            self._fit.epoch_loop.val_loop.batch_progress.reset_on_run()
            self._hold(step, "validation")
            if self._stop.in_validation():
                self._save_at_signal(step, "validation")

    def during_validation(self) -> None:
        """Leave a validation if the process is to end; nothing can be saved within it."""
        # Callbacks may have put an average in the place of the weights, and modules count, cache and switch modes.
        # While gradients are being accumulated, the validation runs to its end, and the next update is saved.
        if not self._stop.in_validation():
            return
        step = self.step
        if self._is_unsaved(step):
            if private_api.is_accumulating(self._fit):
                return
            if self._held is None:  # Else it is saved as after an exception.
                logger.warning(
                    "preempted in the validation after step %d, which is not saved: the run resumes from step %s",
                    step,
                    next(iter(self._recorded), 0),
                )
        self._leave()

    def _is_unsaved(self, step: int) -> bool:
        return step != self._saved and step not in self._recorded

    def notice_metrics(self) -> None:
        """Observe metrics that may be new, and store those that were logged after their step was saved."""
        step = self.step
        self._ledger.observe(step, self._trainer.callback_metrics)
        self._new_metrics = True
        known = self._recorded.get(step)
        if known is None:
            return
        late = {name: value for name, value in self._ledger.of(step).items() if not _same(known, name, value)}
        if late := self._store.processes.decide("late metrics", dict, late):  # those of process 0
            self._store.manager.record_metrics(step, late)
        known.update(late)

    # ---- saving

    def _consider(self, step: int, point: Point, *, stop: bool, ended: bool) -> None:
        self.announce()
        if stop:
            self._save_at_signal(step, point)
            return
        metrics, reports = None, self._new_metrics
        if reports:
            self._ledger.observe(step, self._trainer.callback_metrics)
            metrics = self._ledger.of(step) if self._options.save_on_best else self._ledger.at(step)
        self._new_metrics = False
        decision = self._store.manager.decide(step, metrics=metrics)
        epochs = self._fit.epoch_progress.current.processed if point == "epoch" else None
        if decision.save:
            self._save(step, point, decision.reason)
        elif due := epoch_reason(self._options.every_n_epochs, epochs):
            self._save(step, point, due)
        elif ended and (self._options.save_at_end or self._saved is None):
            self._save(step, point, "at the end")
        elif step in self._outdated:
            self._save(step, point, "replaces the step of an earlier run")
        elif reports and (metric := self._store.awaited_metric(self._recorded, lambda: self._ledger.of(step))):
            self._save(step, point, f"the first with {metric} after a save without it")
        elif self._store.manager.local_due(step):
            dump, strategy = partial(self._dump, point), self._trainer.strategy
            self.witness.save(step, self._shown)
            self._store.save(step, dump, strategy, metrics=self._ledger.of(step), locally=True)
        self._hold(step, point)

    def save_after(self, exception: BaseException) -> None:
        """Save the last point between two batches, if it is not saved: the present state may be half an update."""
        held, self._held = self._held, None
        if held is None or held[0] == self._saved or self.witness.refuses:
            return
        step, checkpoint = held
        name = type(exception).__name__
        self._store.save(
            step, lambda: checkpoint, self._trainer.strategy, metrics=self._ledger.of(step), reason=f"after {name}"
        )
        self._say("saving step %d in %s after %s", step, self._store.directory, name)

    def _hold(self, step: int, point: Point) -> None:
        """Keep a copy of the state at this point, in case of an exception before the next one."""
        if self._copies is None or step == self._saved:
            self._held = None
            return
        self._ledger.observe(step, self._trainer.callback_metrics)
        self._held = step, self._copies.of(self._dump(point, is_cut_off=True))

    def _save(self, step: int, point: Point, reason: str) -> None:
        self._ledger.observe(step, self._trainer.callback_metrics)
        metrics, strategy = {**self._recorded.get(step, {}), **self._ledger.of(step)}, self._trainer.strategy
        dump = partial(self._dump, point, is_cut_off=reason == _PREEMPTED)
        self.witness.save(step, self._shown)
        with self._trainer.profiler.profile("save_checkpoint"):
            self._store.save(step, dump, strategy, metrics=metrics, reason=reason)
            strategy.barrier("CheckpointCallback")
        self._saved, self._recorded = step, {step: metrics}
        self._outdated.discard(step)

    def _dump(self, point: Point, *, is_cut_off: bool = False) -> dict[str, Any]:
        """Return Lightning's dictionary with the position in the data and the random generators."""
        checkpoint = private_api.dump_checkpoint(self._trainer)
        self._warn_of_pruning(checkpoint)
        cut_off = is_cut_off and point == "batch" and self._fit.epoch_loop.done
        position = self._replay.capture(point, is_cut_off=cut_off)
        checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)  # the position holds it
        return {**checkpoint, POSITION: {**position, "optimizers": self.fitting.description()}}

    def _warn_of_pruning(self, checkpoint: dict[str, Any]) -> None:
        """Warn once that ModelPruning has replaced the weights that training continues with."""
        if self._is_pruned or not private_api.callbacks_of(self._trainer, "ModelPruning"):
            return
        names = self._trainer.lightning_module.state_dict().keys() - checkpoint["state_dict"].keys()
        if pruned := sorted(name.removesuffix("_orig") for name in names if name.endswith("_orig")):
            self._is_pruned = True
            logger.warning(
                "ModelPruning makes its pruning permanent in every checkpoint: a run that resumes from one trains on "
                "without the masks until it prunes again, and does not end as a run without a stop would: %s",
                shortened(pruned),
            )

    def _save_at_signal(self, step: int, point: Point) -> None:
        """Save a step, and leave, at once or after some batches that are only recorded."""
        try:
            self._save(step, point, _PREEMPTED)
        except SaveFailedError:
            # The save before this one failed. The process is about to end, so the log must report it.
            logger.exception("an earlier save failed; step %d is being saved", step)
        loop = self._fit.epoch_loop
        if point != "batch" or loop.done:
            self._leave()
        self._after_signal.finish_saves()
        left = self._fit.max_batches - loop.batch_idx - 2  # A validation may follow the last batch.
        if not self._after_signal.begin(None if math.isinf(left) else int(left)):
            self._leave()
        text = "preempted: step %d is saved in %s; stopping after %d more batches, which the resume is compared with"
        self._say(text, step, self._store.directory, self._after_signal.left)

    def _leave(self) -> NoReturn:
        try:
            self._after_signal.finish_saves()
        finally:
            barrier_exit(self._store.processes)
        step = self.step if self._after_signal.left is None else self._saved
        self._say("preempted: stopping after step %d in %s", step, self._store.directory)
        leave(self._trainer, self._preemption)

    def _say(self, text: str, *args: object) -> None:
        announce(text, *args, shown=self._trainer.is_global_zero)

    def _warn_of_misfits(self) -> None:
        if self._trainer.is_global_zero:
            warn_of_misfits(self.fitting.misfits, f"step {self.step}", "state")

    def _is_over(self) -> bool:
        fit = self._fit
        return (  # the same as fit.done, which logs a message
            _reached(fit.epoch_loop.global_step, fit.max_steps)
            or _reached(fit.epoch_progress.current.processed, fit.max_epochs)
            or (self._trainer.should_stop and private_api.can_stop_early(fit))
        )


def _log_event(event_for: tuple[Any, dict[str, Any]]) -> None:
    listener, event = event_for
    if (numbers := event_scalars(event)) and event.get("step") is not None:
        listener.log_metrics(numbers, step=event["step"])


def _reached(count: int, limit: int | None) -> bool:
    return limit is not None and limit != -1 and count >= limit


def _same(known: dict[str, float], name: str, value: float) -> bool:
    return name in known and (known[name] == value or (math.isnan(known[name]) and math.isnan(value)))


class MetricsLedger:
    """Notes the step at which each value of a metric appeared in ``trainer.callback_metrics``."""

    # These hold the last value of every metric that was ever logged: 50 steps after a validation its ``val_loss`` is
    # still there. Ranked by it, the later checkpoint would look as good as the one that was validated.

    def __init__(self) -> None:
        self._seen: dict[str, tuple[Any, int]] = {}

    def observe(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Note which of ``trainer.callback_metrics`` are new."""
        for name, value in metrics.items():
            seen = self._seen.get(name)
            if seen is None or not _same_value(seen[0], value):
                self._seen[name] = (value, step)

    def of(self, step: int) -> dict[str, float]:
        """Return the metrics of one step as numbers, fetched from their device."""
        return {name: float(value) for name, value in self.at(step).items()}

    def at(self, step: int) -> dict[str, Any]:
        """Return the metrics of one step as they were logged, on their device."""
        return {name: value for name, (value, at) in self._seen.items() if at == step}


def _same_value(one: Any, other: Any) -> bool:
    """Return whether this is the same logged value: the same memory, not the same number."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        # Lightning returns a new view at every access. The ledger keeps the old one, so its memory is not reused.
        return one.data_ptr() == other.data_ptr()
    return one is other
