"""Finds the access paths of a state's leaves once, so that chosen leaves can be looked up at every step.

An access path ("way") is a chain of keys and attributes. It leads to the current leaf, whether a training step creates
a new immutable tree or changes a module in place. This module neither changes objects nor calls their methods.
"""

from __future__ import annotations

import functools
import operator
import random
import sys
import types
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from .containers import expand, is_nnx
from .jax_leaves import is_key
from .leaves import PLAIN, is_jax_array, is_torch_tensor, library_of, loaded, nnx, torch

MISSING: Any = object()
"""The result of following an access path whose entry or attribute no longer exists."""

_MOST_NODES = 60_000  # maximum number of objects and leaves to visit
_MOST_ATTRIBUTES = 4_000
_MOST_RATES = 32
_MOST_VALUES = 1000  # maximum number of values to visit in a batch
_LONG = 200  # maximum number of characters in a text; longer texts are truncated and end with a checksum
_SMALL = 1 << 10  # maximum size, in bytes, of an array whose values are converted to text
_TEXT_DEPTH = 3  # maximum nesting depth of containers that are converted to text
_MOST_ENTRIES = 256  # maximum number of entries to convert to text; larger containers show only their length
_CLOSED = (str, bytes, type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)
_LOADERS = ("holdfast", "torchdata", "datasets", "grain", "lightning", "pytorch_lightning", "keras", "flax")
# Libraries whose objects are not searched.
_LIBRARIES = (
    *("torch", "numpy", "jax", "jaxlib", "optax"),
    *("builtins", "concurrent", "logging", "multiprocessing", "queue", "threading"),
)

_Get = Callable[[Any, Any], Any]


class _Child(NamedTuple):
    name: str
    get: _Get
    key: Any
    value: Any
    parameter: tuple[int, int] | None = None  # (group, index) of the parameter whose optimizer state contains the key


@dataclass(eq=False, slots=True)
class _Way:
    """An access path, stored as its last step and the path before this step (None for the root)."""

    parent: _Way | None
    get: _Get
    key: Any

    @property
    def is_open(self) -> bool:
        """True if the access path leads only through containers."""
        return self.get in (operator.getitem, _entry) and (self.parent is None or self.parent.is_open)

    def is_lost(self, values: Mapping[_Way | None, Any]) -> bool:
        """True if a dictionary has lost an entry on the access path; lists and optimizer state may shrink."""
        if self.parent is not None and self.parent.is_lost(values):
            return True
        owner = values[self.parent]
        may_go = self.get in (_state_of, _entry) or owner is MISSING or isinstance(owner, list | deque)
        return values[self] is MISSING and not may_go and (self.parent is None or self.parent.is_open)


_NOWHERE = _Way(None, lambda *_: MISSING, None)  # the access path of a leaf that does not exist in the state


class _Route:
    """Follows several access paths at once, and visits each prefix that they share only once."""

    def __init__(self, ways: Iterable[_Way | None]) -> None:
        self._numbers: dict[_Way | None, int] = {None: 0}
        self._steps: list[tuple[int, _Get, Any]] = []  # for each step: index of the owner's path, getter, key
        self._ends: list[int] = []
        for way in ways:
            ahead: list[_Way] = []
            while way is not None and way not in self._numbers:
                ahead.append(way)
                way = way.parent
            for step in reversed(ahead):
                self._steps.append((self._numbers[step.parent], step.get, step.key))
                self._numbers[step] = len(self._steps)
            self._ends.append(self._numbers[ahead[0] if ahead else way])

    def follow(self, root: Any) -> list[Any]:
        """Follow the access paths from a root; return the values at their ends, in the order of the paths."""
        return [*map(self._values(root).__getitem__, self._ends)]

    def values(self, root: Any) -> dict[_Way | None, Any]:
        """Follow the access paths from a root; return the value at the end of each path and prefix, keyed by path."""
        return dict(zip(self._numbers, self._values(root), strict=True))

    def _values(self, root: Any) -> list[Any]:
        values = [root]
        for owner, get, key in self._steps:
            try:
                values.append(get(values[owner], key))
            except Exception:  # the entry or attribute no longer exists, or its owner is MISSING
                values.append(MISSING)
        return values


