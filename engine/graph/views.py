"""What a live object is to the graph: a branch with named edges, a leaf with a value, or nothing that can be saved."""

from __future__ import annotations

import dataclasses
import enum
import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from ..stateful import is_stateful
from ..tree.containers import class_name, expand
from ..tree.frameworks import is_jax_abstract, is_jax_array, is_torch_tensor
from ..tree.python_leaves import is_python_value
from ..tree.structure import KeyProblem, key_segments
from .cells import ArrayCell, BoxCell, Cell, PartCell, StateCell
from .flax_objects import is_nnx_object, is_nnx_variable, nnx_children, variable_value
from .ledger import proxy
from .paths import Path
from .slots import OptimizerView
from .torch_objects import TensorCell, is_module, is_optimizer, is_uninitialized, module_children
from .tracked import Node, TrackedDict, TrackedList, Untracked, Value

COUNTER = "save_counter"
"""Name of the edge to the number of a checkpoint's last numbered save."""
_NO_PLAIN_OBJECTS = {"torch", "jax", "jaxlib", "flax", "optax", "numpy", "lightning", "pytorch_lightning"}
_CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, staticmethod)


@dataclass(slots=True)
class Position:
    """Where a value hangs: enough to replace it.

    Attributes:
        anchor: The nearest object above that can be referred to weakly.
        trail: The way from there.
        change: Puts another value in its place; None where nothing can.
        part: The cell of this place, where it is a part of something immutable.
    """

    anchor: Any
    trail: Path
    change: Callable[[Any], None] | None
    part: PartCell | None = None

    def cell(self, value: Any) -> Cell:
        """Returns the cell of this place, which holds a value now."""
        if self.part is not None:
            return self.part
        return BoxCell(self.anchor, self.trail, lambda: value, self.change or _refuse)


@dataclass(slots=True)
class Edge:
    """A named edge from a branch.

    Attributes:
        segment: Its name, escaped.
        key: The key that the name was made from.
        value: Where it leads.
        position: Where that hangs.
    """

    segment: str
    key: Any
    value: Any
    position: Position


@dataclass(slots=True)
class Branch:
    """An object with edges.

    Attributes:
        label: The name of its type.
        edges: The edges, in the object's own order.
        sequence: Whether the keys are 0, 1, 2, ...
        functional: Whether it is built anew to change it, so that it may be another object after every restore.
        optimizer: What keeps values for each of its parameters, if this is an optimizer of torch.
        lenient: Whether things below that cannot be saved are reported instead of being errors.
        notes: What people should know, by edge.
    """

    label: str
    edges: list[Edge]
    sequence: bool = False
    functional: bool = False
    optimizer: OptimizerView | None = None
    lenient: bool = False
    notes: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Leaf:
    """An object with a value.

    Attributes:
        cell: Where the value is.
        shared: Whether it is one thing wherever it is reached, to be stored once.
        ready: Whether it has a value already; parameters of lazy modules do not.
        in_place: Whether it is the object itself that is changed, not the place where it hangs.
    """

    cell: Cell
    shared: bool
    ready: bool = True
    in_place: bool = True


@dataclass(slots=True)
class Nothing:
    """What cannot be saved.

    Attributes:
        reason: Why.
        meant: Whether that is as its owner wants it: it was marked, or it is code.
    """

    reason: str
    meant: bool = False


View = Branch | Leaf | Nothing


def look(value: Any, position: Position) -> View:
    """Says what an object is to the graph.

    Args:
        value: The object.
        position: Where it hangs.
    """
    if isinstance(value, np.ndarray):
        if value.flags.writeable and value.dtype != object:
            return Leaf(ArrayCell(value), shared=True)
        return Leaf(position.cell(value), shared=True, in_place=False)
    if is_torch_tensor(value):
        return Leaf(TensorCell(value), shared=True, ready=not is_uninitialized(value))
    if is_jax_array(value) or is_jax_abstract(value):
        return Leaf(position.cell(value), shared=True, in_place=False)
    if is_python_value(value) or isinstance(value, np.generic):
        return Leaf(position.cell(value), shared=False, in_place=False)
    if isinstance(value, Value):
        return Leaf(BoxCell(value, (), lambda: value.value, value.assign), shared=True)
    if isinstance(value, Untracked):
        return Nothing("is marked as untracked", meant=True)
    return _look_inside(value, position)


