"""Store an object graph on disk as a tree of values and a document of nodes and edges."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from numpy.typing import NDArray

from ...engine.arrays import SavedLeaf, SharedReads, TreeReader, TreeSource, naming, read_parts
from ...engine.distributed import current_coordinator
from ...engine.errors import UnsupportedLeafError, shortened
from ...engine.format import GRAPH, FileRecord, own_item
from ...engine.handlers import (
    Files,
    PreparedGraph,
    PreparedItem,
    ProcessShare,
    PyTreeCheckpointHandler,
    Share,
    own_share,
)
from ...engine.pytree import (
    MAX_DEPTH,
    LeafRequest,
    LeafTemplate,
    TreeDef,
    class_name,
    escape_key,
    flatten,
    is_python_value,
    is_torch_tensor,
    materialize,
    unescape_key,
    unflatten,
    with_request,
)
from ...engine.sources import CheckpointSource, read_checkpoint
from ...engine.storage import Location
from .frameworks import OPTIMIZER_SLOTS, is_module, is_uninitialized
from .saved import ATTRIBUTES, OWN_STATES, SavedGraph
from .slots import BoxSlot, MemberSlot, StateSlot, format_node_path, storage_name
from .views import Branch, Leaf
from .walk import LiveGraph, LiveNode

# Storage name prefix for per-process values; no other storage name starts with it.
PER_PROCESS = "//"
_TYPES = {"deque": "collections.deque"}  # type names that differ from the container kind


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    tree: Any  # all values, each under its shortest path
    document: dict[str, Any]  # nodes and edges, as JSON data
    per_process: Mapping[str, Any] | None = None  # per-process values, keyed by storage name


def capture(graph: LiveGraph, *, apart: bool = False) -> CapturedGraph:
    """Capture a graph's values and structure; with ``apart``, each process saves its own object states."""
    for number, node in enumerate(graph.nodes):
        node.number = number
    states = [node for node in graph.leaves() if apart and isinstance(node.slot, StateSlot)]
    too_deep = [node for node in graph.leaves() if len(node.path) > MAX_DEPTH]
    if too_deep:
        raise UnsupportedLeafError(
            f"{format_node_path(too_deep[0].path[:4])}/...: {len(too_deep)} values are more than {MAX_DEPTH} objects "
            "away from the checkpoint, and nothing was written; attach the objects that hold them under their own "
            "names"
        )
    unborn = [node for node in graph.nodes if is_torch_tensor(node.value) and is_uninitialized(node.value)]
    if unborn:
        raise UnsupportedLeafError(
            f"{shortened([format_node_path(node.path) for node in unborn])}: no shape yet, because the lazy module has "
            "not run; nothing was written. Run the module once before the first save"
        )
    elsewhere = {node.number: PER_PROCESS + escape_key(storage_name(node.path)) for node in states}
    flat = flatten(_nested(graph.nodes[0], elsewhere) or {})
    names = elsewhere | dict(zip(flat.values, flat.names, strict=True))
    tree = unflatten(flat.structure, [_stored(graph.nodes[number]) for number in flat.values])
    nodes = [_node_document(node, names) for node in graph.nodes]
    per_process = {storage_name(node.path): _stored(node) for node in states} if apart else None
    return CapturedGraph(tree, {"nodes": nodes, OWN_STATES: True, ATTRIBUTES: True}, per_process)


def _stored(node: LiveNode) -> Any:
    assert isinstance(node.view, Leaf)
    try:
        return node.slot.get() if node.view.packed is None else node.view.packed
    except Exception as error:
        error.add_note(f"raised while reading the state of {format_node_path(node.path)}; nothing was written")
        raise


