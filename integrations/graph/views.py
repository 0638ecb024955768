"""Classify live objects as branches with named edges, leaves with values, or objects that are not saved."""

from __future__ import annotations

import dataclasses
import enum
import types
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ...engine.errors import OptionError
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
    is_optimizer,
    is_uninitialized,
    keras_children,
    keras_kind,
    module_children,
    nnx_children,
    numbered_children,
    variable_accessors,
    why_not_saved,
)
from .outside import is_actor_class, is_code_or_tool, unwrapped, why_more, why_refused
from .slots import BoxSlot, MemberSlot, PartSlot, Path, Place, Slot, StateSlot
from .tracked import Node, Part, TrackedDict, TrackedList, Untracked, Value, tracked_attributes

_NOTHING = object()
COUNTER = "save_counter"  # name of the edge to the number of a checkpoint's last numbered save


@dataclass(slots=True)
class Edge:
    segment: str  # the escaped key, which is the name of the edge
    key: Any
    place: Slot
    value: Any = None  # the module or parameter itself, never a wrapper around it

    def __post_init__(self) -> None:
        self.value = bare_variable(unwrapped(self.place.get()))

    def view(self) -> View:
        return classify(self.value, self.place)


@dataclass(slots=True)
class Branch:
    label: str  # the name of the type
    edges: list[Edge]  # in the object's own order
    sequence: bool = False  # whether the keys are 0, 1, 2, ...
    functional: bool = False  # whether a restore rebuilds it, so that it is another object afterwards
    optimizer: Any = None  # the object itself, if it is a torch optimizer
    parameters: Sequence[Any] = ()  # those of an optimizer of Keras
    # Edges of Keras in an order of the parameters, with lists of these names, or as earlier versions have named them.
    listed: Callable[[list[int] | None, Iterable[str]], list[Edge]] | None = None
    numbered: Callable[[], list[Edge]] | None = None


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


def classify(value: Any, place: Slot) -> View:
    if isinstance(value, np.ndarray):
        if value.flags.writeable and value.dtype != object:
            return Leaf(BoxSlot(value, (), lambda: value, partial(value.__setitem__, ...)), shared=True)
        return Leaf(place, shared=True, in_place=False)
    if is_torch_tensor(value) and not is_uninitialized(value) and not is_dense(value):
        return Leaf(BoxSlot(value, (), partial(encode_state, value), partial(_copy_encoded, value)), shared=True)
    if is_torch_tensor(value):
        return Leaf(TensorSlot(value), shared=True, ready=not is_uninitialized(value))
    if is_jax_array(value) or is_jax_abstract(value):
        return Leaf(place, shared=True, in_place=False)
    if isinstance(value, enum.Enum) and not isinstance(place, PartSlot):
        return Leaf(MemberSlot(place.anchor, place.trail, value, place.set), shared=False, in_place=False)
    if is_python_value(value) or isinstance(value, np.generic):
        return Leaf(place, shared=False, in_place=False)
    if isinstance(value, Value):
        return Leaf(BoxSlot(value, (), lambda: value.value, value.assign), shared=True)
    if isinstance(value, Untracked):
        return Unsaved("is marked as untracked", intended=True)
    return _classify_object(value, place)


def root_view(root: Node | Part) -> Branch:
    view = classify(root, Place(root, (), root))
    if not isinstance(view, Branch):
        raise OptionError(view.reason if isinstance(view, Unsaved) else "the root is a value; give it a name")
    return view


def edge_at(holder: Any, key: object) -> Edge | None:
    """Return one edge of a node or tracked container; None where only `classify` can."""
    if isinstance(holder, Node) and isinstance(key, str):
        if holder.__holdfast_root__() is not None or key in holder._holdfast.untracked or key not in vars(holder):
            return None
        return _attributes(holder, [(key, vars(holder)[key])], Place(holder, (), holder))[0]
    if isinstance(holder, TrackedList) and isinstance(key, int) and not is_python_value(holder[key]):
        segment = str(key)
    elif isinstance(holder, TrackedDict) and type(key) is str and not key.lstrip("-").isdigit():
        (segment,) = key_segments([key])
    else:
        return None
    return Edge(segment, key, Place(holder, (segment,), holder[key], partial(_set_item, holder, key)))


