"""Outlines of a program's objects, without values: what a save of later ones would not restore into the first ones."""

from __future__ import annotations

import copy
from collections import defaultdict, deque
from collections.abc import Collection
from typing import Any

import numpy as np

from ...engine.arrays import MemoryTree, SavedLeaf
from ...engine.pytree import (
    Saved,
    TreeDocument,
    collection_paused,
    describe,
    describe_template,
    expand,
    flatten,
    is_dense,
    is_jax_abstract,
    is_jax_array,
    is_python_value,
    is_torch_tensor,
    loaded,
)
from ...engine.sources import Misfits
from ...engine.storage import LocalBackend, Location
from .frameworks import GROUPS, is_uninitialized
from .restoration import Restoration
from .slots import BoxSlot, Path, StateSlot, format_node_path, parse_path
from .stored import StoredGraph, capture
from .tracked import Node, Part, TrackedDict, TrackedList, Untracked, Value
from .views import COUNTER, Branch, Leaf
from .walk import LiveGraph, LiveNode, walk


class _Opaque:
    """Stands for an object with a state of its own."""

    def get_state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: Any) -> None: ...


class FreshObjects:
    """An outline of objects: stand-ins with the same edges, whose arrays have no memory."""

    def __init__(self, live: LiveGraph) -> None:
        made: dict[int, Any] = {}  # the stand-ins, by the ids of nodes
        self._root: Part = _stand_in(live.nodes[0], made)
        self._outside = [made[id(node)] for node in live.nodes if node.outside and id(node) in made]

    @classmethod
    @collection_paused()
    def of(cls, root: Node) -> FreshObjects:
        """Describe the objects below a root; raise UnsupportedLeafError if one can be neither saved nor restored."""
        return cls(walk(root))

    @collection_paused()
    def refused(self, later: FreshObjects, *, ignore: Collection[Path] = ()) -> list[str]:
        """Return a line for each part of later objects that a restore into these would refuse, except some."""
        origin, ignore = "the fresh state", {(COUNTER,), *ignore}
        now = later._walked()
        restoration = Restoration(_stored(now), self._root, ignore=ignore, final=True, ends=self._ends, origin=origin)
        misfits = Misfits()
        restoration.compare(misfits)
        restoration.report()._note(misfits)
        fresh_paths, later_paths = _paths(self._walked()), _paths(now)
        lines = [*misfits.kept.values()]
        lines += [_line(path, later_paths, "only in the fresh state") for path in map(parse_path, misfits.absent)]
        lines += [_line(path, fresh_paths, "not in the fresh state") for path in map(parse_path, misfits.left)]
        return list(dict.fromkeys(lines))

    def is_none(self, name: str) -> bool:
        """Whether an attribute of the root is None."""
        return self._root.added.get(name, ...) is None

    def _ends(self, value: Any) -> bool:
        return any(value is one for one in self._outside)

    def _walked(self) -> LiveGraph:
        return walk(self._root, ends=self._ends).without_names()


def _line(path: Path, other: dict[Path, bool], what: str) -> str:
    """Return a line for a value that one side lacks, or for the object around it that it lacks as a whole."""
    end = next((size for size in range(1, len(path)) if other.get(path[:size], True)), len(path))
    top = path[:end]
    return f"{format_node_path(top)}: {'another object than in the fresh state' if top in other else what}"


def _paths(live: LiveGraph) -> dict[Path, bool]:
    """Return the paths of all objects, and whether each is a value."""
    return {
        (*node.path, segment): isinstance(child.view, Leaf)
        for node in live.nodes
        for segment, child in node.edges.items()
    }


def _stored(live: LiveGraph) -> StoredGraph:
    """Return what a save of stand-ins would describe."""
    captured = capture(live)
    flat = flatten(captured.tree)
    leaves = [SavedLeaf(name, _saved(name, value)) for name, value in zip(flat.names, flat.values, strict=True)]
    place = Location(LocalBackend(), "/")
    return StoredGraph(MemoryTree(place, TreeDocument(flat.structure), leaves, {}), place, document=captured.document)


def _saved(name: str, value: Any) -> Saved:
    if not (is_torch_tensor(value) or is_jax_abstract(value)):
        return Saved.of(describe([name], [value])[0])
    (found,) = describe_template([name], [value])
    return Saved({"kind": found.kind, "impl": found.variant, "torch_dtype": found.variant}, found.dtype, found.shape)


