"""Constructor arguments as data: how they are kept, and how they are written as JSON.

JSON's own values stand for themselves; every object of JSON has one key, which says what it is: ``{"tuple": [...]}``,
``{"dict": [[key, value], ...]}``, ``{"component": "learner/p0"}``. Nothing here is Python code, pickled or otherwise.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import functools
import math
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

import numpy as np

from ..format import dtype_name
from ..graph import Untracked
from ..tree.frameworks import is_jax_array, is_torch_tensor
from .permissions import import_path

ARRAY_LIMIT = 1 << 20
"""Bytes of the largest array that is kept as a constructor argument."""
MISSING = "missing"
"""Marks an argument that could not be kept; whoever makes the object has to give it."""
_DEPTH = 50

Reference = Callable[[Any], str | None]
"""Returns how a recipe refers to an object that is a component of the same tree, or None if it is none."""
Nested = Callable[[Any], "dict[str, Any] | None"]
"""Returns the recipe of an object that knows how it was made, or None."""


class CtorArguments(Untracked):
    """The arguments an object was made with; to all who compare or track attributes, it is nothing.

    Args:
        args: Positional arguments.
        kwargs: Keyword arguments.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        super().__init__(None)
        self.args = tuple(map(_kept, args))
        self.kwargs = {name: _kept(value) for name, value in kwargs.items()}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CtorArguments)  # flax compares static attributes of modules, to compile once

    def __hash__(self) -> int:
        return hash(CtorArguments)


def _kept(value: Any) -> Any:
    """Returns plain containers as they are now, as the object may change them."""
    if type(value) is dict:
        return {key: _kept(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_kept, value))
    return set(value) if type(value) is set else value


class NotData(TypeError):  # noqa: N818 - becomes a note in the recipe
    """An argument that cannot be kept; its text says why."""


def encode_recipe(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], reference: Reference, nested: Nested
) -> tuple[dict[str, Any], list[str]]:
    """Writes constructor arguments as JSON.

    Args:
        args: Positional arguments.
        kwargs: Keyword arguments.
        reference: How to refer to components of the same tree.
        nested: The recipes of objects that know how they were made.

    Returns:
        The recipe, and one line for each argument that could not be kept.
    """
    problems: list[str] = []

    def one(value: Any, name: str) -> Any:
        try:
            return _encode(value, reference, nested, 0)
        except NotData as problem:
            problems.append(f"{name} {problem}")
            return {MISSING: str(problem)}

    encoded = [one(value, f"argument {index}") for index, value in enumerate(args)]
    return {"args": encoded, "kwargs": {name: one(value, repr(name)) for name, value in kwargs.items()}}, problems


def _encode(value: Any, reference: Reference, nested: Nested, depth: int) -> Any:
    if depth > _DEPTH:
        raise NotData("is nested too deeply, or holds itself")
    within = functools.partial(_encode, reference=reference, nested=nested, depth=depth + 1)
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return _plain(value)
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if kind is complex:
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode("ascii")}
    if kind is list:
        return [within(item) for item in value]
    if kind is tuple:
        return {"tuple": [within(item) for item in value]}
    if kind in (set, frozenset):
        return {kind.__name__: sorted((within(item) for item in value), key=repr)}
    if isinstance(value, Mapping) and (kind is dict or kind.__module__ == "collections"):
        return {"dict": [[within(key), within(item)] for key, item in value.items()]}
    if kind in (range, slice):
        return {kind.__name__: [within(value.start), within(value.stop), within(value.step)]}
    if isinstance(value, PurePath):
        return {"path": str(value)}
    if isinstance(value, types.SimpleNamespace):
        return {"namespace": [[name, within(item)] for name, item in vars(value).items()]}
    return _encode_object(value, reference, nested, within)


def _plain(value: Any) -> Any:
    if isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
        raise NotData("is text with lone surrogates")
    if isinstance(value, int) and value.bit_length() > 10_000:
        raise NotData("is an integer of more than 10000 bits")
    return value


