"""Slots, which a save reads and a restore writes: each holds one value of a live object. Also their paths.

An object that changes in place is its own slot: a tensor, a writable numpy array, a box, an object with a state. Every
other value is replaced where it is attached: an attribute, an entry, or a part of an immutable container, which is
rebuilt.

A path consists of the names of the edges from the root. The name of an edge is its escaped key, as in the names of
leaves (:mod:`~holdfast.engine.pytree.names`).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ...engine.errors import OptionError, TreeMismatchError, shortened
from ...engine.pytree import expand, format_path, is_python_value, key_segments, pack_tree, unescape_key
from ...engine.stateful import begins_epoch, restore_state, state_of
from ..hugging_face import as_start

Path = tuple[str, ...]  # the names of the edges from the root to a node, each escaped


def storage_name(path: Path) -> str:
    """Return the name of the leaf at a path: ``net.l1.weight``."""
    return ".".join(path)


def format_node_path(path: Path) -> str:
    """Format a path for messages: ``net/l1/weight``; the root is ``(root)``."""
    return format_path(storage_name(path))


def parse_path(text: str) -> Path:
    """Parse a path that a user wrote as ``net/l1/weight`` or ``net.l1.weight``."""
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
    """Format a list of paths as a line of a report, or as no line if it is empty."""
    return [f"  {title} ({len(names)}): {shortened(names, 10)}"] if names else []


class Slot(Protocol):
    anchor: Any  # the object whose lifetime bounds that of the slot; it has weak references where possible
    trail: Path  # the path from the anchor to the slot

    def get(self) -> Any:
        """Return the value; ``...`` if the slot is still empty."""

    def set(self, value: Any) -> None:
        """Replace the value by one of the same kind, dtype and shape."""


@dataclass(slots=True, eq=False)
class Attachment:
    """The attribute or entry that a value is attached to; a restore attaches another one there."""

    anchor: Any
    trail: Path
    value: Any
    change: Callable[[Any], None] | None = None  # None if it cannot be replaced

    def get(self) -> Any:
        return self.value

    def set(self, value: Any) -> None:
        if self.change is None:
            raise TypeError("this value cannot be replaced where it is")
        self.change(value)


@dataclass(eq=False)
class BoxSlot:
    """A value with a function that returns it and one that replaces it."""

    anchor: Any
    trail: Path
    get: Callable[[], Any]
    set: Callable[[Any], None]


@dataclass(eq=False)
class StateSlot:
    """An object with methods for its state (see :mod:`~holdfast.engine.stateful`); its value is a tree."""

    target: Any
    anchor: Any
    trail: Path

    def get(self) -> Any:
        return pack_tree(state_of(self.target))

    def set(self, value: Any) -> None:
        restore_state(self.target, value, as_start)


class PartState(StateSlot):
    """A part of an object's state that the object's own methods save and restore; all processes have the same."""


class MemberSlot(Attachment):
    """A member of an enumeration, saved as its name, or as the number or text that it equals."""

    def get(self) -> Any:
        return self.value.value if is_python_value(self.value) else self.value.name

    def set(self, value: Any) -> None:
        super().set(self.member(value))

    def member(self, value: Any) -> Any:
        """Return the member that a saved value stands for; raise TreeMismatchError if there is none."""
        enumeration = type(self.value)
        try:
            return enumeration(value) if is_python_value(self.value) else enumeration[value]
        except (KeyError, ValueError) as error:
            raise TreeMismatchError(
                f"{'/'.join(self.trail)}: expected a member of {enumeration.__qualname__} (program: "
                f"{shortened(member.name for member in enumeration)}), found {value!r:.80} (checkpoint); nothing was "
                "changed"
            ) from error


class PartSlot(Attachment):
    """A part of an immutable container, which `write_slots` rebuilds once for all of its parts."""

    def __init__(self, owner: Slot, below: Path, value: Any) -> None:
        super().__init__(owner.anchor, (*owner.trail, *below), value)
        self.owner, self.below = owner, below


@dataclass(slots=True, eq=False)
class Assignment:
    """A value of the checkpoint, and the slot that it is restored to."""

    saved: int  # the value's node in the checkpoint
    slot: Slot
    path: Path  # the slot's path in the program
    covers: list[tuple[int, Path]] | None = None  # for a container of plain values: its values, with their paths

    def values(self) -> list[tuple[int, Path]]:
        """Return the values that it restores, each with its path in the program."""
        if self.covers is None:
            return [(self.saved, self.path)]
        return [(number, (*self.path, *below)) for number, below in self.covers]


def write_slots(changes: list[tuple[Slot, Any]]) -> None:
    parts: dict[tuple[int, Path], tuple[Slot, dict[Path, Any]]] = {}
    # Loaders that draw from the global generator come first.
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
    """Return a container with parts replaced; it shares all other children with the old one."""
    if () in updates:
        return updates[()]
    contents = expand(value)
    assert contents is not None
    segments = key_segments(contents.keys, len(contents.values))
    below: dict[str, dict[Path, Any]] = {}
    for path, update in updates.items():
        below.setdefault(path[0], {})[path[1:]] = update
    values = [
        _replaced(child, below[segment]) if segment in below else child
        for segment, child in zip(segments, contents.values, strict=True)
    ]
    return contents.build(values)


# ---- the last writer of each slot: the latest restore wins, whatever the order in which objects are attached

restore_numbers = itertools.count(1)
_writers: dict[int, dict[Path, int]] = {}  # by the ids of the anchors, which are alive


@dataclass(eq=False)
class Keeper:
    """Keeps an anchor without weak references alive, as long as the restore that has written to it."""

    anchor: Any


def last_writer(slot: Slot) -> int:
    """Return the number of the restore that wrote to a slot last; 0 if none did."""
    return _writers.get(id(slot.anchor), {}).get(slot.trail, 0)


def note_writer(slot: Slot, number: int, keepers: list[Keeper]) -> None:
    anchor, key = slot.anchor, id(slot.anchor)
    if key not in _writers:
        if not type(anchor).__weakrefoffset__:
            keepers.append(anchor := Keeper(anchor))
        weakref.finalize(anchor, _writers.pop, key, None).atexit = False
    _writers.setdefault(key, {})[slot.trail] = number
