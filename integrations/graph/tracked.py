"""Holders that restore new objects as they are attached, and boxes for plain values."""

from __future__ import annotations

import operator
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, SupportsIndex

from ...engine.errors import OptionError, UnsupportedLeafError
from ...engine.pytree import loaded, opens_as
from .outside import unwrapped
from .slots import Path, format_node_path


class Resumable(Protocol):
    """A restore with values for objects that do not exist yet."""

    def resume(self, holder: object, key: object = None) -> None:
        """Restore new objects under the given key of a holder; a key of None stands for any key."""

    def expects_below(self, holder: object, key: object) -> bool:
        """True if there are values for objects below the given key of a holder."""


class Untracked:
    """Marks a value that a `Node` holds but neither saves nor restores.

    Args:
        value: The value of the attribute.

    >>> node = Node(weights=Untracked("not saved"))
    >>> node.weights
    'not saved'
    """

    def __init__(self, value: Any) -> None:
        self.value = value


def _forward(operation: Callable[[Any, Any], Any]) -> tuple[Callable[[Value, Any], Any], Callable[[Value, Any], Any]]:
    """Return a binary operator whose operands are boxes or plain values, and its reflected counterpart."""

    def forward(box: Value, other: Any) -> Any:
        return operation(box.value, other.value if isinstance(other, Value) else other)

    return forward, lambda box, other: operation(other, box.value)


class Value:
    """A mutable box for a number or another plain value, such as a step counter.

    Comparisons and arithmetic use the value and return plain values, as with a ``tf.Variable``.

    Args:
        value: A bool, int, float, complex, str, bytes or None.

    Attributes:
        value: The value in the box.

    >>> step = Value(1)
    >>> step.assign_add(1)
    >>> int(step), step % 2 == 0, step < 2
    (2, True, False)
    """

    __array_ufunc__ = None  # makes numpy defer operators to this class
    __hash__ = object.__hash__  # by identity, because the value may change
    __eq__ = _forward(operator.eq)[0]
    __ne__ = _forward(operator.ne)[0]
    __lt__, __gt__ = _forward(operator.lt)
    __le__, __ge__ = _forward(operator.le)
    __add__, __radd__ = _forward(operator.add)
    __sub__, __rsub__ = _forward(operator.sub)
    __mul__, __rmul__ = _forward(operator.mul)
    __truediv__, __rtruediv__ = _forward(operator.truediv)
    __floordiv__, __rfloordiv__ = _forward(operator.floordiv)
    __mod__, __rmod__ = _forward(operator.mod)
    __pow__, __rpow__ = _forward(operator.pow)

    def __init__(self, value: Any = 0) -> None:
        self.value = value

    def __bool__(self) -> bool:
        return bool(self.value)

    def __neg__(self) -> Any:
        return -self.value

    def __abs__(self) -> Any:
        return abs(self.value)

    def assign(self, value: Any) -> None:
        """Set the value."""
        self.value = value

    def assign_add(self, amount: Any) -> None:
        """Add to the value."""
        self.value = self.value + amount

    def assign_sub(self, amount: Any) -> None:
        """Subtract from the value."""
        self.value = self.value - amount

    def __int__(self) -> int:
        return int(self.value)

    def __index__(self) -> int:
        return int(self.value.__index__())

    def __float__(self) -> float:
        return float(self.value)

    def __repr__(self) -> str:
        return f"Value({self.value!r})"


@dataclass(slots=True, eq=False)
class NodeState:
    """Internal data of a node, kept apart from the objects that the node holds."""

    untracked: set[str] = field(default_factory=set)  # names of objects that are neither saved nor restored
    root: Any = None  # object whose edges the node shares, or a weak reference to it
    counter: int | None = None  # for a checkpoint object, the number of its last numbered save


