"""Read checkpoint values with the types, dtypes and devices of the program's objects.

Arrays are restored in place, so the program must have a matching array for each of them. Plain values need no
counterpart in the program: a list or dictionary of plain values, such as a loss history, accepts any number of saved
values. An empty deque, such as a replay buffer, also accepts arrays.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping
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
from .saved import SavedGraph, Transform
from .slots import Assignment, Attachment, Path, Slot, StateSlot, format_node_path, storage_name
from .stored import PER_PROCESS, StoredGraph
from .tracked import TrackedDict, TrackedList

# Leaf kinds that need no counterpart in the program.
PLAIN_KINDS = NUMBER_KINDS | {NUMBERS, "str", "bytes", "none", "set", "frozenset", "numpy_scalar"}
NUMBER_VALUES = NUMBER_KINDS | {"numpy_scalar"}
_NUMBERS = (bool, int, float, complex, np.generic)
# Array kinds that can be created without a counterpart in the program. JAX arrays would need a device placement.
MADE_KINDS = frozenset({"numpy", "torch"})

PLAIN_CONTAINERS = (list, dict, OrderedDict, tuple, deque, TrackedList, TrackedDict)
SEQUENCES: dict[str, Any] = {
    "list": list,
    "tuple": tuple,
    "collections.deque": deque,
    f"{TrackedList.__module__}.{TrackedList.__name__}": list,
}
_ORDERED = "collections.OrderedDict"  # the type of a torch state dict, for example
_LABELS = frozenset({*SEQUENCES, "dict", _ORDERED, f"{TrackedDict.__module__}.{TrackedDict.__name__}"})


class SavedValues:
    """Finds plain values and containers of plain values in a checkpoint, and reads values for slots."""

    def __init__(self, stored: StoredGraph, graph: SavedGraph) -> None:
        self._stored = stored
        self._graph = graph
        self.kinds: dict[int, str] = {}  # kinds of the plain values, keyed by node
        self._arrays: set[int] = set()  # nodes of arrays whose kind is in `MADE_KINDS`
        for number, node in graph.values():
            name = str(node.value)
            leaf = stored.leaves.get(name)
            # A node with a type is an enum or a number box. Like an object with state, it must exist in the program.
            if leaf is None or node.type or node.transform is not None or name.startswith(PER_PROCESS):
                continue
            if leaf.saved.kind in PLAIN_KINDS:
                self.kinds[number] = leaf.saved.kind
            elif leaf.saved.kind in MADE_KINDS and "sharding" not in leaf.saved.details:
                self._arrays.add(number)
        self._known: dict[tuple[int, bool], list[tuple[int, Path]] | None] = {}
        self.aliases = defaultdict[int, set[int]](set)  # nodes stored elsewhere, keyed by container; set by `below`
        self.sharing: set[int] = set()  # containers whose inner containers are also used elsewhere; set by `below`
        self._parameter_of = {value: parameter for node in graph.nodes for parameter, _, value in node.optimizer_slots}

    def below(self, number: int, *, arrays: bool = False) -> list[tuple[int, Path]] | None:
        """Return the values in a container with their relative paths, or None if it holds anything but plain values."""
        # With `arrays`, arrays count as plain values, unless objects outside the container refer to them.
        key = number, arrays
        if key not in self._known:
            self._known[key] = None  # the result for a container that contains itself
            self._known[key] = self._search(number, self._arrays if arrays else set())
        return self._known[key]

    def build(self, number: int, values: Mapping[int, Any], made: dict[int, Any]) -> Any:
        """Return the value of a leaf node, or a container built from ``values``; ``made`` caches the containers."""
        if number not in values and number not in made:
            made[number] = self._build(number, values, made)
        return values[number] if number in values else made[number]

    def _build(self, number: int, values: Mapping[int, Any], made: dict[int, Any]) -> Any:
        edges, label = self._graph.nodes[number].edges, self._graph.nodes[number].type
        if label in SEQUENCES:
            elements = [self.build(edges[segment], values, made) for segment in sorted(edges, key=int)]
            stored = self._container(number)
            is_deque = stored is not None and stored.kind == "deque"  # only the stored structure records maxlen
            return stored.build(elements) if stored is not None and is_deque else SEQUENCES[label](elements)
        keys = self.keys(number)
        order = [segment for segment in {**keys, **edges} if segment in edges]
        empty = OrderedDict[Any, Any]() if label == _ORDERED else {}
        return empty | {keys.get(name, unescape_key(name)): self.build(edges[name], values, made) for name in order}

    def keys(self, number: int) -> dict[str, Any]:
        """Return the keys of a saved container, keyed by edge name."""
        stored = self._container(number)
        if stored is None:
            return {}
        return dict(zip(stored.segments, stored.keys or range(len(stored.children)), strict=True))

    def _container(self, number: int) -> TreeDef | None:
        return self._stored.containers.get(self._graph.container_name(number))

    def _search(self, number: int, arrays: set[int]) -> list[tuple[int, Path]] | None:
        values: list[tuple[int, Path]] = []
        held: Counter[int] = Counter()  # how often the container holds each array
        queue: list[tuple[int, Path]] = [(number, ())]
        for node, path in queue:
            if node in self.kinds or node in arrays:
                values.append((node, path))
                continue
            holder = self._graph.nodes[node]
            is_container = holder.value is None and holder.type in _LABELS and not holder.optimizer_slots
            if not is_container or len(path) > MAX_DEPTH:
                return None
            if holder.type in SEQUENCES and not all(edge.isascii() and edge.isdigit() for edge in holder.edges):
                return None  # rename= has changed the keys
            for segment, child in holder.edges.items():
                if child in arrays:
                    held[child] += 1
                    if held[child] > 1:
                        continue
                elif self._graph.above.get(child) != (node, segment):  # stored under another path, or a cycle
                    if (covers := self.below(child, arrays=bool(arrays))) is None:
                        return None  # a cycle, or a value that is not plain
                    self.aliases[number].update({child}, self.aliases[child])
                    values += [(value, (*path, segment, *below)) for value, below in covers]
                    continue
                elif self._graph.uses[child] > 1 and child not in self.kinds:
                    self.sharing.add(number)
                queue.append((child, (*path, segment)))
        return values if all(self._graph.uses[child] == count for child, count in held.items()) else None

    def read_values(self, due: list[Assignment], misfits: Misfits | None = None) -> list[tuple[Assignment, Any]]:
        """Validate and read the values of assignments; with ``misfits``, record and skip values that do not fit."""
        trees: list[Assignment] = []
        leaves: list[Assignment] = []
        for assignment in due:
            whole = assignment.covers is not None or isinstance(assignment.slot, StateSlot)
            (trees if whole or self._name(assignment) not in self._stored.leaves else leaves).append(assignment)
        saved = [self._stored.leaves[self._name(assignment)].saved for assignment in leaves]
        arrays = self._transformed(leaves, saved)
        templates = [_template(assignment, leaf) for assignment, leaf in zip(leaves, saved, strict=True)]
        targets = describe_template([storage_name(assignment.path) for assignment in leaves], templates)
        lines = [self._problem(*each) for each in zip(leaves, targets, saved, strict=True)]
        problems = [(assignment, line) for assignment, line in zip(leaves, lines, strict=True) if line is not None]
        problems += [
            (assignment, difference(format_node_path(assignment.path), live, "the state of an object"))
            for assignment in trees
            if assignment.covers is None and (live := _without_object(assignment.slot)) is not None
        ]
        if problems and misfits is None:
            raise TreeMismatchError(
                f"{self._stored.checkpoint}: {len(problems)} objects do not fit their values in the checkpoint; "
                "nothing was changed. Leave them out with exclude=, or change them:",
                [line for _, line in problems],
            )
        if problems and misfits is not None:
            misfits.kept |= {format_node_path(assignment.path): line for assignment, line in problems}
            lost = {id(assignment) for assignment, _ in problems}
            # If a parameter or one of its optimizer values does not fit, all of its optimizer values are skipped.
            slots = [assignment.slot for assignment, _ in problems]
            tensors = {id(slot.anchor) for slot in slots if isinstance(slot, OptimizerSlot | TensorSlot)}
            lost |= {id(a) for a in due if isinstance(a.slot, OptimizerSlot) and id(a.slot.anchor) in tensors}
            return self.read_values([assignment for assignment in due if id(assignment) not in lost])
        values = self._read_leaves(leaves, targets, saved, arrays) + self._read_trees(trees)
        return list(zip(leaves + trees, values, strict=True))

    def _name(self, assignment: Assignment) -> str:
        return self._graph.nodes[assignment.saved].value or ""

    def _transformed(self, due: list[Assignment], saved: list[Saved]) -> list[NDArray[Any] | None]:
        """Apply ``rename=`` functions, update ``saved`` and return all arrays, or [] if there are no functions."""
        transforms = [self._graph.nodes[assignment.saved].transform for assignment in due]
        if not any(transforms):
            return []
        arrays = self._stored.read_arrays(list(map(self._name, due)))
        for index, (assignment, transform) in enumerate(zip(due, transforms, strict=True)):
            if transform is not None:
                arrays[index] = changed = _transformed(transform, arrays[index], assignment.path)
                saved[index] = Saved({"kind": "numpy"}, changed.dtype, changed.shape)
        return arrays

    def _read_leaves(
        self, due: list[Assignment], targets: list[LeafTemplate], saved: list[Saved], arrays: list[NDArray[Any] | None]
    ) -> list[Any]:
        parts: dict[int, Any] = {}
        if not arrays:
            arrays, parts = self._stored.read_parts(list(map(self._name, due)), targets)
        with naming(self._stored.location):
            values = materialize(targets, saved, arrays, [storage_name(assignment.path) for assignment in due], parts)
        for index, (assignment, leaf) in enumerate(zip(due, saved, strict=True)):
            value, slot = values[index], assignment.slot
            is_tensor = leaf.kind == "torch" and not is_torch_tensor(value)
            if is_tensor and isinstance(slot, OptimizerSlot | OptionSlot):
                values[index] = new_optimizer_tensor(slot, value, leaf.details.get(STRIDES))
            else:
                values[index] = _like(assignment, value)
        return values

    def _read_trees(self, due: list[Assignment]) -> list[Any]:
        numbers = [[number for number, _ in assignment.values()] for assignment in due]
        names = [str(self._graph.nodes[number].value) for group in numbers for number in group]
        loaded = iter(self._stored.load(names, as_tensors=names))
        values = [{number: next(loaded) for number in group} for group in numbers]
        made: dict[int, Any] = {}
        built = (self.build(assignment.saved, group, made) for assignment, group in zip(due, values, strict=True))
        return list(map(_like, due, built))

    def _problem(self, assignment: Assignment, target: LeafTemplate, leaf: Saved) -> str | None:
        """Return why a value does not fit its object (for an optimizer value, its parameter), or None if it fits."""
        if compare(target, leaf) is not None:
            return compare(replace(target, origin="program"), leaf)
        slot = assignment.slot
        if isinstance(slot, TensorSlot) and (problem := slot.problem) is not None:
            return f"{format_node_path(assignment.path)}: {problem}"
        if not isinstance(slot, OptimizerSlot) or not leaf.shape or not _is_empty(slot.get()):
            return None
        shape = tuple(TensorSlot(slot.parameter).template(leaf.shape).shape)
        parameter = self._stored.leaves.get(str(self._graph.nodes[self._parameter_of[assignment.saved]].value))
        if parameter is None or not parameter.saved.shape == leaf.shape != shape:
            return None
        return difference(format_node_path(assignment.path), f"shape {list(shape)}", list(leaf.shape), "its parameter")


def is_plain(value: Any, plain: dict[int, bool], depth: int = 0, *, arrays: bool = False) -> bool:
    """True if a value is plain, or holds only plain values; ``plain`` caches the results by container id."""
    if is_python_value(value):
        return True
    if arrays and (isinstance(value, np.ndarray) or (is_torch_tensor(value) and not value.requires_grad)):
        return True
    if type(value) not in PLAIN_CONTAINERS or depth > MAX_DEPTH:
        return False
    if id(value) not in plain:
        plain[id(value)] = False  # the result for a container that contains itself
        children = value.values() if isinstance(value, dict) else value
        plain[id(value)] = all(is_plain(child, plain, depth + 1, arrays=arrays) for child in children)
    return plain[id(value)]


def _without_object(slot: Slot) -> str | None:
    """Describe the array or plain value that the program has instead of an object with state, or return None."""
    live = None if isinstance(slot, StateSlot) else slot.get()
    if is_torch_tensor(live):
        return "one array"
    return f"{live!r:.80}" if type(slot) is Attachment and is_python_value(live) else None


def _is_empty(live: Any) -> bool:
    return live is None or live is ...


def _like(assignment: Assignment, value: Any) -> Any:
    """Convert a sequence to the type of the program's sequence."""
    live = assignment.slot.get() if isinstance(value, list | tuple | deque) else None
    if not isinstance(live, list | tuple | deque):
        return value
    if isinstance(live, deque):
        if live.maxlen is not None and len(value) > live.maxlen:
            most, where = f"at most {live.maxlen} elements", format_node_path(assignment.path)
            problem = difference(where, most, len(value), "maxlen of the deque in the program")
            raise TreeMismatchError(f"{problem}; nothing was changed")
        return value
    return tuple(value) if isinstance(live, tuple) else list(value)