# ---- stand-ins


def _stand_in(node: LiveNode, made: dict[int, Any]) -> Any:
    """Return the object that is walked, saved and restored as the one of a node."""
    if id(node) not in made:
        made[id(node)] = Untracked(None)  # for an immutable container that holds itself
        made[id(node)] = _of_value(node) if isinstance(node.view, Leaf) else _of_branch(node, node.view, made)
    return made[id(node)]


def _of_value(node: LiveNode) -> Any:
    view, value = node.view, node.value
    assert isinstance(view, Leaf)
    if isinstance(view.slot, StateSlot):
        return _Opaque()
    if view.packed is not None:
        return list(value) if isinstance(value, TrackedList) else copy.copy(value)
    is_box = isinstance(view.slot, BoxSlot) and not hasattr(value, "layout") and not isinstance(value, np.ndarray)
    content = _without_memory(view.slot.get() if is_box else value)
    return Value(content) if is_box and is_python_value(content) else content


def _of_branch(node: LiveNode, view: Branch, made: dict[int, Any]) -> Any:
    value = node.value
    if view.optimizer is not None:
        return _optimizer(node, made)
    if view.functional or (isinstance(value, dict | list | deque) and not isinstance(value, Part)):
        return _container(node, view, made)
    part = made[id(node)] = Part(None)
    for edge in view.edges:
        if edge.segment in node.edges:
            part.added[edge.key] = _stand_in(node.edges[edge.segment], made)
    return part


def _container(node: LiveNode, view: Branch, made: dict[int, Any]) -> Any:
    contents = expand(node.value)
    assert contents is not None
    if view.functional:
        return contents.build([_below(node, edge.segment, made) for edge in view.edges])
    built = made[id(node)] = contents.build([Untracked(None) for _ in view.edges])
    if isinstance(built, TrackedList | TrackedDict):
        built._holdfast_origin = None
    for edge in view.edges:
        kind: Any = dict if isinstance(built, dict) else list if isinstance(built, list) else deque
        kind.__setitem__(built, edge.key, _below(node, edge.segment, made))
    return built


def _below(node: LiveNode, segment: str, made: dict[int, Any]) -> Any:
    return _stand_in(node.edges[segment], made) if segment in node.edges else Untracked(None)


def _optimizer(node: LiveNode, made: dict[int, Any]) -> Any:
    """Return an optimizer of the same class that was never initialized, for stand-ins of the parameters."""
    optimizer = node.value
    found = made[id(node)] = object.__new__(type(optimizer))
    for name, child in node.edges.items():
        if name != GROUPS:
            vars(found)[name] = _stand_in(child, made)
    by_parameter = {id(one.value): _stand_in(one, made) for group in node.groups for one in group}
    groups, state = [], defaultdict[Any, dict[Any, Any]](dict)
    for group in optimizer.param_groups:
        stand_ins = [by_parameter.setdefault(id(one), _without_memory(one)) for one in group["params"]]
        groups.append({**{name: _without_memory(one) for name, one in group.items()}, "params": stand_ins})
        for one, stand_in in zip(group["params"], stand_ins, strict=True):
            if kept := optimizer.state.get(one):
                state[stand_in] = {key: _without_memory(value) for key, value in kept.items()}
    vars(found).setdefault("param_groups", groups)
    vars(found).setdefault("state", state)
    return found


def _without_memory(value: Any) -> Any:
    """Return an array of the same kind, dtype and shape that takes no memory; any other value as it is."""
    if isinstance(value, np.ndarray):
        memory, is_writeable = np.zeros(1, value.dtype), value.flags.writeable
        return np.lib.stride_tricks.as_strided(memory, value.shape, [0] * value.ndim, writeable=is_writeable)
    if is_jax_array(value):
        jax: Any = loaded("jax")
        return jax.ShapeDtypeStruct(value.shape, value.dtype, weak_type=value.weak_type)
    if not is_torch_tensor(value):
        return value
    torch: Any = loaded("torch")
    if is_uninitialized(value):
        parameter = isinstance(value, torch.nn.Parameter)
        kind = torch.nn.parameter.UninitializedParameter if parameter else torch.nn.parameter.UninitializedBuffer
        return kind(dtype=value.dtype, device="meta")
    if not is_dense(value):
        return torch.empty(value.shape, dtype=value.dtype, layout=value.layout)
    tensor = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return tensor.requires_grad_(value.requires_grad)
