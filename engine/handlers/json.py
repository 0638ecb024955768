"""JSON documents as items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..arrays import read_checked, write_file
from ..distributed import ProcessInfo
from ..errors import UnsupportedLeafError
from ..format import DOCUMENT_LIMIT, FileRecord, decode_document, encode_document
from ..storage import Location
from .base import Files, PreparedCheckpointHandler, PreparedItem, refuse_arguments


class JsonCheckpointHandler(PreparedCheckpointHandler):
    """Saves a JSON document: nested dictionaries and lists of text, numbers, booleans and None.

    Of several processes, process 0 saves its document; those of the others are ignored.

    Args:
        filename: Name of the file in the item's folder.
    """

    kind = "json"
    verifies = True

    def __init__(self, filename: str = "data.json") -> None:
        self._filename = filename

    def prepare(self, item: Any, *, snapshot: bool, **kwargs: Any) -> PreparedItem:
        """Make an item ready to be written; raise UnsupportedLeafError if JSON cannot hold it."""
        if kwargs:
            refuse_arguments(self, kwargs, self.prepare)
        try:
            content = encode_document("json", {"data": item})
        except (TypeError, ValueError) as error:
            raise UnsupportedLeafError(
                f"this item cannot be saved as JSON: {error}. Use PyTreeCheckpointHandler for arrays and other values"
            ) from error
        return _PreparedFile(self._filename, content)

    def restore(self, directory: Location, item: Any = None, *, files: Files | None = None, **kwargs: Any) -> Any:
        """Read the item back; ``item`` is not used."""
        if kwargs:
            refuse_arguments(self, kwargs, self.restore)
        place = directory / self._filename
        content = read_checked(place, None if files is None else files.get(self._filename), limit=DOCUMENT_LIMIT)
        return decode_document(content, "json", source=str(place)).get("data")

    def structure(self, directory: Location, *, files: Files | None = None, **kwargs: Any) -> Any:
        """Return the item itself: reading it costs no more than describing it."""
        return self.restore(directory, files=files)


class _PreparedFile:
    def __init__(self, name: str, content: bytes) -> None:
        self._name = name
        self._content = content
        self._files: dict[str, FileRecord] = {}

    def write(self, folder: Location, member: ProcessInfo) -> bytes:
        if member.index == 0:
            self._files[self._name] = write_file(folder / self._name, self._content)
        return b""

    def merge(self, folder: Location, fragments: Sequence[bytes]) -> Files:
        return self._files