def _classify_object(value: Any, place: Slot) -> View:
    if is_actor_class(type(value)):
        return Unsaved(f"is no state ({class_name(value)})", intended=True)
    if isinstance(value, Node):
        return _node(value, place)
    if isinstance(value, Part):
        return _with_root(value, _attributes(value.value, value.__holdfast_children__().items(), place))
    if (packed := pack_numbers(list(value) if type(value) is TrackedList else value)) is not None:
        return _numbers(value, packed, place)
    if isinstance(value, dict | list) and expand(value) is not None and not isinstance(place, PartSlot):
        return _container(value, place)
    if (kind := keras_kind(value)) is not None:
        return _keras(kind, value, place)
    if is_module(value):
        return Branch(class_name(value), _attributes(value, module_children(value), place))
    if is_optimizer(value):
        return _optimizer(value, place)
    if is_nnx_variable(value):
        slot = BoxSlot(value, (), *variable_accessors(value))
        view = classify(slot.get(), slot)
        return Leaf(slot, shared=True) if isinstance(view, Leaf) else view
    if is_nnx(value):
        return Branch(class_name(value), _attributes(value, nnx_children(value), place))
    if is_code_or_tool(value):
        return Unsaved(f"is no state ({type(value).__name__})", intended=True)
    if isinstance(value, StateSlot | OptionSlot):
        return Leaf(value, shared=isinstance(value, StateSlot))
    if is_stateful(value):
        return Leaf(StateSlot(value, *_anchor(value, place)), shared=True)
    if _is_mutable_dataclass(value):
        pairs = [(one.name, getattr(value, one.name)) for one in dataclasses.fields(value) if hasattr(value, one.name)]
        return Branch(class_name(value), _attributes(value, pairs, place))
    if expand(value) is not None:
        return _container(value, place)
    if isinstance(value, enum.Enum):
        return Unsaved("is a member of an enumeration in a container that cannot change; keep its value, or its name")
    if not isinstance(value, types.SimpleNamespace) and (reason := why_refused(value)) is not None:
        return Unsaved(reason)
    return Branch(class_name(value), _attributes(value, tracked_attributes(value), place))  # of a class of the program


def _node(node: Node, place: Slot) -> View:
    """Return the edges of a node, and those of its root, if it has one."""
    own = [(name, child) for name, child in vars(node).items() if name not in node._holdfast.untracked]
    edges = _attributes(node, own, place)
    if node._holdfast.counter is not None:
        edges.append(Edge(COUNTER, COUNTER, Place(node, (COUNTER,), node._holdfast.counter)))
    return _with_root(node, edges)


def _with_root(node: Node | Part, edges: list[Edge]) -> View:
    root = node.__holdfast_root__()
    if root is None:
        return Branch(class_name(node), edges)
    view = classify(root, Place(node, (), root))
    if not isinstance(view, Branch) or view.optimizer is not None or view.functional:
        return Unsaved(f"the root is a {class_name(root)}, which cannot hold other objects; give it a name instead")
    names = {edge.segment for edge in view.edges}
    return replace(view, edges=[*view.edges, *(edge for edge in edges if edge.segment not in names)])


def _attributes(holder: Any, children: Iterable[tuple[str, Any]], place: Slot) -> list[Edge]:
    """Return edges to attributes, which can be set."""
    pairs = list(children)
    anchor, trail = _anchor(holder, place)
    return [
        Edge(segment, name, Place(anchor, (*trail, segment), child, partial(_set_attribute, holder, name)))
        for (name, child), segment in zip(pairs, key_segments([name for name, _ in pairs]), strict=True)
    ]


def _container(value: Any, place: Slot) -> View:
    """Return the edges of a container, whose entries can be set, or which is rebuilt."""
    contents = expand(value)
    assert contents is not None
    keys = contents.keys if contents.keys is not None else range(len(contents.values))
    try:
        segments = key_segments(contents.keys, len(keys))
    except KeyProblem as problem:
        return Unsaved(f"is a {class_name(value)} that {problem}")
    if isinstance(value, dict | list | deque) and (reason := why_more(value, keys)) is not None:
        return Unsaved(reason)
    mutable = not isinstance(place, PartSlot) and isinstance(value, dict | list | deque) and contents.kind != "node"
    entries = zip(segments, keys, contents.values, strict=True)
    if mutable:
        anchor, trail = _anchor(value, place)
        edges = [
            Edge(segment, key, Place(anchor, (*trail, segment), child, partial(_set_item, value, key)))
            for segment, key, child in entries
        ]
    else:
        owner, below = (place.owner, place.below) if isinstance(place, PartSlot) else (place, ())
        edges = [Edge(segment, key, PartSlot(owner, (*below, segment), child)) for segment, key, child in entries]
    return Branch(class_name(value), edges, sequence=contents.keys is None, functional=not mutable)


