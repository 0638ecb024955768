"""What saves the steps that a loop reports."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...engine.errors import CheckpointNotFoundError, SaveFailedError
from ...engine.manager import CheckpointManager
from .checks import warn_of_counter
from .laststep import LastStep
from .metrics import host_metrics

if TYPE_CHECKING:
    from ...engine.policy import Decision

logger = logging.getLogger("holdfast")


class StepSaver:
    """Knows the last step that the loop reported, and saves it when it is told to.

    Args:
        manager: Where it goes: a manager with the items "state", "extras" and "process".
    """

    def __init__(self, manager: CheckpointManager) -> None:
        self._manager = manager
        self._last: LastStep | None = None
        self._saved: int | None = None

    @property
    def step(self) -> int | None:
        """The last step that was reported, or None."""
        return None if self._last is None else self._last.step

    @property
    def is_saved(self) -> bool:
        """Whether there is nothing left to save of what was reported."""
        return self._last is None or self._holds(self._last.step)

    def see(self, step: int, state: Any, metrics: Mapping[str, Any] | None, extras: Mapping[str, Any]) -> None:
        """Takes note of a step that the loop has finished."""
        last = self._last
        if last is None:
            last = self._last = LastStep(step)
        last.see(step, state, metrics, extras)

    def record(self, step: int, metrics: Mapping[str, Any]) -> bool:
        """Stores metrics with the checkpoint of a step, and returns whether there is one.

        Raises:
            SaveFailedError: Its save has failed in the background.
        """
        if not self._holds(step):
            return False
        try:
            self._manager.record_metrics(step, host_metrics(metrics))
        except CheckpointNotFoundError:
            self._manager.wait_until_finished()  # says so if its save has failed
            raise
        return True

    def reconsider(self, step: int, metrics: Mapping[str, Any]) -> Decision | None:
        """Adds metrics to the last step, and returns whether it is to be saved now; None if it is not the last one."""
        last = self._last
        if last is None or last.step != step:
            return None
        last.metrics = {**(last.metrics or {}), **metrics}
        return self._manager.decide(step, metrics=last.metrics)

    def why_lost(self) -> str | None:
        """Returns why the last step cannot be saved any more, or None when it can."""
        return None if self._last is None else self._last.why_lost()

    def save(self, reason: str) -> None:
        """Saves the last step in the background.

        Raises:
            SaveFailedError: The save before this one failed; this one is done nevertheless.
        """
        last = self._last
        assert last is not None
        if self._saved is None:
            warn_of_counter(last.step, last.state)
        metrics = None if last.metrics is None else host_metrics(last.metrics)
        try:
            items = last.items(alone=self._manager.alone)
            self._manager.save(last.step, items, metrics=metrics, force=True, reason=reason)
        except SaveFailedError:  # of the save before; this step is saved nevertheless
            self._saved = last.step
            raise
        self._saved = last.step

    def save_at_end(self) -> None:
        """Saves the last step if that is still possible, and says so if it is not."""
        lost = self.why_lost()
        if lost is None:
            self.save("at the end")
        else:
            logger.warning("step %d is not saved at the end: %s", self.step, lost)

    def _holds(self, step: int) -> bool:
        return step == self._saved or step in self._manager.all_steps()
