"""Values of a checkpoint, made like the values in the program that they are for.

Arrays change in place, so the program must have theirs before they can be restored. Plain values do not: a list or
dictionary that holds nothing else, such as a history of losses, takes all values that were saved, however many. An
empty deque, such as a replay buffer, takes arrays, too.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...engine.arrays import naming
from ...engine.errors import TreeMismatchError, difference
from ...engine.pytree import (
    MAX_DEPTH,
    NUMBER_KINDS,
    NUMBERS,
    STRIDES,
    LeafTemplate,
    Saved,
    TreeDef,
    compare,
    describe_template,
    is_python_value,
    is_torch_tensor,
    materialize,
    unescape_key,
)
from ...engine.sources import Misfits
from .frameworks import OptimizerSlot, OptionSlot, TensorSlot, divided_like, is_single_leaf, new_optimizer_tensor
from .paths import Path, format_node_path, storage_name
from .saved import SavedGraph, Transform
from .slots import Assignment, EntrySlot, Slot, StateSlot
from .stored import StoredGraph, keys_by_segment
from .tracked import TrackedDict, TrackedList

# Kinds of leaves that need no object of the program.
PLAIN_KINDS = NUMBER_KINDS | {NUMBERS, "str", "bytes", "none", "set", "frozenset", "numpy_scalar"}
# Kinds of arrays that can be made without an array of the program; those of jax have a place on devices.
MADE_KINDS = frozenset({"numpy", "torch"})

_CONTAINERS = (list, dict, tuple, deque, TrackedList, TrackedDict)
_SEQUENCES: dict[str, Any] = {
    "list": list,
    "tuple": tuple,
    "collections.deque": deque,
    f"{TrackedList.__module__}.{TrackedList.__name__}": list,
}
_KINDS = (list, tuple, deque)
_LABELS = frozenset({*_SEQUENCES, "dict", f"{TrackedDict.__module__}.{TrackedDict.__name__}"})


class PlainValues:
    """The nodes of a checkpoint that are plain values, or containers of nothing else."""

    def __init__(self, graph: SavedGraph, kinds: Mapping[int, str], arrays: frozenset[int]) -> None:
        self._graph = graph
        self._values = kinds  # of the values, by their nodes
        self._arrays = arrays  # nodes of arrays that can be made without an array of the program
        self._known: dict[tuple[int, bool], list[tuple[int, Path]] | None] = {}
        self._sharing: set[int] = set()

    def below(self, number: int, *, arrays: bool = False) -> list[tuple[int, Path]] | None:
        """Return the values in a container and their paths from it; None if it holds anything else, too.

        With ``arrays``, arrays are values, too, if nothing outside of the container holds them.
        """
        key = number, arrays
        if key not in self._known:
            self._known[key] = None  # during the search, for containers that hold themselves
            self._known[key] = self._search(number, self._arrays if arrays else frozenset())
        return self._known[key]

    def is_packed(self, number: int) -> bool:
        """Whether a value is a sequence of numbers."""
        return self._values.get(number) == NUMBERS

    def is_sequence(self, number: int) -> bool:
        return self._graph.nodes[number].type in _SEQUENCES

    def shares(self, number: int) -> bool:
        """Whether other edges lead to containers in this one, too; asked after `below`."""
        return number in self._sharing

    def build(self, number: int, values: Mapping[int, Any], container: Callable[[int], TreeDef | None]) -> Any:
        if number in values:
            return values[number]
        node = self._graph.nodes[number]
        if node.type in _SEQUENCES:
            order = sorted(node.edges, key=int)
            elements = [self.build(node.edges[segment], values, container) for segment in order]
            stored = container(number)
            is_deque = stored is not None and stored.kind == "deque"  # which knows its greatest length
            return stored.build(elements) if stored is not None and is_deque else _SEQUENCES[node.type](elements)
        known = keys_by_segment(container(number))
        order = [segment for segment in known if segment in node.edges]
        order += [segment for segment in node.edges if segment not in known]
        return {
            known.get(segment, unescape_key(segment)): self.build(node.edges[segment], values, container)
            for segment in order
        }

    def _search(self, number: int, arrays: frozenset[int]) -> list[tuple[int, Path]] | None:
        found: list[tuple[int, Path]] = []
        met: Counter[int] = Counter()  # arrays
        queue: list[tuple[int, Path]] = [(number, ())]
        for node, path in queue:
            if node in self._values or node in arrays:
                found.append((node, path))
                continue
            known = self._graph.nodes[node]
            if known.value is not None or known.type not in _LABELS or known.optimizer_slots or len(path) > MAX_DEPTH:
                return None
            if known.type in _SEQUENCES and not all(edge.isascii() and edge.isdigit() for edge in known.edges):
                return None  # renamed
            for segment, child in known.edges.items():
                if child in arrays:
                    met[child] += 1
                    if met[child] > 1:
                        continue  # one array in two places
                elif self._graph.above(child) != (node, segment):
                    return None  # stored elsewhere, or a container that holds itself
                elif self._graph.uses[child] > 1 and child not in self._values:
                    self._sharing.add(number)
                queue.append((child, (*path, segment)))
        return found if all(self._graph.uses[child] == count for child, count in met.items()) else None


def is_plain(value: Any, known: dict[int, bool], depth: int = 0, *, arrays: bool = False) -> bool:
    """Whether a value is plain, or a container of plain values; ``known`` has the answers by the containers' ids.

    With ``arrays``, arrays that no optimizer changes are values, too.
    """
    if is_python_value(value):
        return True
    if arrays and (isinstance(value, np.ndarray) or (is_torch_tensor(value) and not value.requires_grad)):
        return True
    if type(value) not in _CONTAINERS or depth > MAX_DEPTH:
        return False
    if id(value) not in known:
        known[id(value)] = False  # during the search: no plain container holds itself
        children = value.values() if isinstance(value, dict) else value
        known[id(value)] = all(is_plain(child, known, depth + 1, arrays=arrays) for child in children)
    return known[id(value)]


class ValueReader:
    """Reads the values for slots."""

    def __init__(self, stored: StoredGraph, graph: SavedGraph, plain: PlainValues, where: str) -> None:
        self._stored = stored
        self._graph = graph
        self._plain = plain
        self._where = where
        self._parameter_of = {value: parameter for node in graph.nodes for parameter, _, value in node.optimizer_slots}

    def read(self, due: list[Assignment], misfits: Misfits | None = None) -> list[tuple[Slot, Any]]:
        """Return the slots of assignments with their values, after comparing all of them with the program.

        With ``misfits``, assignments whose values do not fit are removed from ``due``, and are noted there.
        """
        trees: list[Assignment] = []
        leaves: list[Assignment] = []
        for one in due:
            whole = one.covers is not None or isinstance(one.slot, StateSlot)
            (trees if whole or self._name(one) not in self._stored.leaves else leaves).append(one)
        found = self._read_leaves(leaves, misfits)
        if misfits is not None:
            known = set(map(id, leaves + trees))
            lost = [one for one in due if id(one) not in known]
            trees = [one for one in trees if not _depends(one, lost)]
            due[:] = leaves + trees
        for one in filter(self._is_one_array, trees):
            path, expected, found_there = format_node_path(one.path), "one array", "a tree of values"
            if misfits is None:
                raise TreeMismatchError(difference(path, expected, found_there))
            misfits.differs(path, expected, found_there)
        if misfits is not None:
            trees = [one for one in trees if not self._is_one_array(one)]
            due[:] = leaves + trees
        values = [*found, *self._read_trees(trees)]
        return [(one.slot, value) for one, value in zip(leaves + trees, values, strict=True)]

    def _name(self, one: Assignment) -> str:
        return self._graph.nodes[one.saved].value or ""

    def _read_trees(self, due: list[Assignment]) -> list[Any]:
        """Return states of objects, plain values, and containers of plain values."""
        numbers = [[one.saved] if one.covers is None else [number for number, _ in one.covers] for one in due]
        names = [str(self._graph.nodes[number].value) for group in numbers for number in group]
        elements = {str(self._graph.nodes[number].value) for one in due for number, _ in one.covers or ()}
        loaded = iter(self._stored.load(names, as_tensors=elements))
        found = []
        for one, group in zip(due, numbers, strict=True):
            if isinstance(one.slot, EntrySlot):
                segment = one.slot.trail[-1]
                keys = keys_by_segment(self._container(one.slot.holder))
                one.slot.key = keys.get(segment, unescape_key(segment))
            values = {number: next(loaded) for number in group}
            if one.covers is None:
                found.append(values[one.saved])
            else:
                found.append(_like(one, self._plain.build(one.saved, values, self._container)))
        return found

    def _is_one_array(self, one: Assignment) -> bool:
        """Return whether the program has an array in the place of a tree of values."""
        if one.covers is not None or isinstance(one.slot, StateSlot):
            return False
        live = one.slot.get()
        return live is not ... and is_single_leaf(live) and live is not None and not is_python_value(live)

    def _container(self, number: int) -> TreeDef | None:
        return self._stored.container(self._graph.container_name(number))

    def _read_leaves(self, due: list[Assignment], misfits: Misfits | None = None) -> list[Any]:
        """Return the values for leaves, each of the kind that the program has."""
        nodes = [self._graph.nodes[one.saved] for one in due]
        stored_names = list(map(self._name, due))
        saved = [self._stored.leaves[name].saved for name in stored_names]
        arrays: list[NDArray[Any] | None] = []
        if any(node.transform is not None for node in nodes):
            arrays = self._stored.read(stored_names)
            for index, node in enumerate(nodes):
                if node.transform is not None:
                    arrays[index] = changed = _transformed(node.transform, arrays[index], due[index].path)
                    saved[index] = Saved({"kind": "numpy"}, changed.dtype, changed.shape)
        names = [storage_name(one.path) for one in due]
        templates = [_template(one, leaf) for one, leaf in zip(due, saved, strict=True)]
        targets = describe_template(names, templates)
        wrong = [self._problem(*each) for each in zip(due, targets, saved, strict=True)]
        if misfits is not None and any(wrong):
            misfits.kept |= {format_node_path(one.path): line for one, line in zip(due, wrong, strict=True) if line}
            lost = [one for one, line in zip(due, wrong, strict=True) if line]
            due[:] = [one for one, line in zip(due, wrong, strict=True) if not line and not _depends(one, lost)]
            return self._read_leaves(due)
        if lines := list(filter(None, wrong)):
            raise TreeMismatchError(
                f"{self._where}: {len(lines)} objects do not fit their values in the checkpoint; nothing was changed. "
                "Leave them out with exclude=, or change them:",
                lines,
            )
        if not arrays:
            arrays = self._stored.read(stored_names)
        with naming(self._stored.location):
            values = materialize(targets, saved, arrays, names)
        for index, (one, leaf) in enumerate(zip(due, saved, strict=True)):
            values[index] = _like(one, values[index])
            if one.likeness is not None and leaf.kind == "torch" and not is_torch_tensor(values[index]):
                parameter, name, group = one.likeness
                strides = leaf.details.get(STRIDES)
                values[index] = new_optimizer_tensor(parameter, name, values[index], strides, group)
        return values

    def _problem(self, one: Assignment, target: LeafTemplate, leaf: Saved) -> str | None:
        """Return why an object cannot take its value, or why an optimizer's value does not fit its parameter."""
        if compare(target, leaf) is not None:
            return compare(replace(target, origin="program"), leaf)
        if isinstance(one.slot, TensorSlot) and one.slot.overlaps:
            what = "elements of this tensor share memory, as after expand(); make a copy of it"
            return f"{format_node_path(one.path)}: {what}"
        if one.likeness is None or not leaf.shape:
            return None
        live = one.slot.get()
        if not (live is None or live is ...):
            return None
        shape = tuple(TensorSlot(one.likeness[0]).template(leaf.shape).shape)
        number = self._parameter_of.get(one.saved)
        name = None if number is None else self._graph.nodes[number].value
        parameter = None if name is None else self._stored.leaves.get(name)
        if parameter is None or not parameter.saved.shape == leaf.shape != shape:
            return None
        expected, found = f"shape {list(shape)}", list(leaf.shape)
        return difference(format_node_path(one.path), expected, found, "its parameter")


