"""The interface of places that hold steps besides the directory: the mirror, and local storage on the hosts."""

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
    """A place besides the directory that holds steps; all processes of a program call the same methods."""

    shown = ""  # the name used in messages
    url: Place = ""
    background = BackgroundSave()  # the saves to this place, if a thread of its own writes them
    writes_directory = False  # whether a fetch copies a step into the directory, and so requires its ownership
    identity = RunIdentity()  # the fields that this place adds to the run's identity

    @property
    def unused(self) -> Mapping[int, str]:
        """The steps that are damaged or may belong to another run, each with the reason."""
        return {}

    def reached(self, point: Point, step: int) -> None:
        """Handle a point that the run's work in its directory has reached."""

    def newer_steps(self) -> Collection[int]:
        """Return the steps newer than every step in the directory, newest first."""
        return ()

    def steps(self) -> Collection[int]:
        """Return the steps that can be fetched, on process 0."""
        return ()

    def may_have(self, step: int) -> bool:
        """Return whether this place may have a step that the directory lacks; all processes get the same answer."""
        return False

    def fetch(self, step: int, overwrite: bool) -> bool:
        """Make a step readable for the run; return whether that succeeded. ``overwrite`` replaces a damaged one."""
        return False

    def elsewhere(self, step: object) -> str:
        """Return a message suffix about a step that this place has but the run cannot read, or ""."""
        return ""

    def restored(self, step: int) -> dict[str, Any]:
        """Record that a step was restored; return facts for the event if this place supplied the step."""
        return {}

    def drop(self, step: int, damage: str) -> None:
        """Stop reading a step from this place because it is damaged."""

    def close(self, *, finished: bool) -> None:
        """Close with the run, which has ``finished`` or failed; wait a limited time for copies in progress."""