class Node:
    """A holder of named objects that groups them in a checkpoint or stands in for another object.

    Every object assigned to an attribute is saved with the node. If a restored checkpoint has values for an attribute
    that does not exist yet, an object that is later assigned to the attribute is restored immediately.

    Args:
        **objects: The objects that the node holds, by name.

    >>> node = Node(bias=[0.0, 0.0])
    >>> node.bias
    [0.0, 0.0]
    """

    __slots__ = ("__dict__", "__weakref__", "_holdfast", "_holdfast_pending")
    _holdfast_state: ClassVar[type[NodeState]] = NodeState
    _holdfast: NodeState
    _holdfast_pending: list[Resumable]

    def __init__(self, /, **objects: Any) -> None:
        for name, value in objects.items():
            setattr(self, name, value)

    def __new__(cls, *_: Any, **__: Any) -> Self:
        node = super().__new__(cls)
        object.__setattr__(node, "_holdfast", cls._holdfast_state())
        object.__setattr__(node, "_holdfast_pending", [])
        return node

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _reserved(type(self)):  # type: ignore[arg-type]  # mypy takes the class for an instance
            raise OptionError(
                f"{name!r} is a name reserved by {type(self).__name__}; attach the object under another one"
            )
        if isinstance(value, Untracked):
            self._holdfast.untracked.add(name)
            object.__setattr__(self, name, value.value)
            return
        before, untracked = dict(vars(self)), set(self._holdfast.untracked)
        self._holdfast.untracked.discard(name)
        object.__setattr__(self, name, _tracked(self, name, value))

        def undo() -> None:
            vars(self).clear()
            vars(self).update(before)
            self._holdfast.untracked = untracked

        _resume(self, name, undo)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...  # any attached object

    def __delattr__(self, name: str) -> None:
        object.__delattr__(self, name)
        self._holdfast.untracked.discard(name)

    def __holdfast_root__(self) -> Any:
        """Return the object whose edges this node shares, or None."""
        root = self._holdfast.root
        return unwrapped(root() if isinstance(root, weakref.ref) else root)

    def __getstate__(self) -> dict[str, Any]:
        state, root = self._holdfast, self.__holdfast_root__()
        return {"objects": dict(vars(self)), "state": (sorted(state.untracked), root, state.counter)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state["objects"])
        names, self._holdfast.root, self._holdfast.counter = state["state"]
        self._holdfast.untracked.update(names)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(vars(self))})"


@dataclass(slots=True, eq=False, weakref_slot=True)
class Part:
    """A component or a group of its objects. `__holdfast_children__` returns the children that a walk visits."""

    value: Any  # the object whose attributes hold the children; a restore assigns these attributes
    added: dict[str, Any] = field(default_factory=dict, kw_only=True)  # additional children, by name

    def __holdfast_children__(self) -> dict[str, Any]:
        """Return the children by name."""
        return self.added

    def __holdfast_root__(self) -> Any:
        """Return the object whose edges the part shares, or None."""
        return None

    def add(self, path: Path, child: Any) -> None:
        """Add a child at a path, creating missing parts above it."""
        part = self
        for segment in path[:-1]:
            part = part.added.setdefault(segment, Part(None))
        part.added.setdefault(path[-1], child)


def stand_for(node: Node, root: Any) -> None:
    """Add the edges of ``root`` to a node's own edges; ``root`` is an object or a weak reference to one."""
    node._holdfast.root = root


class TrackedList(list[Any]):
    """A list that restores each new element for which a restored checkpoint has values.

    If a plain list is attached to a `Node` while values for its elements are pending, it is converted to this type.

    Args:
        elements: The initial elements.
    """

    def __init__(self, elements: Iterable[Any] = ()) -> None:
        _register_pytrees()
        super().__init__(elements)
        self._holdfast_pending: list[Resumable] = []
        self._holdfast_origin = (elements, _contents(self)) if type(elements) is list else None

    def append(self, element: Any) -> None:
        """Append an element and restore it."""
        super().append(_tracked(self, len(self), element))
        _resume(self, len(self) - 1, super().pop)

    def extend(self, elements: Iterable[Any]) -> None:
        """Append elements and restore them."""
        for element in elements:
            self.append(element)

    def insert(self, index: SupportsIndex, element: Any) -> None:
        """Insert an element and restore the elements whose index has changed."""
        before = list(self)
        super().insert(index, element)
        _resume(self, None, partial(super().__setitem__, slice(None), before))

    def __setitem__(self, index: Any, element: Any) -> None:
        before = list(self) if self._holdfast_pending else []
        super().__setitem__(index, element)
        _resume(self, None, partial(super().__setitem__, slice(None), before))

    def __iadd__(self, elements: Iterable[Any]) -> Self:  # type: ignore[misc]  # as for list
        self.extend(elements)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)


class TrackedDict(dict[Any, Any]):
    """A dictionary that restores each new entry for which a restored checkpoint has values.

    Args:
        entries: The initial entries.
    """

    def __init__(self, entries: Mapping[Any, Any] | Iterable[tuple[Any, Any]] = ()) -> None:
        _register_pytrees()
        super().__init__(entries)
        self._holdfast_pending: list[Resumable] = []
        self._holdfast_origin = (entries, _contents(self)) if type(entries) is dict else None

    def __setitem__(self, key: Any, value: Any) -> None:
        undo = partial(super().__setitem__, key, self[key]) if key in self else partial(super().__delitem__, key)
        super().__setitem__(key, _tracked(self, key, value))
        _resume(self, key, undo)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """Return an entry; if there is none, create and restore it."""
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *entries: Any, **more: Any) -> None:
        """Set entries and restore them."""
        for key, value in dict(*entries, **more).items():
            self[key] = value

    def __ior__(self, entries: Any) -> Self:  # type: ignore[misc]  # accepts whatever `update` accepts
        self.update(entries)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


_registered: set[str] = set()  # frameworks in which tracked containers are registered as pytrees
opens_as(TrackedList, "list")
opens_as(TrackedDict, "dict")