def _look_inside(value: Any, position: Position) -> View:
    if isinstance(value, Node):
        return _node(value, position)
    if isinstance(value, dict | list) and expand(value) is not None and position.part is None:
        return _container(value, position)
    if is_module(value):
        children, notes = module_children(value)
        return Branch(class_name(value), _attributes(value, children, position), lenient=True, notes=notes)
    if is_optimizer(value):
        return Branch(class_name(value), [], optimizer=OptimizerView(value))
    if is_nnx_variable(value):
        return _variable(value)
    if is_nnx_object(value):
        return Branch(class_name(value), _attributes(value, nnx_children(value), position), lenient=True)
    if isinstance(value, _CODE):
        return Nothing(f"is code ({type(value).__name__})", meant=True)
    if isinstance(value, StateCell):  # a state that an adapter has found
        return Leaf(value, shared=True)
    if is_stateful(value):
        anchor, trail = (value, ()) if _can_be_anchor(value) else (position.anchor, position.trail)
        return Leaf(StateCell(value, anchor, trail), shared=True)
    if _is_mutable_dataclass(value):
        names = [entry.name for entry in dataclasses.fields(value) if hasattr(value, entry.name)]
        pairs = [(name, getattr(value, name)) for name in names]
        return Branch(class_name(value), _attributes(value, pairs, position))
    if expand(value) is not None:
        return _container(value, position)
    return _plain_object(value, position)


def _node(node: Node, position: Position) -> View:
    """Returns the edges of a holder of ours, and those of the object that it stands for, if there is one."""
    own = [(name, child) for name, child in vars(node).items() if name not in node._holdfast_untracked]
    edges = _attributes(node, own, position)
    if node._holdfast_counter is not None:
        change = partial(object.__setattr__, node, "_holdfast_counter")
        edges.append(Edge(COUNTER, COUNTER, node._holdfast_counter, Position(node, (COUNTER,), change)))
    root = node.__holdfast_root__()
    if root is None:
        return Branch(class_name(node), edges)
    view = look(root, Position(node, (), None))
    if not isinstance(view, Branch) or view.optimizer is not None or view.functional:
        return Nothing(f"the root is a {class_name(root)}, which cannot hold other objects; give it a name instead")
    names = {edge.segment for edge in view.edges}
    return replace(view, edges=[*view.edges, *(edge for edge in edges if edge.segment not in names)])


def edge_at(holder: Any, key: object) -> Edge | None:
    """Returns one edge of a holder of ours, as `look` would.

    Args:
        holder: The holder.
        key: The name of an attribute, the key of an entry, or a place in a list.

    Returns:
        The edge; None where only all of the edges together tell what it is called, or whether it is one.
    """
    position = Position(holder, (), None)
    if isinstance(holder, Node) and isinstance(key, str):
        if holder.__holdfast_root__() is not None or key in holder._holdfast_untracked or key not in vars(holder):
            return None
        return _attributes(holder, [(key, vars(holder)[key])], position)[0]
    if isinstance(holder, TrackedList) and isinstance(key, int) and not is_python_value(holder[key]):
        segment = str(key)
    elif isinstance(holder, TrackedDict) and type(key) is str and not key.lstrip("-").isdigit():
        (segment,) = key_segments([key])
    else:
        return None
    return Edge(segment, key, holder[key], Position(holder, (segment,), partial(_set_item, holder, key)))


