"""Lists and dictionaries of plain values, such as a history of losses: they take their contents from a checkpoint.

Arrays are changed in place, so that those of the program are needed before they can be restored. Numbers and text are
not: a list or dictionary that holds nothing else gets those that were saved, however many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..tree import unescape_key
from ..tree.leaves import NUMBER_KINDS
from ..tree.python_leaves import is_python_value
from ..tree.structure import MAX_DEPTH
from .paths import Path
from .saved import SavedGraph
from .tracked import TrackedDict, TrackedList

PLAIN_KINDS = NUMBER_KINDS | {"str", "bytes", "none", "set", "frozenset", "numpy_scalar"}
"""Kinds of leaves that need no object of the program."""

_CONTAINERS = (list, dict, tuple, TrackedList, TrackedDict)
_SEQUENCES = {"list": list, "tuple": tuple, f"{TrackedList.__module__}.{TrackedList.__name__}": list}
_LABELS = frozenset({*_SEQUENCES, "dict", f"{TrackedDict.__module__}.{TrackedDict.__name__}"})


class ListCell:
    """The contents of a list.

    Args:
        contents: The list.
        anchor: Whose life ends that of the list's place.
        trail: Where that is, seen from there.
    """

    def __init__(self, contents: list[Any], anchor: Any, trail: Path) -> None:
        self.anchor = anchor
        self.trail = trail
        self._contents = contents

    def get(self) -> Any:
        """Returns the list."""
        return self._contents

    def set(self, value: Any) -> None:
        """Replaces all elements."""
        list.__setitem__(self._contents, slice(None), value)


class EntryCell:
    """An entry that a dictionary does not have yet.

    Attributes:
        holder: The node of the dictionary.
        key: Its key, once that is known.
    """

    def __init__(self, entries: dict[Any, Any], anchor: Any, trail: Path, holder: int) -> None:
        self.anchor = anchor
        self.trail = trail
        self.holder = holder
        self.key: Any = None
        self._entries = entries

    def get(self) -> Any:
        """Returns ``...``, as there is no value yet."""
        return ...

    def set(self, value: Any) -> None:
        """Makes the entry."""
        dict.__setitem__(self._entries, self.key, value)


class PlainValues:
    """Which nodes of a checkpoint are plain values, or containers of nothing else.

    Args:
        graph: The graph.
        values: The nodes that are plain values.
    """

    def __init__(self, graph: SavedGraph, values: set[int]) -> None:
        self._graph = graph
        self._values = values
        self._known: dict[int, list[tuple[int, Path]] | None] = {}
        self._sharing: set[int] = set()

    def below(self, number: int) -> list[tuple[int, Path]] | None:
        """Returns the values in a container, each with its path from there; None if it holds anything else, too.

        Args:
            number: A node; of a value, that itself is returned.
        """
        if number not in self._known:
            self._known[number] = None  # while it is looked into, for those that hold themselves
            self._known[number] = self._look(number)
        return self._known[number]

    def elements(self, number: int) -> list[tuple[int, Path]] | None:
        """Returns the same of a list or tuple, and None for everything else."""
        return self.below(number) if self._graph.nodes[number].type in _SEQUENCES else None

    def shares(self, number: int) -> bool:
        """Tells whether something else holds what is in a container, too, other than values; `below` has an answer."""
        return number in self._sharing

    def build(self, number: int, values: Mapping[int, Any], keys: Callable[[int], Mapping[str, Any]]) -> Any:
        """Returns a value, or a container with all that is in it.

        Args:
            number: A node for which `below` has an answer.
            values: The values by their nodes.
            keys: Returns the keys of a container as it was saved, by the names of its edges.
        """
        if number in values:
            return values[number]
        node = self._graph.nodes[number]
        if node.type in _SEQUENCES:
            order = sorted(node.edges, key=int)
            return _SEQUENCES[node.type](self.build(node.edges[segment], values, keys) for segment in order)
        known = keys(number)
        order = [segment for segment in known if segment in node.edges]
        order += [segment for segment in node.edges if segment not in known]
        return {
            known.get(segment, unescape_key(segment)): self.build(node.edges[segment], values, keys)
            for segment in order
        }

    def _look(self, number: int) -> list[tuple[int, Path]] | None:
        found: list[tuple[int, Path]] = []
        queue: list[tuple[int, Path]] = [(number, ())]
        for node, path in queue:
            if node in self._values:
                found.append((node, path))
                continue
            known = self._graph.nodes[node]
            if known.value is not None or known.type not in _LABELS or known.slots or len(path) > MAX_DEPTH:
                return None
            if known.type in _SEQUENCES and not all(map(_is_index, known.edges)):
                return None  # renamed
            for segment, child in known.edges.items():
                if self._graph.above(child) != (node, segment):
                    return None  # stored elsewhere, or around itself
                if child in self._graph.shared and child not in self._values:
                    self._sharing.add(number)
                queue.append((child, (*path, segment)))
        return found


def _is_index(segment: str) -> bool:
    return segment.isascii() and segment.isdigit()


def is_plain(value: Any) -> bool:
    """Tells whether something in the program is a plain value, or a container of nothing else."""
    return _is_plain(value, 0, {})


def _is_plain(value: Any, depth: int, known: dict[int, bool]) -> bool:
    if is_python_value(value):
        return True
    if type(value) not in _CONTAINERS or depth > MAX_DEPTH:
        return False
    if id(value) not in known:
        known[id(value)] = False  # while it is looked into: nothing plain holds itself
        children = value.values() if isinstance(value, dict) else value
        known[id(value)] = all(_is_plain(child, depth + 1, known) for child in children)
    return known[id(value)]