class Ways:
    """Access paths from a root to at most ``most`` leaves, or to the leaves in ``names``, and to plain attributes.

    Learning rates come first, then trained parameters and their optimizer state, then all other leaves. Leaves of equal
    rank are ordered by a checksum of their names, which is the same in every process.
    """

    def __init__(self, root: Any, most: int, names: Collection[str] | None = None) -> None:
        count = 0
        leaves: list[tuple[str, _Way, int]] = []  # name, access path, rank
        self._attributes: list[tuple[str, _Way | None, str]] = []  # name, access path of the owner, attribute name
        optimizers: list[_Way | None] = []
        queue: deque[tuple[str, _Way | None, Any, tuple[int, ...]]] = deque([("", None, root, ())])
        while queue and count < _MOST_NODES:
            path, way, value, above = queue.popleft()
            if id(value) in above or len(above) > 64:
                continue
            children = _children(value)
            count += len(children)
            if is_optimizer(value):
                optimizers.append(way)
            prefix = f"{path}." if path else ""
            if len(self._attributes) < _MOST_ATTRIBUTES:
                taken = {child.key for child in children if child.get is getattr and _is_open("", child.value)}
                if not most:  # if no leaves are chosen, arrays are converted to text as well
                    taken -= {child.key for child in children if library_of(child.value) is not None}
                self._attributes += [(f"{prefix}{name}", way, name) for name in _attributes(value) if name not in taken]
            states: dict[Any, _Way] = {}
            for child in children:
                owner = way
                if child.parameter is not None:
                    owner = states.setdefault(child.parameter, _Way(way, _state_of, child.parameter))
                name, below = f"{prefix}{child.name}", _Way(owner, child.get, child.key)
                if library_of(child.value) is not None or type(child.value) in (bool, int, float):
                    leaves.append((name, below, _rank(child)))
                elif not isinstance(child.value, _CLOSED) and child.value is not None:
                    queue.append((name, below, child.value, (*above, id(value))))
        self.total = len(leaves)  # number of leaves found, whether chosen or not
        if names is None:
            leaves.sort(key=lambda leaf: (leaf[2], zlib.crc32(leaf[0].encode(errors="replace"))))
            self._leaves: dict[str, _Way | None] = {name: way for name, way, _ in leaves[:most]}
        else:
            ways = {name: way for name, way, _ in leaves}
            self._leaves = {name: ways.get(name) for name in names}
        self.names = tuple(self._leaves)  # names of the chosen leaves: keys and attributes joined by dots
        self._to_leaves = _Route(way or _NOWHERE for way in self._leaves.values())
        self._to_owners = _Route(way for _, way, _ in self._attributes)
        self._to_optimizers = _Route(optimizers)

    def follow(self, root: Any) -> list[Any]:
        """Return the chosen leaves of another root, in the order of :attr:`names`; MISSING if a leaf does not exist."""
        return self._to_leaves.follow(root)

    def ended(self, root: Any) -> list[str]:
        """Return the names of chosen leaves that another root lacks, if they are reached only through containers.

        List items, optimizer state and leaves reached through attributes may come and go, so they are not reported.
        """
        values = self._to_leaves.values(root)
        return [name for name, way in self._leaves.items() if way is not None and way.is_lost(values)]

    def trained(self, root: Any) -> set[int] | None:
        """Return the ids of all parameters in torch optimizers; None if there is no optimizer."""
        groups = [group for one in self._to_optimizers.follow(root) for group in getattr(one, "param_groups", ())]
        return {id(one) for group in groups for one in group["params"]} if groups else None

    def attributes(self, root: Any) -> dict[str, str]:
        """Return, as text, all attributes that are plain values, functions, generators or containers of these."""
        texts: dict[str, str] = {}
        for (name, _, key), owner in zip(self._attributes, self._to_owners.follow(root), strict=True):
            value = vars(owner).get(key, MISSING) if hasattr(owner, "__dict__") else MISSING
            if value is not MISSING and (text := text_of(value)) is not None:
                texts[name] = text
        return texts


def _children(value: Any) -> list[_Child]:
    """Return all children of an object that an access path can reach; arrays have none."""
    if type(value) is dict or isinstance(value, Mapping):
        get = _entry if hasattr(type(value), "__missing__") else operator.getitem
        return [_Child(str(key), get, key, child) for key, child in [*value.items()]]
    if isinstance(value, list | tuple | deque):
        names = getattr(value, "_fields", None) or map(str, range(len(value)))
        pairs = zip(names, [*value], strict=True)
        return [_Child(name, operator.getitem, index, child) for index, (name, child) in enumerate(pairs)]
    if library_of(value) is not None or isinstance(value, _CLOSED):
        return []
    if loaded("torch") is not None and isinstance(value, torch.nn.Module):
        return list(_of_module(value))
    if is_optimizer(value):
        return list(_of_optimizer(value))
    is_object_of_nnx = is_nnx(value)
    if not is_object_of_nnx and _is_variable(value):
        return [_Child("value", _value_of, None, _value_of(value, None))]
    if not is_object_of_nnx and (contents := expand(value)) is not None and contents.keys is not None:
        return [
            _Child(str(key), getattr, str(key), child)
            for key, child in zip(contents.keys, contents.values, strict=True)
            if getattr(value, str(key), MISSING) is child
        ]
    if is_object_of_nnx or (hasattr(value, "__dict__") and not _is_of_library(value)):
        parts = [*vars(value).items()]
        if any(cls.__module__.startswith("torchdata.") for cls in type(value).__mro__):
            # A loader saves the states of its parts, and restores them only when its next iterator begins.
            parts = [(name, part) for name, part in parts if not hasattr(type(part), "state_dict")]
        return [_Child(name, getattr, name, child) for name, child in parts if _is_open(name, child)]
    return []


