"""Holders of objects, which restore what is attached to them after a restore, and boxes for values."""

from __future__ import annotations

import operator
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, SupportsIndex

from ...engine.errors import OptionError, UnsupportedLeafError
from ...engine.pytree import loaded, opens_as
from .outside import unwrapped
from .slots import Path, format_node_path


class Resumable(Protocol):
    """A restore with values for objects that do not exist yet."""

    def resume(self, holder: object, key: object = None) -> None:
        """Restore new objects below a holder: under one key, or anywhere."""

    def expects_below(self, holder: object, key: object) -> bool:
        """True if there are values for objects below a key of a holder."""


class Untracked:
    """Marks a value that belongs to a `Node` and is neither saved nor restored.

    Args:
        value: The value of the attribute.

    >>> node = Node(weights=Untracked("not saved"))
    >>> node.weights
    'not saved'
    """

    def __init__(self, value: Any) -> None:
        self.value = value


def _forward(operation: Callable[[Any, Any], Any]) -> tuple[Callable[[Value, Any], Any], Callable[[Value, Any], Any]]:
    """Return the operator of a box with another value or box, and its reflected form."""

    def forward(box: Value, other: Any) -> Any:
        return operation(box.value, other.value if isinstance(other, Value) else other)

    return forward, lambda box, other: operation(other, box.value)


class Value:
    """A box for a number or another plain value that changes, such as a counter of steps.

    It compares and counts as its value does, and the results are plain values, as with a ``tf.Variable``.

    Args:
        value: A bool, int, float, complex, str, bytes or None.

    Attributes:
        value: The value in the box.

    >>> step = Value(1)
    >>> step.assign_add(1)
    >>> int(step), step % 2 == 0, step < 2
    (2, True, False)
    """

    __array_ufunc__ = None  # numpy leaves operators to this class
    __hash__ = object.__hash__  # the box stays the same when its value changes
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
        """Change the value."""
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
    """The data that holdfast keeps for a node, besides the objects that it holds."""

    untracked: set[str] = field(default_factory=set)  # names of objects that are neither saved nor restored
    root: Any = None  # the object whose edges the node has besides its own, or a weak reference to it
    counter: int | None = None  # of a checkpoint: the number of its last numbered save


class Node:
    """A holder of named objects: a part of a checkpoint, or a stand-in for a part of one.

    Everything that is assigned to an attribute is saved with it. After a restore, an object that is attached under a
    name for which the checkpoint has values gets them at once.

    Args:
        **objects: The objects it holds, by name.

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
                f"{name!r} is a name that {type(self).__name__} needs for itself; attach the object under another one"
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
        """Return the object whose edges this node has, too, or None."""
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
    """A part of a program that is walked by the children that it names."""

    value: Any  # its attributes are the children, which a restore replaces there
    added: dict[str, Any] = field(default_factory=dict, kw_only=True)  # other children, by name

    def __holdfast_children__(self) -> dict[str, Any]:
        """Return the children by name."""
        return self.added

    def __holdfast_root__(self) -> Any:
        """Return the object whose edges it has, too, or None."""
        return None

    def add(self, path: Path, child: Any) -> None:
        """Add a child, and the parts above it that are missing."""
        part = self
        for segment in path[:-1]:
            part = part.added.setdefault(segment, Part(None))
        part.added.setdefault(path[-1], child)


def stand_for(node: Node, root: Any) -> None:
    """Give a node the edges of an object, too; ``root`` may be a weak reference to the object."""
    node._holdfast.root = root


class TrackedList(list[Any]):
    """A list that restores each new element for which a restored checkpoint has values.

    A plain list that is attached to a `Node` while values for its elements are pending becomes one of these.

    Args:
        elements: Its elements.
    """

    def __init__(self, elements: Iterable[Any] = ()) -> None:
        _register_pytrees()
        super().__init__(elements)
        self._holdfast_pending: list[Resumable] = []
        self._holdfast_origin = (elements, _contents(self)) if type(elements) is list else None

    def append(self, element: Any) -> None:
        """Add an element, and restore it."""
        super().append(_tracked(self, len(self), element))
        _resume(self, len(self) - 1, super().pop)

    def extend(self, elements: Iterable[Any]) -> None:
        """Add elements, and restore them."""
        for element in elements:
            self.append(element)

    def insert(self, index: SupportsIndex, element: Any) -> None:
        """Add an element in between, and restore the elements whose index is new."""
        before = list(self)
        super().insert(index, element)
        _resume(self, None, partial(super().__setitem__, slice(None), before))

    def __setitem__(self, index: Any, element: Any) -> None:
        before = list(self) if self._holdfast_pending else []
        super().__setitem__(index, element)
        _resume(self, None, partial(super().__setitem__, slice(None), before))

    def __iadd__(self, elements: Iterable[Any]) -> Self:  # type: ignore[misc]  # like that of list
        self.extend(elements)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)


class TrackedDict(dict[Any, Any]):
    """A dictionary that restores each new entry for which a restored checkpoint has values.

    Args:
        entries: Its entries.
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
        """Return an entry; make and restore it if there is none."""
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *entries: Any, **more: Any) -> None:
        """Set entries, and restore them."""
        for key, value in dict(*entries, **more).items():
            self[key] = value

    def __ior__(self, entries: Any) -> Self:  # type: ignore[misc]  # as wide as `update`
        self.update(entries)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


