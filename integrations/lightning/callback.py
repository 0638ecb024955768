"""The Lightning callback that saves checkpoints, deletes old ones, and resumes runs."""

from __future__ import annotations

import logging
import signal
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch

from ...engine.clock import Clock, Duration
from ...engine.errors import HoldfastError, OptionError
from ...engine.manager import (
    BestFn,
    BestMode,
    KeepPolicy,
    Local,
    Mirror,
    SavePolicy,
    described,
    explains_options,
    takes_texts_of,
)
from ...engine.sources import Misfits, Weights, load_weights
from ...engine.storage import Place
from ..loop import (
    AgreedStop,
    Ending,
    PreemptionSignal,
    Proof,
    Stop,
    Witness,
    announce,
    barrier_exit,
    check_resume,
    resume_step,
    stop_of,
    warn_of_misfits,
)
from ..loop import CheckpointCallback as LoopCallback
from ..options import OnInexact, Partial, Reshard, Resume
from . import private_api
from .io import ResumePath, ResumingCallback, install, redirect_resume
from .recorder import FitRecorder
from .steps import Counts, Fit
from .stopping import Preempted, Signals, leave
from .store import CallbackArguments, RunStore
from .strategies import check_strategy, is_sharded

if TYPE_CHECKING:
    from ...engine.manager import CheckpointManager

logger = logging.getLogger("holdfast")


