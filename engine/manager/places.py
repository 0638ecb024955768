"""Where steps of a run are besides its directory: what its mirror and the local places of its hosts have in common."""

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
    identity = RunIdentity()  # what this place knows of the identity of the run

    @property
    def unused(self) -> Mapping[int, str]:
        """Return the steps that are damaged, or perhaps of this run, and why."""
        return {}

    def reached(self, point: Point, step: int) -> None:
        """Follow what happens in the directory."""

    def newer_steps(self) -> Collection[int]:
        """Return the steps that are newer than all of the directory, the newest first."""
        return ()

    def steps(self) -> Collection[int]:
        """Return the steps that can be fetched, on process 0."""
        return ()

    def may_have(self, step: int) -> bool:
        """Return whether a fetch may bring a step that is not in the directory; the same on all processes."""
        return False

    def fetch(self, step: int, overwrite: bool) -> bool:
        """Let the run read a step; return whether it can be read now. ``overwrite`` replaces a damaged one."""
        return False

    def elsewhere(self, step: object) -> str:
        """Return the end of a sentence that says where this place has a step that the run cannot read; or ""."""
        return ""

    def restored(self, step: int) -> dict[str, Any]:
        """Note that a step was restored; return facts for the event if this place had it."""
        return {}

    def drop(self, step: int, damage: str) -> None:
        """Note that a step of this place is damaged, and is not read any more."""

    def close(self, *, finished: bool) -> None:
        """End with the run, which has ``finished`` or failed; wait a limited time for what is not whole here."""
