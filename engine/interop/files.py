"""Small files and sizes of files in checkpoints of other libraries."""

from __future__ import annotations

import json
import os
from typing import Any

from ..digests import read_checked
from ..errors import CheckpointExistsError, DamagedCheckpointError, ObjectNotFoundError
from ..storage import Location

JSON_LIMIT = 512 << 20
"""Bytes of the largest JSON file that is read."""


def read_json(place: Location) -> Any:
    """Reads a JSON file.

    Raises:
        DamagedCheckpointError: It is missing, too large, or no JSON.
    """
    content = read_checked(place, None, limit=JSON_LIMIT)
    try:
        return json.loads(content.decode("utf-8"))
    except RecursionError as error:
        raise DamagedCheckpointError(f"{place} is damaged: it is nested too deeply") from error
    except ValueError as error:
        raise DamagedCheckpointError(f"{place} is damaged: it is not JSON ({error})") from error


def read_object(place: Location) -> dict[str, Any]:
    """Reads a JSON file that holds an object; see :func:`read_json`."""
    found = read_json(place)
    if not isinstance(found, dict):
        raise DamagedCheckpointError(f"{place} is damaged: expected a JSON object, found {type(found).__name__}")
    return found


def read_optional(place: Location) -> dict[str, Any]:
    """Reads a JSON file that holds an object and may be missing or empty, which is the same as ``{}``."""
    try:
        if not place.read_bytes(limit=JSON_LIMIT):
            return {}
    except ObjectNotFoundError:
        return {}
    return read_object(place)


def total_bytes(location: Location) -> int:
    """Returns the bytes of a file, or of all files below a directory; 0 in object stores, where listing takes long."""
    if not location.is_local:
        return 0
    if not location.is_directory():
        return _size(os.fspath(location))
    total = 0
    seen = set()
    for folder, folders, files in os.walk(location, followlinks=True):
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in seen:  # links may lead in circles
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        total += sum(_size(os.path.join(folder, file)) for file in files)
    return total


def check_destination(destination: Location, *, overwrite: bool) -> None:
    """Checks that a file can go to a place.

    Args:
        destination: The place.
        overwrite: Whether to replace a file that is there.

    Raises:
        CheckpointExistsError: Something is there.
    """
    if destination.is_directory():
        raise CheckpointExistsError(f"{destination} is a directory; give the name of a file, which may lie in it")
    if destination.exists() and not overwrite:
        raise CheckpointExistsError(f"{destination} exists already; choose another name, or pass overwrite=True")


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:  # a link to nothing, or a file that is being replaced
        return 0
