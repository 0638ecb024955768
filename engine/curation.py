"""What a manager changes in checkpoints that are there: metrics and pins are added, steps are deleted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .errors import StateError
from .history import CheckpointHistory, valid_step
from .metrics import LateMetrics, plain_metrics


class CheckpointCuration(CheckpointHistory):
    """The part of a :class:`~holdfast.CheckpointManager` that writes, but does not save."""

    _closed = False
    _acquired = False
    _in_flight: int | None = None  # the step that is being saved
    _late: LateMetrics  # one for each manager

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

        def record() -> dict[str, Any] | None:
            if self._late.add(step, found):
                return None  # the record is yet to be written, and will hold them
            self._change(step, found)
            return found

        self.acquire()
        recorded = self._together.decide(f"metrics of step {step}", record)
        if recorded is None:
            return
        if not self._together.leads:
            self._change(step, recorded)
        if not self._background.running:  # a save that is under way collects when it is done
            self._background.start(self._run.collect, what=f"{self.directory}: deleting old steps")

    def _change(self, step: int, metrics: Mapping[str, Any]) -> None:
        if step == self._in_flight:
            self._background.join()
        self._run.change(step, lambda record: record.with_metrics(metrics))

    def pin(self, step: int) -> None:
        """Keeps a step whatever the rules say, until it is unpinned."""
        self._check_writable()
        self.acquire()
        self._everywhere(f"pin {step}", lambda: self._run.pin(step, True))

    def unpin(self, step: int) -> None:
        """Leaves a step to the rules again."""
        self._check_writable()
        self.acquire()
        self._everywhere(f"unpin {step}", lambda: self._run.pin(step, False))

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
        self._everywhere(f"delete {step}", lambda: self._run.delete(step))

    def delete_after(self, step: int) -> list[int]:
        """Deletes all steps later than one, pinned and damaged ones, too: the way to go back to a step for good.

        ::

            state = manager.restore(1200, template)
            manager.delete_after(1200)  # or they would count as the newest, for retention and for the next resume

        The latest goes first, so that what is left at any moment is the beginning of what was there.

        Args:
            step: The step to go back to.

        Returns:
            The steps that were deleted, in ascending order.
        """
        self._check_writable()
        step = valid_step(step)
        self._background.join()
        self.acquire()
        deleted: list[int] = self._together.decide(f"delete after {step}", lambda: self._run.delete_after(step))
        if not self._together.leads:
            for one in deleted:
                self._steps.remove(one)
        return deleted

    def _everywhere(self, what: str, work: Callable[[], None]) -> None:
        """Does something on process 0, and then, where that went well, in the books of the others."""
        self._together.decide(what, work)
        if not self._together.leads:
            work()

    def acquire(self) -> None:
        """Takes the right to write to the directory, and removes what interrupted runs have left in it.

        Saving does this by itself; doing it early tells a second run that it is one before it has trained for an hour.

        Raises:
            OwnershipError: Another run writes to this directory.
        """
        self._check_writable()
        if self._acquired:
            self._run.ownership.check_not_lost()
            return
        self._together.decide("acquire", lambda: self._run.acquire(self._metadata, self.options))
        if not self._together.leads:
            self._steps.reload()
        self._acquired = True

    def _check_writable(self) -> None:
        if self._closed:
            raise StateError(f"{self.directory}: this manager is closed; make a new one")
        if self.options.read_only:
            raise StateError(f"{self.directory}: this manager was made with read_only=True")
