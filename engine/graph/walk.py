"""The walk over live objects: every object once, under the shortest way to it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from ..errors import OptionError, UnsupportedLeafError
from ..tree.python_leaves import is_python_value
from ..tree.structure import key_segments
from .flax_objects import parameter_like
from .paths import Path, shown
from .tracked import Node, check_origin
from .views import Branch, Edge, Leaf, Nothing, Position, look

GROUPS = "groups"
"""Name of the edge from a torch optimizer to the options of its groups."""
SLOTS = "slots"
"""Name below which stands what a torch optimizer keeps for its parameters, by the parameters' paths."""


@dataclass(slots=True)
class LiveNode:
    """An object of the graph.

    Attributes:
        value: The object.
        view: What it is to the graph.
        path: The shortest path to it.
        keys: The keys of its edges, by the edges' names.
        edges: Where the edges lead.
        slots: What an optimizer keeps: the parameter's node, the name, the value's node.
        groups: The parameters of an optimizer's groups, as far as they are in the graph.
    """

    value: Any
    view: Branch | Leaf
    path: Path = ()
    keys: dict[str, Any] = field(default_factory=dict)
    edges: dict[str, LiveNode] = field(default_factory=dict)
    slots: list[tuple[LiveNode, str, LiveNode]] = field(default_factory=list)
    groups: list[list[LiveNode]] = field(default_factory=list)

    @property
    def has_value(self) -> bool:
        """Whether it is a leaf, and has a value already."""
        return isinstance(self.view, Leaf) and self.view.ready


@dataclass(slots=True)
class LiveGraph:
    """What a walk has found.

    Attributes:
        nodes: The objects, the nearest to the root first; the values of slots last.
        skipped: What is not saved, each with the reason.
        notes: What people should know of objects that are saved.
    """

    nodes: list[LiveNode]
    skipped: dict[Path, str]
    notes: dict[Path, str]

    @property
    def root(self) -> LiveNode:
        """The object that the walk began with."""
        return self.nodes[0]

    def leaves(self) -> list[LiveNode]:
        """Returns the objects that have a value."""
        return [node for node in self.nodes if node.has_value]


def walk(root: Node, *, strict: bool = True) -> LiveGraph:
    """Walks over everything that can be reached.

    Args:
        root: Where to begin.
        strict: Whether something that was attached and cannot be saved is an error.

    Returns:
        The graph; nothing in it is copied.

    Raises:
        UnsupportedLeafError: Something was attached that cannot be saved; names all such objects.
    """
    found = _Walk()
    start = LiveNode(root, root_view(root))
    found.discover(start)
    if found.problems and strict:
        lines = "\n".join(f"  {shown(path)}: {what}" for path, what in found.problems.items())
        raise UnsupportedLeafError(f"these objects cannot be saved, and nothing was written:\n{lines}")
    found.skipped.update(found.problems)
    nodes = _ordered(start)
    lonely = _lonely_moments(nodes)
    for node in lonely:
        for holder in nodes:
            for segment in [segment for segment, child in holder.edges.items() if child is node]:
                del holder.edges[segment]
                path = (*holder.path, segment)
                found.skipped[path] = "its parameters are not part of the checkpoint"
    nodes = _ordered(start) if lonely else nodes
    found.slots(nodes)
    return LiveGraph(nodes, found.skipped, found.notes)