@takes_texts_of(LoopCallback)
class CheckpointCallback(ResumingCallback):
    """Saves checkpoints of a Lightning run, deletes old ones, and automatically resumes the run where it stopped.

    ::

        callback = CheckpointCallback("runs/x/checkpoints", save_interval_steps=100, max_to_keep=3)
        trainer = L.Trainer(callbacks=[callback])
        trainer.fit(model, datamodule)  # resumes when the program is run again, without ckpt_path

    The step number is ``trainer.global_step``, so checkpoint N includes N optimizer updates. A batch trained without a
    Lightning optimizer, as in manual optimization with ``use_pl_optimizer=False``, also counts as a step. A run that is
    interrupted at any point and then resumed ends with exactly the same bits as an uninterrupted run. When a run
    resumes in the middle of an epoch, data loaders with ``state_dict`` and ``load_state_dict`` continue where they
    stopped; all others draw the earlier batches again and discard them.

    A ``ckpt_path`` given to ``fit`` takes precedence over the newest checkpoint; it may name a step in this or another
    directory, or one of Lightning's own files. Without ``ckpt_path``, a run resumes only from this directory, never
    from the files of a ``ModelCheckpoint``. ``trainer.test(ckpt_path="best")`` and ``"last"`` work as usual.

    After SIGTERM, the callback saves before the next batch or validation, waits until the files are durable, and ends
    the process with status 143; data loader workers keep running until then. A signal during validation ends the
    process at once, and the run resumes from the last saved step. Nothing can be saved during validation, because
    callbacks may have replaced the weights with an average. After an exception, the callback lets a pending save finish
    but saves nothing new (except with ``save_on_exception``). Under SLURM, the requeue signal triggers a save in the
    same way, requeues the job, and ends the process with status 75; Lightning's own requeue checkpoints are ignored.

    Under DDP (``strategy="ddp"``) and ``ModelParallelStrategy`` (FSDP2), all processes save one checkpoint together:
    each saves its share of the parameters and optimizer state, its random generators, and its data position. SIGTERM to
    any process stops all of them at the same step. All processes must have access to the same directory.

    A checkpoint contains only arrays and plain values, each under its own path, such as ``state_dict/layer.weight``;
    nothing is pickled. Hyper-parameters and callback states of other types are left out, and a warning lists them.

    ``init_from`` must provide exactly the parameters and buffers in the module's state dict. With
    ``partial="initialize"``, only those that fit are loaded; likewise, resuming restores only the module, optimizer,
    and scheduler state that fits.

    Args:
        dirpath: The checkpoint directory: a path or a URL.
        save_interval_steps, save_interval_secs, save_on_best, best_fn, best_mode, max_to_keep, keep_latest,
        keep_period, keep_time_interval, keep_steps, mirror, local, reuse_unchanged, step_name_width, save, keep,
        save_at_end, resume, init_from, partial, compression, signals, grace_secs, replicated, witness, on_inexact,
        witness_steps_after_signal, clock, metadata, hyperparameters, reshard, keep_checkpoints_without_metrics,
        item_intervals, step_prefix, save_timeout_secs, barrier_timeout_secs, load_and_broadcast:
        every_n_epochs: Save at the end of every epoch whose number is a multiple of this value.
        save_on_exception: When training ends with an exception, save the state as of the last complete batch. A copy of
            the complete state is kept in host memory and updated after every step. Supported only with one process.
        export_best: The file to which the weights of the best checkpoint by ``best_fn`` are exported, such as
            ``best.safetensors``, or ``best.ckpt`` for Lightning's ``load_from_checkpoint``; relative to ``dirpath``.
        links: Maintain symlinks on local disks: ``last`` points to the newest checkpoint and, with ``best_fn``,
            ``best`` to the best one.

    Raises:
        OptionError: An option has an invalid value.
        StateError: The callback does not support the strategy that ``fit`` uses; the message lists supported ones.
    """

    filename = "{step}"
    save_weights_only = False
    save_last = True

    @explains_options
    def __init__(
        self,
        dirpath: Place,
        *,
        save_interval_steps: int | None = None,
        save_interval_secs: Duration | None = None,
        save_on_best: bool = False,
        best_fn: BestFn | None = None,
        best_mode: BestMode | None = None,
        max_to_keep: int | None = None,
        keep_latest: int | None = None,
        keep_period: int | None = None,
        keep_time_interval: Duration | None = None,
        keep_steps: Sequence[int] = (),
        mirror: Place | Mirror | None = None,
        local: Local | None = None,
        reuse_unchanged: bool = True,
        step_name_width: int | None = None,
        save: SavePolicy | Sequence[SavePolicy] | None = None,
        keep: KeepPolicy | Sequence[KeepPolicy] | None = None,
        save_at_end: bool = True,
        resume: Resume = "auto",
        init_from: Place | None = None,
        partial: Partial = None,
        compression: int | None = None,
        signals: Sequence[str | signal.Signals] = ("SIGTERM", "SIGHUP"),
        grace_secs: Duration | None = None,
        replicated: Sequence[str] = (),
        witness: bool = True,
        on_inexact: OnInexact = "warn",
        witness_steps_after_signal: int = 4,
        clock: Clock | None = None,
        metadata: Mapping[str, Any] | None = None,
        hyperparameters: Literal["saved", "program"] = "saved",
        reshard: Reshard | None = None,
        keep_checkpoints_without_metrics: bool = False,
        item_intervals: Mapping[str, int] | None = None,
        step_prefix: str | None = None,
        save_timeout_secs: Duration = "1h",
        barrier_timeout_secs: Duration = "10m",
        load_and_broadcast: bool | None = None,
        every_n_epochs: int | None = None,
        save_on_exception: bool = False,
        export_best: Place | None = None,
        links: bool = True,
    ) -> None:
        options = CallbackArguments(**{name: value for name, value in locals().items() if name != "self"})
        self._options = options
        self._store = RunStore(options.dirpath, options)
        self.dirpath = str(self._store.directory)
        self._preemption = PreemptionSignal(options.preemption_signals())
        self._signals: Signals | None = None
        self._evaluation: Stop | None = None
        self._recorder: FitRecorder | None = None
        self._witness: Witness | None = None
        self._has_weights = False
        private_api.follow_choices(CheckpointCallback)

    @property
    def state_key(self) -> str:
        """The callback's key in Lightning checkpoints; it is constant because the callback itself has no state."""
        return "holdfast.CheckpointCallback"

    @property
    def manager(self) -> CheckpointManager:
        """The run's checkpoint manager, for tasks outside the trainer, such as listing and pinning checkpoints.

        A checkpoint saved by several processes has two items: ``state``, and ``process`` for the data positions.
        """
        return self._store.manager

    @property
    def proof(self) -> Proof:
        """The result, so far, of comparing the resumed ``fit`` with the steps recorded before the interruption."""
        return Proof() if self._witness is None else self._witness.proof

    @property
    def preempted(self) -> bool:
        """True if a signal listed in ``signals`` or the SLURM requeue signal has arrived."""
        return self._preemption.received

    @property
    def ckpt_path(self) -> str | None:  # type: ignore[override] # trainers take None for nothing to resume from
        """The path that a trainer resumes from when no ``ckpt_path`` is given; None if there is nothing to resume from.

        Raises:
            CheckpointNotFoundError: There is no checkpoint to satisfy ``resume="must"``, or ``resume`` names a step
                that does not exist.
        """
        steps = self._store.steps()
        if self._store.may_fetch:  # The step is not known until ``setup`` fetches from the mirror.
            return ResumePath(self._store.directory) if steps and self._options.resume in ("auto", "must") else None
        if self._options.resume == "must":
            check_resume("must", steps, self._store.directory)
        step = None if self._store.has_saved else resume_step(self._options.resume, self._store.manager)
        return ResumePath(self._store.directory, step) if steps else None

    # ---- attributes of a ModelCheckpoint that trainers and loggers read; scores are 0-d tensors, None without best_fn

    @property
    def monitor(self) -> str | None:
        """The name of the metric that ranks checkpoints; None if ``best_fn`` is a function or None."""
        return self._options.best_fn if isinstance(self._options.best_fn, str) else None

    @property
    def mode(self) -> str:
        """The ranking mode: whether the largest or the smallest value is best."""
        return self._options.ranking_mode

    @property
    def save_top_k(self) -> int:
        """The maximum number of checkpoints to keep; -1 for all."""
        return -1 if self._options.max_to_keep is None else self._options.max_to_keep

    @property
    def best_model_path(self) -> str:
        """The path of the best checkpoint, or of the newest if ``best_fn`` is not set; empty if there is none."""
        return self._store.path_of(self._store.manager.best_step())

    @best_model_path.setter
    def best_model_path(self, path: str) -> None:
        """Ignore the assigned path, because the getter always reads the path from the directory."""

    @property
    def best_model_score(self) -> torch.Tensor | None:
        """The value of the ranking metric in the best checkpoint."""
        return _tensor(self._store.score(self._store.manager.best_step()))

    @property
    def last_model_path(self) -> str:
        """The path of the newest checkpoint; empty if there is no checkpoint."""
        return self._store.path_of(self._store.manager.latest_step())

    @property
    def current_score(self) -> torch.Tensor | None:
        """The value of the ranking metric in the newest checkpoint."""
        return _tensor(self._store.score(self._store.manager.latest_step()))

    @property
    def best_k_models(self) -> dict[str, torch.Tensor]:
        """A dictionary that maps the path of each checkpoint to its score; checkpoints without a score are omitted."""
        scores = {step: self._store.score(step) for step in self._store.manager.all_steps()}
        return {self._store.path_of(step): torch.tensor(score) for step, score in scores.items() if score is not None}

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to pickle, resetting the attributes of a trainer call in progress."""
        fresh = dict.fromkeys(("_signals", "_evaluation", "_recorder", "_witness"))
        return {**vars(self), **fresh, "_preemption": PreemptionSignal(self._options.preemption_signals())}

    # ---- hooks of the trainer

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Prepare the trainer to save to this directory and resume from it."""
        private_api.check_version(trainer)
        install(trainer, self._store)
        if stage != "fit":
            redirect_resume(trainer, lambda path: None if private_api.is_left_alone(trainer, path) else path)
            self._signals = Signals(trainer, self._preemption, self._store)
            self._evaluation = self._stop(getattr(trainer, f"{trainer.state.fn.value}_loop"))
            self._evaluation.begin()
            return
        # If no ckpt_path was given, the directory determines where to resume.
        begin_from = partial(self._begin_from, trainer, private_api.was_given_no_path(trainer))
        if trainer.fast_dev_run:
            redirect_resume(trainer, begin_from)
            return
        check_strategy(trainer)
        directory = self._store.directory
        if (count := sum(callback._store.directory.url == directory.url for callback in _callbacks_of(trainer))) > 1:
            raise OptionError(
                f"the trainer has {count} callbacks that save to {directory}: keep one of them, or give each its own "
                "directory"
            )
        if self._options.partial is not None and is_sharded(trainer.strategy):
            raise OptionError(
                f"partial={self._options.partial!r} does not work with {type(trainer.strategy).__name__}, which loads "
                "into a module that is already sharded; resume once with strategy='ddp' or in one process"
            )
        if self._options.save_on_exception and trainer.world_size > 1:
            raise OptionError(
                f"save_on_exception=True works with one process, but this run has {trainer.world_size}: if one of "
                "them fails, the others may wait for it and cannot save"
            )
        self._store.fetch()
        if self._options.resume == "never" and not self._store.has_saved:
            check_resume("never", self._store.steps(), directory)
        self._store.open()
        if trainer.is_global_zero:
            self._store.publish(self._options)  # in case an earlier process was killed before publishing
        self._signals = Signals(trainer, self._preemption, self._store)
        stop = self._stop(trainer.fit_loop.epoch_loop.val_loop)
        if not isinstance(stop, AgreedStop):
            self._evaluation = stop  # ends the sanity check on a signal; an AgreedStop works only once training begins
        present = (other._recorder for other in _callbacks_of(trainer) if other is not self)
        first = next((other for other in present if other is not None and other.fit.trainer is trainer), None)
        counts, replay = (Counts(), None) if first is None else (first.fit.counts, first.replay)
        fit = Fit(trainer, self._store, self._options, self._preemption, counts)
        self._recorder = FitRecorder(fit, stop, self, replay)
        self._witness = self._recorder.witness.run
        # Choose again here: if the module provides this callback, the trainer adds it only after choosing a checkpoint.
        redirect_resume(trainer, begin_from)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Read the data position and the random generator states, which are restored when the loops start."""
        if self._recorder is not None and not private_api.is_search_file(trainer.ckpt_path):
            self._recorder.resume_from(checkpoint)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Record the program's hyperparameters before those in the checkpoint replace them."""
        if self._recorder is not None:
            self._recorder.fitting.note_hyperparameters()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start saving checkpoints."""
        if self._recorder is not None:
            self._recorder.begin()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Record the batch for comparison with a resumed run."""
        if self._recorder is not None:
            self._recorder.begin_batch(batch)

    def on_validation_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        """Abort validation after a preemption signal, because the process may be killed before validation ends."""
        step = trainer.global_step if self._recorder is None else self._recorder.fit.step
        self._store.observer.reached("validation", step)
        if self._recorder is None or trainer.sanity_checking:
            self._leave_evaluation(trainer)
        else:
            self._recorder.during_validation()

    def on_test_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        """Abort a test or prediction run after a preemption signal."""
        self._leave_evaluation(trainer)

    on_predict_batch_end = on_test_batch_end

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Store the validation metrics."""
        if self._recorder is not None and not trainer.sanity_checking:
            self._recorder.writer.note_metrics(self._recorder.fit.step)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """If the run was already complete, announce that there was nothing left to do."""
        if self._recorder is not None:
            self._recorder.finish()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Let a pending save finish; with ``save_on_exception``, save the state as of the last complete batch."""
        try:
            if self._recorder is not None:
                self._recorder.writer.save_after(exception)
        except HoldfastError:
            logger.exception("the state after the last complete batch could not be saved")
        try:
            self._end(trainer, orderly=False, error=exception)
        except HoldfastError:
            # This error is only logged, because it must not replace the original exception.
            logger.exception("a background save failed while training was ending with an exception")

    def teardown(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        """Wait for the last save.

        Raises:
            SaveFailedError: The save failed.
        """
        self._end(trainer, orderly=True)

    def _chosen(self, trainer: Any, decides: bool, path: Any) -> Any:
        """Return the path to resume from: the given path or, if none was given, the path that process 0 chooses."""
        if trainer.fast_dev_run:
            return None if decides or isinstance(path, ResumePath) else path
        path = None if private_api.is_left_alone(trainer, path) else path
        if path and not decides and not isinstance(path, ResumePath):
            return path
        if private_api.only_searches(trainer):
            return None  # A Tuner must find the same values each time the program starts, so its search never resumes.
        if path and decides:
            # The trainer has compared the times of our directories, and of the files of a ModelCheckpoint.
            present = [callback for callback in _callbacks_of(trainer) if callback.ckpt_path]
            newest = max(present, key=lambda one: (one._options.resume != "auto", one._store.steps()[-1]), default=None)
            path = newest and newest.ckpt_path
        chosen = path or self.ckpt_path
        if chosen and (decides or path is None) and self._options.resume == "auto":
            self._store.check_module(trainer.lightning_module)
        directory, processes = self._store.directory, self._store.processes
        processes.compare("the options of the callbacks", {"directory": directory.url, "resume": self._options.resume})
        agreed = processes.decide("what to begin from", bool, chosen is not None)
        return (chosen or ResumePath(directory)) if agreed else None

    def _stop(self, evaluation: Any) -> Stop:
        return stop_of(self._store.processes, self._preemption, lambda: sum(evaluation.max_batches))

    def _leave_evaluation(self, trainer: Any) -> None:
        if self._evaluation is not None and self._evaluation.in_validation():
            announce("preempted: stopping; there is nothing new to save", shown=trainer.is_global_zero)
            leave(trainer, self._preemption)

    def _begin_from(self, trainer: Any, decides: bool, path: Any) -> Any:
        """Load the weights from ``init_from`` if the run starts fresh; return the path to resume from."""
        path, source = self._chosen(trainer, decides, path), self._options.init_from
        if source is None or self._has_weights:
            return path
        if path:
            logger.info("init_from=%s is ignored, as the run resumes", source)
        else:
            misfits = None if self._options.partial is None else Misfits()
            taken = take_weights(trainer, trainer.lightning_module, source, misfits)
            logger.info("took the weights from %s; everything else starts fresh", taken)
            if trainer.is_global_zero:
                warn_of_misfits(misfits, f"init_from={str(source)!r}", "weights")
        self._has_weights = True
        return path

    def _end(self, trainer: Any, *, orderly: bool, error: BaseException | None = None) -> None:
        private_api.forget_choice(trainer)
        signals, self._signals = self._signals, None
        if signals is not None:
            signals.end(error)
        recorder, self._recorder = self._recorder, None
        evaluation, self._evaluation = self._evaluation, None
        if recorder is None:
            if evaluation is not None:
                evaluation.end(orderly=orderly)
            return
        has_begun = self._store.is_open
        try:
            self._store.close(orderly=orderly)
        finally:
            recorder.detach(orderly=orderly)
            if orderly:
                barrier_exit(self._store.processes)
            recorder.announce()
        if has_begun and recorder.has_started:
            ended = "preempted" if isinstance(error, Preempted) else "failed" if error is not None else "finished"
            facts = {"error": described(error)} if ended == "failed" and error is not None else {}
            self._store.manager.events.write(ended, step=recorder.fit.step, **facts)
            if ended == "failed":
                newest = self._store.manager.latest_step()
                ending = Ending(str(self._store.directory), step=recorder.fit.step, saved=newest)
                ending.end(error, shown=trainer.is_global_zero)
            if ended == "finished":
                self._store.note_finished(trainer.lightning_module)
            recorder.announce()


def _tensor(score: float | None) -> torch.Tensor | None:
    return None if score is None else torch.tensor(score)


def _callbacks_of(trainer: Any) -> list[CheckpointCallback]:
    return [callback for callback in trainer.callbacks if isinstance(callback, CheckpointCallback)]


def take_weights(trainer: Any, module: Any, source: Place, misfits: Misfits | None = None) -> Weights:
    """Load all weights from a checkpoint into a module or, with ``misfits``, only the weights that fit."""
    if trainer.strategy.restore_checkpoint_after_setup:
        raise OptionError(
            f"init_from={str(source)!r} does not work with {type(trainer.strategy).__name__}, which shards the module "
            "before weights can be loaded; load them in the module's configure_model"
        )
    weights = load_weights(source, dict(module.state_dict()), misfits=misfits)
    module.load_state_dict(weights.tree, strict=True)
    return weights
