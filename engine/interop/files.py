"""Small files and sizes of files in checkpoints of other libraries."""

from __future__ import annotations

import json
from typing import Any

from ..errors import DamagedCheckpointError, ObjectNotFoundError
from ..storage import Location

JSON_LIMIT = 512 << 20
"""Bytes of the largest JSON file that is read."""
_DEEPEST = 16  # directories inside directories, where sizes are counted


def read_json(place: Location) -> Any:
    """Reads a JSON file.

    Raises:
        DamagedCheckpointError: It is missing, too large, or no JSON.
    """
    try:
        content = place.read_bytes(limit=JSON_LIMIT)
    except ObjectNotFoundError as error:
        raise DamagedCheckpointError(f"{place} is missing: the checkpoint is not whole") from error
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
    """Returns the bytes of a file, or of all files below a directory, as far as listing them tells."""
    if not location.is_directory():
        return next((entry.size or 0 for entry in location.parent.entries() if entry.name == location.name), 0)
    return _below(location, _DEEPEST)


def _below(location: Location, depth: int) -> int:
    return sum(
        (_below(location / entry.name, depth - 1) if depth else 0) if entry.is_directory else entry.size or 0
        for entry in location.entries()
    )