class _Walk:
    def __init__(self) -> None:
        self.skipped: dict[Path, str] = {}
        self.problems: dict[Path, str] = {}
        self.notes: dict[Path, str] = {}
        self._known: dict[int, LiveNode] = {}

    def discover(self, start: LiveNode) -> None:
        """Finds all nodes and edges."""
        self._known[id(start.value)] = start
        root = start.value.__holdfast_root__()
        if root is not None:
            self._known[id(root)] = start
        queue = deque([(start, False)])
        while queue:
            node, lenient = queue.popleft()
            view = node.view
            if not isinstance(view, Branch):
                continue
            lenient = lenient or view.lenient
            check_origin(node.value, shown(node.path))
            for segment, note in view.notes.items():
                self.notes[*node.path, segment] = note
            for edge in view.edges:
                child = self._child(node, edge, lenient)
                if child is not None:
                    node.keys[edge.segment] = edge.key
                    node.edges[edge.segment] = child
                    if not child.path:
                        child.path = (*node.path, edge.segment)
                        queue.append((child, lenient))
            if view.optimizer is not None:
                self._options(node)

    def _child(self, holder: LiveNode, edge: Edge, lenient: bool) -> LiveNode | None:
        known = self._known.get(id(edge.value))
        if known is not None:
            return known
        path = (*holder.path, edge.segment)
        view = look(edge.value, edge.position)
        if isinstance(view, Nothing):
            if not view.meant:
                (self.skipped if lenient else self.problems)[path] = view.reason
            return None
        if isinstance(view, Leaf) and not view.ready:
            self.skipped[path] = "has no shape yet; run the module once"
        node = LiveNode(edge.value, view)
        if view.shared if isinstance(view, Leaf) else not _is_constant(edge.value):
            self._known[id(edge.value)] = node
        return node

    def _options(self, node: LiveNode) -> None:
        """Adds the options of an optimizer's groups as ordinary nodes."""
        assert isinstance(node.view, Branch)
        assert node.view.optimizer is not None
        optimizer = node.view.optimizer
        groups = LiveNode(None, Branch("list", [], sequence=True), (*node.path, GROUPS))
        node.edges[GROUPS], node.keys[GROUPS] = groups, GROUPS
        for number in range(len(optimizer.groups())):
            group = LiveNode(None, Branch("dict", []), (*groups.path, str(number)))
            groups.edges[str(number)], groups.keys[str(number)] = group, number
            options = optimizer.options(number)
            for segment, name in zip(key_segments(list(options)), options, strict=True):
                path = (*group.path, segment)
                cell = optimizer.option_cell(number, name)
                group.edges[segment] = LiveNode(options[name], Leaf(cell, shared=False), path)
                group.keys[segment] = name

    def slots(self, nodes: list[LiveNode]) -> None:
        """Adds what optimizers keep for parameters that are in the graph, too."""
        by_object = {id(node.value): node for node in nodes if isinstance(node.view, Leaf) and node.view.shared}
        for node in list(nodes):
            if not isinstance(node.view, Branch) or node.view.optimizer is None:
                continue
            optimizer = node.view.optimizer
            missing = 0
            for parameters in optimizer.groups():
                within = [by_object[id(parameter)] for parameter in parameters if id(parameter) in by_object]
                node.groups.append(within)
                missing += sum(bool(optimizer.slots(p)) for p in parameters if id(p) not in by_object)
                for parameter in within:
                    self._slots_of(node, parameter, nodes)
            if missing:
                self.skipped[*node.path, SLOTS] = f"{missing} of its parameters are not part of the checkpoint"

    def _slots_of(self, node: LiveNode, parameter: LiveNode, nodes: list[LiveNode]) -> None:
        assert isinstance(node.view, Branch)
        assert node.view.optimizer is not None
        kept = node.view.optimizer.slots(parameter.value)
        for segment, name in zip(key_segments(list(kept)), kept, strict=True):
            cell = node.view.optimizer.slot_cell(parameter.value, name)
            path = (*node.path, SLOTS, *parameter.path, segment)
            value = LiveNode(kept[name], Leaf(cell, shared=True), path)
            node.slots.append((parameter, segment, value))
            nodes.append(value)


def _is_constant(value: Any, depth: int = 4) -> bool:
    """Whether something is a tuple of plain values: Python makes one object of several that are written alike."""
    return type(value) is tuple and all(
        is_python_value(child) or (depth > 0 and _is_constant(child, depth - 1)) for child in value
    )


def _ordered(start: LiveNode) -> list[LiveNode]:
    """Returns what can be reached, the nearest first, and gives every node its shortest path."""
    start.path = ()
    nodes = [start]
    seen = {id(start)}
    for node in nodes:  # grows while it is walked over
        for segment, child in node.edges.items():
            if id(child) not in seen:
                seen.add(id(child))
                child.path = (*node.path, segment)
                nodes.append(child)
    return nodes


def _lonely_moments(nodes: list[LiveNode]) -> list[LiveNode]:
    """Returns the moments of optax whose parameters are nowhere in the graph."""
    lonely = []
    for node in nodes:
        for segment, child in node.edges.items():
            if isinstance(child.view, Branch) and parameter_like(node.value, segment):
                shapes = _shapes(child)
                holders = (other for other in nodes if isinstance(other.view, Branch) and other is not child)
                if shapes and not any(_has(holder, shapes) and not _below(holder, node) for holder in holders):
                    lonely.append(child)
    return lonely


def _below(one: LiveNode, other: LiveNode) -> bool:
    return one.path[: len(other.path)] == other.path


def _shapes(start: LiveNode) -> dict[Path, tuple[int, ...]]:
    """Returns the shapes of all leaves below a node, by their paths from it."""
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
    assert isinstance(node.view, Leaf)
    return tuple(getattr(node.view.cell.get(), "shape", ()))


def _has(holder: LiveNode, shapes: dict[Path, tuple[int, ...]]) -> bool:
    """Whether leaves of these shapes are at these paths below a node."""
    for path, shape in shapes.items():
        node: LiveNode | None = holder
        for segment in path:
            node = None if node is None else node.edges.get(segment)
        if node is None or not isinstance(node.view, Leaf) or _shape(node) != shape:
            return False
    return True


def root_view(root: Node) -> Branch:
    """Returns the edges of a root.

    Raises:
        OptionError: It stands for an object that has none.
    """
    view = look(root, Position(root, (), None))
    if not isinstance(view, Branch):
        raise OptionError(view.reason if isinstance(view, Nothing) else "the root is a value; give it a name")
    return view
