"""Walk the graph of live objects, and find each object once, under its shortest path."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ...engine.errors import UnsupportedLeafError
from ...engine.pytree import collection_paused, is_python_value, is_torch_tensor, key_segments
from .frameworks import GROUPS, OPTIMIZER_SLOTS, ModuleState, OptimizerSlot, is_buffer, is_module, keras_kind, slot_name
from .slots import Path, Slot, format_node_path
from .tracked import Node, Part, check_origin
from .views import Branch, Edge, Leaf, Unsaved, classify, options_edge, root_view


@dataclass(slots=True)
class LiveNode:
    value: Any
    view: Branch | Leaf
    path: Path  # the shortest path to the object
    edges: dict[str, LiveNode] = field(default_factory=dict)
    optimizer_slots: list[tuple[LiveNode, str, LiveNode]] = field(default_factory=list)  # (parameter, name, value)
    groups: list[list[LiveNode]] = field(default_factory=list)  # for each param group, its parameters in the graph
    number: int = -1  # node number in the saved document
    outside: bool = False  # whether the node only refers to an object whose value is saved elsewhere

    @property
    def has_value(self) -> bool:
        return isinstance(self.view, Leaf) and self.view.ready and not self.outside

    @property
    def optimizer(self) -> Any:
        return self.view.optimizer if isinstance(self.view, Branch) else None

    @property
    def slot(self) -> Slot:
        assert isinstance(self.view, Leaf)
        return self.view.slot


@dataclass(slots=True)
class LiveGraph:
    nodes: list[LiveNode]  # sorted by distance from the root, with optimizer values last
    skipped: dict[Path, str]  # reasons why objects are not saved, keyed by path

    @property
    def notes(self) -> dict[Path, str]:
        """Notes about saved objects, keyed by path."""
        modules = [node for node in self.nodes if is_module(node.value) and keras_kind(node.value) is None]
        children = [child for node in modules for child in node.edges.values()]
        note = "is a plain {} of modules, which state_dict() does not include"
        plain = [child for child in children if isinstance(child.value, dict | list | tuple)]
        return {child.path: note.format(type(child.value).__name__) for child in plain}

    @property
    def own_states(self) -> list[Path]:
        """The paths of objects that holdfast 0.1.0 did not save: module states, enums, and nested optimizers."""
        paths = [node.path for node in self.nodes if isinstance(node.value, ModuleState | enum.Enum)]
        optimizers = [node for node in self.nodes if node.optimizer is not None]
        return paths + [child.path for node in optimizers for name, child in node.edges.items() if name != GROUPS]

    @property
    def own(self) -> list[LiveNode]:
        """The nodes that belong to the graph, excluding nodes that only refer to objects outside it."""
        return [node for node in self.nodes if not node.outside]

    def without_names(self) -> LiveGraph:
        """Return the graph without outside nodes, or unchanged if its optimizers need them to identify parameters."""
        if any(node.groups or node.optimizer_slots for node in self.nodes):
            return self
        for node in self.own:
            node.edges = {segment: child for segment, child in node.edges.items() if not child.outside}
        return LiveGraph(self.own, self.skipped)

    def leaves(self) -> list[LiveNode]:
        return [node for node in self.nodes if node.has_value]


def walk(
    root: Node | Part, *, strict: bool = True, ends: Callable[[Any], bool] = lambda _: False, tensors: bool = True
) -> LiveGraph:
    """Find reachable objects; with ``strict``, raise UnsupportedLeafError if one can be neither saved nor restored."""
    # An object for which `ends` returns True, and all objects below it, serve only to identify optimizer parameters.
    walker = _Walk(ends, tensors)
    nodes = walker.discover(root)
    if strict and walker.problems:
        lines = "\n".join(f"  {format_node_path(path)}: {reason}" for path, reason in walker.problems.items())
        raise UnsupportedLeafError(f"these objects cannot be saved, and nothing was written:\n{lines}")
    walker.skipped.update(walker.problems)
    walker.add_optimizer_slots(nodes)
    return LiveGraph(nodes, walker.skipped)


def check(root: Node | Part) -> None:
    """Raise UnsupportedLeafError if a reachable object can be neither saved nor restored."""
    with collection_paused():
        walk(root, tensors=False)  # skip tensors, which can always be saved


class _Walk:
    def __init__(self, ends: Callable[[Any], bool], tensors: bool) -> None:
        self._ends, self._tensors = ends, tensors
        self.skipped: dict[Path, str] = {}
        self.problems: dict[Path, str] = {}
        self._known: dict[int, LiveNode] = {}

    def discover(self, root: Node | Part) -> list[LiveNode]:
        """Find all nodes and edges in breadth-first order, so that each node gets its shortest path."""
        start = LiveNode(root, root_view(root), ())
        self._known[id(root)] = start
        if (stood_for := root.__holdfast_root__()) is not None:
            self._known[id(stood_for)] = start
        queue, outside = [(start, False)], list[tuple[LiveNode, bool]]()
        for node, covered in itertools.chain(queue, outside):  # both lists grow in the loop
            view = node.view
            check_origin(node.value, node.path)
            if not isinstance(view, Branch):
                continue
            # Skip buffers and inner states inside a module whose own state includes them.
            gives = covered or any(isinstance(edge.value, ModuleState) for edge in view.edges)
            options = [] if view.optimizer is None else [options_edge(view.optimizer)]
            for edge in [*view.edges, *options]:
                if (covered and isinstance(edge.value, ModuleState)) or (gives and is_buffer(node.value, edge.key)):
                    continue
                child = self._known.get(id(edge.value))
                if child is None:
                    child = self._new(edge, (*node.path, edge.segment), node.outside or self._ends(edge.value))
                    if child is None:
                        continue
                    (outside if child.outside else queue).append((child, gives))
                node.edges[edge.segment] = child
        return [node for node, _ in (*queue, *outside)]

    def _new(self, edge: Edge, path: Path, outside: bool) -> LiveNode | None:
        if not self._tensors and is_torch_tensor(edge.value):
            return None
        view = classify(edge.value, edge.slot)
        if isinstance(view, Unsaved):
            if not view.intended and not outside:
                self.problems[path] = view.reason
            return None
        if isinstance(view, Leaf) and not view.ready and not outside:
            self.skipped[path] = "has no shape yet; run the module once"
        node = LiveNode(edge.value, view, path, outside=outside)
        if view.shared if isinstance(view, Leaf) else not _is_constant(edge.value):
            self._known[id(edge.value)] = node
        return node

    def add_optimizer_slots(self, nodes: list[LiveNode]) -> None:
        """Add the values that optimizers keep for parameters in the graph."""
        by_object = {id(node.value): node for node in nodes if isinstance(node.view, Leaf) and node.view.shared}
        for node in [node for node in nodes if not node.outside]:
            view, missing = node.view, 0
            if not isinstance(view, Branch):
                continue
            if view.parameters and all(id(parameter) in by_object for parameter in view.parameters):
                node.groups.append([by_object[id(parameter)] for parameter in view.parameters])
            for group in [] if view.optimizer is None else view.optimizer.param_groups:
                state = view.optimizer.state
                within = [by_object[id(parameter)] for parameter in group["params"] if id(parameter) in by_object]
                node.groups.append(within)
                missing += sum(bool(state.get(tensor)) for tensor in group["params"] if id(tensor) not in by_object)
                for parameter in within:
                    values = state.get(parameter.value, {})
                    names = list(map(slot_name, values))
                    for segment, name, value in zip(key_segments(names), names, values.values(), strict=True):
                        leaf = Leaf(OptimizerSlot(view.optimizer, group, parameter.value, name), shared=True)
                        nodes.append(LiveNode(value, leaf, (*node.path, OPTIMIZER_SLOTS, *parameter.path, segment)))
                        node.optimizer_slots.append((parameter, segment, nodes[-1]))
            if missing:
                self.skipped[*node.path, OPTIMIZER_SLOTS] = (
                    f"{missing} of its parameters are not part of the checkpoint, so what it keeps for them is lost: "
                    "also save the modules that have them"
                )


def _is_constant(value: Any, depth: int = 4) -> bool:
    """Return whether a value is a tuple of plain values; Python may merge equal constant tuples into one object."""
    return type(value) is tuple and all(
        is_python_value(child) or (depth > 0 and _is_constant(child, depth - 1)) for child in value
    )
