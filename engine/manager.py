"""Many checkpoints of one run: when to save, what to keep, which one to go on from."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from .checkpointer import Checkpointer, Place
from .clock import Clock
from .coordination import Coordinator
from .curation import CheckpointCuration
from .decisions import SaveDecisions
from .errors import SaveFailedError
from .history import valid_step
from .metrics import LateMetrics, plain_metrics
from .options import CheckpointManagerOptions
from .policy import Decision, StepInfo
from .record import CheckpointRecord, ItemRecord
from .report import SaveReport
from .rollback import Rollback
from .saving import Save

_logger = logging.getLogger("holdfast")


class CheckpointManager(CheckpointCuration):
    """Keeps the checkpoints of one run in one directory.

    A manager is used from one thread. Any number may read a directory; one at a time writes to it. In a program of
    several processes, each of them makes a manager and calls the same methods at the same steps: they save together,
    process 0 decides what depends on time or metrics, and only it deletes.

    Args:
        directory: Where the checkpoints are: a path or a URL. It is made when something is saved.
        checkpointers: A checkpointer for the one item, or a dictionary of them for several. None is one item: a tree,
            saved in the background.
        options: When to save and what to keep.
        metadata: Facts about the run, as JSON can hold them; stored beside the checkpoints.
        clock: Where the time comes from.
        coordinator: How processes find each other. None takes jax.distributed or torch.distributed where one of them is
            initialized; ``hf.Alone()`` is this process alone.

    >>> import tempfile, numpy as np
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     with CheckpointManager(directory, options=CheckpointManagerOptions(max_to_keep=2)) as manager:
    ...         for step in range(5):
    ...             _ = manager.save(step, {"weights": np.full(3, step)})
    ...         manager.wait_until_finished()
    ...         manager.all_steps(), manager.why_kept(3), manager.restore()
    ([3, 4], ('one of the newest 2',), {'weights': array([4, 4, 4])})
    """

    def __init__(
        self,
        directory: Place,
        checkpointers: Checkpointer | Mapping[str, Checkpointer] | None = None,
        options: CheckpointManagerOptions | None = None,
        *,
        metadata: Mapping[str, Any] | None = None,
        clock: Clock | None = None,
        coordinator: Coordinator | None = None,
    ) -> None:
        super().__init__(directory, checkpointers, options, metadata=metadata, clock=clock, coordinator=coordinator)
        self._late = LateMetrics()
        self._listeners: list[Callable[[SaveReport], None]] = []
        self._decisions = SaveDecisions(self.options.triggers(), self._clock, self._together)
        self._decisions.previous = self.latest_step()
        self._rollback = Rollback(self.directory, self._steps, warns=self._together.leads)

    # ---- saving

    def decide(self, step: int, *, metrics: Mapping[str, Any] | None = None) -> Decision:
        """Tells whether a save is due, and why or why not.

        The first step that is asked about counts as the one that the run begins with.

        Args:
            step: The number of optimizer updates done.
            metrics: The metrics of this step, for ``save_on_best``.
        """
        saved = (step in self._steps and not self._rollback.replaces(step)) or step == self._in_flight
        return self._decisions.decide(step, metrics, saved=saved, earlier=self._earlier)

    def should_save(self, step: int, *, metrics: Mapping[str, Any] | None = None) -> bool:
        """Tells whether a save is due at a step."""
        return not self.options.read_only and self.decide(step, metrics=metrics).save

    def save(
        self,
        step: int,
        items: Any,
        *,
        metrics: Mapping[str, Any] | None = None,
        force: bool = False,
        save_kwargs: Mapping[str, Any] | None = None,
        reason: str | None = None,
    ) -> bool:
        """Saves a step if that is due.

        Args:
            step: The number of optimizer updates in the items, 0 or more.
            items: The item, or a dictionary of items if the manager has several.
            metrics: Numbers to store with the checkpoint and to rank it by.
            force: Save although nothing is due; a checkpoint of the same step is replaced, atomically. After
                :meth:`restore` of an older step, the steps after it are replaced in this way without being forced.
            save_kwargs: Further arguments for the handler, or a dictionary of them by item.
            reason: Why it is saved, for the log and the record, instead of what the triggers say.

        Returns:
            Whether it was saved. What is saved in the background is not committed yet.

        Raises:
            SaveFailedError: The save before this one failed in the background; this one is done nevertheless.
            UnsupportedLeafError: An item cannot be saved; nothing was written.
            OwnershipError: Another run writes to this directory.
        """
        began = time.perf_counter()
        self._check_writable()
        step = valid_step(step)
        decision = Decision(True, "forced") if force else self.decide(step, metrics=metrics)
        if not decision.save:
            return False
        self.acquire()
        self._background.join()
        group = self._together.group("save")
        try:
            numbers = plain_metrics(metrics)
            values = self._items.to_save(items, save_kwargs or {})
        except BaseException as error:
            if group is not None:
                group.fail(error)
            raise
        save = Save(
            self._steps.location(step),
            values,
            overwrite=force or step in self._steps.damage or self._rollback.replaces(step),
            began=began,
            record=lambda found: self._record(step, found, reason or decision.reason),
            group=group,
            timeout=self._together.timeout,
        )
        self._rollback.saving(step)
        self._late.open(step, numbers)
        self._decisions.note_save(step)
        if not save.in_background:
            self._complete(step, save)
        earlier = self._background.take_error()
        if save.in_background:
            self._in_flight = step
            what = f"step {step} of {self.directory}"
            try:
                self._background.start(lambda: self._complete(step, save), what=what, step=step)
            except BaseException as error:  # the system has no more threads
                self._in_flight = None
                self._late.close()
                save.give_up(error)
                raise
        if earlier is not None:
            raise earlier
        return True

    def add_listener(self, listener: Callable[[SaveReport], None]) -> None:
        """Calls a function after every commit, on the thread that committed.

        Args:
            listener: Receives the report.
        """
        self._listeners.append(listener)

    # ---- ending

    def is_saving_in_progress(self) -> bool:
        """Tells whether a save is under way in the background."""
        return self._background.running

    def wait_until_finished(self) -> None:
        """Waits for the save that is under way.

        Raises:
            SaveFailedError: It failed.
        """
        self._background.wait()

    def check_for_errors(self) -> None:
        """Raises SaveFailedError if a save has failed that was not told yet; does not wait."""
        self._background.check()

    def close(self) -> None:
        """Waits for the save that is under way and gives the directory back.

        Raises:
            SaveFailedError: It failed.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._background.wait()
        finally:
            self._run.ownership.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- within

    def _complete(self, step: int, save: Save) -> None:
        """Writes and commits a save, then lets go of what is not needed any more."""
        try:
            record, report = save.complete()
            self._steps.add(step, record)
            self._rollback.saved(step)
            self._run.last_saved = step
        finally:
            self._in_flight = None
            self._late.close()
        _logger.info("%s", report)
        try:
            self._run.collect()
            for listener in self._listeners:
                listener(report)
        except Exception as error:
            raise SaveFailedError(
                f"step {step} of {self.directory} is saved, but a listener or best_fn failed then: {error!r}",
                step,
            ) from error

    def _reached(self, step: int) -> None:
        self._decisions.previous = step
        self._rollback.restored(step)

    def _earlier(self) -> Sequence[StepInfo]:
        """Returns the steps that a new best has to beat, the one that is being saved among them."""
        step = self._in_flight
        if step is None:
            return self._steps.infos()
        return *self._steps.infos(), StepInfo(step=step, time=self._clock.now(), metrics=self._late.peek())

    def _record(self, step: int, items: Mapping[str, ItemRecord], reason: str) -> CheckpointRecord:
        """Makes the commit record, at the last moment: the right to write is checked here."""
        self._run.ownership.check()
        return CheckpointRecord(
            items=items, time=self._clock.now(), step=step, reason=reason, metrics=self._late.close()
        )
