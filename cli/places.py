"""The checkpoints that a directory argument of the command names."""

from __future__ import annotations

from ..engine.errors import CheckpointNotFoundError, StorageError, shortened
from ..engine.format import RECORD
from ..engine.sources import is_foreign, is_ours
from ..engine.storage import Location, as_location

INSIDE_A_RUN = "checkpoints"
_LOOKED_AT = 100  # the most folders to search below a directory without checkpoints


def checkpoints_at(place: str) -> Location:
    """Return the location of the checkpoints that an argument names.

    Args:
        place: A path or URL: a manager's directory, the directory of one checkpoint, or a run directory with
            ``checkpoints`` inside; or a checkpoint of another library, which may be a file.

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
        what = "this file is no checkpoint of a supported library" if location.exists() else "no such directory"
        raise CheckpointNotFoundError(f"{place}: {what}; give a run, a directory of checkpoints or one step")
    return location


def is_one_checkpoint(location: Location) -> bool:
    """Return whether a location is one checkpoint, not a directory of them."""
    return (location / RECORD).is_there() or is_foreign(location)


def runs_below(location: Location) -> list[str]:
    """Return the names of the folders, among the first hundred of a directory, that hold holdfast checkpoints."""
    if not location.is_local or is_ours(location):  # Listing the folders of an object store takes long.
        return []
    try:
        folders = [entry.name for entry in location.entries() if entry.is_directory][:_LOOKED_AT]
        return sorted(name for name in folders if any(map(is_ours, (location / name, location / name / INSIDE_A_RUN))))
    except StorageError:
        return []


def where_else(location: Location) -> str:
    """Return the end of a sentence that names checkpoints near a directory without any, or an empty string."""
    if (location.parent / RECORD).is_there():
        return f"; it is a part of the checkpoint {location.parent}"
    found = runs_below(location)
    return f"; there are some below: {shortened(found)}" if found else ""
