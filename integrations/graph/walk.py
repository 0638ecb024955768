"""The walk over live objects: every object once, under the shortest path to it."""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from ...engine.errors import UnsupportedLeafError
from ...engine.pytree import collection_paused, is_python_value, is_torch_tensor, key_segments
from .frameworks import ModuleState, OptimizerSlot, OptionSlot, group_options, is_buffer, is_optax_moment, slot_name
from .paths import Path, format_node_path
from .slots import Slot
from .tracked import Node, TrackedDict, TrackedList, check_origin
from .views import Branch, Edge, Leaf, Unsaved, classify, root_view

GROUPS = "groups"  # name of the edge from a torch optimizer to the options of its groups
OWN_STATES = "own_states"  # key of whether a document has the states that modules and optimizers give by methods
OPTIMIZER_SLOTS = "slots"  # name below which a torch optimizer's values for parameters are, by the parameters' paths


@dataclass(slots=True)
class LiveNode:
    value: Any
    view: Branch | Leaf
    path: Path = ()  # the shortest path to it
    keys: dict[str, Any] = field(default_factory=dict)  # the keys of its edges, by the edges' names
    edges: dict[str, LiveNode] = field(default_factory=dict)
    optimizer_slots: list[tuple[LiveNode, str, LiveNode]] = field(default_factory=list)  # parameter, name, value
    # The parameters of an optimizer's groups, as far as they are in the graph.
    groups: list[list[LiveNode]] = field(default_factory=list)

    @property
    def has_value(self) -> bool:
        return isinstance(self.view, Leaf) and self.view.ready

    @property
    def optimizer(self) -> Any:
        return self.view.optimizer if isinstance(self.view, Branch) else None

    @property
    def slot(self) -> Slot:
        assert isinstance(self.view, Leaf)
        return self.view.slot

    def stored_value(self) -> Any:
        """Return what a checkpoint holds of it."""
        assert isinstance(self.view, Leaf)
        return self.slot.get() if self.view.packed is None else self.view.packed

    def add(self, segment: str, key: Any, child: LiveNode) -> None:
        self.keys[segment], self.edges[segment] = key, child


@dataclass(slots=True)
class LiveGraph:
    nodes: list[LiveNode]  # the nearest to the root first, values of optimizers last
    skipped: dict[Path, str]  # objects that are not saved, each with the reason
    notes: dict[Path, str]  # for people, on objects that are saved

    @property
    def own_states(self) -> list[Path]:
        """The paths of states of modules, of optimizers in optimizers and of enumerations, which 0.1.0 did not save."""
        found = [node.path for node in self.nodes if isinstance(node.value, ModuleState | enum.Enum)]
        inner = [child for node in self.nodes if node.optimizer is not None for child in node.edges.values()]
        return found + [child.path for child in inner if child.value is not None]

    @property
    def root(self) -> LiveNode:
        return self.nodes[0]

    def leaves(self) -> list[LiveNode]:
        return [node for node in self.nodes if node.has_value]


def walk(root: Node, *, strict: bool = True) -> LiveGraph:
    walker = _Walk()
    start = LiveNode(root, root_view(root))
    walker.discover(start)
    if strict:
        walker.refuse()
    walker.skipped.update(walker.problems)
    nodes = _ordered(start)
    orphans = [] if root._holdfast_keeps_moments else _orphaned_moments(nodes)
    for orphan in orphans:
        for holder in nodes:
            for segment in [segment for segment, child in holder.edges.items() if child is orphan]:
                del holder.edges[segment]
                walker.skipped[*holder.path, segment] = "its parameters are not part of the checkpoint"
    nodes = _ordered(start) if orphans else nodes
    walker.add_optimizer_slots(nodes)
    return LiveGraph(nodes, walker.skipped, walker.notes)


def check(root: Node) -> None:
    """Raise UnsupportedLeafError if anything that can be reached can be neither saved nor restored."""
    walker = _Walk(tensors=False)  # which can always be saved
    with collection_paused():
        walker.discover(LiveNode(root, root_view(root)))
    walker.refuse()


