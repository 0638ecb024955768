"""A checkpoint callback for ``model.fit`` in Keras 3 with the torch and jax backends."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from ..engine.errors import OptionError, StateError
from ..engine.manager import Moment, SavePolicy, listed_policies
from ..engine.storage import Place
from .loop import CheckpointCallback as LoopCallback
from .options import epoch_reason

try:
    from keras.callbacks import Callback
except ImportError:  # the documentation is built without Keras
    Callback = object

__all__ = ["CheckpointCallback"]

_POSITION = "position"  # extra that counts the finished epochs and the batches of the current epoch

logger = logging.getLogger("holdfast")


class CheckpointCallback(Callback):  # type: ignore[misc]  # Keras has no types
    """A Keras callback that saves and restores the model and optimizer in ``model.fit``, and stops training on SIGTERM.

    ::

        with CheckpointCallback("runs/digits", max_to_keep=3) as checkpoint:
            model.fit(x, y, epochs=10, initial_epoch=checkpoint.initial_epoch, callbacks=[checkpoint])
        sys.exit(checkpoint.exit_status)

    Each batch is a step. The last step of an epoch is saved after validation, with the epoch's metrics, such as
    ``val_loss``. A run that resumes from the end of an epoch continues bit for bit if its data depends only on
    ``extras`` and the global random generators of Python, numpy and torch. Steps within an epoch are saved on
    preemption and at the interval ``save_interval_steps``. Because ``fit`` cannot start within an epoch, a run that
    resumes from such a step reads the epoch's data from the beginning, and a warning states how many batches repeat.

    Args:
        directory: The checkpoint directory, as a path or URL.
        every_n_epochs: Save at the end of every epoch whose number is a multiple of this value. If None, only
            the other options determine when to save.
        extras: Further values and objects to save and restore, by name, such as a data generator that has ``get_state``
            and ``set_state``. All extras of ``holdfast.CheckpointCallback`` are supported.
        **options: All other options of ``holdfast.CheckpointCallback``.

    Raises:
        OptionError: Keras is not installed, or the value of an option is invalid.
        StateError: Raised by ``fit`` if it does not begin at the epoch given by ``checkpoint.initial_epoch``.
    """

    def __init__(
        self,
        directory: Place,
        *,
        every_n_epochs: int | None = 1,
        extras: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        if Callback is object:
            raise OptionError("holdfast.keras needs Keras 3: pip install keras")
        super().__init__()
        self._ends = _EndsOfEpochs(every_n_epochs)
        policies = [*listed_policies(options.pop("save", None))]
        if every_n_epochs is not None:
            policies.append(self._ends)
        self._loop = LoopCallback(directory, save=policies or None, **options)
        self._extras = dict(extras or {})
        self._began = False
        self._epoch = 0  # number of finished epochs
        self._begin_of_epoch = 0  # step at the start of the epoch
        self._waiting: tuple[int, Any] | None = None  # index and logs of a batch that has not been reported yet

    @property
    def loop(self) -> LoopCallback:
        """The training loop callback that does the work, with attributes such as ``manager`` and ``proof``."""
        return self._loop

    @property
    def exit_status(self) -> int:
        """The exit status for the program, as in ``holdfast.CheckpointCallback``: 75 after a preemption."""
        return self._loop.exit_status

    @property
    def initial_epoch(self) -> int:
        """The number of finished epochs in the checkpoint, or 0 if there is none. Pass it as ``initial_epoch``."""
        checkpoint = self._loop.peek()
        return 0 if checkpoint is None else int(checkpoint.extras[_POSITION]["epoch"])

    def __enter__(self) -> Self:
        self._loop.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._loop.__exit__(kind, error, traceback)

    # ---- the hooks of Keras

    def on_train_begin(self, logs: Any = None) -> None:
        """Restore the model and optimizer, whose variables now exist."""
        if self._began:  # a later call to fit continues the run
            return
        self._began = True
        start = {"epoch": 0, "batch": 0}
        _, self._begin_of_epoch = self._loop.restore_or_initialize(
            {"model": self.model}, **{_POSITION: start}, **self._extras
        )
        position = self._loop.extras[_POSITION]
        self._epoch = position["epoch"]
        if position["batch"]:
            logger.warning(
                "step %d is within epoch %d, %d batches after its beginning, where fit cannot begin: the run goes on "
                "with the first batch of this epoch, so that these are trained on again",
                self._begin_of_epoch,
                position["epoch"] + 1,
                position["batch"],
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Raise StateError if the epoch differs from the number of finished epochs."""
        if epoch != self._epoch:
            raise StateError(
                f"fit begins with initial_epoch={epoch}, and {self._epoch} epochs are in the state: pass "
                "initial_epoch=checkpoint.initial_epoch"
            )

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Report the previous batch, which cannot have been the last of its epoch."""
        self._report_waiting()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Report the batch now if it cannot be the last of its epoch."""
        self._waiting = batch, logs
        steps = self.params.get("steps")
        if steps is not None and batch + 1 < steps:
            self._report_waiting()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Report the last batch of an epoch, after its validation."""
        if self._waiting is None:  # the run was stopped after a batch that has already been reported
            return
        batch, self._waiting = self._waiting[0], None
        self.model.reset_metrics()  # as Keras does at the start of the next epoch, where a resumed run begins
        self._epoch = epoch + 1
        self._ends.finished = self._epoch
        self._report(batch, logs, {"epoch": self._epoch, "batch": 0})
        self._ends.finished = None
        self._begin_of_epoch += batch + 1

    def _report_waiting(self) -> None:
        if self._waiting is not None:
            (batch, logs), self._waiting = self._waiting, None
            self._report(batch, logs, {"epoch": self._epoch, "batch": batch + 1})

    def _report(self, batch: int, logs: Any, position: Mapping[str, int]) -> None:
        model = self.model  # with jax, this access copies the current values to the model
        step = self._begin_of_epoch + batch + 1
        outcome = self._loop.on_step(step, {"model": model}, metrics=logs, **{_POSITION: position}, **self._extras)
        if outcome.should_stop:
            model.stop_training = True


class _EndsOfEpochs(SavePolicy):
    """Saves at the end of every ``n``-th epoch."""

    def __init__(self, n: int | None) -> None:
        if n is not None and (type(n) is not int or n < 1):
            raise OptionError(f"every_n_epochs={n!r} must be a whole number of at least 1, or None")
        self._n = n
        self.finished: int | None = None  # number of finished epochs; None within an epoch

    def reason(self, moment: Moment) -> str | None:
        return epoch_reason(self._n, self.finished)
