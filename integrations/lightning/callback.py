"""The callback of a Lightning trainer: saves, keeps, resumes."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from ...engine.checkpointer import Place
from ...engine.errors import CheckpointExistsError, CheckpointNotFoundError, HoldfastError
from ..options import BestFn, BestMode, CallbackOptions, Resume
from ..preemption import PreemptionSignal
from .attributes import ModelCheckpointAttributes
from .initialization import take_weights
from .io import ResumePath, install, redirect_resume
from .packages import ResumingCallback, silence_misleading_warnings
from .saver import FitSaver
from .signals import take_over_sigterm
from .stopping import AgreedStop, OwnStop, Stop
from .store import RunStore
from .strategies import check_strategy

if TYPE_CHECKING:
    from ...engine.durations import Duration
    from ...engine.manager import CheckpointManager

logger = logging.getLogger("holdfast")


class CheckpointCallback(ModelCheckpointAttributes, ResumingCallback):
    """Saves a Lightning run, keeps the right checkpoints, and brings the run back where it was, all by itself.

    ::

        callback = CheckpointCallback("runs/x/checkpoints", save_interval_steps=100, max_to_keep=3)
        trainer = L.Trainer(callbacks=[callback])
        trainer.fit(model, datamodule)  # the same command again resumes; no ckpt_path

    Step N means ``trainer.global_step == N``: N optimizer updates are in the checkpoint. A run that is interrupted
    anywhere and resumed ends bit for bit where the uninterrupted run does. In the middle of an epoch, data loaders
    with ``state_dict`` and ``load_state_dict`` go on where they were; others draw the batches of before once more.

    A ``ckpt_path`` given to ``fit`` wins over the newest checkpoint; it may name a step of this or another directory,
    or one of Lightning's own files. ``trainer.test(ckpt_path="best")`` and ``"last"`` work as usual.

    SIGTERM only sets a flag. The next point between two batches, or within a validation, saves, waits until the files
    are durable, and ends the process with status 143. Other exceptions save nothing more, but let a save that is under
    way finish.

    Under DDP (``strategy="ddp"``) and ``ModelParallelStrategy`` (FSDP2) all processes save one checkpoint, each
    a share of the parameters and of the optimizers, and each its own random generators and place in the data; SIGTERM
    to any of them stops all at the same step. Every process has to see the directory.

    Everything goes into the engine's format as arrays and plain values, each under its own path, such as
    ``state_dict/layer.weight``; nothing is pickled. Hyper-parameters and callback states that are neither are left
    out, and named in a warning.

    Args:
        dirpath: Where the checkpoints go: a path or a URL.
        save_interval_steps: Save every so many optimizer steps.
        save_interval_secs: Save when so much time has passed since the last save: seconds, or ``"15m"``, ``"1h"``.
            Without any of the three triggers, every 15 minutes.
        save_on_best: Save when the metric is better than at every checkpoint so far, after a validation or an epoch;
            needs ``best_fn``.
        save_at_end: Save the last step when training ends.
        best_fn: Name of the metric in ``trainer.callback_metrics`` that tells which step is best, or a function of the
            metrics.
        best_mode: Whether the best value is the largest or the smallest.
        max_to_keep: Keep so many checkpoints: the best ones with ``best_fn``, the newest without; None for all.
        keep_latest: Keep so many of the newest checkpoints, best or not.
        keep_period: Keep every checkpoint whose step is a multiple of this.
        keep_time_interval: Keep one checkpoint in every such span of time.
        keep_steps: Keep these steps.
        resume: ``"auto"`` resumes if there is something to resume from, ``"must"`` raises if there is not, and
            ``"never"`` raises if there is.
        init_from: Where a fresh start takes its weights from: any checkpoint that ``hf.load`` reads, such as a file of
            ``torch.save``, Lightning or safetensors. Names, shapes and dtypes must be those of the module's state dict;
            all else, such as the optimizers and the step, starts fresh. A run that resumes ignores it.
        compression: Compress arrays with zstd at this level, 1 to 22. It takes longer than a fast disk; None does not.

    Raises:
        OptionError: An option has a value that makes no sense.
        StateError: From the trainer: its strategy is not one that can be saved; the message says which ones are.
    """

    def __init__(
        self,
        dirpath: Place,
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
    ) -> None:
        # The base class is not initialized: all it does is to note the one file that it would save on an exception.
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
        self._store = RunStore(dirpath, self._options)
        self.dirpath = str(self._store.directory)
        self._preemption = PreemptionSignal()
        self._saver: FitSaver | None = None
        self._has_saved = False
        self._has_weights = False
        silence_misleading_warnings()

    @property
    def state_key(self) -> str:
        """The same whatever the arguments are, as there is no state under it."""
        return "holdfast.CheckpointCallback"

    @property
    def manager(self) -> CheckpointManager:
        """The manager of the checkpoints, for everything beyond the trainer: listing, metrics, pinning.

        What several processes have saved has two items: ``state``, and ``process`` for what each of them had.
        """
        return self._store.manager

    @property
    def preempted(self) -> bool:
        """Whether SIGTERM has arrived."""
        return self._preemption.received

    @property
    def ckpt_path(self) -> str | None:  # type: ignore[override] # trainers take None for nothing to resume from
        """The path that a trainer resumes from when it is given none; None when there is nothing to resume from.

        Raises:
            CheckpointNotFoundError: ``resume="must"``, and there is no checkpoint.
        """
        if self._store.steps():
            return ResumePath(self._store.directory)
        if self._options.resume == "must":
            raise CheckpointNotFoundError(
                f"resume='must', but there is no checkpoint in {self._store.directory}; check the path, or pass "
                "resume='auto' to start fresh when there is none"
            )
        return None

    # ---- hooks of the trainer

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Gets between the trainer and its checkpoints, before any is loaded."""
        install(trainer.strategy, self._store)
        if stage != "fit":
            return
        if trainer.fast_dev_run:
            redirect_resume(
                trainer, lambda path: self._begin_from(trainer, None if isinstance(path, ResumePath) else path)
            )
            return
        check_strategy(trainer)
        # Trainers look for a checkpoint before they ask the module for its callbacks, this one perhaps among them.
        redirect_resume(trainer, lambda path: self._begin_from(trainer, self._chosen(path)))
        steps = self._store.steps()
        if self._options.resume == "never" and steps and not self._has_saved:
            raise CheckpointExistsError(
                f"resume='never', but {self._store.directory} holds {len(steps)} checkpoint(s), the newest of step "
                f"{steps[-1]}; choose another directory, delete this one, or pass resume='auto' to go on from there"
            )
        self._store.open()
        self._saver = FitSaver(
            trainer,
            self._store,
            self._options,
            self._stop(trainer),
            attached=lambda: any(callback is self for callback in trainer.callbacks),
            announce=lambda: self._announce(trainer),
        )

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Adds the place in the data and the random generators to what is saved."""
        if self._saver is not None:
            self._saver.add_to(checkpoint)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Takes them out again, for the moment when the loops need them."""
        if self._saver is not None:
            self._saver.go_on_from(checkpoint)

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        """Takes SIGTERM over from a handler that would wait for other processes in the middle of anything."""
        if self._saver is not None and trainer.world_size > 1:
            take_over_sigterm(trainer, self._preemption)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Takes SIGTERM over."""
        if self._saver is not None:
            take_over_sigterm(trainer, self._preemption)
            self._saver.begin()

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """Leaves a validation that would outlast the time that a preempted process has."""
        if self._saver is not None:
            self._saver.during_validation()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Notes what was measured."""
        if self._saver is not None and not trainer.sanity_checking:
            self._saver.notice_metrics()

    def on_exception(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        """Lets a save that is under way finish; saves nothing, as the exception came in the middle of something."""
        try:
            self._end(trainer, orderly=False)
        except HoldfastError:
            # The exception under way matters more; this one must not take its place.
            logger.exception("a save failed in the background while training was ending with an exception")

    def teardown(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        """Waits for the last save.

        Raises:
            SaveFailedError: It failed.
        """
        self._end(trainer, orderly=True)

    def _chosen(self, path: Any) -> Any:
        """Returns the path to resume from: the one that was named, or else what process 0 has found for all."""
        if path and not isinstance(path, ResumePath):
            return path
        found = path or self.ckpt_path
        return (found or ResumePath(self._store.directory)) if self._store.agree(found is not None) else None

    def _stop(self, trainer: Any) -> Stop:
        group = self._store.together.group("where to stop")
        if group is None:
            return OwnStop(self._preemption)
        validation = trainer.fit_loop.epoch_loop.val_loop
        return AgreedStop(group, self._preemption, lambda: sum(validation.max_batches))

    def _begin_from(self, trainer: Any, path: Any) -> Any:
        """Takes the weights of a fresh start, once; returns the path to resume from."""
        place = self._options.init_from
        if place is None or self._has_weights:
            return path
        if path:
            logger.info("init_from=%s is ignored, as the run resumes", place)
        else:
            logger.info(
                "took the weights from %s; all else starts fresh",
                take_weights(trainer, trainer.lightning_module, place),
            )
        self._has_weights = True
        return path

    def _end(self, trainer: Any, *, orderly: bool) -> None:
        saver, self._saver = self._saver, None
        if saver is None:
            return
        self._preemption.restore()
        try:
            self._store.close()
        finally:
            saver.detach(orderly=orderly)
            if orderly:
                self._store.part()
            self._announce(trainer)

    def _announce(self, trainer: Any) -> None:
        """Tells loggers of committed checkpoints, from the trainer's thread."""
        reports = self._store.reports
        if not reports:
            return
        del reports[: len(reports)]
        self._has_saved = True
        if not trainer.is_global_zero:
            return
        for listener in trainer.loggers:
            listener.after_save_checkpoint(weakref.proxy(self))