def _like(one: Assignment, value: Any) -> Any:
    """Return the elements of a sequence in the kind of sequence that the program has."""
    live = one.slot.get() if isinstance(value, _KINDS) else None
    if not isinstance(live, _KINDS):
        return value
    if isinstance(live, deque) and live.maxlen is not None and len(value) > live.maxlen:
        raise TreeMismatchError(
            difference(
                format_node_path(one.path),
                f"at most {live.maxlen} elements",
                f"{len(value)}",
                "maxlen of the deque in the program",
            )
            + "; nothing was changed"
        )
    return value if isinstance(live, deque) else tuple(value) if isinstance(live, tuple) else list(value)


def _depends(one: Assignment, lost: list[Assignment]) -> bool:
    """Whether it is a value that an optimizer keeps for a parameter together with a lost one, or for a lost one."""
    return isinstance(one.slot, OptimizerSlot) and any(
        other.slot.anchor is one.slot.anchor for other in lost if isinstance(other.slot, OptimizerSlot | TensorSlot)
    )


def _transformed(transform: Transform, array: Any, path: Path) -> NDArray[Any]:
    """Apply a function of the program; a note on its error names the value."""
    try:
        changed = np.asarray(transform(array), order="C")
    except Exception as error:
        error.add_note(f"raised by the function of rename= for {format_node_path(path)}")
        raise
    if changed.dtype == object:
        raise TreeMismatchError(f"{format_node_path(path)}: the function of rename= did not return an array of numbers")
    return changed


def _template(one: Assignment, leaf: Saved) -> Any:
    """Return the template for a value; ``...`` where any value will do."""
    if isinstance(one.slot, TensorSlot):
        return one.slot.template(leaf.shape or ())
    live = one.slot.get()
    if one.likeness is not None and (live is None or live is ...) and leaf.kind == "torch":
        return divided_like(one.likeness[0], leaf.shape, leaf.dtype)  # a value that the optimizer has yet to create
    if live is None or live is ... or (is_python_value(live) and leaf.kind == "none"):
        return ...  # a slot that was empty in the program or in the checkpoint
    if isinstance(one.slot, OptionSlot) and is_python_value(live) and leaf.kind in PLAIN_KINDS:
        return ...  # torch's own defaults are 0 where others are 0.1
    if not (is_single_leaf(live) or hasattr(live, "dtype")):
        return ...  # a container of an optimizer
    return live
