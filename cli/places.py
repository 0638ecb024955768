"""What a directory argument means."""

from __future__ import annotations

from ..engine.errors import CheckpointNotFoundError, StorageError
from ..engine.interop.places import is_foreign, is_ours
from ..engine.record import RECORD
from ..engine.storage import Location, as_location

INSIDE_A_RUN = "checkpoints"
_LOOKED_AT = 100  # directories below one that holds no checkpoint
_NAMED = 8


def checkpoints_at(place: str) -> Location:
    """Finds the checkpoints that an argument names.

    Args:
        place: A path or URL: a manager's directory, the directory of one checkpoint, or a run directory with
            ``checkpoints`` inside; or what another library wrote, a file perhaps.

    Returns:
        The manager's directory, or the one checkpoint.

    Raises:
        CheckpointNotFoundError: There is no such directory, and no file that is a checkpoint.
    """
    location = as_location(place).snapshot()
    if (location / RECORD).is_there():
        return location
    inside = location / INSIDE_A_RUN
    if inside.is_directory() and not is_foreign(location):
        return inside
    if not location.is_directory() and not is_foreign(location):
        what = "this file is no checkpoint that is known" if location.exists() else "no such directory"
        raise CheckpointNotFoundError(f"{place}: {what}; give a run, a directory of checkpoints or one step")
    return location


def is_one_checkpoint(location: Location) -> bool:
    """Returns whether there is one checkpoint here, not a directory of many."""
    return (location / RECORD).is_there() or is_foreign(location)


def where_else(location: Location) -> str:
    """Returns where checkpoints are that lie near a directory without any, as the end of a sentence; or nothing."""
    if (location.parent / RECORD).is_there():
        return f"; it is a part of the checkpoint {location.parent}"
    if not location.is_local or is_ours(location):  # elsewhere, looking around takes long
        return ""
    try:
        folders = [entry.name for entry in location.entries() if entry.is_directory][:_LOOKED_AT]
        found = sorted(name for name in folders if any(map(is_ours, (location / name, location / name / INSIDE_A_RUN))))
    except StorageError:
        return ""
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return f"; there are some below: {', '.join(found[:_NAMED])}{more}" if found else ""