def _nested(node: LiveNode, elsewhere: Collection[int]) -> Any:
    """Return the containers below a node, with node numbers as leaves, or None if all values are stored elsewhere."""
    if not isinstance(node.view, Branch):
        return node.number if node.has_value and node.number not in elsewhere else None
    children: dict[Any, Any] = {}
    complete = True
    keys = {edge.segment: edge.key for edge in node.view.edges}
    for segment, child in node.edges.items():
        if child.path != (*node.path, segment) or len(child.path) > MAX_DEPTH:
            continue  # stored under another path, or nested too deeply to contain values
        below = _nested(child, elsewhere)
        if below is not None:
            children[keys.get(segment, segment)] = below
        elif isinstance(child.view, Branch):
            complete = False
    for _, _, value in node.optimizer_slots:
        branch = children
        for segment in value.path[len(node.path) : -1]:
            branch = branch.setdefault(unescape_key(segment), {})
        branch[unescape_key(value.path[-1])] = value.number
    sequence: Any = tuple if node.view.label == "tuple" else list
    if isinstance(node.value, deque):
        sequence = partial(deque, maxlen=node.value.maxlen)
    if children:
        is_sequence = node.view.sequence and complete and list(children) == list(range(len(children)))
        return sequence(children.values()) if is_sequence else children
    if node.view.edges or len(node.path) == MAX_DEPTH:
        return None
    if node.view.sequence:
        return sequence()
    return {} if isinstance(node.value, dict) else None


def _node_document(node: LiveNode, names: Mapping[int, str]) -> dict[str, Any]:
    document: dict[str, Any] = {}
    if isinstance(node.view, Branch):
        document["type"] = node.view.label
        if is_module(node.value) and not node.value.training:
            document["training"] = False
        document["edges"] = {segment: child.number for segment, child in node.edges.items()}
    elif isinstance(node.slot, MemberSlot) or (
        node.view.in_place and isinstance(node.slot, BoxSlot) and is_python_value(node.slot.get())
    ):
        document["type"] = class_name(node.value)  # the type of an enum, or of a number box such as `Value`
    if node.number in names:
        document["value"] = names[node.number]
    if node.optimizer_slots:
        document[OPTIMIZER_SLOTS] = [[key.number, name, value.number] for key, name, value in node.optimizer_slots]
    if node.groups:
        document["groups"] = [[parameter.number for parameter in group] for group in node.groups]
    return document


class GraphCheckpointHandler(PyTreeCheckpointHandler):
    """Saves an object graph as a tree of values and a document of nodes and edges."""

    shares_reads = True

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._own_states = PyTreeCheckpointHandler(**kwargs)  # separate, because a handler remembers only one structure

    def prepare(self, item: Any, *, snapshot: bool, **kwargs: Any) -> PreparedItem:
        """Prepare a `CapturedGraph` for writing."""
        assert isinstance(item, CapturedGraph)
        tree = super().prepare(item.tree, snapshot=snapshot, **kwargs)
        share = None
        if item.per_process is not None:
            share = ProcessShare(self._own_states.prepare(dict(item.per_process), snapshot=snapshot))
        return PreparedGraph(tree, item.document, share)

    def restore(
        self,
        directory: Location,
        item: Any = None,
        *,
        files: Files | None = None,
        shared: SharedReads | None = None,
        **kwargs: Any,
    ) -> Any:
        """Open a graph; if ``item`` is a template, return the result of its ``prepare`` method."""
        tree = TreeReader(directory, files)
        stored = StoredGraph(tree, directory.parent, tree.files, shared)
        return stored if item is None else item.prepare(stored)