def is_optimizer(value: Any) -> bool:
    return loaded("torch") is not None and isinstance(value, torch.optim.Optimizer)


def _of_module(module: Any) -> Iterator[_Child]:
    for attribute in ("_parameters", "_buffers", "_modules"):
        for name, child in [*getattr(module, attribute).items()]:
            if child is not None:
                yield _Child(name, _held, (attribute, name), child)


def _of_optimizer(optimizer: Any) -> Iterator[_Child]:
    number = 0
    for index, group in enumerate(optimizer.param_groups):
        for in_group, parameter in enumerate(group["params"]):
            for key, child in [*optimizer.state.get(parameter, {}).items()]:
                yield _Child(f"state.{number}.{key}", operator.getitem, key, child, (index, in_group))
            number += 1
        for key, child in [*group.items()]:
            if type(child) in (bool, int, float):
                yield _Child(f"param_groups.{index}.{key}", _option, (index, key), child)


def _entry(mapping: Any, key: Any) -> Any:
    return mapping.get(key, MISSING)  # not mapping[key], which would create the entry in a defaultdict


def _held(module: Any, key: tuple[str, str]) -> Any:
    return getattr(module, key[0])[key[1]]


def _state_of(optimizer: Any, parameter: tuple[int, int]) -> Any:
    group, number = parameter
    return optimizer.state.get(optimizer.param_groups[group]["params"][number])


def _option(optimizer: Any, key: tuple[int, str]) -> Any:
    return optimizer.param_groups[key[0]][key[1]]


def _value_of(variable: Any, _: object) -> Any:
    return variable.get_value() if hasattr(variable, "get_value") else variable.value


def _is_variable(value: Any) -> bool:
    """True if an object is an nnx or Keras variable, which holds one array."""
    if loaded("flax.nnx") is not None and isinstance(value, nnx.Variable):
        return True
    return type(value).__module__.startswith("keras.") and hasattr(value, "value") and hasattr(value, "assign")


def _is_open(name: str, value: Any) -> bool:
    """True if access paths may lead through an attribute; all other attributes are only converted to text."""
    return not name.startswith(_INTERNAL) and not isinstance(value, (*PLAIN, *_CLOSED, np.generic, Enum))


def _is_of_library(value: Any) -> bool:
    """True for library objects, which are not searched; False for torch data loaders, because they lead to the data."""
    module = type(value).__module__
    is_loader = module.startswith("torch.utils.data") and not isinstance(value, Iterator)
    return module.partition(".")[0] in _LIBRARIES and not is_loader


def _rank(child: _Child) -> int:
    """Return 0 for learning rates, 1 for trained parameters and optimizer state, 2 for other leaves."""
    if child.get is _option:
        return 0 if child.key[1] == "lr" and child.key[0] < _MOST_RATES else 2
    is_trained = child.parameter is not None or (is_torch_tensor(child.value) and child.value.requires_grad)
    return 1 if is_trained else 2


# ---- attributes as texts


def _attributes(value: Any) -> list[str]:
    """Return the names of attributes that may be plain values; none for library objects."""
    is_schedule = loaded("torch") is not None and isinstance(value, torch.optim.lr_scheduler.LRScheduler)
    is_closed = type(value).__module__.partition(".")[0] in (*_LIBRARIES, *_LOADERS)
    if (is_closed and not is_schedule) or _is_variable(value):
        return []
    attributes = getattr(value, "__dict__", None)
    if not isinstance(attributes, dict):
        return []
    is_module = loaded("torch") is not None and isinstance(value, torch.nn.Module)
    omitted = _attributes_of_modules(sys.modules.get("lightning.pytorch")) if is_module else frozenset()
    torchmetrics: Any = loaded("torchmetrics")
    if torchmetrics is not None and isinstance(value, (torchmetrics.Metric, torchmetrics.MetricCollection)):
        omitted |= _CACHES
    names = [name for name in [*attributes] if isinstance(name, str) and name not in omitted]
    return [name for name in names if not name.startswith(_INTERNAL)]


