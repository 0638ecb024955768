"""JSON documents as items."""

from __future__ import annotations

from typing import Any

from ..digests import read_checked
from ..errors import UnsupportedLeafError
from ..format import DOCUMENT_LIMIT, decode_document, encode_document
from ..storage import Location
from .base import PreparedCheckpointHandler, no_arguments
from .saves import Files, PreparedFile, PreparedItem


class JsonCheckpointHandler(PreparedCheckpointHandler):
    """Saves what JSON can hold: nested dictionaries and lists of text, numbers, booleans and None.

    Args:
        filename: The file's name in the item's folder.
    """

    kind = "json"
    verifies = True

    def __init__(self, filename: str = "data.json") -> None:
        self._filename = filename

    def prepare(self, item: Any, *, snapshot: bool, **kwargs: Any) -> PreparedItem:
        """Makes an item ready to be written. Raises UnsupportedLeafError if JSON cannot hold it."""
        no_arguments(self, kwargs, self.prepare)
        try:
            content = encode_document("json", {"data": item})
        except (TypeError, ValueError) as error:
            raise UnsupportedLeafError(
                f"this item cannot be saved as JSON: {error}. Use PyTreeCheckpointHandler for arrays and other values"
            ) from error
        return PreparedFile(self._filename, content)

    def restore(self, directory: Location, item: Any = None, *, files: Files | None = None, **kwargs: Any) -> Any:
        """Reads the item back; ``item`` is not needed."""
        no_arguments(self, kwargs, self.restore)
        place = directory / self._filename
        content = read_checked(place, None if files is None else files.get(self._filename), limit=DOCUMENT_LIMIT)
        return decode_document(content, "json", source=str(place)).get("data")

    def structure(self, directory: Location, *, files: Files | None = None, **kwargs: Any) -> Any:
        """Returns the item itself: reading it costs no more than describing it."""
        return self.restore(directory, files=files)
