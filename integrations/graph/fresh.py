"""Describe a program's freshly constructed objects, to detect saves that could not be restored into them."""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

from ...engine.errors import UnsupportedLeafError, difference
from ...engine.pytree import LeafTemplate, Saved, collection_paused, compare, describe_template, is_python_value
from .frameworks import OptionSlot, TensorSlot
from .slots import Attachment, BoxSlot, Path, StateSlot, format_node_path
from .tracked import Node
from .values import MADE_KINDS, NUMBER_VALUES, PLAIN_CONTAINERS, is_plain
from .views import Leaf
from .walk import LiveGraph, LiveNode, walk


class _Object:
    """Describes an object without its value, because the value changes during training."""

    def __init__(self, node: LiveNode, plain: tuple[dict[int, bool], dict[int, bool]]) -> None:
        view = node.view
        slot = view.slot if isinstance(view, Leaf) else None
        self.edges: dict[str, _Object] = {}
        self.is_leaf, self.has_values = slot is not None, node.has_value  # later also set if a child has values
        self.is_state, self.is_option = isinstance(slot, StateSlot), isinstance(slot, OptionSlot)
        self.is_dict, self.is_sequence = isinstance(node.value, dict), isinstance(node.value, list | tuple | deque)
        self.is_packed = isinstance(view, Leaf) and view.packed is not None
        # Whether a restore can replace the leaf with a container (`opens`), or create the object itself (`is_made`).
        self.opens = isinstance(view, Leaf) and (node.value is None or view.opened is not None)
        self.template = _template(node)
        is_array = self.template is not None and self.template.kind in MADE_KINDS
        # Whether a restore can replace all elements at once; `is_plain[True]` allows arrays among them.
        self.is_plain = is_plain(node.value, plain[0]), is_plain(node.value, plain[1], arrays=True)
        self.is_made = is_array or self.is_plain[True]
        self.is_tuple, self.is_container = isinstance(node.value, tuple), type(node.value) in PLAIN_CONTAINERS
        self.is_fixed = view.in_place if isinstance(view, Leaf) else not view.functional


class FreshObjects:
    """Describes objects by the edges between them and the types of their values."""

    def __init__(self, live: LiveGraph) -> None:
        for node in live.own:
            if isinstance(node.view, Leaf) and isinstance(node.slot, TensorSlot) and (problem := node.slot.problem):
                raise UnsupportedLeafError(f"{format_node_path(node.path)}: {problem}")
        plain: tuple[dict[int, bool], dict[int, bool]] = {}, {}
        objects = {id(node): _Object(node, plain) for node in live.own}
        uses = Counter(id(child) for node in live.own for child in chain(node.edges.values(), *node.groups))
        for node in reversed(live.own):  # in reverse, so that children come before their holders
            described = objects[id(node)]
            described.edges = {name: objects[id(child)] for name, child in node.edges.items() if not child.outside}
            described.has_values |= any(child.has_values for child in described.edges.values())
            lone = (objects[one].is_made and uses[one] == 1 for one in map(id, node.edges.values()) if one in objects)
            described.is_made = (described.is_made or described.is_container) and all(lone)
        self._root = objects[id(live.nodes[0])]

    @classmethod
    @collection_paused()
    def of(cls, root: Node) -> FreshObjects:
        """Describe the objects below a root; raise UnsupportedLeafError if one can be neither saved nor restored."""
        return cls(walk(root))

    def refused(self, later: FreshObjects) -> Iterator[str]:
        """Yield a message for each object in ``later`` that could not be restored into these fresh objects."""
        queue: list[tuple[_Object, _Object, Path]] = [(self._root, later._root, ())]
        seen, first = set[tuple[int, int]](), dict[int, tuple[int, Path]]()
        for fresh, now, path in queue:
            if (id(fresh), id(now)) in seen:
                continue
            seen.add((id(fresh), id(now)))
            one, where = first.setdefault(id(now), (id(fresh), path)) if fresh.is_fixed else (id(fresh), path)
            if one != id(fresh):
                yield f"{format_node_path(where)} and {format_node_path(path)}: two objects in the fresh state"
                continue
            if now.is_leaf and (fresh.is_leaf or now.is_packed):
                if (problem := _problem(fresh, now, format_node_path(path))) is not None:
                    yield problem
            elif now.is_leaf or (fresh.is_leaf and not (fresh.opens and now.is_made)):
                yield f"{format_node_path(path)}: a different object than in the fresh state"
            elif not fresh.is_leaf and not _is_replaced(fresh, now):
                for segment, child in {**fresh.edges, **now.edges}.items():
                    below = (*path, segment)
                    if segment in fresh.edges and segment in now.edges:
                        queue.append((fresh.edges[segment], child, below))
                    elif child.has_values and segment in fresh.edges:
                        yield f"{format_node_path(below)}: only in the fresh state"
                    elif child.has_values and not child.is_option and not (now.is_dict and child.is_made):
                        yield f"{format_node_path(below)}: not in the fresh state"


def _is_replaced(fresh: _Object, now: _Object) -> bool:
    """True if a restore replaces all elements of a plain sequence at once."""
    changes = len(fresh.edges) != len(now.edges)
    is_new = now.is_made if changes else now.is_plain[False] and not fresh.is_tuple
    return is_new and fresh.is_sequence and now.is_sequence and fresh.is_plain[changes]


def _problem(fresh: _Object, now: _Object, path: str) -> str | None:
    """Return why a saved value would not fit a fresh object, or None if it would."""
    wanted, saved = fresh.template, now.template
    if wanted is None:
        return None
    if now.is_state:
        return difference(path, wanted, "the state of an object", "the fresh state")
    if saved is None or "none" in (wanted.kind, saved.kind) or {wanted.kind, saved.kind} <= NUMBER_VALUES:
        return None
    details = {"kind": saved.kind, "impl": saved.variant, "torch_dtype": saved.variant}
    return compare(wanted, Saved(details, saved.dtype, saved.shape), path)


def _template(node: LiveNode) -> LeafTemplate | None:
    """Return the template for a single array or plain value, or None for anything else."""
    if not (node.has_value and isinstance(node.slot, TensorSlot | Attachment | BoxSlot)):
        return None
    value: Any = node.value if isinstance(node.slot, TensorSlot) or hasattr(node.value, "layout") else node.slot.get()
    if is_python_value(value) or hasattr(value, "dtype"):
        with contextlib.suppress(UnsupportedLeafError):
            (template,) = describe_template([""], [value])
            return replace(template, leaf=None, sharding=None, origin="the fresh state")
    return None
