"""Objects of our own: holders of named things, which restore what is attached to them later, and boxes for values."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, Self, SupportsIndex

from ..errors import OptionError, UnsupportedLeafError


class Resumable(Protocol):
    """A restore that has values for objects which do not exist yet."""

    def resume(self, holder: object, key: object = None) -> None:
        """Restores what has turned up below a holder since: under one key, or anywhere."""
        ...

    def expects_below(self, holder: object, key: object) -> bool:
        """Tells whether there are values for what may be attached below a key of a holder."""
        ...


class Untracked:
    """Marks a value that belongs to a `Node` and is neither saved nor restored.

    Args:
        value: What the attribute shall be.

    >>> node = Node(weights=Untracked("not saved"))
    >>> node.weights
    'not saved'
    """

    def __init__(self, value: Any) -> None:
        self.value = value


class Value:
    """A box for a number or another plain value that changes, such as a counter of steps.

    Args:
        value: A bool, int, float, complex, str, bytes or None.

    Attributes:
        value: What is in it.

    >>> step = Value(1)
    >>> step.assign_add(1)
    >>> int(step)
    2
    """

    def __init__(self, value: Any = 0) -> None:
        self.value = value

    def assign(self, value: Any) -> None:
        """Changes the value."""
        self.value = value

    def assign_add(self, amount: Any) -> None:
        """Adds to the value."""
        self.value = self.value + amount

    def __int__(self) -> int:
        return int(self.value)

    def __index__(self) -> int:
        return int(self.value.__index__())

    def __float__(self) -> float:
        return float(self.value)

    def __repr__(self) -> str:
        return f"Value({self.value!r})"


class Node:
    """A holder of named objects: a part of a checkpoint, or a stand-in for a part of one.

    Everything that is assigned to an attribute is saved with it. After a restore, what is attached under a name that
    the checkpoint has values for gets them at once.

    Args:
        **objects: What it holds.

    >>> node = Node(bias=[0.0, 0.0])
    >>> node.bias
    [0.0, 0.0]
    """

    __slots__ = (
        "__dict__",
        "__weakref__",
        "_holdfast_counter",
        "_holdfast_pending",
        "_holdfast_root",
        "_holdfast_untracked",
    )
    _holdfast_pending: list[Resumable]
    _holdfast_untracked: set[str]
    _holdfast_root: Any
    _holdfast_counter: int | None

    def __init__(self, /, **objects: Any) -> None:
        for name, value in objects.items():
            setattr(self, name, value)

    def __new__(cls, *_: Any, **__: Any) -> Self:  # noqa: D102 - also called for copies, which have no __init__
        node = super().__new__(cls)
        object.__setattr__(node, "_holdfast_pending", [])
        object.__setattr__(node, "_holdfast_untracked", set())
        object.__setattr__(node, "_holdfast_root", None)
        object.__setattr__(node, "_holdfast_counter", None)
        return node

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _reserved(type(self)) or name in _OWN:
            raise OptionError(
                f"{name!r} is a name of {type(self).__name__} itself; attach the object under another one"
            )
        if isinstance(value, Untracked):
            self._holdfast_untracked.add(name)
            object.__setattr__(self, name, value.value)
            return
        before, hidden = vars(self).get(name, _NOTHING), name in self._holdfast_untracked
        self._holdfast_untracked.discard(name)
        object.__setattr__(self, name, _tracked(self, name, value))
        try:
            resume(self, name)
        except BaseException:  # what does not fit is not attached
            if before is _NOTHING:
                object.__delattr__(self, name)
            else:
                object.__setattr__(self, name, before)
                self._holdfast_untracked.update([name] if hidden else [])
            raise

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...  # whatever was attached

    def __delattr__(self, name: str) -> None:
        object.__delattr__(self, name)
        self._holdfast_untracked.discard(name)

    def __holdfast_root__(self) -> Any:
        """Returns the object whose edges this node has besides its own, or None."""
        root = self._holdfast_root
        return root() if isinstance(root, weakref.ref) else root

    def __getstate__(self) -> dict[str, Any]:
        return {
            "objects": dict(vars(self)),
            "untracked": sorted(self._holdfast_untracked),
            "root": self.__holdfast_root__(),
            "counter": self._holdfast_counter,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state["objects"])
        self._holdfast_untracked.update(state["untracked"])
        object.__setattr__(self, "_holdfast_root", state["root"])
        object.__setattr__(self, "_holdfast_counter", state["counter"])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(vars(self))})"


class TrackedList(list[Any]):
    """A list that restores what is put into it, where a restored checkpoint has values for that place.

    A plain list that is attached to a `Node` while values for its elements are pending becomes one of these.

    Args:
        elements: What is in it.
    """

    def __init__(self, elements: Iterable[Any] = ()) -> None:
        super().__init__(elements)
        self._holdfast_pending: list[Resumable] = []
        self._holdfast_origin = _Origin(elements, list(self)) if type(elements) is list else None

    def append(self, element: Any) -> None:
        """Adds an element, and restores it."""
        super().append(_tracked(self, len(self), element))
        try:
            resume(self, len(self) - 1)
        except BaseException:  # what does not fit is not attached
            super().pop()
            raise

    def extend(self, elements: Iterable[Any]) -> None:
        """Adds elements, and restores them."""
        for element in elements:
            self.append(element)

    def insert(self, index: SupportsIndex, element: Any) -> None:
        """Adds an element in between, and restores what stands at the places that are new."""
        before = list(self)
        super().insert(index, element)
        self._resume(before)

    def __setitem__(self, index: Any, element: Any) -> None:
        before = list(self) if self._holdfast_pending else []
        super().__setitem__(index, element)
        self._resume(before)

    def _resume(self, before: list[Any]) -> None:
        try:
            resume(self)
        except BaseException:
            super().__setitem__(slice(None), before)
            raise

    def __iadd__(self, elements: Iterable[Any]) -> Self:  # type: ignore[misc]  # as list's own is
        self.extend(elements)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)


class TrackedDict(dict[Any, Any]):
    """A dictionary that restores what is put into it, where a restored checkpoint has values for that key.

    Args:
        entries: What is in it.
    """

    def __init__(self, entries: Mapping[Any, Any] | Iterable[tuple[Any, Any]] = ()) -> None:
        super().__init__(entries)
        self._holdfast_pending: list[Resumable] = []
        known = [item for pair in self.items() for item in pair]
        self._holdfast_origin = _Origin(entries, known) if type(entries) is dict else None

    def __setitem__(self, key: Any, value: Any) -> None:
        before = self.get(key, _NOTHING)
        super().__setitem__(key, _tracked(self, key, value))
        try:
            resume(self, key)
        except BaseException:  # what does not fit is not attached
            if before is _NOTHING:
                super().__delitem__(key)
            else:
                super().__setitem__(key, before)
            raise

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """Returns an entry, after making and restoring it where there is none."""
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *entries: Any, **more: Any) -> None:
        """Sets entries, and restores them."""
        for key, value in dict(*entries, **more).items():
            self[key] = value

    def __ior__(self, entries: Any) -> Self:  # type: ignore[misc]  # as wide as `update`
        self.update(entries)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class _Origin:
    """The plain container that a tracked one was made from: changes to it would be lost, so they are found."""

    def __init__(self, container: Any, contents: list[Any]) -> None:
        self._container = container
        self._contents = contents  # kept, so that ids stay theirs

    def check(self, path: str) -> None:
        container = self._container
        now = [item for pair in container.items() for item in pair] if isinstance(container, dict) else container
        if [*map(id, now)] != [*map(id, self._contents)]:
            kind = type(container).__name__
            raise UnsupportedLeafError(
                f"{path}: the {kind} that was attached here has been changed since through another reference to it, "
                f"which the checkpoint does not see. Change it through the object that it was attached to, or attach a "
                f"Tracked{kind.title()} from the start; nothing was written"
            )


def check_origin(container: object, path: str) -> None:
    """Makes sure that what a tracked container was made from has not been changed apart from it.

    Raises:
        UnsupportedLeafError: It has.
    """
    origin = getattr(container, "_holdfast_origin", None)
    if isinstance(origin, _Origin):
        origin.check(path)


def expect(holder: object, restore: Resumable) -> bool:
    """Has a holder tell a restore of what is attached to it from now on, if it is one that can.

    Returns:
        Whether it does so from now on, and did not before.
    """
    if not isinstance(holder, Node | TrackedList | TrackedDict) or restore in holder._holdfast_pending:
        return False
    holder._holdfast_pending.append(restore)
    return True


def forget(holder: object, restore: Resumable) -> None:
    """Ends what :func:`expect` began."""
    if isinstance(holder, Node | TrackedList | TrackedDict) and restore in holder._holdfast_pending:
        holder._holdfast_pending.remove(restore)


def resume(holder: Node | TrackedList | TrackedDict, key: object = None) -> None:
    """Tells all restores that wait for a holder that something has been attached to it; the latest goes first.

    Args:
        holder: The holder.
        key: The name, key or place of what has been attached; None where that may be several things.
    """
    for restore in reversed(list(holder._holdfast_pending)):
        restore.resume(holder, key)


def _tracked(holder: Node | TrackedList | TrackedDict, key: object, value: Any) -> Any:
    """Returns a container that restores what is put into it, in the place of a plain one that values wait for."""
    if type(value) in (list, dict) and any(restore.expects_below(holder, key) for restore in holder._holdfast_pending):
        return TrackedList(value) if type(value) is list else TrackedDict(value)
    return value


_NOTHING = object()
_OWN = frozenset(Node.__slots__) - {"__dict__", "__weakref__"}
_RESERVED: dict[type, frozenset[str]] = {Node: frozenset()}


def _reserved(kind: type) -> frozenset[str]:
    """Returns the names that a class derived from `Node` needs for itself."""
    found = _RESERVED.get(kind)
    if found is None:
        bases = [base for base in kind.__mro__ if base not in (Node, object)]
        found = _RESERVED[kind] = frozenset(name for base in bases for name in vars(base)) - {"__doc__", "__module__"}
    return found
