"""The state codec, which encodes trees of arrays, objects and plain values for loading without a template.

Without a template, all arrays in a checkpoint load as numpy arrays, so each torch or jax array is wrapped in a dict
that names its library. A named tuple or dataclass is wrapped in a dict that names its class. The program must define
this class before loading, because loading imports nothing and calls no constructors.
"""

from __future__ import annotations

import dataclasses
import io
import sys
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from ..errors import StateError
from .containers import expand
from .jax_leaves import is_key
from .leaves import PLAIN, is_jax_array, is_torch_tensor, jax, loaded, torch
from .torch_leaves import STRIDES, is_dense, tensor_of, with_strides

_TORCH = "torch.Tensor"
_JAX = "jax.Array"
_KEY = "jax.random.key"
_SAVED = "torch.save"  # dict key for the bytes of an object saved with torch.save; loading them runs no code
_BYTES = "holdfast.bytearray"  # dict key for a bytearray's contents
_PAIRS = "holdfast.pairs"  # dict key for the items of a dictionary with keys other than str and int
_CLASS = "holdfast.class"  # dict key for a class name; the field values are under `_FIELDS`
_FIELDS = "fields"
_SEQUENCES = (list, tuple, deque)
_classes: WeakValueDictionary[str, type] = WeakValueDictionary()  # classes of encoded instances, keyed by name


def is_plain(value: object) -> bool:
    """True if a value consists only of plain data and contains no arrays or objects."""
    if isinstance(value, dict):
        return all(isinstance(key, (str, int)) and is_plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(is_plain, value))
    return isinstance(value, (*PLAIN, bytearray))


def encode_plain(value: Any) -> Any:
    """Encode plain data for a checkpoint by wrapping bytearrays; all other values stay the same."""
    if type(value) in (dict, list, tuple):
        return _rebuilt(value, encode_plain)
    return {_BYTES: bytes(value)} if isinstance(value, bytearray) else value