_registered: set[str] = set()  # frameworks that know tracked containers as pytrees
opens_as(TrackedList, "list")
opens_as(TrackedDict, "dict")


def _register_pytrees() -> None:
    """Make tracked containers pytrees of the imported frameworks, so that parameters in them are trained."""
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
        register(
            TrackedDict, lambda node: (list(node.values()), tuple(node)), lambda children, keys: _dict(keys, children)
        )


def _sorted(entries: TrackedDict) -> list[Any]:
    try:
        return sorted(entries)  # jax sorts the keys of dictionaries, too
    except TypeError:
        return list(entries)


def _list(_: Any, children: Iterable[Any]) -> TrackedList:
    return TrackedList(iter(children))


def _dict(keys: Iterable[Any], children: Iterable[Any]) -> TrackedDict:
    return TrackedDict(zip(keys, children, strict=True))


def tracked_attributes(value: object) -> list[tuple[str, Any]]:
    """Return the attributes of an object, without those that its class or a base names in ``__untracked__``."""
    untracked = {name for cls in type(value).__mro__ for name in vars(cls).get("__untracked__", ())}
    slots = [
        name
        for base in reversed(type(value).__mro__)
        if "__slots__" in vars(base)
        for name, member in vars(base).items()
        if isinstance(member, types.MemberDescriptorType) and hasattr(value, name)
    ]
    attributes = {**getattr(value, "__dict__", {}), **{name: getattr(value, name) for name in slots}}
    return [(name, child) for name, child in attributes.items() if name not in untracked]


def check_origin(container: object, path: Path) -> None:
    """Raise UnsupportedLeafError if the plain container behind a tracked one has been changed."""
    if not isinstance(container, TrackedList | TrackedDict) or container._holdfast_origin is None:
        return
    origin, contents = container._holdfast_origin  # kept alive, so that no other object gets their ids
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
    """Make a holder report new objects to a restore; return whether it can and did not do so before."""
    if not isinstance(holder, Node | TrackedList | TrackedDict) or restore in holder._holdfast_pending:
        return False
    holder._holdfast_pending.append(restore)
    return True


def forget(holder: object, restore: Resumable) -> None:
    """Undo :func:`expect`."""
    if isinstance(holder, Node | TrackedList | TrackedDict) and restore in holder._holdfast_pending:
        holder._holdfast_pending.remove(restore)


def _resume(holder: Node | TrackedList | TrackedDict, key: object, undo: Callable[[], Any]) -> None:
    """Report a new object to all restores that wait for its holder, the latest first."""
    try:
        for restore in reversed(list(holder._holdfast_pending)):
            restore.resume(holder, key)
    except BaseException:  # an object that does not fit is not attached
        undo()
        raise


def _tracked(holder: Node | TrackedList | TrackedDict, key: object, value: Any) -> Any:
    """Return a tracked container for a plain one if values wait for its contents, or any other value itself."""
    if type(value) in (list, dict) and any(restore.expects_below(holder, key) for restore in holder._holdfast_pending):
        return TrackedList(value) if type(value) is list else TrackedDict(value)
    return value


@cache
def _reserved(cls: type) -> frozenset[str]:
    """Return the names that a class derived from `Node` uses itself."""
    bases = [base for base in cls.__mro__ if base not in (Node, object)]
    names = frozenset(name for base in bases for name in vars(base)).union(Node.__slots__)
    return names - {"__dict__", "__weakref__", "__doc__", "__module__"}
