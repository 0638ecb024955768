"""The facts about a run that the program gave, stored beside its steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ObjectNotFoundError
from ..format import decode_document, encode_document
from ..storage import Location

METADATA = "metadata"  # name of the folder
_FILE = "data.json"
_LIMIT = 64 << 20  # bytes


def stored_metadata(location: Location) -> Mapping[str, Any] | None:
    """Return the facts about the run in a directory, or None."""
    place = location / METADATA / _FILE
    try:
        content = place.read_bytes(limit=_LIMIT)
    except ObjectNotFoundError:
        return None
    found: Mapping[str, Any] | None = decode_document(content, "json", source=str(place)).get("data")
    return found


def store_metadata(location: Location, metadata: Mapping[str, Any] | None) -> None:
    """Store the facts about a run, if there are any."""
    if metadata is not None:
        (location / METADATA).check_not_link()
        (location / METADATA).make_directory()
        (location / METADATA / _FILE).write_bytes(encode_document("json", {"data": metadata}))
