"""The interface of storage tiers that hold steps in addition to the directory: the mirror and host-local storage."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

from ..checkpoint import BackgroundSave
from ..storage import Place
from .ownership import RunIdentity

Point = Literal["saving", "commit", "committed", "ended", "changed", "deleted"]
"""A point in the run's work. The values mean, in order: a save starts; process 0 is about to write the commit record;
the record has been written; the save has succeeded or failed; the directory has been acquired, or a step has been
committed or its metrics or pin changed; steps have been explicitly deleted, and no storage tier may restore them."""


class StepPlace:
    """A storage tier that holds steps in addition to the directory. All processes must call the same methods."""

    shown = ""  # the name used in messages
    url: Place = ""
    background = BackgroundSave()  # the background saves to this tier, if it has any
    writes_directory = False  # whether a fetch acquires the directory and copies a step into it
    identity = RunIdentity()  # the fields that this tier adds to the run's identity

    @property
    def unused(self) -> Mapping[int, str]:
        """The unused steps, each mapped to the reason, for example that its files are damaged."""
        return {}

    def reached(self, point: Point, step: int) -> None:
        """Respond when the run reaches a point, such as the start of a save or a deletion, at the given step."""

    def newer_steps(self) -> Collection[int]:
        """Return the steps that are newer than all steps in the directory, newest first."""
        return ()

    def steps(self) -> Collection[int]:
        """Return the steps that process 0 can fetch."""
        return ()

    def fetch(self, step: int, overwrite: bool) -> bool:
        """Make a step available to the run; return whether this succeeded. ``overwrite`` replaces a damaged step."""
        return False

    def elsewhere(self, step: object) -> str:
        """Return a suffix for error messages if this tier has a step that the run cannot read; otherwise, ""."""
        return ""

    def restored(self, step: int) -> dict[str, Any]:
        """Record that a step was restored; return fields for the event if this tier supplied the step."""
        return {}

    def drop(self, step: int, damage: str) -> None:
        """Stop reading a step from this tier because the step is damaged."""

    def close(self, *, finished: bool) -> None:
        """Close this tier after the run has ``finished`` or failed; wait a limited time for copies in progress."""
