"""Many checkpoints of one run: when to save, what to keep, which one to go on from."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from .background import BackgroundSave
from .checkpointer import Checkpointer, Place
from .clock import Clock, SystemClock
from .directory import RunDirectory
from .durations import seconds
from .errors import (
    CheckpointNotFoundError,
    DamagedCheckpointError,
    NoWholeCheckpointError,
    OptionError,
    SaveFailedError,
    StateError,
)
from .items import ItemSet
from .metrics import LateMetrics, plain_metrics
from .options import CheckpointManagerOptions
from .policy import Decision, Moment, StepInfo, best, decide
from .record import CheckpointRecord, ItemRecord
from .report import SaveReport
from .saving import Save
from .storage import Location, as_location

_logger = logging.getLogger("holdfast")


@dataclass(frozen=True, slots=True)
class Restored:
    """A checkpoint that was restored.

    Attributes:
        step: Its step.
        items: What was restored: the item, or a dictionary of items if the manager has several.
        skipped: Newer steps that are damaged, each with what is wrong.
    """

    step: int
    items: Any
    skipped: tuple[tuple[int, str], ...] = ()


class CheckpointManager:
    """Keeps the checkpoints of one run in one directory.

    A manager is used from one thread. Any number may read a directory; one at a time writes to it.

    Args:
        directory: Where the checkpoints are: a path or a URL. It is made when something is saved.
        checkpointers: A checkpointer for the one item, or a dictionary of them for several. None is one item: a tree,
            saved in the background.
        options: When to save and what to keep.
        metadata: Facts about the run, as JSON can hold them; stored beside the checkpoints.
        clock: Where the time comes from.

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
    ) -> None:
        self.directory: Location = as_location(directory)
        self.options = options or CheckpointManagerOptions()
        self._items = ItemSet(checkpointers)
        self._metadata = None if metadata is None else dict(metadata)
        self._clock = clock or SystemClock()
        self._triggers = self.options.triggers()
        self._background = BackgroundSave(seconds(self.options.save_timeout_secs))
        self._run = RunDirectory(
            self.directory, self.options.step_prefix, self.options.rules(), self._clock, self._background.join
        )
        self._steps = self._run.steps
        self._listeners: list[Callable[[SaveReport], None]] = []
        self._closed = False
        self._in_flight: int | None = None
        self._late = LateMetrics()
        self._previous: int | None = self.latest_step()
        self._last_save = self._clock.monotonic()

    # ---- saving

    def decide(self, step: int, *, metrics: Mapping[str, Any] | None = None) -> Decision:
        """Tells whether a save is due, and why or why not.

        The first step that is asked about counts as the one that the run begins with.

        Args:
            step: The number of optimizer updates done.
            metrics: The metrics of this step, for ``save_on_best``.
        """
        decision = decide(
            self._triggers,
            Moment(
                step=step,
                previous=self._previous,
                now=self._clock.monotonic(),
                last=self._last_save,
                metrics=metrics,
                earlier=self._earlier() if self.options.save_on_best else (),
                saved=step in self._steps or step == self._in_flight,
            ),
        )
        if self._previous is None:
            self._previous = step
        return decision

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
            force: Save although nothing is due; a checkpoint of the same step is replaced, atomically.
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
        step = _valid_step(step)
        decision = Decision(True, "forced") if force else self.decide(step, metrics=metrics)
        if not decision.save:
            return False
        self.acquire()
        self._background.join()
        numbers = plain_metrics(metrics)
        save = Save(
            self._steps.location(step),
            self._items.to_save(items, save_kwargs or {}),
            overwrite=force or step in self._steps.damage,
            began=began,
            record=lambda found: self._record(step, found, reason or decision.reason),
        )
        self._late.open(step, numbers)
        self._previous, self._last_save = step, self._clock.monotonic()
        if not save.in_background:
            self._complete(step, save)
        earlier = self._background.take_error()
        if save.in_background:
            self._in_flight = step
            what = f"step {step} of {self.directory}"
            self._background.start(lambda: self._complete(step, save), what=what, step=step)
        if earlier is not None:
            raise earlier
        return True

    def record_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Stores metrics with a step that has been saved, or is being saved; new values replace old ones.

        Args:
            step: The step.
            metrics: Numbers, possibly nested.

        Raises:
            CheckpointNotFoundError: There is no such step.
        """
        self._check_writable()
        found = plain_metrics(metrics) or {}
        if self._late.add(step, found):
            return  # its record is yet to be written, and will hold them
        if step == self._in_flight:
            self._background.join()
        self.acquire()
        self._run.change(step, lambda record: record.with_metrics(found))
        if not self._background.running:  # a save that is under way collects when it is done
            self._background.start(self._run.collect, what=f"{self.directory}: deleting old steps")

    def pin(self, step: int) -> None:
        """Keeps a step whatever the rules say, until it is unpinned."""
        self._check_writable()
        self.acquire()
        self._run.pin(step, True)

    def unpin(self, step: int) -> None:
        """Leaves a step to the rules again."""
        self._check_writable()
        self.acquire()
        self._run.pin(step, False)

    def delete(self, step: int) -> None:
        """Deletes a step.

        Args:
            step: The step.

        Raises:
            CheckpointNotFoundError: There is no such step.
        """
        self._check_writable()
        if step == self._in_flight:
            self._background.join()
        self.acquire()
        self._run.delete(step)

    def acquire(self) -> None:
        """Takes the right to write to the directory, and removes what interrupted runs have left in it.

        Saving does this by itself; doing it early tells a second run that it is one before it has trained for an hour.

        Raises:
            OwnershipError: Another run writes to this directory.
        """
        self._check_writable()
        self._run.acquire(self._metadata, self.options)

    def add_listener(self, listener: Callable[[SaveReport], None]) -> None:
        """Calls a function after every commit, on the thread that committed.

        Args:
            listener: Receives the report.
        """
        self._listeners.append(listener)

    # ---- looking

    def all_steps(self) -> list[int]:
        """Returns the committed steps in ascending order."""
        return self._steps.steps()

    def latest_step(self) -> int | None:
        """Returns the newest committed step, or None."""
        steps = self.all_steps()
        return steps[-1] if steps else None

    def best_step(self) -> int | None:
        """Returns the step that ``best_fn`` ranks first; the newest if there is no ``best_fn`` or no metric."""
        if self.options.best_fn is None:
            return self.latest_step()
        found = best(self._steps.infos(), self.options.best_fn, self.options.best_mode)
        return self.latest_step() if found is None else found

    def why_kept(self, step: int) -> tuple[str, ...]:
        """Returns every reason for which a committed step is kept; empty if it is about to be deleted.

        Args:
            step: The step.

        Raises:
            CheckpointNotFoundError: There is no such step.
        """
        self._steps.record(step)
        return self._run.kept().get(step, ())

    def metrics(self, step: int) -> Mapping[str, Any] | None:
        """Returns the metrics stored with a step, or None.

        Args:
            step: The step.

        Raises:
            CheckpointNotFoundError: There is no such step.
        """
        return self._steps.record(step).metrics

    def metadata(self) -> Mapping[str, Any] | None:
        """Returns the facts about the run that are stored beside the checkpoints, or None."""
        return self._metadata if self._metadata is not None else self._run.metadata()

    def structure(self, step: int | None = None) -> Any:
        """Returns what a step looks like, without reading its data.

        Args:
            step: The step; None is the newest.

        Returns:
            The tree with a description of every leaf, or a dictionary of those by item if the manager has several.
        """
        found = self.latest_step() if step is None else step
        if found is None:
            raise CheckpointNotFoundError(f"{self.directory}: there is no checkpoint")
        return self._items.structure(self._steps.location(found), self._steps.record(found))

    def reload(self) -> None:
        """Reads the directory anew, to see what another process has done; waits for a save that is under way."""
        self._background.join()
        self._steps.reload(forget=True)

    # ---- restoring

    def restore(
        self, step: int | None = None, items: Any = None, *, restore_kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Reads a step back.

        Args:
            step: The step; None is the newest that is whole.
            items: A template, or a dictionary of templates if the manager has several items. Only the items that are
                named in it are restored; None restores all.
            restore_kwargs: Further arguments for the handler, or a dictionary of them by item.

        Returns:
            The item, or a dictionary of items if the manager has several.

        Raises:
            CheckpointNotFoundError: There is no such step, or none at all.
            DamagedCheckpointError: The step is damaged.
            TreeMismatchError: A template and what was saved differ.
            NoWholeCheckpointError: No step was given, and all of them are damaged.
        """
        self._background.join()
        if step is None:
            restored = self.restore_latest(items, restore_kwargs=restore_kwargs)
            if restored is None:
                raise CheckpointNotFoundError(f"{self.directory}: there is no checkpoint to restore")
            return restored.items
        found = self._restore(_valid_step(step), items, restore_kwargs or {})
        self._previous = step
        return found

    def restore_latest(self, items: Any = None, *, restore_kwargs: Mapping[str, Any] | None = None) -> Restored | None:
        """Reads the newest step that is whole.

        Damaged steps are passed over, with a warning for each; that a template does not fit is an error at once.

        Args:
            items: As for :meth:`restore`.
            restore_kwargs: As for :meth:`restore`.

        Returns:
            The step and what was restored, or None if the directory holds no checkpoint.

        Raises:
            NoWholeCheckpointError: There are checkpoints, and all of them are damaged.
            TreeMismatchError: A template and what was saved differ.
        """
        self._background.join()
        skipped: list[tuple[int, str]] = []
        for step in sorted({*self.all_steps(), *self._steps.damage}, reverse=True):
            try:
                found = self._restore(step, items, restore_kwargs or {})
            except DamagedCheckpointError as error:
                _logger.warning("%s: step %d is damaged and passed over: %s", self.directory, step, error)
                skipped.append((step, str(error)))
                continue
            if skipped:
                _logger.warning("%s: going back to step %d, the newest whole checkpoint", self.directory, step)
            for damaged, what in skipped:
                self._steps.condemn(damaged, what)
            self._previous = step
            return Restored(step, found, tuple(skipped))
        if skipped:
            raise NoWholeCheckpointError(
                "\n".join(
                    [
                        f"{self.directory}: every checkpoint is damaged. Look with `holdfast verify`; "
                        "to start over, use another directory",
                        *(f"  step {step}: {what}" for step, what in skipped),
                    ]
                )
            )
        return None

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

    def _restore(self, step: int, items: Any, kwargs: Mapping[str, Any]) -> Any:
        return self._items.restore(self._steps.location(step), self._steps.record(step), items, kwargs)

    def _check_writable(self) -> None:
        if self._closed:
            raise StateError(f"{self.directory}: this manager is closed; make a new one")
        if self.options.read_only:
            raise StateError(f"{self.directory}: this manager was made with read_only=True")


def _valid_step(step: Any) -> int:
    try:
        number = int(step.__index__())
    except AttributeError:
        raise OptionError(f"step={step!r} must be a whole number") from None
    if number < 0:
        raise OptionError(f"step={number} must not be negative")
    return number
