"""The interface of places that hold steps besides the directory: the mirror, and the local places of the hosts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

from ..checkpoint import BackgroundSave
from ..storage import Place
from .ownership import RunIdentity

Point = Literal["saving", "commit", "committed", "ended", "changed", "deleted"]
"""What happens in the directory: a save begins; its commit record is about to be written, on process 0; it was written;
the save has ended, whether it has failed or not; the run owns the directory, or a step was committed, or its metrics or
its pin have changed; steps were deleted explicitly, and no later run may take them from elsewhere."""


class StepPlace:
    """A place of steps besides the directory; all processes of a program call the same methods."""

    shown = ""  # how messages name it
    url: Place = ""
    background = BackgroundSave()  # the saves of this place, if it has a thread for them
    writes_directory = False  # whether a fetch copies a step into the directory, which the run must own then
    identity = RunIdentity()  # the fields of the run's identity that this place supplies

    @property
    def unused(self) -> Mapping[int, str]:
        """The steps that are damaged or whose run is uncertain, each with the reason."""
        return {}

    def reached(self, point: Point, step: int) -> None:
        """Handle a point that the run has reached in its directory."""

    def newer_steps(self) -> Collection[int]:
        """Return the steps that are newer than every step of the directory, the newest first."""
        return ()

    def steps(self) -> Collection[int]:
        """Return the steps that can be fetched, on process 0."""
        return ()

    def may_have(self, step: int) -> bool:
        """Return whether this place may have a step that the directory lacks; the same on all processes."""
        return False

    def fetch(self, step: int, overwrite: bool) -> bool:
        """Make a step readable for the run; return whether it is. ``overwrite`` replaces a damaged one."""
        return False

    def elsewhere(self, step: object) -> str:
        """Return the end of a message about a step that this place has and the run cannot read; else ""."""
        return ""

    def restored(self, step: int) -> dict[str, Any]:
        """Note that a step was restored; return facts for its event if this place supplied it."""
        return {}

    def drop(self, step: int, damage: str) -> None:
        """Stop reading a step of this place, as it is damaged."""

    def close(self, *, finished: bool) -> None:
        """End with the run, which has ``finished`` or failed; wait a limited time for copies under way."""
