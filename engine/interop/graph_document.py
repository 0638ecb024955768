"""The document of nodes and edges beside a tree: which objects its values belonged to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..coordination import Member
from ..errors import UnsupportedLeafError
from ..format import crc32c, encode_document
from ..handlers import Files, PreparedItem
from ..record import FileRecord
from ..storage import Location

GRAPH = "graph.json"
"""Name of the file, beside the tree's own, that says which objects and edges there were."""
KIND = "graph"
"""What the document calls itself."""


class PreparedGraph:
    """A tree that is about to be written, and its document.

    Args:
        tree: The tree.
        document: The document, as data.

    Raises:
        UnsupportedLeafError: It cannot be written.
    """

    def __init__(self, tree: PreparedItem, document: Any) -> None:
        self._tree = tree
        try:
            self._document = encode_document(KIND, document)
        except ValueError as error:
            raise UnsupportedLeafError(f"this graph cannot be described: {error}; nothing was written") from error

    def write(self, folder: Location, member: Member) -> bytes:
        """Writes this process's share; see `PreparedItem`."""
        if member.index == 0:
            (folder / GRAPH).write_bytes(self._document, atomic=False)
        return self._tree.write(folder, member)

    def merge(self, folder: Location, fragments: Sequence[bytes]) -> Files:
        """Completes the item; see `PreparedItem`."""
        files = dict(self._tree.merge(folder, fragments))
        folder.sync_directory()
        return {**files, GRAPH: FileRecord(len(self._document), crc32c(self._document))}