def _register_pytrees() -> None:
    """Register tracked containers as pytrees in the imported frameworks, so that parameters inside them are trained."""
    if "jax" not in _registered and (jax := loaded("jax")) is not None:
        _registered.add("jax")
        util = jax.tree_util

        def keyed(node: Any, keys: Iterable[Any], key_type: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
            return [(key_type(key), node[key]) for key in keys], tuple(keys)

        util.register_pytree_with_keys(TrackedList, lambda node: keyed(node, range(len(node)), util.SequenceKey), _list)
        util.register_pytree_with_keys(TrackedDict, lambda node: keyed(node, _sorted(node), util.DictKey), _dict)
    if "torch" not in _registered and (torch := loaded("torch")) is not None:
        _registered.add("torch")
        register = torch.utils._pytree.register_pytree_node
        register(TrackedList, lambda node: (list(node), None), lambda children, _: _list(None, children))
        register(TrackedDict, lambda node: (list(node.values()), tuple(node)), lambda values, keys: _dict(keys, values))


def _sorted(entries: TrackedDict) -> list[Any]:
    try:
        return sorted(entries)  # JAX sorts dictionary keys, too
    except TypeError:
        return list(entries)


def _list(_: Any, children: Iterable[Any]) -> TrackedList:
    return TrackedList(iter(children))


def _dict(keys: Iterable[Any], children: Iterable[Any]) -> TrackedDict:
    return TrackedDict(zip(keys, children, strict=True))


def tracked_attributes(value: object) -> list[tuple[str, Any]]:
    """Return an object's attributes, except those named in ``__untracked__`` by its class or a base class."""
    untracked = {name for cls in type(value).__mro__ for name in vars(cls).get("__untracked__", ())}
    tables = [vars(base) for base in reversed(type(value).__mro__) if "__slots__" in vars(base)]
    members = [name for table in tables for name in table if isinstance(table[name], types.MemberDescriptorType)]
    # The value of a dataclass field may be its default, which is an attribute of the class.
    names = [*(each.name for each in (fields(value) if is_dataclass(value) else ())), *members]
    attributes = {name: getattr(value, name) for name in names if hasattr(value, name)}
    attributes |= getattr(value, "__dict__", {})
    return [(name, child) for name, child in attributes.items() if name not in untracked]


def check_origin(container: object, path: Path) -> None:
    """Raise UnsupportedLeafError if a plain container was modified after its conversion to a tracked container."""
    if not isinstance(container, TrackedList | TrackedDict) or container._holdfast_origin is None:
        return
    origin, contents = container._holdfast_origin  # both are kept alive so that ids are not reused
    if [*map(id, _contents(origin))] != [*map(id, contents)]:
        name = type(origin).__name__
        raise UnsupportedLeafError(
            f"{format_node_path(path)}: the {name} that was attached here was changed later through another reference, "
            "which the checkpoint does not see; nothing was written. Change it through the object that it was attached "
            f"to, or attach a Tracked{name.title()} from the start"
        )


def _contents(container: Any) -> list[Any]:
    return [item for pair in container.items() for item in pair] if isinstance(container, dict) else list(container)


def expect(holder: object, restore: Resumable) -> bool:
    """Subscribe a restore to a holder's new objects; return False if this is impossible or already done."""
    if not isinstance(holder, Node | TrackedList | TrackedDict) or restore in holder._holdfast_pending:
        return False
    holder._holdfast_pending.append(restore)
    return True


def forget(holder: object, restore: Resumable) -> None:
    """Undo :func:`expect`."""
    if isinstance(holder, Node | TrackedList | TrackedDict) and restore in holder._holdfast_pending:
        holder._holdfast_pending.remove(restore)


def _resume(holder: Node | TrackedList | TrackedDict, key: object, undo: Callable[[], Any]) -> None:
    """Notify all restores that are waiting for new objects in this holder, starting with the latest restore."""
    try:
        for restore in reversed(list(holder._holdfast_pending)):
            restore.resume(holder, key)
    except BaseException:  # detach an object that does not fit
        undo()
        raise


def _tracked(holder: Node | TrackedList | TrackedDict, key: object, value: Any) -> Any:
    """Track a plain list or dict if a restore has values for its contents; return any other value unchanged."""
    if type(value) in (list, dict) and any(restore.expects_below(holder, key) for restore in holder._holdfast_pending):
        return TrackedList(value) if type(value) is list else TrackedDict(value)
    return value


@cache
def _reserved(cls: type) -> frozenset[str]:
    """Return the attribute names that are reserved in a subclass of `Node`."""
    bases = [base for base in cls.__mro__ if base not in (Node, object)]
    names = frozenset(name for base in bases for name in vars(base)).union(Node.__slots__)
    return names - {"__dict__", "__weakref__", "__doc__", "__module__"}