def _transformed(transform: Transform, array: Any, path: Path) -> NDArray[Any]:
    """Apply a function from ``rename=``; if it fails, the error names the value."""
    try:
        changed = np.asarray(transform(array), order="C")
    except Exception as error:
        error.add_note(f"raised by the function of rename= for {format_node_path(path)}")
        raise
    if changed.dtype == object:
        raise TreeMismatchError(f"{format_node_path(path)}: the function of rename= did not return an array of numbers")
    return changed


def _template(assignment: Assignment, leaf: Saved) -> Any:
    """Return the template for a value; the template ``...`` accepts any value."""
    slot = assignment.slot
    if isinstance(slot, TensorSlot):
        return slot.template(leaf.shape or ())
    live = slot.get()
    if _is_empty(live):
        if isinstance(slot, OptimizerSlot | OptionSlot) and leaf.kind == "torch":
            return divided_like(slot.parameter, leaf.shape, leaf.dtype)  # the optimizer has not created the value yet
        return ...
    # Accept a saved None, and any type of number, because a value that is now a float may have started as the int 0.
    if leaf.kind == "none" and (is_python_value(live) or type(slot) is Attachment):
        return ...
    if isinstance(live, _NUMBERS) and leaf.kind in NUMBER_VALUES:
        return ...
    if isinstance(slot, OptionSlot) and is_python_value(live) and leaf.kind in PLAIN_KINDS:
        return ...
    return live if is_single_leaf(live) or hasattr(live, "dtype") else ...
