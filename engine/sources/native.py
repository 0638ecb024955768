"""Checkpoints of holdfast as sources, and trees with the document of the objects that their values belonged to."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..arrays import TreeReader, TreeSource, read_checked, write_file
from ..distributed import ProcessInfo
from ..errors import OptionError, UnsupportedLeafError
from ..format import (
    DOCUMENT_LIMIT,
    OWN_FOLDER,
    CheckpointRecord,
    FileRecord,
    decode_document,
    encode_document,
)
from ..handlers import (
    DEFAULT_REGISTRY,
    Files,
    JsonCheckpointHandler,
    PreparedItem,
    PyTreeCheckpointHandler,
    restore_external,
)
from ..pytree import EXTERNAL, Patterns
from ..steps import has_changed, read_record
from ..storage import Location
from .protocol import JSON, NATIVE, TREE, CheckpointSource

GRAPH = "graph.json"  # name of the file, beside the tree's own, with the objects and the edges between them
KIND = "graph"  # the kind of the document


class PreparedGraph:
    """A tree that is about to be written, its document, and what this process has of its own."""

    def __init__(self, tree: PreparedItem, document: Any, own: PreparedItem | None = None) -> None:
        self._tree = tree
        self._own = own
        self._files: dict[str, FileRecord] = {}
        try:
            self._document = encode_document(KIND, document)
        except ValueError as error:
            raise UnsupportedLeafError(f"this graph cannot be described: {error}; nothing was written") from error

    def write(self, folder: Location, member: ProcessInfo) -> bytes:
        if member.index == 0:
            self._files[GRAPH] = write_file(folder / GRAPH, self._document)
        fragment = self._tree.write(folder, member)
        if self._own is None:
            return fragment
        place = folder / OWN_FOLDER
        place.make_directory()
        return json.dumps([self._own.write(place, member).hex(), fragment.hex()]).encode()

    def merge(self, folder: Location, fragments: Sequence[bytes]) -> Files:
        own: Files = {}
        if self._own is not None:
            pairs = [[bytes.fromhex(part) for part in json.loads(fragment)] for fragment in fragments]
            shares, fragments = zip(*pairs, strict=True)
            files = self._own.merge(folder / OWN_FOLDER, shares)
            own = {f"{OWN_FOLDER}/{path}": known for path, known in files.items()}
        return {**self._tree.merge(folder, fragments), **own, **self._files}


class NativeTree(TreeReader):
    """A tree that holdfast wrote, with the document of its objects where it was saved as a graph."""

    def __init__(self, location: Location, files: Files | None = None, select: Patterns | None = None) -> None:
        super().__init__(location, files, select=select)
        self._graph = (files or {}).get(GRAPH)

    def graph_document(self) -> Any:
        if self._graph is None:
            return None
        place = self.location / GRAPH
        return decode_document(read_checked(place, self._graph, limit=DOCUMENT_LIMIT), KIND, source=str(place))


class NativeCheckpoint(CheckpointSource):
    """A checkpoint that holdfast committed."""

    format = NATIVE

    def __init__(self, location: Location) -> None:
        self.location = location
        self.record: CheckpointRecord = read_record(location)
        self.parts = self.record.parts()  # an item with a share of each process is one part for each
        self.items = {name: item.kind for name, item in self.parts.items()}
        self.step = self.record.step
        self.reason = self.record.reason

    @property
    def time(self) -> float | None:
        return self.record.time

    @property
    def metrics(self) -> Mapping[str, Any] | None:
        return self.record.metrics

    @property
    def custom_metadata(self) -> Mapping[str, Any] | None:
        return self.record.custom_metadata

    @property
    def nbytes(self) -> int:
        return self.record.nbytes

    def has_changed(self) -> bool:
        return has_changed(self.location, self.record)

    def files(self, item: str) -> Mapping[str, FileRecord]:
        return self.parts[item].files

    def tree(self, item: str) -> TreeSource:
        return self.selected_tree(item, None)

    def selected_tree(self, item: str, select: Patterns | None) -> TreeSource:
        saved = self.parts[item]
        return NativeTree(self.location / saved.folder, saved.files, select)

    def value(self, item: str) -> Any:
        saved = self.parts[item]
        if saved.kind != JSON:
            raise OptionError(
                f"{self.location}: item {item!r} was written by a handler of your own; restore it with that handler "
                "(Checkpointer(handler).restore, or a CheckpointManager)"
            )
        return JsonCheckpointHandler().restore(self.location / saved.folder, files=saved.files)

    def load(self, item: str, like: Any = None, select: Patterns | None = None) -> Any:
        saved = self.parts[item]
        if saved.kind != TREE:
            return super().load(item, like, select)
        kwargs: dict[str, Any] = {} if select is None else {"select": select}
        return PyTreeCheckpointHandler().restore(self.location / saved.folder, like, files=saved.files, **kwargs)

    def complete(self, item: str, source: TreeSource, tree: Any) -> Any:
        numbers = source.numbers if isinstance(source, TreeReader) else range(len(source.leaves))
        pairs = zip(source.leaves, numbers, strict=True)
        kept = {leaf.name: number for leaf, number in pairs if leaf.saved.kind == EXTERNAL}
        return (
            restore_external(tree, source.location, self.parts[item].files, kept, DEFAULT_REGISTRY, {})
            if kept
            else tree
        )

    def items_to_load(self) -> list[str]:
        return list(self.items)
