"""Classify live objects as branches with named edges, leaves with values, or objects that are not saved."""

from __future__ import annotations

import dataclasses
import enum
import types
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ...engine.errors import OptionError
from ...engine.pytree import (
    KeyProblem,
    PackedNumbers,
    class_name,
    expand,
    is_jax_abstract,
    is_jax_array,
    is_nnx,
    is_python_value,
    is_torch_tensor,
    key_segments,
    loaded,
    pack_numbers,
)
from ...engine.stateful import decode_state, encode_state, is_dense, is_stateful
from .frameworks import (
    GROUPS,
    OptionSlot,
    TensorSlot,
    group_options,
    has_own_protocol,
    is_module,
    is_nnx_variable,
    is_optimizer,
    is_uninitialized,
    module_children,
    nnx_children,
    variable_accessors,
)
from .keras import VARIABLE, bare_variable, keras_children, keras_kind, variable_slot, why_not_saved
from .outside import is_actor_class, is_code_or_tool, why_more, why_refused
from .paths import Path
from .slots import BoxSlot, MemberSlot, PartSlot, Slot, StateSlot
from .tracked import Node, TrackedDict, TrackedList, Untracked, Value, tracked_attributes
from .wrappers import unwrapped

COUNTER = "save_counter"  # name of the edge to the number of a checkpoint's last numbered save


@dataclass(slots=True)
class Position:
    """The place of a value, and how to replace the value there."""

    anchor: Any  # the nearest object above that can be referred to weakly
    trail: Path  # the path from the anchor
    change: Callable[[Any], None] | None  # replaces the value; None where that is impossible
    part: PartSlot | None = None  # the slot of a part of an immutable container

    def slot(self, value: Any) -> Slot:
        if self.part is not None:
            return self.part
        return BoxSlot(self.anchor, self.trail, lambda: value, self.change or _refuse)


@dataclass(slots=True)
class Edge:
    segment: str  # the escaped key, which is the name of the edge
    key: Any
    value: Any  # the module or parameter itself, never a wrapper around it
    position: Position

    def __post_init__(self) -> None:
        self.value = bare_variable(unwrapped(self.value))

    def view(self) -> View:
        return classify(self.value, self.position)


@dataclass(slots=True)
class Branch:
    label: str  # the name of the type
    edges: list[Edge]  # in the object's own order
    sequence: bool = False  # whether the keys are 0, 1, 2, ...
    functional: bool = False  # whether a restore builds it anew, so that it is another object afterwards
    optimizer: Any = None  # the object itself, if it is a torch optimizer


@dataclass(slots=True)
class Leaf:
    """An object with a value."""

    slot: Slot
    shared: bool  # whether it is stored once, however many paths lead to it
    ready: bool = True  # whether it has a value; parameters of lazy modules have none before the first call
    in_place: bool = True  # whether a restore changes the object itself, instead of replacing it
    packed: PackedNumbers | None = None  # the elements of a long sequence of numbers
    opened: Callable[[], View] | None = None  # returns the branch that a checkpoint may have instead


@dataclass(slots=True)
class Unsaved:
    reason: str
    intended: bool = False  # whether the program wants that, or the object is code or a tool


View = Branch | Leaf | Unsaved


def classify(value: Any, position: Position) -> View:
    if isinstance(value, np.ndarray):
        if value.flags.writeable and value.dtype != object:
            return Leaf(BoxSlot(value, (), lambda: value, partial(value.__setitem__, ...)), shared=True)
        return Leaf(position.slot(value), shared=True, in_place=False)
    if is_torch_tensor(value) and not is_uninitialized(value) and not is_dense(value):
        return Leaf(BoxSlot(value, (), partial(encode_state, value), partial(_copy_encoded, value)), shared=True)
    if is_torch_tensor(value):
        return Leaf(TensorSlot(value), shared=True, ready=not is_uninitialized(value))
    if is_jax_array(value) or is_jax_abstract(value):
        return Leaf(position.slot(value), shared=True, in_place=False)
    if isinstance(value, enum.Enum) and position.part is None:
        return Leaf(MemberSlot(value, position.slot(value)), shared=False, in_place=False)
    if is_python_value(value) or isinstance(value, np.generic):
        return Leaf(position.slot(value), shared=False, in_place=False)
    if isinstance(value, Value):
        return Leaf(BoxSlot(value, (), lambda: value.value, value.assign), shared=True)
    if isinstance(value, Untracked):
        return Unsaved("is marked as untracked", intended=True)
    return _classify_object(value, position)


def root_view(root: Node) -> Branch:
    view = classify(root, Position(root, (), None))
    if not isinstance(view, Branch):
        raise OptionError(view.reason if isinstance(view, Unsaved) else "the root is a value; give it a name")
    return view


