"""Classify live objects as branches with named edges, as leaves with values, or as objects that are not saved."""

from __future__ import annotations

import enum
import types
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ...engine.errors import OptionError
from ...engine.loaders import derives
from ...engine.pytree import (
    KeyProblem,
    PackedNumbers,
    class_name,
    decode_state,
    encode_state,
    expand,
    is_dense,
    is_jax_abstract,
    is_jax_array,
    is_nnx,
    is_optimizer,
    is_python_value,
    is_torch_tensor,
    key_segments,
    loaded,
    pack_numbers,
)
from ...engine.stateful import is_stateful
from .frameworks import (
    GROUPS,
    OPTIMIZER,
    VARIABLE,
    OptionSlot,
    TensorSlot,
    bare_variable,
    group_options,
    has_own_protocol,
    is_module,
    is_nnx_variable,
    is_uninitialized,
    keras_children,
    keras_kind,
    module_children,
    nnx_children,
    variable_accessors,
    why_not_saved,
)
from .outside import is_actor_class, is_code_or_tool, unwrapped, why_more, why_refused
from .slots import Attachment, BoxSlot, MemberSlot, PartSlot, Path, Slot, StateSlot
from .tracked import Node, Part, TrackedDict, TrackedList, Untracked, Value, tracked_attributes

COUNTER = "save_counter"  # name of the edge from a checkpoint to its save counter


@dataclass(slots=True)
class Edge:
    segment: str  # the escaped key, used as the edge name
    key: Any
    slot: Slot
    value: Any = None  # the slot's value, with wrapped modules and Keras variables unwrapped

    def __post_init__(self) -> None:
        self.value = bare_variable(unwrapped(self.slot.get()))


@dataclass(slots=True)
class Branch:
    label: str  # type name
    edges: list[Edge]  # in the object's own order
    sequence: bool = False  # whether the keys are 0, 1, 2, ...
    functional: bool = False  # whether a restore rebuilds the object instead of changing it
    optimizer: Any = None  # the object itself, if it is a torch optimizer
    parameters: Sequence[Any] = ()  # parameters of a Keras optimizer
    edges_to: Callable[[list[tuple[str, Any]]], list[Edge]] | None = None  # Keras only: edges to children as named


@dataclass(slots=True)
class Leaf:
    """An object that has a value instead of edges."""

    slot: Slot
    shared: bool  # whether the object is stored only once, even if several paths lead to it
    ready: bool = True  # whether it has a value yet; a lazy module's parameters have none until the first call
    in_place: bool = True  # whether a restore changes the object itself instead of replacing it
    packed: PackedNumbers | None = None  # the elements of a long sequence of numbers
    opened: Callable[[], View] | None = None  # returns a branch view to use if the object was saved as several values


@dataclass(slots=True)
class Unsaved:
    reason: str
    intended: bool = False  # True if the object is marked as untracked or holds no state, which is not an error


View = Branch | Leaf | Unsaved


def classify(value: Any, slot: Slot) -> View:
    if isinstance(value, np.ndarray) and value.flags.writeable and value.dtype != object:
        return Leaf(BoxSlot(value, (), lambda: value, partial(value.__setitem__, ...)), shared=True)
    if is_torch_tensor(value) and not is_uninitialized(value) and not is_dense(value):
        return Leaf(BoxSlot(value, (), partial(encode_state, value), partial(_copy_encoded, value)), shared=True)
    if is_torch_tensor(value):
        return Leaf(TensorSlot(value), shared=True, ready=not is_uninitialized(value))
    if isinstance(value, np.ndarray) or is_jax_array(value) or is_jax_abstract(value):
        return Leaf(slot, shared=True, in_place=False)
    if isinstance(value, enum.Enum) and not isinstance(slot, PartSlot):
        return Leaf(MemberSlot(slot.anchor, slot.trail, value, slot.set), shared=False, in_place=False)
    if is_python_value(value) or isinstance(value, np.generic):
        return Leaf(slot, shared=False, in_place=False)
    if isinstance(value, Value):
        return Leaf(BoxSlot(value, (), lambda: value.value, value.assign), shared=True)
    if isinstance(value, Untracked):
        return Unsaved("is marked as untracked", intended=True)
    return _classify_object(value, slot)


def root_view(root: Node | Part) -> Branch:
    view = classify(root, Attachment(root, (), root))
    if not isinstance(view, Branch):
        raise OptionError(view.reason if isinstance(view, Unsaved) else "the root is a value; give it a name")
    return view