class StoredGraph:
    """A graph that is open for reading. Its structure is read immediately, and its values are read on demand."""

    def __init__(
        self,
        source: TreeSource,
        checkpoint: Location,
        files: Mapping[str, FileRecord] | None = None,
        shared: SharedReads | None = None,
        document: Any = None,  # overrides the source's document of nodes and edges
    ) -> None:
        self.checkpoint = checkpoint
        self._source = source
        self._shared = shared
        self.location = source.location  # the item's folder
        self.variables = source.variables  # None unless values have TensorFlow names
        self.leaves: dict[str, SavedLeaf] = {leaf.name: leaf for leaf in source.leaves}  # keyed by storage name
        item = own_item(files or {})  # item with the object states of this process
        share = None
        if item is not None:
            folder = source.location / item.folder
            otherwise = "gets the states of process 0, without its random streams and data positions"
            share = own_share(folder, item.files, is_same=_is_same, otherwise=otherwise)
        self._share = None if share is None else TreeReader(share.folder, share.files)
        # Whether the object states belong to this process; states saved by a single process belong to process 0.
        self.has_own = current_coordinator().process_index == 0 if share is None else share.is_own
        self.containers = _containers(source.tree.structure, "")  # keyed by storage name
        kinds = {name: _TYPES.get(container.kind, container.kind) for name, container in self.containers.items()}
        if self._share is not None:
            containers = _containers(self._share.tree.structure, "")
            self.containers.update({PER_PROCESS + name: container for name, container in containers.items() if name})
            self.leaves.update({PER_PROCESS + leaf.name: leaf for leaf in self._share.leaves})
        document = source.graph_document() if document is None else document
        if document is None:
            self.graph = SavedGraph.of_names(self.leaves, kinds)
        else:
            self.graph = SavedGraph.of_document(document, [*self.leaves, *self.containers], str(self.location / GRAPH))

    def read_arrays(self, names: Sequence[str]) -> list[NDArray[Any] | None]:
        """Read the arrays of leaves; if a name occurs several times, each occurrence gets its own copy."""
        arrays: dict[str, NDArray[Any] | None] = {}
        for source, per_process in ((self._source, False), (self._share, True)):
            wanted = list(dict.fromkeys(name for name in names if name.startswith(PER_PROCESS) is per_process))
            if source is not None and wanted:
                arrays.update(zip(wanted, source.read_leaves([self.leaves[name] for name in wanted]), strict=True))
        first = {name: index for index, name in reversed([*enumerate(names)])}
        pairs = [(arrays[name], first[name] == index) for index, name in enumerate(names)]
        return [array if array is None or is_first else array.copy() for array, is_first in pairs]

    def read_parts(self, names: Sequence[str], targets: Sequence[LeafTemplate]) -> tuple[list[Any], dict[int, Any]]:
        """Read the array data that each leaf's template needs, in the form that `materialize` expects."""
        count = Counter(names)
        once = [index for index, name in enumerate(names) if count[name] == 1 and not name.startswith(PER_PROCESS)]
        leaves = [self.leaves[names[index]] for index in once]
        read, parts = read_parts(self._source, leaves, [targets[index] for index in once], self._shared)
        arrays = dict(zip(once, read, strict=True))
        others = [index for index in range(len(names)) if index not in arrays]
        arrays.update(zip(others, self.read_arrays([names[index] for index in others]), strict=True))
        return [arrays[index] for index in range(len(names))], {once[index]: part for index, part in parts.items()}

    def load(self, names: Sequence[str], *, as_tensors: Collection[str] = ()) -> list[Any]:
        """Read values without templates; those in ``as_tensors`` become tensors if they were saved as torch tensors."""
        leaves = [self.leaves_of(name) for name in names]
        every = [leaf for group in leaves for leaf in group]
        arrays = self.read_arrays(every)
        saved = [self.leaves[leaf].saved for leaf in every]
        request, pairs = LeafRequest(kind="torch"), list(zip(every, saved, strict=True))
        tensors = {name for name, leaf in pairs if leaf.kind == "torch" and name in as_tensors}
        templates = [with_request(name, request, leaf, None) if name in tensors else None for name, leaf in pairs]
        with naming(self.location):
            values = iter(materialize(templates, saved, arrays, every))
        return [
            next(values) if name in self.leaves else unflatten(self.containers[name], [next(values) for _ in group])
            for name, group in zip(names, leaves, strict=True)
        ]

    def leaves_of(self, name: str) -> list[str]:
        """Return the storage names of a container's leaves in order; for a leaf, its own name."""
        if name in self.leaves:
            return [name]
        return [leaf for child, _ in self.containers[name].named_children(name) for leaf in self.leaves_of(child)]


def open_graph(location: Location) -> StoredGraph:
    def open_tree(checkpoint: CheckpointSource) -> StoredGraph:
        name = checkpoint.only_tree(how="expected a graph, which must be the only tree")
        return StoredGraph(checkpoint.tree(name), checkpoint.location, checkpoint.files(name))

    return read_checkpoint(location.without_links(), open_tree)


def _is_same(mine: Share, other: Share) -> bool:
    """Return whether two processes have saved the same states, for example of schedulers."""
    trees = [TreeReader(share.folder, share.files) for share in (mine, other)]
    arrays = ([array is None or array.tobytes() for array in tree.read_leaves(tree.leaves)] for tree in trees)
    return trees[0].leaves == trees[1].leaves and next(arrays) == next(arrays)


def _containers(structure: TreeDef | None, name: str) -> dict[str, TreeDef]:
    if structure is None:
        return {}
    containers = {name: structure}
    for below, child in structure.named_children(name):
        containers.update(_containers(child, below))
    return containers
