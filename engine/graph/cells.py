"""Cells: the places of a program that hold one value each, from which it is saved and into which it is restored.

What can be changed in place is its own cell (tensors, writable numpy arrays, boxes, objects with a state); everything
else is replaced where it hangs: an attribute, an entry, or a part of something immutable that is built anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ..stateful import restore_state, state_of
from ..tree.containers import expand
from ..tree.structure import key_segments
from .paths import Path


class Cell(Protocol):
    """A place that holds a value.

    Attributes:
        anchor: The object whose life ends this place's.
        trail: Where it is, seen from the anchor.
    """

    anchor: Any
    trail: Path

    def get(self) -> Any:
        """Returns the value, or a template of it where there is none yet."""
        ...

    def set(self, value: Any) -> None:
        """Changes the value; it has the kind, dtype and shape of what `get` returns."""
        ...


@dataclass(slots=True, eq=False)
class Assignment:
    """A value of the checkpoint and the cell that it belongs into.

    Attributes:
        saved: The node of the checkpoint.
        cell: Where the value goes.
        path: The path of that in the program.
        likeness: What a tensor is made for that an optimizer does not have yet: the parameter, the name, the group.
        covers: Of a container of plain values that is restored as a whole: its values, with their paths from it.
    """

    saved: int
    cell: Cell
    path: Path
    likeness: tuple[Any, str, dict[str, Any]] | None = None
    covers: list[tuple[int, Path]] | None = None


class ArrayCell:
    """A numpy array that can be written to."""

    def __init__(self, array: Any) -> None:
        self.anchor = array
        self.trail: Path = ()

    def get(self) -> Any:
        """Returns the array."""
        return self.anchor

    def set(self, value: Any) -> None:
        """Copies the elements."""
        self.anchor[...] = value


class BoxCell:
    """An object that stands for a value, with a method to ask for it and one to change it.

    Args:
        anchor: Whose life ends that of the value.
        trail: Where the value is, seen from there.
        get: Returns the value.
        change: Takes a new one.
    """

    def __init__(self, anchor: Any, trail: Path, get: Callable[[], Any], change: Callable[[Any], None]) -> None:
        self.anchor = anchor
        self.trail = trail
        self._get = get
        self._change = change

    def get(self) -> Any:
        """Returns the value."""
        return self._get()

    def set(self, value: Any) -> None:
        """Changes the value."""
        self._change(value)


class StateCell:
    """An object with a state of its own (see :mod:`~holdfast.engine.stateful`); its value is a tree."""

    def __init__(self, thing: Any, anchor: Any, trail: Path) -> None:
        self.thing = thing
        self.anchor = anchor
        self.trail = trail

    def get(self) -> Any:
        """Takes the state: a snapshot."""
        return state_of(self.thing)

    def set(self, value: Any) -> None:
        """Gives the state back."""
        restore_state(self.thing, value)


class PartCell:
    """A part of something immutable, which is built anew to change it.

    Args:
        owner: The cell of the outermost immutable thing.
        below: The way from there to the part.
        value: What is there now.
    """

    def __init__(self, owner: Cell, below: Path, value: Any) -> None:
        self._value = value
        self.owner = owner
        self.below = below
        self.anchor = owner.anchor
        self.trail: Path = (*owner.trail, *below)

    def get(self) -> Any:
        """Returns the value."""
        return self._value

    def set(self, value: Any) -> None:
        """Builds the owner's value anew; see :func:`write` for many parts at once."""
        self.owner.set(_replaced(self.owner.get(), {self.below: value}))


def write(changes: list[tuple[Cell, Any]]) -> None:
    """Changes cells; what several parts belong to is built anew once.

    Args:
        changes: The cells, each with its new value.
    """
    parts: dict[tuple[int, Path], tuple[Cell, dict[Path, Any]]] = {}
    for cell, value in changes:
        if isinstance(cell, PartCell):
            owner = (id(cell.owner.anchor), cell.owner.trail)
            parts.setdefault(owner, (cell.owner, {}))[1][cell.below] = value
        else:
            cell.set(value)
    for owner_cell, updates in parts.values():
        owner_cell.set(_replaced(owner_cell.get(), updates))


def _replaced(value: Any, updates: dict[Path, Any]) -> Any:
    """Returns a container with parts replaced; what is not on the way to one of them is shared with the old one."""
    if () in updates:
        return updates[()]
    contents = expand(value)
    assert contents is not None
    segments = map(str, range(len(contents.values))) if contents.keys is None else key_segments(contents.keys)
    below: dict[str, dict[Path, Any]] = {}
    for path, update in updates.items():
        below.setdefault(path[0], {})[path[1:]] = update
    values = [
        _replaced(child, below[segment]) if segment in below else child
        for segment, child in zip(segments, contents.values, strict=True)
    ]
    return contents.build(values)
