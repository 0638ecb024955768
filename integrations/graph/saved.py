"""The graph that a checkpoint stores: its nodes, their named edges and their values."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...engine.errors import DamagedCheckpointError, OptionError, TreeMismatchError
from ...engine.forks import cached_property
from ...engine.pytree import unescape_key
from .frameworks import EXTRA_STATE, OPTIMIZER_SLOTS
from .outside import wrapped_nodes
from .slots import Path, format_node_path, parse_path, storage_name

OWN_STATES = "own_states"  # document key: whether states from custom methods and hooks are included
ATTRIBUTES = "attributes"  # document key: whether the parts of Keras objects are named after attributes

Transform = Callable[[Any], Any]  # converts a saved array to the array to restore

Rename = Mapping[str, str | tuple[str, Transform]]
"""Maps each path in the checkpoint to a path in the program, or to a pair of a path and a function to apply to the
array. All paths below a renamed path are renamed with it."""


_MOVED = re.compile(r"holdfast\.engine\.(?=(?:graph|components|formats)\.)")


def current_name(name: str) -> str:
    """Return the current name of a class or function that holdfast 0.1.0 saved under a former module name."""
    return _MOVED.sub("holdfast.integrations.", name, count=1) if name.startswith("holdfast.") else name


@dataclass(slots=True)
class SavedNode:
    edges: dict[str, int] = field(default_factory=dict)
    value: str | None = None  # storage name of the value, which is a leaf or a container
    type: str = ""  # the object's type name; among values, only number boxes and enums have one
    optimizer_slots: list[tuple[int, str, int]] = field(default_factory=list)  # (parameter node, name, value node)
    groups: list[list[int]] = field(default_factory=list)  # parameters of each optimizer group
    transform: Transform | None = None  # None restores the value unchanged
    training: bool = True  # whether a module was in training mode


class SavedGraph:
    """A checkpoint's graph; node 0 is the root."""

    def __init__(
        self,
        nodes: Sequence[SavedNode],
        before: SavedGraph | None = None,
        *,
        has_own_states: bool = False,
        numbers_keras: bool = False,
    ) -> None:
        self.nodes = list(nodes)
        # Whether the checkpoint contains states from custom methods and hooks, which holdfast 0.1.0 did not save.
        self.has_own_states: bool = has_own_states if before is None else before.has_own_states
        self.numbers_keras: bool = numbers_keras if before is None else before.numbers_keras
        self._before = before
        # Maps each node to the last edge on the shortest path to it, as a pair of start node and edge name. Paths are
        # built on demand, because in a forged graph their total length may grow with the square of the number of nodes.
        self.above: dict[int, tuple[int, str]] = {0: (0, "")}
        self._slots: dict[int, tuple[int, int, str]] = {}
        queue = [0]
        for number in queue:
            for segment, child in self.nodes[number].edges.items():
                if child not in self.above:
                    self.above[child] = number, segment
                    queue.append(child)
        for number in queue:
            for parameter, name, value in self.nodes[number].optimizer_slots:
                if parameter in self.above and value not in self.above:
                    self._slots.setdefault(value, (number, parameter, name))

    def path(self, number: int) -> Path:
        """Return the shortest path to a node; for an optimizer's value, the path under which it is stored."""
        if number in self._slots:
            optimizer, parameter, name = self._slots[number]
            return (*self.path(optimizer), OPTIMIZER_SLOTS, *self.path(parameter), name)
        keys: list[str] = []
        while number:
            number, segment = self.above[number]
            keys.append(segment)
        return tuple(reversed(keys))

    def values(self) -> Iterator[tuple[int, SavedNode]]:
        pairs = ((number, self.nodes[number]) for number in (*self.above, *self._slots))
        return (pair for pair in pairs if pair[1].value is not None)

    def find(self, path: Path) -> int | None:
        """Return the node that a path leads to, or None; the path need not be the shortest one."""
        number: int | None = 0
        for segment in path:
            number = None if number is None else self.nodes[number].edges.get(segment)
        if number is None and OPTIMIZER_SLOTS in path:
            number = next((value for value in self._slots if self.path(value) == path), None)
        return number

    def container_name(self, number: int) -> str:
        """Return the storage name under which a container was saved, regardless of any renaming."""
        return storage_name(self.path(number)) if self._before is None else self._before.container_name(number)

    def unwrapped(self) -> SavedGraph:
        """Return a graph in which wrapped modules are also reachable by paths without the wrappers."""
        nodes, is_wrapped = list(self.nodes), False
        for number in reversed(self.above):  # inner wrappers first
            for child in wrapped_nodes(nodes[number].type, nodes[number].edges):
                nodes[number] = replace(nodes[number], edges={**nodes[child].edges, **nodes[number].edges})
                is_wrapped = True
        return SavedGraph(nodes, self) if is_wrapped else self

    def renamed(self, table: Rename) -> SavedGraph:
        nodes = [replace(node, edges=dict(node.edges)) for node in self.nodes]
        moved: list[tuple[Path, int]] = []
        for old_text, entry in table.items():
            new_text, transform = (entry, None) if isinstance(entry, str) else _pair(entry)
            old, new = parse_path(old_text), parse_path(new_text)
            number = self.find(old)
            holder = self.find(old[:-1])
            if number is None or holder is None or old[-1] not in nodes[holder].edges:
                raise TreeMismatchError(f"rename: the checkpoint has no {format_node_path(old)}")
            if transform is not None and nodes[number].value is None:
                raise OptionError(f"rename: {format_node_path(old)} is not an array; a function can change only arrays")
            nodes[number].transform = transform
            del nodes[holder].edges[old[-1]]
            moved.append((new, number))
        for new, number in sorted(moved, key=lambda move: len(move[0])):
            below = _walk_down(nodes, 0, new[:-1])
            if below is None:
                raise TreeMismatchError(f"rename: {format_node_path(new)} is below a value; choose another path")
            if new[-1] in nodes[below].edges:
                raise TreeMismatchError(
                    f"rename: the checkpoint already has something at {format_node_path(new)}; rename that, too"
                )
            nodes[below].edges[new[-1]] = number
        return SavedGraph(nodes, self)

    @cached_property
    def uses(self) -> Counter[int]:
        """The number of edges, optimizer groups and optimizer slots that refer to each node."""
        ends = [number for node in self.nodes for number in node.edges.values()]
        ends += [number for node in self.nodes for group in node.groups for number in group]
        ends += [number for node in self.nodes for first, _, last in node.optimizer_slots for number in (first, last)]
        return Counter(ends)

    @cached_property
    def optimizers(self) -> dict[int, dict[int, list[tuple[str, int]]]]:
        """The optimizer values as (name, node) pairs, keyed by optimizer node, then by parameter node."""
        kept_by: dict[int, dict[int, list[tuple[str, int]]]] = {}
        for number, node in enumerate(self.nodes):
            kept: dict[int, list[tuple[str, int]]] = {parameter: [] for group in node.groups for parameter in group}
            for parameter, name, value in node.optimizer_slots:
                kept.setdefault(parameter, []).append((name, value))
            if kept:
                kept_by[number] = kept
        return kept_by

    @cached_property
    def with_values(self) -> set[int]:
        """The nodes that have a value or lead to a node with a value."""
        above: dict[int, list[int]] = {}
        for number, node in enumerate(self.nodes):
            for child in node.edges.values():
                above.setdefault(child, []).append(number)
        queue = [number for number, node in enumerate(self.nodes) if node.value is not None or node.optimizer_slots]
        with_values = set(queue)
        for number in queue:
            for holder in above.get(number, ()):
                if holder not in with_values:
                    with_values.add(holder)
                    queue.append(holder)
        return with_values

    @classmethod
    def of_names(cls, names: Iterable[str], kinds: Mapping[str, str]) -> SavedGraph:
        """Return the graph of a plain tree, with one node for each container and leaf."""
        nodes = [SavedNode(type=kinds.get("", ""))]
        leaves = dict.fromkeys(names)
        for name in (*leaves, *kinds):
            number = 0
            segments = name.split(".") if name else []
            for depth, segment in enumerate(segments, 1):
                edges = nodes[number].edges
                if segment not in edges:
                    edges[segment] = len(nodes)
                    nodes.append(SavedNode(type=kinds.get(".".join(segments[:depth]), "")))
                number = edges[segment]
            nodes[number].value = name if name in leaves else None
        # Dotted keys, as in a flat state_dict, are also split into edges that lead to the same values.
        for number in range(len(nodes)):
            for segment, child in list(nodes[number].edges.items()):
                *keys, last = segment.split("%2E")
                is_value = nodes[child].value is not None or last == EXTRA_STATE
                if keys and last and all(keys) and is_value:
                    holder = _walk_down(nodes, number, keys)
                    if holder is not None:
                        nodes[holder].edges.setdefault(last, child)
        return cls(nodes)

    @classmethod
    def of_document(cls, document: Any, names: Sequence[str], source: str) -> SavedGraph:
        """Build a graph from an untrusted document."""
        nodes = document.get("nodes") if isinstance(document, dict) else None
        if not isinstance(nodes, list) or not nodes:
            raise DamagedCheckpointError(f"{source} has no list of nodes")
        stored = frozenset(names)
        used: set[str] = set()
        read = []
        for number, node in enumerate(nodes):
            try:
                read.append(_read_node(node, len(nodes)))
            except (ValueError, TypeError, AttributeError) as error:
                raise DamagedCheckpointError(f"{source}: node {number} is not valid: {error}") from error
            value = read[-1].value
            if value is None:
                continue
            if value not in stored or value in used:
                problem = "is also the value of another node" if value in used else "is not in the checkpoint"
                raise DamagedCheckpointError(f"{source}: the value of node {number}, {value!r:.100}, {problem}")
            used.add(value)
        if read[0].value is not None:
            raise DamagedCheckpointError(f"{source}: its root has a value")
        has_own_states = document.get(OWN_STATES) is True
        numbers_keras = has_own_states and document.get(ATTRIBUTES) is not True
        return cls(read, has_own_states=has_own_states, numbers_keras=numbers_keras)


