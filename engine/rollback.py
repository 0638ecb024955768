"""A run that has gone back to an older step: the later steps that are there belong to a branch that it has left."""

from __future__ import annotations

import logging

from .steps import StepIndex
from .storage import Location

_logger = logging.getLogger("holdfast")


class Rollback:
    """Knows the steps that a run has left behind, until it has replaced them or gone past them.

    Nothing of it is stored: another run cannot tell which steps belong together, which is why there is a warning.

    Args:
        directory: The manager's directory.
        steps: Its steps.
        warns: Whether this process warns; another one does otherwise.
    """

    def __init__(self, directory: Location, steps: StepIndex, *, warns: bool) -> None:
        self._directory = directory
        self._steps = steps
        self._warns = warns
        self._origin: int | None = None
        self._left: frozenset[int] = frozenset()
        self._began = False

    def restored(self, step: int) -> None:
        """Notes that a step was restored, from which the run may go on."""
        self._began = True
        self._origin = step
        self._left = frozenset(later for later in self._steps.steps() if later > step)

    def replaces(self, step: int) -> bool:
        """Tells whether a step that is there is one of those that were left, and is to be saved again."""
        return step in self._left

    def saving(self, step: int) -> None:
        """Notes that a step is about to be saved; warns, once, where later ones are there that were left.

        Args:
            step: The step.
        """
        later = [one for one in self._steps.steps() if one > step]
        began, self._began = self._began, True
        if not began and later:
            self._warn(
                f"step {step} is saved, and later steps are there that this run has not restored ({_listed(later)}). "
                "They count as the newest, for what is kept and for the next resume, and are not saved again unless "
                "that is forced. Use another directory, or drop them before with delete_after(step)"
            )
        elif not self._left.intersection(later):  # past all of them, or an older step was only looked at
            self._left &= {step}
        elif self._origin is not None:
            self._warn(
                f"this run went back to step {self._origin}, and later steps are there ({_listed(later)}). Each is "
                "replaced when the run saves it again; until then they count as the newest, for what is kept and for "
                f"the next resume. Drop them with delete_after({self._origin}) right after restoring, or use another "
                "directory to keep both"
            )
            self._origin = None

    def saved(self, step: int) -> None:
        """Notes that a step has been committed."""
        self._left -= {step}

    def _warn(self, what: str) -> None:
        if self._warns:
            _logger.warning("%s: %s", self._directory, what)


def _listed(steps: list[int]) -> str:
    shown = [str(step) for step in steps]
    return ", ".join(shown if len(shown) <= 6 else [*shown[:3], "...", *shown[-2:]])