def _numbers(value: Any, packed: PackedNumbers, place: Slot) -> Leaf:
    grows = _is_growing(value, place)
    return Leaf(
        sequence_slot(value, place),
        shared=grows or type(value) is not tuple,
        in_place=grows,
        packed=packed,
        opened=partial(_container, value, place),
    )


def _is_growing(value: Any, place: Slot) -> bool:
    """Whether a value is a list or deque whose elements can be replaced in place."""
    return isinstance(value, list | deque) and not isinstance(place, PartSlot)


def sequence_slot(value: Any, place: Slot) -> Slot:
    """Return the slot of all elements of a sequence; a list or deque stays the same object where it can."""
    if not _is_growing(value, place):
        return place
    anchor, trail = _anchor(value, place)
    return BoxSlot(anchor, trail, lambda: value, partial(_refill, value))


def _refill(sequence: Any, elements: Any) -> None:
    if isinstance(sequence, list):
        list.__setitem__(sequence, slice(None), elements)
    else:
        sequence.clear()
        sequence.extend(elements)


def _optimizer(value: Any, place: Slot) -> View:
    """Return an optimizer as groups and values for parameters, or by its ``state_dict()``, with edges to inner ones."""
    inner = [(name, one) for name, one in vars(value).items() if is_optimizer(one)]
    branch = Branch(class_name(value), _attributes(value, inner, place), optimizer=value)
    if not has_own_protocol(value):
        return branch
    if any(type(one).__name__ == "DTensor" for group in value.param_groups for one in group["params"]):
        return Unsaved(
            f"is a {class_name(value)} with a state_dict() of its own, which does not say how processes share it; save "
            "the optimizer inside it, or mark it with Untracked"
        )
    slot = StateSlot(value, *_anchor(value, place))
    return Leaf(slot, shared=True, opened=lambda: branch)


def options_edge(optimizer: Any) -> Edge:
    """Return the edge from a torch optimizer to the options of its groups, each of which is its own slot."""
    groups = [
        {name: OptionSlot(optimizer, number, name) for name in group_options(group)}
        for number, group in enumerate(optimizer.param_groups)
    ]
    return Edge(GROUPS, GROUPS, Place(optimizer, (GROUPS,), groups))


def _keras(kind: str, value: Any, place: Slot) -> View:
    if kind == VARIABLE:
        return Leaf(BoxSlot(value, (), lambda: value.value, value.assign), shared=True)
    if (reason := why_not_saved(value)) is not None:
        return Unsaved(reason)
    return Branch(
        class_name(value),
        _attributes(value, keras_children(value), place),
        parameters=list(map(bare_variable, getattr(value, "_trainable_variables", ()))) if kind == OPTIMIZER else (),
        listed=lambda order, saved: _attributes(value, keras_children(value, order, saved), place),
        numbered=lambda: _attributes(value, numbered_children(value), place),
    )


def _anchor(value: object, place: Slot) -> tuple[Any, Path]:
    """Return the anchor for what is below an object, and the path from there to the object."""
    return (value, ()) if type(value).__weakrefoffset__ else (place.anchor, place.trail)


def _is_mutable_dataclass(value: Any) -> bool:
    parameters = getattr(type(value), "__dataclass_params__", None)
    contents = None if parameters is None or parameters.frozen else expand(value)
    return contents is not None and contents.kind == "dataclass"  # jax builds all others


def _set_attribute(holder: Any, name: str, value: Any) -> None:
    # __setattr__ of a Node would take the value for a new object.
    if isinstance(holder, Node):
        vars(holder)[name] = value
    elif getattr(holder, name, _NOTHING) is not value:
        setattr(holder, name, value)


def _set_item(container: Any, key: Any, value: Any) -> None:
    kind: Any = dict if isinstance(container, dict) else list if isinstance(container, list) else deque
    kind.__setitem__(container, key, value)


def _copy_encoded(tensor: Any, value: Any) -> None:
    torch: Any = loaded("torch")
    with torch.no_grad():  # a detached sparse tensor has indices of its own
        tensor.copy_(decode_state(value))
