"""The values of a checkpoint, made like what is in the program in their places."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import TreeMismatchError
from ..item import SavedLeaf, naming
from ..tree import Saved, compare, describe_template, display, materialize, unescape_key
from ..tree.frameworks import is_torch_tensor
from ..tree.python_leaves import is_python_value
from .cells import Assignment, Cell, StateCell
from .contents import PLAIN_KINDS, EntryCell, PlainValues
from .paths import Path, shown
from .saved import SavedGraph, Transform
from .slots import OptionCell, is_simple
from .stored import StoredGraph
from .torch_objects import TensorCell, like_state_of


class Values:
    """Reads values for cells.

    Args:
        stored: The checkpoint.
        graph: Its graph, under the names of the program.
        plain: What in it is plain values.
        where: What to call it in messages.
    """

    def __init__(self, stored: StoredGraph, graph: SavedGraph, plain: PlainValues, where: str) -> None:
        self._stored = stored
        self._graph = graph
        self._plain = plain
        self._where = where
        self._kept_for = {value: one for node in graph.nodes for one, _, value in node.slots}

    def of(self, due: list[Assignment]) -> list[tuple[Cell, Any]]:
        """Returns the cells of assignments with their values.

        Args:
            due: The assignments.

        Raises:
            TreeMismatchError: An object does not fit its value; names all such objects.
            DamagedCheckpointError: A value does not verify.
        """
        trees: list[Assignment] = []
        leaves: list[Assignment] = []
        for one in due:
            whole = one.covers is not None or isinstance(one.cell, StateCell)
            (trees if whole or self._value(one) not in self._stored.leaves else leaves).append(one)
        values = [*self._materialized(leaves), *self._trees(trees)]
        return [(one.cell, value) for one, value in zip(leaves + trees, values, strict=True)]

    def _value(self, one: Assignment) -> str:
        """Returns the storage name of a value."""
        return self._graph.nodes[one.saved].value or ""

    def _trees(self, due: list[Assignment]) -> list[Any]:
        """Returns states of objects, plain values, and containers of such values and of empty ones."""
        for one in due:
            if one.covers is None and not isinstance(one.cell, StateCell):
                live = one.cell.get()
                if live is not ... and is_simple(live) and live is not None and not is_python_value(live):
                    raise TreeMismatchError(
                        f"{shown(one.path)}: expected one array (program), found a tree of values (checkpoint)"
                    )
        numbers = [[one.saved] if one.covers is None else [number for number, _ in one.covers] for one in due]
        names = [str(self._graph.nodes[number].value) for several in numbers for number in several]
        loaded = iter(self._stored.load(names))
        found = []
        for one, several in zip(due, numbers, strict=True):
            if isinstance(one.cell, EntryCell):
                segment = one.cell.trail[-1]
                one.cell.key = self._keys(one.cell.holder).get(segment, unescape_key(segment))
            values = {number: next(loaded) for number in several}
            found.append(values[one.saved] if one.covers is None else self._plain.build(one.saved, values, self._keys))
        return found

    def _keys(self, number: int) -> dict[str, Any]:
        return self._stored.keys_at(self._graph.place(number))

    def _materialized(self, due: list[Assignment]) -> list[Any]:
        """Returns the values for leaves, each like what is in the program."""
        nodes = [self._graph.nodes[one.saved] for one in due]
        saved = [self._stored.leaves[self._value(one)].saved for one in due]
        arrays: list[NDArray[Any] | None] = []
        if any(node.transform is not None for node in nodes):
            arrays = self._read(due)
            for index, node in enumerate(nodes):
                if node.transform is not None:
                    arrays[index] = changed = _transformed(node.transform, arrays[index], due[index].path)
                    saved[index] = Saved({"kind": "numpy"}, changed.dtype, changed.shape)
        templates = [_template(one, leaf) for one, leaf in zip(due, saved, strict=True)]
        names = [".".join(one.path) for one in due]
        targets = describe_template(names, templates)
        differences = [
            difference
            for target, leaf in zip(targets, saved, strict=True)
            if (difference := compare(target, leaf)) is not None
        ]
        differences += [what for one, leaf in zip(due, saved, strict=True) if (what := self._problem(one, leaf))]
        if differences:
            raise TreeMismatchError(
                f"{self._where}: {len(differences)} objects do not fit their values in the checkpoint; "
                "nothing was changed. Leave them out with exclude=, or change them:",
                [line.replace("(template)", "(program)") for line in differences],
            )
        if not arrays:
            arrays = self._read(due)
        with naming(self._stored.location):
            values = materialize(targets, saved, arrays, names)
        return [_likened(one, leaf, value) for one, leaf, value in zip(due, saved, values, strict=True)]

    def _read(self, due: list[Assignment]) -> list[NDArray[Any] | None]:
        return self._stored.read([self._value(one) for one in due])

    def _problem(self, one: Assignment, leaf: Saved) -> str | None:
        """Says why a tensor cannot take its value, or what an optimizer kept does not fit its parameter."""
        if isinstance(one.cell, TensorCell) and one.cell.overlaps:
            return f"{shown(one.path)}: elements of this tensor share memory, as after expand(); make a copy of it"
        if one.likeness is None or not leaf.shape or one.cell.get() not in (None, ...):
            return None
        own = tuple(TensorCell(one.likeness[0]).template(leaf.shape).shape)
        kept_for = self._kept_for.get(one.saved)
        parameter = None if kept_for is None else self._leaf(kept_for)
        if parameter is None or not parameter.saved.shape == leaf.shape != own:
            return None
        where = display(".".join(one.path))
        return f"{where}: expected shape {list(own)} (its parameter), found {list(leaf.shape)} (checkpoint)"

    def _leaf(self, number: int) -> SavedLeaf | None:
        value = self._graph.nodes[number].value
        return None if value is None else self._stored.leaves.get(value)


def _transformed(transform: Transform, array: Any, path: Path) -> NDArray[Any]:
    """Applies a function of the user's own; what it raises says which value it was for."""
    try:
        changed = np.asarray(transform(array), order="C")
    except Exception as error:
        error.add_note(f"raised by the function of rename= for {shown(path)}")
        raise
    if changed.dtype == object:
        raise TreeMismatchError(f"{shown(path)}: the function of rename= returned no array of numbers")
    return changed


def _template(one: Assignment, leaf: Saved) -> Any:
    """Returns what the value has to be like; ``...`` where anything will do."""
    if isinstance(one.cell, TensorCell):
        return one.cell.template(leaf.shape or ())
    live = one.cell.get()
    if live is None or live is ... or (is_python_value(live) and leaf.kind == "none"):
        return ...  # a place for a value that was not there yet, or is not there any more
    if isinstance(one.cell, OptionCell) and is_python_value(live) and leaf.kind in PLAIN_KINDS:
        return ...  # torch's own defaults are 0 where others are 0.1
    if not (is_simple(live) or hasattr(live, "dtype")):
        return ...  # a container that an optimizer keeps
    return live


def _likened(one: Assignment, leaf: Saved, value: Any) -> Any:
    """Makes the tensors that an optimizer does not have yet."""
    if one.likeness is None or leaf.kind != "torch" or is_torch_tensor(value):
        return value
    parameter, name, group = one.likeness
    return like_state_of(parameter, name, value, group)
