"""A graph as a checkpoint describes it: nodes, named edges, and which value belongs to which node."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import DamagedCheckpointError, OptionError, TreeMismatchError
from ..tree import unescape_key
from .paths import Path, parse_path, shown, storage_name
from .walk import SLOTS

Transform = Callable[[Any], Any]
"""Makes the array that is restored from the one that was saved."""

Rename = Mapping[str, str | tuple[str, Transform]]
"""For paths in the checkpoint the paths in the program, or those with a function that is applied to the array; what is
below a path goes with it."""


@dataclass(slots=True)
class SavedNode:
    """One node.

    Attributes:
        edges: Where its edges lead, by name.
        value: The storage name of its value, or of the container that its value is; None without one.
        type: The name of the object's type; ``""`` for values that are no boxes for numbers.
        slots: What an optimizer kept: the parameter's node, the name, the value's node.
        groups: The parameters of an optimizer's groups.
        transform: What makes the value that is restored from the one that was saved; None restores it as it is.
    """

    edges: dict[str, int] = field(default_factory=dict)
    value: str | None = None
    type: str = ""
    slots: list[tuple[int, str, int]] = field(default_factory=list)
    groups: list[list[int]] = field(default_factory=list)
    transform: Transform | None = None


class SavedGraph:
    """The graph of a checkpoint.

    Args:
        nodes: The nodes; the first is the root. Cycles are fine.
        before: What this was made from, and which node of that is the root now.

    Attributes:
        nodes: The nodes.
    """

    def __init__(self, nodes: Sequence[SavedNode], before: tuple[SavedGraph, int] | None = None) -> None:
        self.nodes = list(nodes)
        self._before = before
        # Not the paths themselves: in a graph that somebody forged they may be as long as there are nodes.
        self._above: dict[int, tuple[int, str]] = {0: (0, "")}
        self._slots: dict[int, tuple[int, int, str]] = {}
        queue = [0]
        for number in queue:
            for segment, child in self.nodes[number].edges.items():
                if child not in self._above:
                    self._above[child] = number, segment
                    queue.append(child)
        for number in queue:
            for parameter, slot, value in self.nodes[number].slots:
                if parameter in self._above and value not in self._above:
                    self._slots.setdefault(value, (number, parameter, slot))

    def path(self, number: int) -> Path:
        """Returns the shortest path to a node; for the value of a slot, what it is stored under.

        Args:
            number: A node that can be reached.
        """
        if number in self._slots:
            optimizer, parameter, slot = self._slots[number]
            return (*self.path(optimizer), SLOTS, *self.path(parameter), slot)
        keys: list[str] = []
        while number:
            number, segment = self._above[number]
            keys.append(segment)
        return tuple(reversed(keys))

    def above(self, number: int) -> tuple[int, str] | None:
        """Returns the last edge of the shortest path to a node: where it begins, and its name."""
        return self._above.get(number)

    def values(self) -> Iterator[tuple[int, SavedNode]]:
        """Generates the nodes that can be reached and have a value."""
        for number in [*self._above, *self._slots]:
            if self.nodes[number].value is not None:
                yield number, self.nodes[number]

    def find(self, path: Path) -> int | None:
        """Returns the node at a path, or None; any path that leads to it will do."""
        number: int | None = 0
        for segment in path:
            number = None if number is None else self.nodes[number].edges.get(segment)
        if number is None and SLOTS in path:
            number = next((value for value in self._slots if self.path(value) == path), None)
        return number

    def place(self, number: int) -> str:
        """Returns the storage name of a container, under which its values lie.

        Args:
            number: The container's node.
        """
        if self._before is None:
            return storage_name(self.path(number))
        before, start = self._before
        return before.place({0: start, start: 0}.get(number, number))

    def at(self, path: Path) -> SavedGraph:
        """Returns the graph as it is seen from another node, which becomes the root.

        Args:
            path: Any path to the node.

        Raises:
            TreeMismatchError: There is no such node, or it is a value.
        """
        start = self.find(path)
        if start is None or self.nodes[start].value is not None:
            what = "has nothing" if start is None else "has a value, and no objects,"
            raise TreeMismatchError(f"the checkpoint {what} at {shown(path)}")

        def moved(number: int) -> int:
            return {0: start, start: 0}.get(number, number)

        nodes = [_copy(node) for node in self.nodes]
        nodes[0], nodes[start] = nodes[start], nodes[0]
        for node in nodes:
            node.edges = {segment: moved(child) for segment, child in node.edges.items()}
            node.slots = [(moved(parameter), slot, moved(value)) for parameter, slot, value in node.slots]
            node.groups = [[moved(parameter) for parameter in group] for group in node.groups]
        return SavedGraph(nodes, (self, start))

    def renamed(self, table: Rename) -> SavedGraph:
        """Returns the graph with other paths.

        Args:
            table: For paths in the checkpoint the paths in the program.

        Raises:
            TreeMismatchError: A path is not in the checkpoint, or the new one is taken.
            OptionError: A path is written wrongly.
        """
        nodes = [_copy(node) for node in self.nodes]
        moved: list[tuple[Path, int]] = []
        for old_text, entry in table.items():
            new_text, transform = (entry, None) if isinstance(entry, str) else _pair(entry)
            old, new = parse_path(old_text), parse_path(new_text)
            number = self.find(old)
            holder = self.find(old[:-1])
            if number is None or holder is None or old[-1] not in nodes[holder].edges:
                raise TreeMismatchError(f"rename: the checkpoint has no {shown(old)}")
            if transform is not None and nodes[number].value is None:
                raise OptionError(f"rename: {shown(old)} is no array, so that no function can be applied to it")
            nodes[number].transform = transform
            del nodes[holder].edges[old[-1]]
            moved.append((new, number))
        for new, number in sorted(moved, key=lambda move: len(move[0])):
            _attach(nodes, new, number)
        return SavedGraph(nodes, (self, 0))

    def has_values_below(self, number: int) -> bool:
        """Whether a node or something below it has a value."""
        return number in self._valued

    @functools.cached_property
    def shared(self) -> frozenset[int]:
        """The nodes that several edges lead to."""
        seen: set[int] = set()
        found: set[int] = set()
        for node in self.nodes:
            for child in node.edges.values():
                (found if child in seen else seen).add(child)
        return frozenset(found)

    @functools.cached_property
    def _valued(self) -> set[int]:
        above: dict[int, list[int]] = {}
        for number, node in enumerate(self.nodes):
            for child in node.edges.values():
                above.setdefault(child, []).append(number)
        queue = [number for number, node in enumerate(self.nodes) if node.value is not None or node.slots]
        found = set(queue)
        for number in queue:
            for holder in above.get(number, ()):
                if holder not in found:
                    found.add(holder)
                    queue.append(holder)
        return found

    @classmethod
    def of_names(cls, names: Iterable[str], kinds: Mapping[str, str]) -> SavedGraph:
        """Returns the graph of a plain tree: its containers are the nodes.

        Where the keys of a container are paths themselves, as in a flat ``state_dict``, the same values can be reached
        by these paths, too.

        Args:
            names: The storage names of the leaves.
            kinds: The kinds of the containers by their storage names.
        """
        nodes = [SavedNode(type=kinds.get("", ""))]
        names = list(names)
        filled = {name.rpartition(".")[0] for name in (*names, *kinds)}
        leaves = frozenset(names)
        for name in [*names, *(name for name in kinds if name not in filled)]:
            number = 0
            segments = name.split(".") if name else []
            for depth, segment in enumerate(segments, 1):
                edges = nodes[number].edges
                if segment not in edges:
                    edges[segment] = len(nodes)
                    nodes.append(SavedNode(type=kinds.get(".".join(segments[:depth]), "")))
                number = edges[segment]
            nodes[number].value = name if name in leaves else None
        _split_keys(nodes)
        return cls(nodes)

    @classmethod
    def of_document(cls, document: Any, names: Sequence[str], source: str) -> SavedGraph:
        """Reads a graph.

        Args:
            document: Parsed JSON, not trusted in any way: ``{"nodes": [...]}``.
            names: The storage names of the leaves and containers that there are.
            source: Where it came from, for messages.

        Raises:
            DamagedCheckpointError: It does not describe a graph over these leaves.
        """
        nodes = document.get("nodes") if isinstance(document, dict) else None
        if not isinstance(nodes, list) or not nodes:
            raise DamagedCheckpointError(f"{source} has no list of nodes")
        known = frozenset(names)
        used: set[str] = set()
        read = []
        for number, node in enumerate(nodes):
            try:
                read.append(_read(node, len(nodes)))
            except (ValueError, TypeError, AttributeError) as error:
                raise DamagedCheckpointError(f"{source}: node {number} is no node: {error}") from error
            value = read[-1].value
            if value is not None and (value not in known or value in used):
                what = "is the value of another node, too" if value in used else "is not in the checkpoint"
                raise DamagedCheckpointError(f"{source}: the value of node {number}, {value!r:.100}, {what}")
            if value is not None:
                used.add(value)
        if read[0].value is not None:
            raise DamagedCheckpointError(f"{source}: its root has a value")
        return cls(read)


def _split_keys(nodes: list[SavedNode]) -> None:
    """Adds the edges that keys with dots in them stand for, where those lead nowhere else."""
    for number in range(len(nodes)):
        for segment, child in list(nodes[number].edges.items()):
            *keys, last = segment.split("%2E")
            if keys and last and all(keys) and nodes[child].value is not None:
                _add_way(nodes, number, keys, last, child)


def _add_way(nodes: list[SavedNode], holder: int, keys: Sequence[str], last: str, child: int) -> None:
    for key in keys:
        edges = nodes[holder].edges
        if key not in edges:
            edges[key] = len(nodes)
            nodes.append(SavedNode())
        holder = edges[key]
        if nodes[holder].value is not None:
            return
    nodes[holder].edges.setdefault(last, child)


def _copy(node: SavedNode) -> SavedNode:
    return SavedNode(dict(node.edges), node.value, node.type, node.slots, node.groups, node.transform)


def _pair(entry: Any) -> tuple[str, Transform]:
    if isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str) and callable(entry[1]):
        return entry
    raise OptionError(f"rename: {entry!r:.100} must be a path, or a path and a function of the array")


def _attach(nodes: list[SavedNode], path: Path, number: int) -> None:
    """Adds an edge, and the nodes on the way to it that there are not yet."""
    holder = 0
    for segment in path[:-1]:
        edges = nodes[holder].edges
        if segment not in edges:
            edges[segment] = len(nodes)
            nodes.append(SavedNode())
        holder = edges[segment]
    if path[-1] in nodes[holder].edges:
        raise TreeMismatchError(f"rename: the checkpoint has something at {shown(path)} already; rename that, too")
    nodes[holder].edges[path[-1]] = number


def _read(document: Any, count: int) -> SavedNode:
    if not isinstance(document, dict):
        raise TypeError(f"{document!r:.80}")
    value, label = document.get("value"), document.get("type", "")
    if not isinstance(value, str | None) or not isinstance(label, str):
        raise TypeError(f"value {value!r:.80}, type {label!r:.80}")
    node = SavedNode({}, value, label)
    if "edges" in document:
        node.edges = {_segment(name): _number(child, count) for name, child in document["edges"].items()}
    if node.edges and value is not None:
        raise ValueError("it has both a value and edges")
    if SLOTS in document:
        for entry in _list(document[SLOTS]):
            parameter, name, child = _list(entry)
            node.slots.append((_number(parameter, count), _segment(name), _number(child, count)))
    if "groups" in document:
        groups = map(_list, _list(document["groups"]))
        node.groups = [[_number(parameter, count) for parameter in group] for group in groups]
    return node


def _number(value: Any, count: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < count:
        raise ValueError(f"{value!r:.80} is the number of no node")
    return value


def _segment(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.80} is the name of no edge")
    unescape_key(value)
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"expected a list, found {value!r:.80}")
    return value
