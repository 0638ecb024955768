"""A graph on disk: written as an item that is a tree with a document beside it, and opened for reading."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..coordination import Member
from ..digests import read_checked
from ..errors import CheckpointNotFoundError, UnsupportedLeafError
from ..format import DOCUMENT_LIMIT, crc32c, decode_document, encode_document
from ..handlers import Files, PreparedItem, ProcessShare, PyTreeCheckpointHandler, own_share
from ..interop.graph_document import GRAPH, KIND
from ..interop.native import NativeCheckpoint
from ..interop.places import open_checkpoint
from ..interop.source import TREE, TreeSource
from ..item import SavedLeaf, TreeReader, naming
from ..record import OWN_FOLDER, FileRecord, own_item
from ..storage import Location
from ..tree import Node, materialize, unflatten
from ..tree.structure import key_segments
from .capture import OWN, CapturedGraph
from .paths import Path
from .saved import SavedGraph

_logger = logging.getLogger("holdfast")


class GraphCheckpointHandler(PyTreeCheckpointHandler):
    """Saves graphs of objects: a tree of their values, and a document of nodes and edges beside it.

    What it writes can be loaded, shown and verified as any other tree.
    """

    def prepare(self, item: Any, *, snapshot: bool, **kwargs: Any) -> PreparedItem:
        """Makes a `CapturedGraph` ready to be written."""
        assert isinstance(item, CapturedGraph)
        tree = super().prepare(item.tree, snapshot=snapshot, **kwargs)
        try:
            document = encode_document(KIND, item.document)
        except ValueError as error:
            raise UnsupportedLeafError(f"this graph cannot be described: {error}; nothing was written") from error
        own = None
        if item.own is not None:
            own = ProcessShare(super().prepare(dict(item.own), snapshot=snapshot))
        return _PreparedGraph(tree, document, own)

    def restore(self, directory: Location, item: Any = None, *, files: Files | None = None, **kwargs: Any) -> Any:
        """Opens a graph.

        Args:
            directory: The folder.
            item: A function of the `StoredGraph`, or None to have that itself.
            files: What the commit record says about the folder.
            **kwargs: None are known.
        """
        stored = StoredGraph(TreeReader(directory, files), directory.parent, files)
        return stored if item is None else item(stored)


class _PreparedGraph:
    """A tree and its document, and what this process has of its own."""

    def __init__(self, tree: PreparedItem, document: bytes, own: PreparedItem | None) -> None:
        self._tree = tree
        self._document = document
        self._own = own

    def write(self, folder: Location, member: Member) -> bytes:
        if member.index == 0:
            (folder / GRAPH).write_bytes(self._document, atomic=False)
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
        files = {**self._tree.merge(folder, fragments), **own}
        folder.sync_directory()
        return {**files, GRAPH: FileRecord(len(self._document), crc32c(self._document))}


class NamedVariables(Protocol):
    """Values by the names that the library has for them that wrote the checkpoint."""

    def shapes(self) -> dict[str, list[int]]:
        """Returns the shape of every value."""
        ...

    def dtypes(self) -> dict[str, np.dtype[Any] | None]:
        """Returns the dtype of every value, None where there is none."""
        ...

    def read(self, name: str) -> Any:
        """Reads a value."""
        ...


class StoredGraph:
    """A graph on disk, opened for reading: its structure is known, no data has been read.

    Args:
        source: The tree of values. One that has a method ``graph_document()`` says itself which objects there were; one
            that has ``variables`` has names of its own for its values.
        checkpoint: Where the checkpoint is that it belongs to, for messages.
        files: What the commit record says of the item's files, or None where there is none.

    Raises:
        DamagedCheckpointError: The document is missing or makes no sense.

    Attributes:
        checkpoint: Where the checkpoint is.
        location: The item's folder.
        graph: The nodes and edges. A tree that was saved without a graph is one of containers.
        leaves: The leaves by their storage names.
        variables: The values by the names of the library that wrote them; None where those are their paths.
    """

    def __init__(self, source: TreeSource, checkpoint: Location, files: Mapping[str, FileRecord] | None = None) -> None:
        self.checkpoint = checkpoint
        self._source = source
        self.location = source.location
        self.variables: NamedVariables | None = getattr(source, "variables", None)
        self.leaves: dict[str, SavedLeaf] = {leaf.name: leaf for leaf in source.leaves}
        self._own = _own_tree(source.location, files or {})
        self._containers = _containers(source.skeleton.structure, "")
        kinds = {name: container.kind for name, container in self._containers.items()}
        if self._own is not None:
            own = _containers(self._own.skeleton.structure, "")
            self._containers.update({OWN + name: container for name, container in own.items() if name})
            self.leaves.update({OWN + leaf.name: leaf for leaf in self._own.leaves})
        document = _document(source, files)
        if document is None:
            self.graph = SavedGraph.of_names(self.leaves, kinds)
        else:
            names = [*self.leaves, *self._containers]
            self.graph = SavedGraph.of_document(document, names, str(self.location / GRAPH))

    def at(self, path: Path) -> StoredGraph:
        """Returns the same as it is seen from another node, which becomes the root.

        Args:
            path: Any path to the node.

        Raises:
            TreeMismatchError: There is no such node, or it is a value.
        """
        found = copy.copy(self)
        found.graph = self.graph.at(path)
        return found

    def read(self, names: Sequence[str]) -> list[NDArray[Any] | None]:
        """Reads leaves.

        Args:
            names: Their storage names.

        Returns:
            For every one its array, the caller's own; None where the value stands in the structure.

        Raises:
            DamagedCheckpointError: Something does not verify.
        """
        found: dict[str, NDArray[Any] | None] = {}
        for source, mine in ((self._source, False), (self._own, True)):
            wanted = list(dict.fromkeys(name for name in names if name.startswith(OWN) is mine))
            if source is not None and wanted:
                found.update(zip(wanted, source.read([self.leaves[name] for name in wanted]), strict=True))
        given: set[str] = set()
        arrays = []
        for name in names:
            array = found[name]
            arrays.append(array.copy() if array is not None and name in given else array)
            given.add(name)
        return arrays

    def load(self, names: Sequence[str]) -> list[Any]:
        """Reads values as they are without a template: arrays of numpy, Python values, or trees of those.

        Args:
            names: The storage names of leaves or containers.
        """
        leaves = [self.leaves_of(name) for name in names]
        every = [leaf for several in leaves for leaf in several]
        arrays = self.read(every)
        with naming(self.location):
            values = iter(materialize([None] * len(every), [self.leaves[leaf].saved for leaf in every], arrays, every))
        return [
            next(values) if name in self.leaves else unflatten(self._containers[name], [next(values) for _ in several])
            for name, several in zip(names, leaves, strict=True)
        ]

    def leaves_of(self, name: str) -> list[str]:
        """Returns the storage names of the leaves in a container, in their order; of a leaf, its own.

        Args:
            name: The storage name of the leaf or container.
        """
        return [name] if name in self.leaves else _leaves(self._containers[name], name)

    def keys_at(self, name: str) -> dict[str, Any]:
        """Returns the keys of a container by the names of its edges; none where there is no such container.

        Args:
            name: Its storage name.
        """
        container = self._containers.get(name)
        if container is None:
            return {}
        keys = range(len(container.children)) if container.keys is None else container.keys
        return dict(zip(_segments(container), keys, strict=True))


def open_graph(location: Location) -> StoredGraph:
    """Opens the graph that a checkpoint holds.

    Args:
        location: A checkpoint, of holdfast or of another library that is known.

    Raises:
        CheckpointNotFoundError: There is none, or it has no item that is a tree, or several.
        DamagedCheckpointError: It does not verify.
    """
    checkpoint = open_checkpoint(location)
    trees = [name for name, kind in checkpoint.items.items() if kind == TREE]
    if len(trees) != 1:
        raise CheckpointNotFoundError(
            f"{location}: expected one tree, found {len(trees)}; the items are {', '.join(checkpoint.items) or 'none'}"
        )
    files = checkpoint.record.items[trees[0]].files if isinstance(checkpoint, NativeCheckpoint) else None
    return StoredGraph(checkpoint.tree(trees[0]), checkpoint.location, files)


def _document(source: TreeSource, files: Mapping[str, FileRecord] | None) -> Any:
    """Returns the document of nodes and edges, or None for a tree that has none."""
    if hasattr(source, "graph_document"):
        return source.graph_document()
    known = (files or {}).get(GRAPH)
    if known is None:
        return None
    place = source.location / GRAPH
    content = read_checked(place, known, limit=DOCUMENT_LIMIT)
    return decode_document(content, KIND, source=str(place))


def _own_tree(location: Location, files: Mapping[str, FileRecord]) -> TreeReader | None:
    """Opens what this process has of its own, if processes have."""
    own = own_item(files)
    return None if own is None else TreeReader(*own_share(location / own.folder, own.files))


def _segments(structure: Node) -> list[str]:
    return [*map(str, range(len(structure.children)))] if structure.keys is None else key_segments(structure.keys)


def _leaves(structure: Node, name: str) -> list[str]:
    """Returns the storage names of the leaves in a container, in their order."""
    found = []
    for segment, child in zip(_segments(structure), structure.children, strict=True):
        below = f"{name}.{segment}" if name else segment
        found += [below] if child is None else _leaves(child, below)
    return found


def _containers(structure: Node | None, name: str) -> dict[str, Node]:
    """Returns all containers by their storage names."""
    if structure is None:
        return {}
    found = {name: structure}
    for segment, child in zip(_segments(structure), structure.children, strict=True):
        found.update(_containers(child, f"{name}.{segment}" if name else segment))
    return found
