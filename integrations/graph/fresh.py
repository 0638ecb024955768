"""What the objects of a program are before its first step, and which later saves could not be restored into them."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ...engine.errors import UnsupportedLeafError, difference
from ...engine.pytree import LeafTemplate, Saved, compare, describe_template, is_python_value
from .frameworks import OptionSlot, TensorSlot
from .slots import BoxSlot, PartSlot, Path, Place, StateSlot, format_node_path, storage_name
from .values import MADE_KINDS, NUMBER_VALUES, is_plain
from .views import Leaf
from .walk import LiveGraph, LiveNode


class _Object:
    """One object without its value, which steps change."""

    def __init__(self, node: LiveNode, known: dict[int, bool]) -> None:
        view = node.view
        slot = view.slot if isinstance(view, Leaf) else None
        self.edges: dict[str, _Object] = {}
        self.is_leaf, self.is_value = slot is not None, node.has_value
        self.is_state, self.is_option = isinstance(slot, StateSlot), isinstance(slot, OptionSlot)
        self.is_dict, self.is_sequence = isinstance(node.value, dict), isinstance(node.value, list | tuple | deque)
        self.is_packed = isinstance(view, Leaf) and view.packed is not None
        # Whether a restore can take the elements as one value, and whether it can make the object where there is none.
        self.opens = isinstance(view, Leaf) and (node.value is None or view.opened is not None)
        self.template = _template(node)
        is_array = self.template is not None and self.template.kind in MADE_KINDS
        self.is_made = is_array or is_plain(node.value, known, arrays=True)

    def has_values(self) -> bool:
        """Whether a checkpoint has anything of the object, or of what is below it."""
        below = {id(self): self}
        queue = [self]
        for one in queue:
            if one.is_value:
                return True
            queue += [child for child in one.edges.values() if below.setdefault(id(child), child) is child]
        return False


class FreshObjects:
    """A description of objects: the edges between them, and the kinds of their values."""

    def __init__(self, live: LiveGraph) -> None:
        known: dict[int, bool] = {}
        found = {id(node): _Object(node, known) for node in live.own}
        for node in live.own:
            own = {segment: child for segment, child in node.edges.items() if not child.outside}
            found[id(node)].edges = {segment: found[id(child)] for segment, child in own.items()}
        self._root = found[id(live.nodes[0])]

    def refused(self, later: FreshObjects) -> Iterator[str]:
        """Generate a line for each part of later objects that a restore into these would refuse."""
        queue: list[tuple[_Object, _Object, Path]] = [(self._root, later._root, ())]
        seen = set[tuple[int, int]]()
        for fresh, now, path in queue:
            if (id(fresh), id(now)) in seen:
                continue
            seen.add((id(fresh), id(now)))
            if now.is_leaf and (fresh.is_leaf or now.is_packed):
                if (problem := _problem(fresh, now, format_node_path(path))) is not None:
                    yield problem
            elif now.is_leaf or (fresh.is_leaf and not (fresh.opens and now.is_made)):
                yield f"{format_node_path(path)}: another object than in the fresh state"
            elif not fresh.is_leaf and not (now.is_sequence and now.is_made):
                both = {**fresh.edges, **now.edges}
                for segment in both:
                    mine, theirs, below = fresh.edges.get(segment), now.edges.get(segment), (*path, segment)
                    if mine is not None and theirs is not None:
                        queue.append((mine, theirs, below))
                    elif theirs is None and both[segment].has_values():
                        yield f"{format_node_path(below)}: only in the fresh state"
                    elif theirs is not None and _is_surplus(theirs, now):
                        yield f"{format_node_path(below)}: not in the fresh state"


def _is_surplus(child: _Object, holder: _Object) -> bool:
    return child.has_values() and not child.is_option and not (holder.is_dict and child.is_made)


def _problem(fresh: _Object, now: _Object, path: str) -> str | None:
    """Return why a value that is restored as a whole does not fit, as the reader of values decides."""
    wanted, found = fresh.template, now.template
    if wanted is None:
        return None
    if now.is_state:
        return difference(path, wanted, "the state of an object", "the fresh state")
    if found is None or "none" in (wanted.kind, found.kind) or {wanted.kind, found.kind} <= NUMBER_VALUES:
        return None
    details = {"kind": found.kind, "impl": found.variant, "torch_dtype": found.variant}
    return compare(wanted, Saved(details, found.dtype, found.shape), path)


def _template(node: LiveNode) -> LeafTemplate | None:
    """Return what one array or plain value asks for; None for anything else."""
    if not (node.has_value and isinstance(node.slot, TensorSlot | Place | PartSlot | BoxSlot)):
        return None
    value: Any = node.value if isinstance(node.slot, TensorSlot) or hasattr(node.value, "layout") else node.slot.get()
    if is_python_value(value) or hasattr(value, "dtype"):
        with contextlib.suppress(UnsupportedLeafError):
            (found,) = describe_template([storage_name(node.path)], [value])
            return replace(found, leaf=None, sharding=None, origin="the fresh state")
    return None
