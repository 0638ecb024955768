"""Checkpoints that Orbax wrote: which directories are, and what is in them."""

from __future__ import annotations

from ..storage import Location
from .source import CheckpointSource, StepDirectories


def recognise(location: Location, names: frozenset[str]) -> CheckpointSource | None:
    """Opens an Orbax checkpoint; see :class:`~holdfast.engine.interop.source.Format`."""
    return None


def recognise_steps(location: Location, names: frozenset[str]) -> StepDirectories | None:
    """Finds the steps of an Orbax manager; see :class:`~holdfast.engine.interop.source.Format`."""
    return None