def _attributes(holder: Any, children: Iterable[tuple[str, Any]], position: Position) -> list[Edge]:
    """Returns the edges of an object whose children are attributes that can be set."""
    pairs = list(children)
    anchor, trail = (holder, ()) if _can_be_anchor(holder) else (position.anchor, position.trail)
    return [
        Edge(segment, name, child, Position(anchor, (*trail, segment), partial(_set_attribute, holder, name)))
        for (name, child), segment in zip(pairs, key_segments([name for name, _ in pairs]), strict=True)
    ]


def _container(value: Any, position: Position) -> View:
    """Returns the edges of a container: entries that can be set, or parts of something that is built anew."""
    contents = expand(value)
    assert contents is not None
    keys = contents.keys if contents.keys is not None else list(range(len(contents.values)))
    try:
        segments = list(map(str, keys)) if contents.keys is None else key_segments(keys)
    except KeyProblem as problem:
        return Nothing(f"is a {class_name(value)} that {problem}")
    mutable = position.part is None and isinstance(value, dict | list) and contents.kind != "node"
    edges = []
    if mutable:
        anchor, trail = (value, ()) if _can_be_anchor(value) else (position.anchor, position.trail)
        for key, segment, child in zip(keys, segments, contents.values, strict=True):
            edges.append(Edge(segment, key, child, Position(anchor, (*trail, segment), partial(_set_item, value, key))))
    else:
        owner = position.part.owner if position.part is not None else position.cell(value)
        below = position.part.below if position.part is not None else ()
        for key, segment, child in zip(keys, segments, contents.values, strict=True):
            part = PartCell(owner, (*below, segment), child)
            edges.append(Edge(segment, key, child, Position(part.anchor, part.trail, None, part)))
    return Branch(class_name(value), edges, sequence=contents.keys is None, functional=not mutable)


def _variable(value: Any) -> View:
    """Returns what a flax variable is: a leaf, or a container of parts if that is what it holds."""
    get, change = variable_value(value)
    cell = BoxCell(value if _can_be_anchor(value) else proxy(value), (), get, change)
    inner = get()
    kind = look(inner, Position(cell.anchor, cell.trail, change))
    if isinstance(kind, Leaf):
        return Leaf(cell, shared=True)
    return kind


def _plain_object(value: Any, position: Position) -> View:
    """Returns the attributes of an object of a class that is nobody's but the program's."""
    root = type(value).__module__.partition(".")[0]
    if isinstance(value, enum.Enum):
        return Nothing("is a member of an enumeration; keep its value, which is a number or text")
    if isinstance(value, types.SimpleNamespace):
        return Branch(class_name(value), _attributes(value, vars(value).items(), position))
    if not hasattr(value, "__dict__") or root in _NO_PLAIN_OBJECTS or root in sys.stdlib_module_names:
        return Nothing(
            f"is of type {class_name(value)}; give it get_state() and set_state(state), or state_dict() and "
            "load_state_dict(state), or mark it with Untracked"
        )
    left_out = frozenset(getattr(type(value), "__untracked__", ()))
    pairs = [(name, child) for name, child in vars(value).items() if name not in left_out]
    return Branch(class_name(value), _attributes(value, pairs, position), lenient=True)


def _can_be_anchor(value: object) -> bool:
    return type(value).__weakrefoffset__ != 0


def _is_mutable_dataclass(value: Any) -> bool:
    parameters = getattr(type(value), "__dataclass_params__", None)
    contents = None if parameters is None or parameters.frozen else expand(value)
    return contents is not None and contents.kind == "dataclass"  # others are for jax to build


def _set_attribute(holder: Any, name: str, value: Any) -> None:
    # Not what the class does on assignment: a holder of ours would take it for a new object.
    if isinstance(holder, Node):
        vars(holder)[name] = value
    else:
        setattr(holder, name, value)


def _set_item(container: Any, key: Any, value: Any) -> None:
    (dict if isinstance(container, dict) else list).__setitem__(container, key, value)


def _refuse(_: Any) -> None:
    raise TypeError("this value has no place where another could be put")