class _Walk:
    def __init__(self, *, tensors: bool = True) -> None:
        self._tensors = tensors
        self.skipped: dict[Path, str] = {}
        self.problems: dict[Path, str] = {}
        self.notes: dict[Path, str] = {}
        self._known: dict[int, LiveNode] = {}

    def refuse(self) -> None:
        if self.problems:
            lines = "\n".join(f"  {format_node_path(path)}: {what}" for path, what in self.problems.items())
            raise UnsupportedLeafError(f"these objects cannot be saved, and nothing was written:\n{lines}")

    def discover(self, start: LiveNode) -> None:
        """Find all nodes and edges, breadth first."""
        self._known[id(start.value)] = start
        root = start.value.__holdfast_root__()
        if root is not None:
            self._known[id(root)] = start
        queue = deque([(start, False)])
        while queue:
            node, covered = queue.popleft()
            view = node.view
            if isinstance(node.value, TrackedList | TrackedDict):
                check_origin(node.value, format_node_path(node.path))
            if not isinstance(view, Branch):
                continue
            for segment, note in view.notes.items():
                self.notes[*node.path, segment] = note
            # The outermost module with a state of its own gives those of the modules in it, and all buffers, by that.
            gives = any(isinstance(edge.value, ModuleState) for edge in view.edges)
            for edge in view.edges:
                if covered and isinstance(edge.value, ModuleState):
                    continue
                if (covered or gives) and is_buffer(node.value, edge.key):
                    continue
                child = self._child(node, edge)
                if child is not None:
                    node.add(edge.segment, edge.key, child)
                    if not child.path:
                        child.path = (*node.path, edge.segment)
                        queue.append((child, covered or gives))
            if view.optimizer is not None:
                self._add_options(node, view.optimizer)

    def _child(self, holder: LiveNode, edge: Edge) -> LiveNode | None:
        known = self._known.get(id(edge.value))
        if known is not None:
            return known
        if not self._tensors and is_torch_tensor(edge.value):
            return None
        path = (*holder.path, edge.segment)
        view = classify(edge.value, edge.position)
        if isinstance(view, Unsaved):
            if not view.intended:
                self.problems[path] = view.reason
            return None
        if isinstance(view, Leaf) and not view.ready:
            self.skipped[path] = "has no shape yet; run the module once"
        node = LiveNode(edge.value, view)
        if view.shared if isinstance(view, Leaf) else not _is_constant(edge.value):
            self._known[id(edge.value)] = node
        return node

    def _add_options(self, node: LiveNode, optimizer: Any) -> None:
        """Add the options of an optimizer's groups as ordinary nodes."""
        groups = LiveNode(None, Branch("list", [], sequence=True), (*node.path, GROUPS))
        node.add(GROUPS, GROUPS, groups)
        for number, live in enumerate(optimizer.param_groups):
            group = LiveNode(None, Branch("dict", []), (*groups.path, str(number)))
            groups.add(str(number), number, group)
            options = group_options(live)
            for segment, name in zip(key_segments(list(options)), options, strict=True):
                leaf = Leaf(OptionSlot(optimizer, number, name), shared=False)
                group.add(segment, name, LiveNode(options[name], leaf, (*group.path, segment)))

    def add_optimizer_slots(self, nodes: list[LiveNode]) -> None:
        """Add the values that optimizers keep for parameters that are in the graph, too."""
        by_object = {id(node.value): node for node in nodes if isinstance(node.view, Leaf) and node.view.shared}
        for node in list(nodes):
            if node.optimizer is None:
                continue
            missing = 0
            state = node.optimizer.state
            for group in node.optimizer.param_groups:
                within = [by_object[id(parameter)] for parameter in group["params"] if id(parameter) in by_object]
                node.groups.append(within)
                missing += sum(bool(state.get(one)) for one in group["params"] if id(one) not in by_object)
                for parameter in within:
                    nodes += _slots_of(node, parameter)
            if missing:
                self.skipped[*node.path, OPTIMIZER_SLOTS] = (
                    f"{missing} of its parameters are not part of the checkpoint"
                )


def _slots_of(node: LiveNode, parameter: LiveNode) -> list[LiveNode]:
    values = node.optimizer.state.get(parameter.value, {})
    added = []
    names = list(map(slot_name, values))
    for segment, name, one in zip(key_segments(names), names, values.values(), strict=True):
        leaf = Leaf(OptimizerSlot(node.optimizer, parameter.value, name), shared=True)
        value = LiveNode(one, leaf, (*node.path, OPTIMIZER_SLOTS, *parameter.path, segment))
        node.optimizer_slots.append((parameter, segment, value))
        added.append(value)
    return added


def _is_constant(value: Any, depth: int = 4) -> bool:
    """Whether a value is a tuple of plain values: Python makes one object of equal constants."""
    return type(value) is tuple and all(
        is_python_value(child) or (depth > 0 and _is_constant(child, depth - 1)) for child in value
    )


def _ordered(start: LiveNode) -> list[LiveNode]:
    """Return all reachable nodes, the nearest first, and give each its shortest path."""
    start.path = ()
    nodes = [start]
    seen = {id(start)}
    for node in nodes:  # grows during the loop
        for segment, child in node.edges.items():
            if id(child) not in seen:
                seen.add(id(child))
                child.path = (*node.path, segment)
                nodes.append(child)
    return nodes


def _orphaned_moments(nodes: list[LiveNode]) -> list[LiveNode]:
    """Return the moments of optax whose parameters are nowhere in the graph."""
    orphans = []
    for node in nodes:
        for segment, child in node.edges.items():
            if isinstance(child.view, Branch) and is_optax_moment(node.value, segment):
                shapes = _shapes(child)
                others = (other for other in nodes if other.path[: len(node.path)] != node.path)
                if shapes and not any(_has(other, shapes) for other in others if other is not child):
                    orphans.append(child)
    return orphans


def _shapes(start: LiveNode) -> dict[Path, tuple[int, ...]]:
    """Return the shapes of all leaves below a node, by their paths from it."""
    found: dict[Path, tuple[int, ...]] = {}
    queue: list[tuple[LiveNode, Path]] = [(start, ())]
    seen = {id(start)}
    for node, path in queue:
        if isinstance(node.view, Leaf):
            found[path] = _shape(node)
        for segment, child in node.edges.items():
            if id(child) not in seen:
                seen.add(id(child))
                queue.append((child, (*path, segment)))
    return found


def _shape(node: LiveNode) -> tuple[int, ...]:
    return tuple(getattr(node.slot.get(), "shape", ()))


def _has(holder: LiveNode, shapes: dict[Path, tuple[int, ...]]) -> bool:
    """Whether leaves of these shapes are at these paths below a node."""
    for path, shape in shapes.items():
        node: LiveNode | None = holder
        for segment in path:
            node = None if node is None else node.edges.get(segment)
        if node is None or not isinstance(node.view, Leaf) or _shape(node) != shape:
            return False
    return True