def encode_state(value: Any) -> Any:
    """Return a snapshot of a tree, encoded so that `decode_state` can restore each array in its original library."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, dict) and not all(isinstance(key, (str, int)) for key in value) and is_plain(list(value)):
        return {_PAIRS: [[key, encode_state(item)] for key, item in value.items()]}
    if isinstance(value, dict) or type(value) in _SEQUENCES:
        return _rebuilt(value, encode_state)
    if type(value) in (set, frozenset):
        return type(value)(value)
    if type(value) is bytearray:
        return encode_plain(value)
    if isinstance(value, np.ndarray):
        return value.copy()
    if is_torch_tensor(value):
        if not is_dense(value):
            return _saved_by_torch(value)
        return {_TORCH: value.detach().clone()} | ({} if value.is_contiguous() else {STRIDES: list(value.stride())})
    if is_jax_array(value):
        if is_key(value):
            return {_KEY: jax.random.key_data(value), "impl": str(jax.random.key_impl(value))}
        return {_JAX: value}
    contents = None if isinstance(value, type) else expand(value)
    if contents is not None and contents.kind in ("namedtuple", "dataclass"):
        fields = dict(zip(contents.keys or (), map(encode_state, contents.values), strict=True))
        name = import_path(type(value))
        _classes[name] = type(value)
        return {_CLASS: name, _FIELDS: fields}
    return _saved_by_torch(value)


def _saved_by_torch(value: Any) -> Any:
    """Encode a torch object, such as a sparse tensor, with torch.save; return it unchanged if loading it would fail."""
    is_of_torch = type(value).__module__.partition(".")[0] == "torch"
    if loaded("torch") is None or not (is_of_torch or type(value) in torch.serialization.get_safe_globals()):
        return value
    content = io.BytesIO()
    try:
        torch.save(value.detach() if is_torch_tensor(value) else value, content)
        torch.load(io.BytesIO(content.getvalue()), weights_only=True)
    except Exception:  # torch raises many types of errors; the leaf is refused later with a clear message
        return value
    return {_SAVED: content.getvalue()}


def _rebuilt(value: Any, convert: Callable[[Any], Any]) -> Any:
    """Apply ``convert`` to the values in a dictionary, list, tuple or deque; return a container of the same type."""
    if type(value) is deque:
        return deque(map(convert, value), value.maxlen)
    if not isinstance(value, dict):
        return type(value)(map(convert, value))
    # Copying keeps the dictionary's type and key order. Assign each value, because Counter.update() would add counts.
    copied = {} if type(value) is dict else value.copy()
    for key, item in value.items():
        copied[key] = convert(item)
    return copied


def decode_state(value: Any) -> Any:
    """Decode the result of :func:`encode_state` after it has been loaded without a template."""
    if isinstance(value, dict):
        if value.keys() == {_TORCH} or value.keys() == {_TORCH, STRIDES}:
            tensor = value[_TORCH] if is_torch_tensor(value[_TORCH]) else tensor_of(np.asarray(value[_TORCH]))
            return with_strides(tensor, value.get(STRIDES))
        if value.keys() == {_JAX}:
            return jax.numpy.asarray(value[_JAX])
        if value.keys() == {_KEY, "impl"}:
            return jax.random.wrap_key_data(jax.numpy.asarray(value[_KEY]), impl=value["impl"])
        if value.keys() == {_SAVED}:
            return torch.load(io.BytesIO(value[_SAVED]), weights_only=True)
        if value.keys() == {_BYTES} and isinstance(value[_BYTES], bytes):
            return bytearray(value[_BYTES])
        if value.keys() == {_PAIRS}:
            return {hashable(key): decode_state(item) for key, item in value[_PAIRS]}
        if value.keys() == {_CLASS, _FIELDS}:
            return _instance(value[_CLASS], {name: decode_state(field) for name, field in value[_FIELDS].items()})
    if isinstance(value, dict) or type(value) in _SEQUENCES:
        return _rebuilt(value, decode_state)
    return value


def hashable(key: Any) -> Any:
    """Convert the lists in a loaded key back to tuples, which are hashable; saving stores tuples as lists."""
    return tuple(map(hashable, key)) if isinstance(key, (list, tuple)) else key


def instance_of(cls: Any, fields: Mapping[str, Any]) -> Any | None:
    """Create a named tuple or dataclass without running its code; return None if the fields do not fit the class."""
    if not isinstance(cls, type):
        return None
    if issubclass(cls, tuple):
        return tuple.__new__(cls, fields.values()) if getattr(cls, "_fields", None) == tuple(fields) else None
    if not dataclasses.is_dataclass(cls):
        return None
    values = {field.name: fields.get(field.name, field.default) for field in dataclasses.fields(cls)}
    if not fields.keys() <= values.keys() or any(value is dataclasses.MISSING for value in values.values()):
        return None
    instance = object.__new__(cls)
    for name, value in values.items():
        object.__setattr__(instance, name, value)
    return instance


def import_path(definition: Any) -> str:
    """Return the import path of a class or function: ``"module:qualified.name"``."""
    return f"{definition.__module__}:{definition.__qualname__}"


def loaded_object(name: str) -> Any:
    """Return the object at an import path such as ``torch.nn:ReLU`` if its module is loaded, otherwise None."""
    module, _, path = name.partition(":")
    value: Any = sys.modules.get(module)
    for part in path.split("."):
        # A class that is defined in a function cannot be found, so the result is None.
        value = vars(value).get(part) if isinstance(value, type) or hasattr(value, "__dict__") else None
    return value


def _instance(name: str, fields: Mapping[str, Any]) -> Any:
    cls = loaded_object(name)
    instance = instance_of(_classes.get(name) if cls is None else cls, fields)
    if instance is not None:
        return instance
    raise StateError(
        f"a state contains a {name} with the fields {', '.join(fields)}, but the program has no such class; define or "
        "import it at module level before the restore, or return plain dictionaries from get_state"
    )