@functools.cache
def _attributes_of_modules(lightning: Any) -> frozenset[str]:
    """Return the attributes of every torch module and, if Lightning is imported, of every LightningModule."""
    classes = [torch.nn.Module, *([lightning.LightningModule] if hasattr(lightning, "LightningModule") else [])]
    return frozenset(name for cls in classes for name in vars(cls()))


# Attributes of torchmetrics metrics and collections that are overwritten by the next call or compute().
_CACHES = {"_computed", "_forward_cache", "_groups", "_groups_checked", "_state_is_copy"}
_INTERNAL = ("__", "_pytree__", "_nnx", "_object__", "_TrackedList", "_self_")  # prefixes of library-internal names


def text_of(value: Any) -> str | None:
    """Return a plain value as text that is identical in every process, without addresses; None for other objects.

    >>> text_of({"b", "a"}), text_of(len), text_of(object()), text_of([1.5, None])
    ("{'a', 'b'}", 'builtins.len', None, '[1.5, None]')
    """
    text = _text_of(value, _TEXT_DEPTH)
    if text is not None and len(text) > _LONG:
        return f"{text[:40]}... ({len(text)} characters, checksum {zlib.crc32(text.encode()):08x})"
    return text


def _text_of(value: Any, depth: int) -> str | None:
    if isinstance(value, Enum):
        return str(value)
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, np.generic):
        return repr(value.item())
    if isinstance(value, types.FunctionType | types.MethodType | types.BuiltinFunctionType | type):
        return f"{value.__module__}.{value.__qualname__}"
    if is_torch_tensor(value):
        is_whole = value.device.type == "cpu" and not hasattr(value, "to_local")
        if not is_whole or value.requires_grad or value.numel() * value.element_size() > _SMALL:
            return None
        return repr(value.tolist())
    if isinstance(value, np.ndarray):
        return repr(value.tolist()) if value.nbytes <= _SMALL and not value.dtype.hasobject else None
    if is_jax_array(value):
        is_small = not is_key(value) and value.nbytes <= _SMALL and value.is_fully_addressable and value.is_ready()
        return repr(np.asarray(value).tolist()) if is_small else None
    if (state := _state_of_generator(value)) is not None:
        return f"generator {zlib.crc32(repr(state).encode()):08x}"
    if not depth or not isinstance(value, list | tuple | deque | dict | set | frozenset):
        return None
    if len(value) > _MOST_ENTRIES:
        return f"{type(value).__name__} of {len(value)}"
    if isinstance(value, dict):
        pairs = [(_text_of(key, depth - 1), _text_of(item, depth - 1)) for key, item in [*value.items()]]
        return None if any(None in pair for pair in pairs) else f"{{{', '.join(f'{a}: {b}' for a, b in pairs)}}}"
    texts = [text for item in [*value] if (text := _text_of(item, depth - 1)) is not None]
    if len(texts) < len(value):
        return None
    is_set = isinstance(value, set | frozenset)
    return f"{{{', '.join(sorted(texts))}}}" if is_set else f"[{', '.join(texts)}]"


def _state_of_generator(value: Any) -> Any:
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.RandomState):
        return value.get_state(legacy=False)
    return value.get_state().tolist() if loaded("torch") is not None and isinstance(value, torch.Generator) else None


def leaves_of(value: Any) -> tuple[list[Any], str]:
    """Return the arrays in a value, such as a batch or a state, and its plain values as text."""
    arrays: list[Any] = []
    texts: list[str] = []
    queue: deque[Any] = deque([value])
    for _ in range(_MOST_VALUES):
        if not queue:
            break
        item = queue.popleft()
        if library_of(item) is not None:
            arrays.append(item)
        elif isinstance(item, list | tuple) and len(item) > 16 and (kinds := {*map(type, item)}) <= {*PLAIN}:
            texts.append(_text_of_integers(item) if kinds == {int} else repr(item))
        elif isinstance(item, Mapping):
            texts.append(repr([*map(str, item)]))
            queue.extend(item.values())
        elif isinstance(item, list | tuple | deque):
            queue.extend(item)
        elif isinstance(item, PLAIN):
            texts.append(repr(item))
        elif not isinstance(item, _CLOSED) and (contents := expand(item)) is not None:
            queue.extend(contents.values)
    return arrays, "\n".join(texts)


def _text_of_integers(numbers: Collection[int]) -> str:
    """Return a checksum of integers, such as a generator's state; repr would take ten times as long."""
    try:
        return f"integers {zlib.crc32(array('q', numbers).tobytes()):08x}"
    except OverflowError:
        return repr(numbers)