def edge_at(holder: Any, key: object) -> Edge | None:
    """Return one edge of a node or tracked container, or None if only a full `classify` can find it."""
    if isinstance(holder, Node) and isinstance(key, str) and holder.__holdfast_root__() is None:
        return _attributes(holder, [(key, vars(holder)[key])], Attachment(holder, (), holder))[0]
    if isinstance(holder, TrackedList) and isinstance(key, int) and not is_python_value(holder[key]):
        segment = str(key)
    elif isinstance(holder, TrackedDict) and type(key) is str and not key.lstrip("-").isdigit():
        (segment,) = key_segments([key])
    else:
        return None
    return Edge(segment, key, Attachment(holder, (segment,), holder[key], partial(_set_item, holder, key)))


def _classify_object(value: Any, slot: Slot) -> View:
    if is_actor_class(type(value)):
        return Unsaved(f"holds no state ({class_name(value)})", intended=True)
    if isinstance(value, Node):
        return _node(value, slot)
    if isinstance(value, Part):
        return _with_root(value, _attributes(value.value, value.__holdfast_children__().items(), slot))
    if (packed := pack_numbers(list(value) if type(value) is TrackedList else value)) is not None:
        elements = sequence_slot(value, slot)
        opened = partial(_container, value, slot)
        shared, in_place = type(value) is not tuple, elements is not slot
        return Leaf(elements, shared=shared, in_place=in_place, packed=packed, opened=opened)
    if isinstance(value, dict | list) and expand(value) is not None and not isinstance(slot, PartSlot):
        return _container(value, slot)
    if (keras := keras_kind(value)) is not None:
        return _keras(keras, value, slot)
    if is_module(value):
        if derives(value, "FSDPModule", "torch."):
            value.reshard()  # after a forward pass alone, it shows whole parameters
        return Branch(class_name(value), _attributes(value, module_children(value), slot))
    if is_optimizer(value):
        return _optimizer(value, slot)
    if is_nnx_variable(value):
        box = BoxSlot(value, (), *variable_accessors(value))
        view = classify(box.get(), box)
        return Leaf(box, shared=True) if isinstance(view, Leaf) else view
    if is_nnx(value):
        return Branch(class_name(value), _attributes(value, nnx_children(value), slot))
    if is_code_or_tool(value):
        return Unsaved(f"holds no state ({type(value).__name__})", intended=True)
    if isinstance(value, StateSlot | OptionSlot):
        return Leaf(value, shared=isinstance(value, StateSlot))
    if is_stateful(value):
        return Leaf(StateSlot(value, *_anchor(value, slot)), shared=True)
    contents, parameters = expand(value), getattr(type(value), "__dataclass_params__", None)
    is_dataclass = contents is not None and contents.kind == "dataclass"  # JAX-registered dataclasses have kind "node"
    is_mutable = is_dataclass and parameters is not None and not parameters.frozen
    if contents is not None and not is_mutable:
        return _container(value, slot)
    if isinstance(value, enum.Enum):
        return Unsaved("is an enum member in a container that cannot change; store its value or its name instead")
    if not (is_mutable or isinstance(value, types.SimpleNamespace)) and (reason := why_refused(value)) is not None:
        return Unsaved(reason)
    return Branch(class_name(value), _attributes(value, tracked_attributes(value), slot))  # user-defined class


def _node(node: Node, slot: Slot) -> View:
    """Return a view of a node. If the node has a root, the view also includes the root's edges."""
    edges = _attributes(node, [pair for pair in vars(node).items() if pair[0] not in node._holdfast.untracked], slot)
    if node._holdfast.counter is not None:
        edges.append(Edge(COUNTER, COUNTER, Attachment(node, (COUNTER,), node._holdfast.counter)))
    return _with_root(node, edges)


def _with_root(node: Node | Part, edges: list[Edge]) -> View:
    root = node.__holdfast_root__()
    if root is None:
        return Branch(class_name(node), edges)
    view = classify(root, Attachment(node, (), root))
    if not isinstance(view, Branch) or view.optimizer is not None or view.functional:
        return Unsaved(f"the root is a {class_name(root)}, which cannot hold other objects; give it a name instead")
    names, edges_to = {edge.segment for edge in view.edges}, view.edges_to
    own = [edge for edge in edges if edge.segment not in names]
    if edges_to is not None:
        view = replace(view, edges_to=lambda children: [*edges_to(children), *own])
    return replace(view, edges=[*view.edges, *own])


def _attributes(holder: Any, children: Collection[tuple[str, Any]], slot: Slot) -> list[Edge]:
    """Return the edges from an object to the given attributes, which a restore sets."""
    anchor, trail = _anchor(holder, slot)
    return [
        Edge(segment, name, Attachment(anchor, (*trail, segment), child, partial(_set_attribute, holder, name)))
        for (name, child), segment in zip(children, key_segments([name for name, _ in children]), strict=True)
    ]


