"""Slots and their paths. A slot holds a value that a save reads and a restore writes.

An object that can change in place, such as a tensor, a writable numpy array, a box like `Value` or an object with
state, is its own slot. Any other value is replaced in the attribute or entry that holds it; if its container is
immutable, the container is rebuilt.

A path consists of the names of the edges from the root. The name of an edge is its escaped key, as in leaf names
(:mod:`~holdfast.engine.pytree.names`).
"""

from __future__ import annotations

import enum
import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ...engine.errors import OptionError, TreeMismatchError, shortened
from ...engine.pytree import expand, format_path, is_python_value, key_segments, pack_tree, unescape_key
from ...engine.stateful import begins_epoch, restore_state, state_of
from ..hugging_face import as_start

Path = tuple[str, ...]  # the escaped edge names from the root to a node


def storage_name(path: Path) -> str:
    """Return the storage name of the leaf at a path, such as ``net.l1.weight``."""
    return ".".join(path)


def format_node_path(path: Path) -> str:
    """Format a path for messages, such as ``net/l1/weight``; the root is shown as ``(root)``."""
    return format_path(storage_name(path))


def parse_path(text: str) -> Path:
    """Parse a path given by a user, such as ``net/l1/weight`` or ``net.l1.weight``."""
    if not isinstance(text, str) or not text:
        raise OptionError(f"{text!r} is not a path; write 'net/l1/weight' or 'net.l1.weight'")
    path = tuple(key.replace(".", "%2E") for key in text.split("/")) if "/" in text else tuple(text.split("."))
    try:
        for key in path:
            unescape_key(key)
    except ValueError as error:
        raise OptionError(f"{text!r} is not a path: {error}") from error
    return path


def format_section(title: str, names: Sequence[str]) -> list[str]:
    """Return a list with one report line for the given names, or an empty list if there are no names."""
    return [f"  {title} ({len(names)}): {shortened(names, 10)}"] if names else []


class Slot(Protocol):
    anchor: Any  # object that the slot belongs to; preferably one that supports weak references
    trail: Path  # the path from the anchor to the slot

    def get(self) -> Any:
        """Return the value, or ``...`` if the slot is empty."""

    def set(self, value: Any) -> None:
        """Replace the value with one of the same kind, dtype and shape."""


@dataclass(slots=True, eq=False)
class Attachment:
    """An attribute or entry whose value a restore replaces."""

    anchor: Any
    trail: Path
    value: Any
    change: Callable[[Any], None] | None = None  # None if no restore replaces the value

    def get(self) -> Any:
        return self.value

    def set(self, value: Any) -> None:
        assert self.change is not None
        self.change(value)


@dataclass(eq=False)
class BoxSlot:
    """A value that is accessed through a getter and a setter function."""

    anchor: Any
    trail: Path
    get: Callable[[], Any]
    set: Callable[[Any], None]


@dataclass(eq=False)
class StateSlot:
    """An object with state methods (see :mod:`~holdfast.engine.stateful`). The slot's value is the state tree."""

    target: Any
    anchor: Any
    trail: Path

    def get(self) -> Any:
        return pack_tree(state_of(self.target))

    def set(self, value: Any) -> None:
        restore_state(self.target, value, as_start)


class PartState(StateSlot):
    """A part of an object's state that is the same on all processes, accessed through methods of the object."""


class MemberSlot(Attachment):
    """An enum member, saved by name (flags as ``A|B``), or by value if it is also a number or string."""

    def get(self) -> Any:
        return self.value.value if is_python_value(self.value) else self.value.name or ""  # "" if no flag is set

    def set(self, value: Any) -> None:
        super().set(self.member(value))

    def member(self, value: Any) -> Any:
        """Return the enum member for a saved value; raise TreeMismatchError if there is none."""
        enumeration = type(self.value)
        try:
            if is_python_value(self.value):
                return enumeration(value)
            if not issubclass(enumeration, enum.Flag):
                return enumeration[value]
            names = filter(None, str(value).split("|"))
            return functools.reduce(operator.or_, map(enumeration.__getitem__, names), enumeration(0))
        except (KeyError, ValueError) as error:
            raise TreeMismatchError(
                f"{'/'.join(self.trail)}: expected a member of {enumeration.__qualname__} (program: "
                f"{shortened(member.name for member in enumeration)}), found {value!r:.80} (checkpoint); nothing was "
                "changed"
            ) from error


class PartSlot(Attachment):
    """A part of an immutable container. `write_slots` rebuilds the container once for all changed parts."""

    def __init__(self, owner: Slot, below: Path, value: Any) -> None:
        super().__init__(owner.anchor, (*owner.trail, *below), value)
        self.owner, self.below = owner, below


@dataclass(slots=True, eq=False)
class Assignment:
    """A checkpoint value and the slot that it is restored to."""

    saved: int  # node number of the value in the checkpoint
    slot: Slot
    path: Path  # the slot's path in the program
    covers: list[tuple[int, Path]] | None = None  # node and relative path of each value in a plain container

    def values(self) -> list[tuple[int, Path]]:
        """Return the node numbers of the values to restore, each with its path in the program."""
        if self.covers is None:
            return [(self.saved, self.path)]
        return [(number, (*self.path, *below)) for number, below in self.covers]


def write_slots(changes: list[tuple[Slot, Any]]) -> None:
    parts: dict[tuple[int, Path], tuple[Slot, dict[Path, Any]]] = {}
    # Restore loaders that draw from the global random generator first, so that they do not change its restored state.
    for slot, value in sorted(
        changes, key=lambda change: not (isinstance(change[0], StateSlot) and begins_epoch(change[0].target))
    ):
        if isinstance(slot, PartSlot):
            owner = (id(slot.owner.anchor), slot.owner.trail)
            parts.setdefault(owner, (slot.owner, {}))[1][slot.below] = value
        else:
            slot.set(value)
    for owner_slot, updates in parts.values():
        owner_slot.set(_replaced(owner_slot.get(), updates))


def _replaced(value: Any, updates: dict[Path, Any]) -> Any:
    """Return a container with some parts replaced, sharing all other children with the old container."""
    if () in updates:
        return updates[()]
    contents = expand(value)
    assert contents is not None
    segments = key_segments(contents.keys, len(contents.values))
    below: dict[str, dict[Path, Any]] = {}
    for path, update in updates.items():
        below.setdefault(path[0], {})[path[1:]] = update
    children = zip(segments, contents.values, strict=True)
    return contents.build([_replaced(child, below[name]) if name in below else child for name, child in children])


# ---- the last writer of each slot: the latest restore wins, whatever the order in which objects are attached

restore_numbers = itertools.count(1)
_writers: dict[int, dict[Path, int]] = {}  # number of each slot's last restore, keyed by anchor id, then by trail


class Keeper(list[Any]):
    """The anchors that cannot be weakly referenced; they are kept alive as long as the restore that wrote to them."""


def last_writer(slot: Slot) -> int:
    """Return the number of the last restore that wrote to a slot, or 0 if there is none."""
    return _writers.get(id(slot.anchor), {}).get(slot.trail, 0)


def note_writer(slot: Slot, number: int, keeper: Keeper) -> None:
    anchor, key = slot.anchor, id(slot.anchor)
    if key not in _writers:
        if not type(anchor).__weakrefoffset__:
            keeper.append(anchor)
            anchor = keeper
        weakref.finalize(anchor, _writers.pop, key, None).atexit = False
    _writers.setdefault(key, {})[slot.trail] = number