def _walk_down(nodes: list[SavedNode], start: int, path: Sequence[str]) -> int | None:
    """Return the node at a path, creating any missing nodes; return None if the path passes through a value."""
    for segment in path:
        edges = nodes[start].edges
        if segment not in edges:
            edges[segment] = len(nodes)
            nodes.append(SavedNode())
        start = edges[segment]
        if nodes[start].value is not None:
            return None
    return start


def _pair(entry: Any) -> tuple[str, Transform]:
    if isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str) and callable(entry[1]):
        return entry
    raise OptionError(f"rename: {entry!r:.100} must be a path, or a path and a function of the array")


def _read_node(document: Any, count: int) -> SavedNode:
    if not isinstance(document, dict):
        raise TypeError(f"{document!r:.80}")
    value, label = document.get("value"), document.get("type", "")
    if not isinstance(value, str | None) or not isinstance(label, str):
        raise TypeError(f"value {value!r:.80}, type {label!r:.80}")
    node = SavedNode({}, value, current_name(label), training=document.get("training") is not False)
    if "edges" in document:
        node.edges = {_segment(name): _number(child, count) for name, child in document["edges"].items()}
    if node.edges and value is not None:
        raise ValueError("it has both a value and edges")
    for entry in as_list(document.get(OPTIMIZER_SLOTS, [])):
        parameter, name, child = as_list(entry, 3)
        node.optimizer_slots.append((_number(parameter, count), _segment(name), _number(child, count)))
    groups = map(as_list, as_list(document.get("groups", [])))
    node.groups = [[_number(parameter, count) for parameter in group] for group in groups]
    return node


def _number(value: Any, count: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < count:
        raise ValueError(f"{value!r:.80} is not the number of a node")
    return value


def _segment(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.80} is not the name of an edge")
    unescape_key(value)
    return value


def as_list(value: Any, count: int | None = None) -> list[Any]:
    """Return an untrusted value if it is a list (of ``count`` elements, if given); otherwise, raise TypeError."""
    if not isinstance(value, list) or (count is not None and len(value) != count):
        raise TypeError(f"expected a list{'' if count is None else f' of {count}'}, found {value!r:.80}")
    return value