def _container(value: Any, slot: Slot) -> View:
    """Return a view of a container. A restore sets the entries of a mutable container and rebuilds an immutable one."""
    contents = expand(value)
    assert contents is not None
    keys = contents.keys if contents.keys is not None else range(len(contents.values))
    try:
        segments = key_segments(contents.keys, len(keys))
    except KeyProblem as problem:
        return Unsaved(f"is a {class_name(value)} that {problem}")
    if isinstance(value, dict | list | deque) and (reason := why_more(value, keys)) is not None:
        return Unsaved(reason)
    mutable = not isinstance(slot, PartSlot) and isinstance(value, dict | list | deque) and contents.kind != "node"
    entries = zip(segments, keys, contents.values, strict=True)
    if mutable:
        anchor, trail = _anchor(value, slot)
        edges = [
            Edge(segment, key, Attachment(anchor, (*trail, segment), child, partial(_set_item, value, key)))
            for segment, key, child in entries
        ]
    else:
        owner, below = (slot.owner, slot.below) if isinstance(slot, PartSlot) else (slot, ())
        edges = [Edge(segment, key, PartSlot(owner, (*below, segment), child)) for segment, key, child in entries]
    return Branch(class_name(value), edges, sequence=contents.keys is None, functional=not mutable)


def sequence_slot(value: Any, slot: Slot) -> Slot:
    """Return one slot for a sequence's elements. A list or deque outside immutable containers is updated in place."""
    if isinstance(slot, PartSlot) or not isinstance(value, list | deque):
        return slot
    anchor, trail = _anchor(value, slot)
    return BoxSlot(anchor, trail, lambda: value, partial(_refill, value))


def _refill(sequence: Any, elements: Any) -> None:
    base: Any = list if isinstance(sequence, list) else deque  # bypasses the overridden methods of a tracked list
    base.clear(sequence)
    base.extend(sequence, elements)


def _optimizer(value: Any, slot: Slot) -> View:
    """Return a leaf for an optimizer that customizes its state, and a branch to inner optimizers for all others."""
    inner = [(name, attribute) for name, attribute in vars(value).items() if is_optimizer(attribute)]
    branch = Branch(class_name(value), _attributes(value, inner, slot), optimizer=value)
    if not has_own_protocol(value):
        return branch
    if any(type(parameter).__name__ == "DTensor" for group in value.param_groups for parameter in group["params"]):
        return Unsaved(
            f"is a {class_name(value)} with its own state_dict(), which does not say how processes share it; save "
            "the optimizer inside it, or mark it with Untracked"
        )
    return Leaf(StateSlot(value, *_anchor(value, slot)), shared=True, opened=lambda: branch)


def options_edge(optimizer: Any) -> Edge:
    """Return the edge from a torch optimizer to its group options; each option has its own slot."""
    options = map(group_options, optimizer.param_groups)
    groups = [{name: OptionSlot(optimizer, index, name) for name in names} for index, names in enumerate(options)]
    return Edge(GROUPS, GROUPS, Attachment(optimizer, (GROUPS,), groups))


def _keras(role: str, value: Any, slot: Slot) -> View:
    if role == VARIABLE:
        return Leaf(BoxSlot(value, (), lambda: value.value, value.assign), shared=True)
    if (reason := why_not_saved(value)) is not None:
        return Unsaved(reason)
    return Branch(
        class_name(value),
        _attributes(value, keras_children(value), slot),
        parameters=list(map(bare_variable, getattr(value, "_trainable_variables", ()))) if role == OPTIMIZER else (),
        edges_to=partial(_attributes, value, slot=slot),
    )


def _anchor(value: object, slot: Slot) -> tuple[Any, Path]:
    """Return the anchor for slots below an object, and the path from the anchor to the object."""
    return (value, ()) if type(value).__weakrefoffset__ else (slot.anchor, slot.trail)


def _set_attribute(holder: Any, name: str, value: Any) -> None:
    # Node.__setattr__ would treat the value as a new object.
    if isinstance(holder, Node):
        vars(holder)[name] = value
    elif getattr(holder, name, ...) is not value:
        setattr(holder, name, value)


def _set_item(container: Any, key: Any, value: Any) -> None:
    base: Any = next(base for base in (dict, list, deque) if isinstance(container, base))
    base.__setitem__(container, key, value)  # bypasses the overridden method of a tracked container


def _copy_encoded(tensor: Any, value: Any) -> None:
    torch: Any = loaded("torch")
    with torch.no_grad():  # unlike detach().copy_(), this also changes the indices of a sparse tensor
        tensor.copy_(decode_state(value))
