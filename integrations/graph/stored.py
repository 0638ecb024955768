"""A graph on disk: an item that is a tree with a document of nodes and edges beside it, written and opened."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from ...engine.arrays import SavedLeaf, TreeReader, TreeSource, naming
from ...engine.distributed import current_coordinator
from ...engine.format import FileRecord, own_item
from ...engine.handlers import Files, PreparedItem, ProcessShare, PyTreeCheckpointHandler, own_share
from ...engine.pytree import LeafRequest, TreeDef, key_segments, materialize, unflatten, with_request
from ...engine.sources import GRAPH, CheckpointSource, NativeTree, PreparedGraph, read_checkpoint
from ...engine.storage import Location
from .capture import PER_PROCESS, CapturedGraph
from .saved import SavedGraph

_TYPES = {"deque": "collections.deque"}  # of objects, by the kinds of containers that have other names


class GraphTemplate(Protocol):
    """Objects that take the values of a graph."""

    def prepare(self, stored: StoredGraph) -> Any:
        """Read and compare the values; return what changes the objects when it is applied."""
        ...


class GraphCheckpointHandler(PyTreeCheckpointHandler):
    """Saves graphs of objects: a tree of their values, and a document of nodes and edges beside it.

    The tree can be loaded, shown and verified as any other.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._own_states = PyTreeCheckpointHandler(**kwargs)  # a handler knows the structure of one tree

    def prepare(self, item: Any, *, snapshot: bool, **kwargs: Any) -> PreparedItem:
        """Make a `CapturedGraph` ready to be written."""
        assert isinstance(item, CapturedGraph)
        tree = super().prepare(item.tree, snapshot=snapshot, **kwargs)
        share = None
        if item.per_process is not None:
            share = ProcessShare(self._own_states.prepare(dict(item.per_process), snapshot=snapshot))
        return PreparedGraph(tree, item.document, share)

    def restore(self, directory: Location, item: Any = None, *, files: Files | None = None, **kwargs: Any) -> Any:
        """Open a graph; a template reads what it takes of it, and nothing changes yet."""
        stored = StoredGraph(NativeTree(directory, files), directory.parent, files)
        template: GraphTemplate | None = item
        return stored if template is None else template.prepare(stored)


class StoredGraph:
    """A graph on disk, opened for reading: its structure is known, no data has been read."""

    def __init__(self, source: TreeSource, checkpoint: Location, files: Mapping[str, FileRecord] | None = None) -> None:
        self.checkpoint = checkpoint
        self._source = source
        self.location = source.location  # the item's folder
        self.variables = source.variables  # None for values whose names are their paths
        self.leaves: dict[str, SavedLeaf] = {leaf.name: leaf for leaf in source.leaves}  # by storage name
        own = own_item(files or {})  # of this process
        share = None if own is None else own_share(source.location / own.folder, own.files)
        self._share = None if share is None else TreeReader(share.folder, share.files)
        # Whether the states of objects belong to this process; a checkpoint of one process has those of process 0.
        self.has_own = current_coordinator().process_index == 0 if share is None else share.is_own
        self._containers = _containers(source.tree.structure, "")
        kinds = {name: _TYPES.get(container.kind, container.kind) for name, container in self._containers.items()}
        if self._share is not None:
            containers = _containers(self._share.tree.structure, "")
            self._containers.update({PER_PROCESS + name: container for name, container in containers.items() if name})
            self.leaves.update({PER_PROCESS + leaf.name: leaf for leaf in self._share.leaves})
        document = source.graph_document()
        if document is None:
            self.graph = SavedGraph.of_names(self.leaves, kinds)
        else:
            names = [*self.leaves, *self._containers]
            self.graph = SavedGraph.of_document(document, names, str(self.location / GRAPH))

    def read_arrays(self, names: Sequence[str]) -> list[NDArray[Any] | None]:
        """Read leaves; an array that is named twice is copied."""
        arrays: dict[str, NDArray[Any] | None] = {}
        for source, per_process in ((self._source, False), (self._share, True)):
            wanted = list(dict.fromkeys(name for name in names if name.startswith(PER_PROCESS) is per_process))
            if source is not None and wanted:
                arrays.update(zip(wanted, source.read([self.leaves[name] for name in wanted]), strict=True))
        given: set[str] = set()
        found = []
        for name in names:
            array = arrays[name]
            found.append(array.copy() if array is not None and name in given else array)
            given.add(name)
        return found

    def load(self, names: Sequence[str], *, as_tensors: Collection[str] = ()) -> list[Any]:
        """Read values without a template: numpy arrays, Python values, or trees of those.

        Those of ``as_tensors`` are of torch if they were saved from torch.
        """
        leaves = [self.leaves_of(name) for name in names]
        every = [leaf for group in leaves for leaf in group]
        arrays = self.read_arrays(every)
        saved = [self.leaves[leaf].saved for leaf in every]
        templates = [
            with_request(name, LeafRequest(kind="torch"), leaf, None)
            if leaf.kind == "torch" and name in as_tensors
            else None
            for name, leaf in zip(every, saved, strict=True)
        ]
        with naming(self.location):
            values = iter(materialize(templates, saved, arrays, every))
        return [
            next(values) if name in self.leaves else unflatten(self._containers[name], [next(values) for _ in group])
            for name, group in zip(names, leaves, strict=True)
        ]

    def leaves_of(self, name: str) -> list[str]:
        """Return the storage names of the leaves in a container, in their order; for a leaf, its own."""
        if name in self.leaves:
            return [name]
        return [leaf for child in _names(self._containers[name], name) for leaf in self.leaves_of(child)]

    def container(self, name: str) -> TreeDef | None:
        """Return the container of this storage name, or None."""
        return self._containers.get(name)


def keys_by_segment(container: TreeDef | None) -> dict[str, Any]:
    """Return the keys of a container by the names of its edges; none where there is no container."""
    if container is None:
        return {}
    keys = range(len(container.children)) if container.keys is None else container.keys
    return dict(zip(key_segments(container.keys, len(container.children)), keys, strict=True))


def open_graph(location: Location) -> StoredGraph:
    def open_tree(checkpoint: CheckpointSource) -> StoredGraph:
        name = checkpoint.only_tree(how="expected a graph, which is the only tree of its checkpoint")
        return StoredGraph(checkpoint.tree(name), checkpoint.location, checkpoint.files(name))

    return read_checkpoint(location, open_tree)


def _names(structure: TreeDef, name: str) -> list[str]:
    segments = key_segments(structure.keys, len(structure.children))
    return [f"{name}.{segment}" if name else segment for segment in segments]


def _containers(structure: TreeDef | None, name: str) -> dict[str, TreeDef]:
    if structure is None:
        return {}
    found = {name: structure}
    for below, child in zip(_names(structure, name), structure.children, strict=True):
        found.update(_containers(child, below))
    return found
