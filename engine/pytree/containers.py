"""Determines which values are pytree containers, what their children are, and how to rebuild them."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

from .leaves import StaticLeaf, jax, loaded, nnx

# The only default factories of a defaultdict that are stored, keyed by name.
FACTORIES: dict[str, Any] = {kind.__name__: kind for kind in (bool, dict, float, int, list, set, str, tuple)}


class Contents(NamedTuple):
    """The contents of a container: the fields of `TreeDef`, but with child values instead of child definitions."""

    kind: str
    keys: list[Any] | None
    values: list[Any]
    build: Callable[[list[Any]], Any]
    label: str | None = None


def expand(value: object, objects: NnxObjects | None = None) -> Contents | None:
    """Return the contents of a container, or None for a leaf; ``objects`` collects the nnx objects of the tree."""
    opener = _EXACT.get(type(value))
    if opener is not None:
        return opener(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        namedtuple: Any = type(value)
        if loaded("jax") is not None and _has_own_children(value) and (contents := _open_registered(value)) is not None:
            return contents
        return Contents("namedtuple", list(value._fields), list(value), namedtuple._make, class_name(value))
    if is_nnx(value):
        objects = objects or NnxObjects()
        number, variables = objects.state_of(value)
        build = partial(objects.build, number, list(variables))
        return Contents("node", list(variables), list(variables.values()), build, class_name(value))
    # Built-in types are skipped, because only other classes can be registered with jax.
    is_registrable = type(value).__module__ != "builtins" and loaded("jax") is not None
    if is_registrable and (contents := _open_registered(value)) is not None:
        return contents
    for base, kind in _SUBCLASSES:
        if isinstance(value, base):
            return _open_subclass(value, kind)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        values = [getattr(value, name) for name in names]
        build = partial(_copied, value, object.__setattr__, names)
        return Contents("dataclass", list(names), values, build, class_name(value))
    return None


def class_name(value: object) -> str:
    return name_of_class(type(value))


def name_of_class(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}".removeprefix("builtins.")


def build_mapping(make: Callable[[Any], Any], keys: list[Any], values: list[Any]) -> Any:
    return make(zip(keys, values, strict=True))


def build_counter(pairs: Iterable[tuple[Any, Any]]) -> Any:
    """Build a Counter from (key, count) pairs; its constructor would count the pairs themselves."""
    return Counter(dict(pairs))


def _open_mapping(value: Any, kind: str, make: Callable[[Any], Any], label: str | None = None) -> Contents:
    keys = list(value)
    return Contents(kind, keys, list(value.values()), partial(build_mapping, make, keys), label)


def _open_ordered(value: Any) -> Contents:
    if value.__dict__:  # for example, _metadata in torch state dicts, which holds module versions
        keys = list(value)
        return Contents("ordered_dict", keys, list(value.values()), partial(_copied, value, operator.setitem, keys))
    return _open_mapping(value, "ordered_dict", OrderedDict)


def _open_default(value: Any) -> Contents:
    factory = value.default_factory
    label = factory.__name__ if factory in FACTORIES.values() else None
    return _open_mapping(value, "default_dict", partial(defaultdict, factory), label)


def _open_deque(value: Any) -> Contents:
    label = None if value.maxlen is None else str(value.maxlen)
    return Contents("deque", None, list(value), partial(deque, maxlen=value.maxlen), label)


_EXACT: dict[type, Callable[[Any], Contents]] = {
    dict: partial(_open_mapping, kind="dict", make=dict),
    list: lambda value: Contents("list", None, value, list),
    tuple: lambda value: Contents("tuple", None, value, tuple),
    OrderedDict: _open_ordered,
    defaultdict: _open_default,
    Counter: partial(_open_mapping, kind="counter", make=build_counter),
    deque: _open_deque,
}


def opens_as(subclass: type, kind: str) -> None:
    """Treat a dict or list subclass as a container of the given kind, even if it is registered with jax."""
    _EXACT[subclass] = partial(_open_subclass, kind=kind)


# ---- flax.nnx objects, such as modules and optimizers. `nnx.state` returns their variables; loading creates copies.
# A tree can contain nnx objects only if the program has imported flax.


def is_nnx(value: object) -> bool:
    """True if a value is an nnx object, such as a Module, an Optimizer or Rngs."""
    if loaded("flax.nnx") is None:
        return False
    # The name of the common base class of Module, Optimizer and Rngs differs between flax releases.
    base = getattr(nnx, "Pytree", None) or getattr(nnx, "Object", None) or nnx.Module
    return isinstance(value, (base, nnx.Module, nnx.Optimizer)) and not isinstance(value, nnx.Variable)


class NnxObjects:
    """The nnx objects in a tree. A shared variable is stored with its first object, and is shared again on loading."""

    def __init__(self) -> None:
        self._objects: list[Any] = []
        self._copies: Any = None

    def state_of(self, value: Any) -> tuple[int, dict[Any, Any]]:
        """Add an object; return its index in the tree, and a dict of the variables that no earlier object contains."""
        number = len(self._objects)
        self._objects.append(value)
        state = nnx.state(tuple(self._objects))
        return number, dict(state[number].items()) if number in state else {}

    def build(self, number: int, keys: list[Any], children: list[Any]) -> Any:
        """Return a copy of an object with the given variables; the object itself may be abstract."""
        if self._copies is None:
            self._copies = nnx.clone(tuple(self._objects))
        if keys:
            nested = [child.raw_mapping if isinstance(child, nnx.State) else child for child in children]
            nnx.update(self._copies[number], nnx.State(dict(zip(keys, nested, strict=True))))
        return self._copies[number]


def _has_own_children(value: tuple[Any, ...]) -> bool:
    """True if a named tuple is registered with jax and its children are not its fields."""
    children = jax.tree_util.tree_leaves(value, is_leaf=lambda inner: inner is not value)
    return len(children) != len(value) or not all(map(operator.is_, children, value))


def _open_registered(value: object) -> Contents | None:
    """Return the children of an object registered with jax; None for a leaf. Static fields stay in the treedef."""
    children, treedef = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda inner: inner is not value)
    if len(children) == 1 and children[0][0] == ():
        return None  # jax treats the object as a leaf
    entries = [path[0] for path, _ in children]
    values = [StaticLeaf.of(child) or child for _, child in children]
    has_functions = any(type(child) is StaticLeaf for child in values)
    build = partial(_with_functions, treedef) if has_functions else treedef.unflatten
    if entries and [getattr(entry, "idx", None) for entry in entries] == list(range(len(entries))):
        return Contents("list", None, values, build, class_name(value))
    return Contents("node", [_entry_key(entry) for entry in entries], values, build, class_name(value))


def _with_functions(treedef: Any, children: list[Any]) -> Any:
    return treedef.unflatten([child.function if type(child) is StaticLeaf else child for child in children])


def _entry_key(entry: Any) -> Any:
    names = ("key", "name", "idx")  # attributes of DictKey or FlattenedIndexKey, GetAttrKey, and SequenceKey
    return next((getattr(entry, name) for name in names if hasattr(entry, name)), str(entry))


def _open_subclass(value: Any, kind: str) -> Contents:
    if kind in {"list", "tuple"}:
        return Contents(kind, None, list(value), type(value), class_name(value))
    keys = list(value)
    if kind == "mapping":
        build = partial(build_mapping, lambda pairs: type(value)(dict(pairs)), keys)
    else:
        build = partial(_copied, value, operator.setitem, keys)
    return Contents(kind, keys, [value[key] for key in keys], build, class_name(value))


def _copied(template: Any, assign: Callable[[Any, Any, Any], None], keys: list[Any], values: list[Any]) -> Any:
    # Copy instead of calling the constructor, which may recompute fields or not accept all of them.
    built = copy.copy(template)
    for key, value in zip(keys, values, strict=True):
        assign(built, key, value)
    return built


_SUBCLASSES: list[tuple[type, str]] = [
    (OrderedDict, "ordered_dict"),
    (defaultdict, "default_dict"),
    (Counter, "counter"),
    (dict, "dict"),
    (list, "list"),
    (tuple, "tuple"),
    (Mapping, "mapping"),
]