def _encode_object(value: Any, reference: Reference, nested: Nested, within: Callable[[Any], Any]) -> Any:
    name = reference(value)
    if name is not None:
        return {"component": name}
    recipe = nested(value)
    if recipe is not None:
        return {"recipe": recipe}
    if isinstance(value, enum.Enum):
        return {"enum": [import_path(type(value)), value.name]}
    of_framework = _encode_of_framework(value)
    if of_framework is not None:
        return of_framework
    if isinstance(value, functools.partial):
        keywords = [[key, within(item)] for key, item in value.keywords.items()]
        return {"partial": [within(value.func), [within(item) for item in value.args], keywords]}
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType | np.ufunc):
        return {"name": _named(value)}
    if dataclasses.is_dataclass(value):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        return {"object": [_named(type(value)), [[one, within(getattr(value, one))] for one in fields]]}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        pairs = zip(value._fields, value, strict=True)
        return {"object": [_named(type(value)), [[one, within(item)] for one, item in pairs]]}
    raise NotData(f"is a {type(value).__module__}.{type(value).__qualname__}, which a recipe cannot hold")


def _named(thing: Any) -> str:
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        raise NotData(f"is {thing!r:.80}, which has no import path")
    if "<lambda>" in name:
        raise NotData("is a lambda, which has no name; use a function of a module")
    if "<locals>" in name and not isinstance(thing, type):
        raise NotData(f"is the function {name}, which cannot be imported; define it in a module")
    return f"{module}:{name}"


def _encode_of_framework(value: Any) -> dict[str, Any] | None:
    """Writes what belongs to an array library: arrays, element types, devices, streams of random numbers."""
    if isinstance(value, np.dtype):
        return {"dtype": dtype_name(value)}
    if isinstance(value, np.ndarray | np.generic):
        return {"array": ["scalar" if isinstance(value, np.generic) else "numpy", *_array(np.asarray(value))]}
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.dtype):
        return {"torch.dtype": str(value).removeprefix("torch.")}
    if torch is not None and isinstance(value, torch.device):
        return {"device": str(value)}
    if is_torch_tensor(value):
        if value.numel() * value.element_size() > ARRAY_LIMIT or not _is_plain_tensor(value):
            raise NotData(f"is a {type(value).__name__} of {value.dtype}{list(value.shape)}; those belong to the state")
        return {"array": ["torch", *_array(value.detach().cpu().numpy())]}
    if is_jax_array(value):
        jax: Any = sys.modules["jax"]
        if not value.is_fully_addressable or value.nbytes > ARRAY_LIMIT:
            raise NotData(f"is an array of {value.dtype}{list(value.shape)} of jax; those belong to the state")
        if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
            return {"key": [str(jax.random.key_impl(value)), *_array(np.asarray(jax.random.key_data(value)))]}
        return {"array": ["jax", *_array(np.asarray(value))]}
    if type(value).__module__ == "jax._src.numpy.scalar_types" and isinstance(value.dtype, np.dtype):
        return {"jax.dtype": value.dtype.name}
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(value, nnx.Rngs):
        return {"nnx.Rngs": [name for name in vars(value) if not name.startswith("_")]}
    return None


_PLAIN_TENSORS = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool")


def _is_plain_tensor(value: Any) -> bool:
    """Whether a tensor has one place in memory, and elements that numpy has."""
    torch: Any = sys.modules["torch"]
    plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
    return plain and str(value.dtype).removeprefix("torch.") in _PLAIN_TENSORS


def _array(array: Any) -> list[Any]:
    if array.nbytes > ARRAY_LIMIT:
        raise NotData(f"is an array of {array.nbytes} bytes; those belong to the state")
    if array.dtype.hasobject or array.dtype.names is not None:
        raise NotData(f"is an array of {array.dtype}")
    little = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False))
    return [dtype_name(array.dtype), list(array.shape), base64.b64encode(little.tobytes()).decode("ascii")]
