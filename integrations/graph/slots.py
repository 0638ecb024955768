"""Slots: places in live objects that hold one value each, which a save reads and a restore writes; and their paths.

Objects that change in place are their own slots (tensors, writable numpy arrays, boxes, objects with a state). Every
other value is replaced where it is attached: an attribute, an entry, or a part of an immutable container, which is
rebuilt.

A path is the names of the edges from the root. An edge is named by the escaped form of its key, as in the names of
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
from ...engine.stateful import begins_epoch, is_stream, restore_state, state_of
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


def format_section(what: str, names: Sequence[str]) -> list[str]:
    """Format the line of a report for a list of paths; an empty list has none."""
    return [f"  {what} ({len(names)}): {shortened(names, 10)}"] if names else []


# ---- slots


class Slot(Protocol):
    anchor: Any  # the object whose lifetime bounds that of the slot; it has weak references where possible
    trail: Path  # the path from the anchor to the slot

    def get(self) -> Any:
        """Return the value; ``...`` where the slot is still empty."""

    def set(self, value: Any) -> None:
        """Change the value; it has the kind, dtype and shape of what `get` returns."""


@dataclass(slots=True, eq=False)
class Place:
    """The place of a value, in which a restore puts another one."""

    anchor: Any
    trail: Path
    value: Any
    change: Callable[[Any], None] | None = None  # None where no other value can be put

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
    """An object with a state of its own (see :mod:`~holdfast.engine.stateful`); its value is a tree."""

    thing: Any
    anchor: Any
    trail: Path

    @property
    def is_stream(self) -> bool:
        """Whether each process saves and restores its own state."""
        return is_stream(self.thing)

    def get(self) -> Any:
        return pack_tree(state_of(self.thing))

    def set(self, value: Any) -> None:
        restore_state(self.thing, value, as_start)


class PartState(StateSlot):
    """A part of the state of an object, saved and restored by the object's own methods; the same on all processes."""

    is_stream = False


class MemberSlot(Place):
    """A member of an enumeration, saved as its name, or as the number or text that it equals."""

    def get(self) -> Any:
        return self.value.value if is_python_value(self.value) else self.value.name

    def set(self, value: Any) -> None:
        super().set(self.member(value))

    def member(self, value: Any) -> Any:
        """Return the member that a saved value stands for; raise TreeMismatchError if there is none."""
        kind = type(self.value)
        try:
            return kind(value) if is_python_value(self.value) else kind[value]
        except (KeyError, ValueError) as error:
            raise TreeMismatchError(
                f"{'/'.join(self.trail)}: expected a member of {kind.__qualname__} (program: "
                f"{shortened([one.name for one in kind])}), found {value!r:.80} (checkpoint); nothing was changed"
            ) from error


class PartSlot(Place):
    """A part of an immutable container, which `write_slots` rebuilds once for all of its parts."""

    def __init__(self, owner: Slot, below: Path, value: Any) -> None:
        super().__init__(owner.anchor, (*owner.trail, *below), value)
        self.owner, self.below = owner, below


@dataclass(slots=True, eq=False)
class Assignment:
    """A value of the checkpoint and the slot it belongs in."""

    saved: int  # the value's node in the checkpoint
    slot: Slot
    path: Path  # the slot's path in the program
    covers: list[tuple[int, Path]] | None = None  # the values of a container of plain values, by their paths from it

    def values(self) -> list[tuple[int, Path]]:
        """Return the values that it restores, each with its path in the program."""
        if self.covers is None:
            return [(self.saved, self.path)]
        return [(number, (*self.path, *below)) for number, below in self.covers]


def write_slots(changes: list[tuple[Slot, Any]]) -> None:
    parts: dict[tuple[int, Path], tuple[Slot, dict[Path, Any]]] = {}
    for slot, value in sorted(changes, key=lambda change: not _begins_epoch(change[0])):
        if isinstance(slot, PartSlot):
            owner = (id(slot.owner.anchor), slot.owner.trail)
            parts.setdefault(owner, (slot.owner, {}))[1][slot.below] = value
        else:
            slot.set(value)
    for owner_slot, updates in parts.values():
        owner_slot.set(_replaced(owner_slot.get(), updates))


def _begins_epoch(slot: Slot) -> bool:
    return isinstance(slot, StateSlot) and begins_epoch(slot.thing)


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


# ---- the last writer of each slot: the latest restore wins, regardless of the order in which objects are attached

restore_numbers = itertools.count(1)
_writers: dict[int, dict[Path, int]] = {}  # by the ids of the anchors, which still exist


class Keeper:
    """Keeps an anchor without weak references alive, as long as the restore that has written to it."""

    def __init__(self, anchor: Any) -> None:
        self.anchor = anchor


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