def edge_at(holder: Any, key: object) -> Edge | None:
    """Return one edge of a node or tracked container; None where only `classify` can."""
    position = Position(holder, (), None)
    if isinstance(holder, Node) and isinstance(key, str):
        if holder.__holdfast_root__() is not None or key in holder._holdfast.untracked or key not in vars(holder):
            return None
        return _attributes(holder, [(key, vars(holder)[key])], position)[0]
    if isinstance(holder, TrackedList) and isinstance(key, int) and not is_python_value(holder[key]):
        segment = str(key)
    elif isinstance(holder, TrackedDict) and type(key) is str and not key.lstrip("-").isdigit():
        (segment,) = key_segments([key])
    else:
        return None
    return Edge(segment, key, holder[key], Position(holder, (segment,), partial(_set_item, holder, key)))


def _classify_object(value: Any, position: Position) -> View:
    if is_actor_class(type(value)):
        return Unsaved(f"is no state ({class_name(value)})", intended=True)
    if isinstance(value, Node):
        return _node(value, position)
    if (packed := _packed(value)) is not None:
        return _numbers(value, packed, position)
    if isinstance(value, dict | list) and expand(value) is not None and position.part is None:
        return _container(value, position)
    if (kind := keras_kind(value)) is not None:
        return _keras(kind, value, position)
    if is_module(value):
        return Branch(class_name(value), _attributes(value, module_children(value), position))
    if is_optimizer(value):
        return _optimizer(value, position)
    if is_nnx_variable(value):
        return _variable(value)
    if is_nnx(value):
        return Branch(class_name(value), _attributes(value, nnx_children(value), position))
    if is_code_or_tool(value):
        return Unsaved(f"is no state ({type(value).__name__})", intended=True)
    if isinstance(value, StateSlot | OptionSlot):
        return Leaf(value, shared=isinstance(value, StateSlot))
    if is_stateful(value):
        return Leaf(StateSlot(value, *_anchor(value, position)), shared=True)
    if _is_mutable_dataclass(value):
        names = [entry.name for entry in dataclasses.fields(value) if hasattr(value, entry.name)]
        pairs = [(name, getattr(value, name)) for name in names]
        return Branch(class_name(value), _attributes(value, pairs, position))
    if expand(value) is not None:
        return _container(value, position)
    return _plain_object(value, position)


def _node(node: Node, position: Position) -> View:
    """Return the edges of a node, and those of its root, if it has one."""
    own = [(name, child) for name, child in vars(node).items() if name not in node._holdfast.untracked]
    edges = _attributes(node, own, position)
    if node._holdfast.counter is not None:
        edges.append(Edge(COUNTER, COUNTER, node._holdfast.counter, Position(node, (COUNTER,), None)))
    root = node.__holdfast_root__()
    if root is None:
        return Branch(class_name(node), edges)
    view = classify(root, Position(node, (), None))
    if not isinstance(view, Branch) or view.optimizer is not None or view.functional:
        return Unsaved(f"the root is a {class_name(root)}, which cannot hold other objects; give it a name instead")
    names = {edge.segment for edge in view.edges}
    return replace(view, edges=[*view.edges, *(edge for edge in edges if edge.segment not in names)])


def _attributes(holder: Any, children: Iterable[tuple[str, Any]], position: Position) -> list[Edge]:
    """Return edges to attributes, which can be set."""
    pairs = list(children)
    anchor, trail = _anchor(holder, position)
    return [
        Edge(segment, name, child, Position(anchor, (*trail, segment), partial(_set_attribute, holder, name)))
        for (name, child), segment in zip(pairs, key_segments([name for name, _ in pairs]), strict=True)
    ]


def _container(value: Any, position: Position) -> View:
    """Return the edges of a container, whose entries can be set, or which is built anew."""
    contents = expand(value)
    assert contents is not None
    keys = contents.keys if contents.keys is not None else list(range(len(contents.values)))
    try:
        segments = key_segments(contents.keys, len(keys))
    except KeyProblem as problem:
        return Unsaved(f"is a {class_name(value)} that {problem}")
    if isinstance(value, dict | list | deque) and (reason := why_more(value, keys)) is not None:
        return Unsaved(reason)
    mutable = position.part is None and isinstance(value, dict | list | deque) and contents.kind != "node"
    positions = []
    if mutable:
        anchor, trail = _anchor(value, position)
        for key, segment in zip(keys, segments, strict=True):
            positions.append(Position(anchor, (*trail, segment), partial(_set_item, value, key)))
    else:
        owner = position.part.owner if position.part is not None else position.slot(value)
        below = position.part.below if position.part is not None else ()
        for segment, child in zip(segments, contents.values, strict=True):
            part = PartSlot(owner, (*below, segment), child)
            positions.append(Position(part.anchor, part.trail, None, part))
    edges = list(map(Edge, segments, keys, contents.values, positions))
    return Branch(class_name(value), edges, sequence=contents.keys is None, functional=not mutable)


