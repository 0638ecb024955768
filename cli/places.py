"""What a directory argument means."""

from __future__ import annotations

from ..engine.errors import CheckpointNotFoundError
from ..engine.record import RECORD
from ..engine.storage import Location, as_location

INSIDE_A_RUN = "checkpoints"


def checkpoints_at(place: str) -> Location:
    """Finds the checkpoints that an argument names.

    Args:
        place: A path or URL: a manager's directory, the directory of one checkpoint, or a run directory with
            ``checkpoints`` inside.

    Returns:
        The manager's directory, or the directory of the one checkpoint.

    Raises:
        CheckpointNotFoundError: There is no such directory.
    """
    location = as_location(place)
    if (location / RECORD).exists():
        return location
    inside = location / INSIDE_A_RUN
    if inside.is_directory():
        return inside
    if not location.is_directory():
        raise CheckpointNotFoundError(f"{place}: no such directory; give a run, a directory of checkpoints or one step")
    return location


def is_one_checkpoint(location: Location) -> bool:
    """Returns whether a directory is one checkpoint, not a directory of many."""
    return (location / RECORD).exists()