def _packed(value: Any) -> PackedNumbers | None:
    return pack_numbers(list(value) if type(value) is TrackedList else value)


def _numbers(value: Any, packed: PackedNumbers, position: Position) -> Leaf:
    """Return a long sequence of numbers as one value."""
    grows = _is_growing(value, position)
    return Leaf(
        sequence_slot(value, position),
        shared=grows or type(value) is not tuple,
        in_place=grows,
        packed=packed,
        opened=partial(_container, value, position),
    )


def _is_growing(value: Any, position: Position) -> bool:
    """Whether a value is a list or deque whose elements can be replaced in place."""
    return isinstance(value, list | deque) and position.part is None


def sequence_slot(value: Any, position: Position) -> Slot:
    """Return the slot of all elements of a sequence; a list or deque stays the same object where it can."""
    if not _is_growing(value, position):
        return position.slot(value)
    anchor, trail = _anchor(value, position)
    return BoxSlot(anchor, trail, lambda: value, partial(_refill, value))


def _refill(sequence: Any, elements: Any) -> None:
    if isinstance(sequence, list):
        list.__setitem__(sequence, slice(None), elements)
    else:
        sequence.clear()
        sequence.extend(elements)


def _optimizer(value: Any, position: Position) -> View:
    """Return an optimizer as groups and values for parameters, or as the state of its own ``state_dict()``.

    An optimizer that drives another one, which its state may not include, has an edge to it.
    """
    inner = [(name, one) for name, one in vars(value).items() if is_optimizer(one)]
    branch = Branch(class_name(value), _attributes(value, inner, position), optimizer=value)
    if not has_own_protocol(value):
        return branch
    if any(type(one).__name__ == "DTensor" for group in value.param_groups for one in group["params"]):
        return Unsaved(
            f"is a {class_name(value)} with a state_dict() of its own, which does not say how processes share it; save "
            "the optimizer inside it, or mark it with Untracked"
        )
    slot = StateSlot(value, *_anchor(value, position))
    return Leaf(slot, shared=True, opened=lambda: branch)


def options_edge(optimizer: Any) -> Edge:
    """Return the edge from a torch optimizer to the options of its groups, each of which is its own slot."""
    groups = [
        {name: OptionSlot(optimizer, number, name) for name in group_options(group)}
        for number, group in enumerate(optimizer.param_groups)
    ]
    return Edge(GROUPS, GROUPS, groups, Position(optimizer, (GROUPS,), None))


def _variable(value: Any) -> View:
    get, change = variable_accessors(value)
    slot = BoxSlot(value, (), get, change)
    view = classify(get(), Position(slot.anchor, slot.trail, change))
    return Leaf(slot, shared=True) if isinstance(view, Leaf) else view


def _keras(kind: str, value: Any, position: Position) -> View:
    if kind == VARIABLE:
        return Leaf(variable_slot(value), shared=True)
    if (reason := why_not_saved(value)) is not None:
        return Unsaved(reason)
    return Branch(class_name(value), _attributes(value, keras_children(value), position))


def _plain_object(value: Any, position: Position) -> View:
    """Return the attributes of an instance of a class of the program."""
    if isinstance(value, enum.Enum):
        return Unsaved("is a member of an enumeration in a container that cannot change; keep its value, or its name")
    if not isinstance(value, types.SimpleNamespace) and (reason := why_refused(value)) is not None:
        return Unsaved(reason)
    return Branch(class_name(value), _attributes(value, tracked_attributes(value), position))


def _anchor(value: object, position: Position) -> tuple[Any, Path]:
    """Return the anchor for what is below an object, and the path from there to the object."""
    return (value, ()) if _can_be_anchor(value) else (position.anchor, position.trail)


def _can_be_anchor(value: object) -> bool:
    return type(value).__weakrefoffset__ != 0


def _is_mutable_dataclass(value: Any) -> bool:
    parameters = getattr(type(value), "__dataclass_params__", None)
    contents = None if parameters is None or parameters.frozen else expand(value)
    return contents is not None and contents.kind == "dataclass"  # jax builds all others


def _set_attribute(holder: Any, name: str, value: Any) -> None:
    # __setattr__ of a Node would take the value for a new object.
    if isinstance(holder, Node):
        vars(holder)[name] = value
    else:
        setattr(holder, name, value)


def _set_item(container: Any, key: Any, value: Any) -> None:
    kind: Any = dict if isinstance(container, dict) else list if isinstance(container, list) else deque
    kind.__setitem__(container, key, value)


def _copy_encoded(tensor: Any, value: Any) -> None:
    torch: Any = loaded("torch")
    with torch.no_grad():  # a detached sparse tensor has indices of its own
        tensor.copy_(decode_state(value))


def _refuse(_: Any) -> None:
    raise TypeError("this value cannot be replaced where it is")
