"""Encode constructor arguments as JSON (a constructor spec), and decode specs without trusting their contents.

JSON scalars and lists stand for themselves. Every JSON object has a single key that names the kind of the value, as in
``{"tuple": [...]}`` or ``{"component": "learner/p0"}``. A spec never contains Python code, pickled or otherwise.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import functools
import importlib
import logging
import math
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path as FilePath
from pathlib import PurePath
from typing import Any

import numpy as np

from ...engine.errors import DamagedCheckpointError, FormatVersionError, OptionError
from ...engine.format import dtype_from_name, dtype_name
from ...engine.pytree import (
    NUMBERS,
    PLAIN,
    import_path,
    is_jax_array,
    is_key,
    is_torch_tensor,
    loaded,
    pack_numbers,
    unpack_numbers,
)
from ..graph import Untracked, as_list
from .permissions import Permissions

_logger = logging.getLogger("holdfast")

_ARRAY_LIMIT = 1 << 20  # maximum size in bytes of an array argument that is saved
_WRITTEN_DEPTH = 50
_READ_DEPTH = 200
# Tensor dtypes that numpy also supports.
_TORCH_DTYPES = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool")
_MISSING = "missing"  # kind of an argument that could not be saved
_NUMBERS = "numbers"  # kind of a long sequence of numbers
_NESTED = "recipe"  # kind of an object with its own spec

# Returns the reference to a component in the same tree, or None for any other object.
Reference = Callable[[Any], str | None]
# Returns the spec of an object with known constructor arguments, or None for any other object.
Nested = Callable[[Any], "dict[str, Any] | None"]


class CtorArguments(Untracked):
    """An object's constructor arguments, stored in an untracked attribute; all instances compare equal."""

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        super().__init__(None)
        self.args = tuple(map(_kept, args))
        self.kwargs = {name: _kept(value) for name, value in kwargs.items()}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CtorArguments)  # equal, because flax recompiles functions if static attributes differ

    def __hash__(self) -> int:
        return hash(CtorArguments)


def _kept(value: Any, depth: int = 0) -> Any:
    """Return an argument with its plain containers copied, because the constructed object may modify the original."""
    if depth > _WRITTEN_DEPTH:  # too deep to be encoded
        return value
    if type(value) is dict:
        return {key: _kept(item, depth + 1) for key, item in value.items()}
    if type(value) in (list, tuple):
        plain = set(map(type, value)).issubset(PLAIN)  # a long list of numbers is copied in one step
        return value[:] if plain else type(value)(_kept(item, depth + 1) for item in value)
    return set(value) if type(value) is set else value


class NotData(TypeError):  # noqa: N818 - becomes a note in the spec
    """Raised for an argument that cannot be saved; the message gives the reason."""


def encode_spec(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], reference: Reference, nested: Nested
) -> tuple[dict[str, Any], list[str]]:
    """Return the arguments as JSON, and a description of each argument that cannot be saved."""
    problems: list[str] = []

    def encode(value: Any, name: str) -> Any:
        try:
            return _encode(value, reference, nested, 0)
        except NotData as problem:
            problems.append(f"{name} {problem}")
            return {_MISSING: str(problem)}

    encoded = [encode(value, f"argument {index}") for index, value in enumerate(args)]
    return {"args": encoded, "kwargs": {name: encode(value, repr(name)) for name, value in kwargs.items()}}, problems


def _encode(value: Any, reference: Reference, nested: Nested, depth: int) -> Any:
    if depth > _WRITTEN_DEPTH:
        raise NotData("is nested too deeply, or contains itself")
    within = functools.partial(_encode, reference=reference, nested=nested, depth=depth + 1)
    cls = type(value)

    def pairs(entries: Mapping[str, Any]) -> list[Any]:
        return [[name, within(item)] for name, item in entries.items()]

    if cls is str and any("\ud800" <= character <= "\udfff" for character in value):
        raise NotData("is text with lone surrogates")
    if cls is int and value.bit_length() > 10_000:
        raise NotData("is an integer of more than 10000 bits")
    if value is None or cls in (bool, int, str):
        return value
    if cls is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if cls is complex:
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if cls is bytes:
        return {"bytes": base64.b64encode(value).decode("ascii")}
    if cls in (list, tuple) and (packed := pack_numbers(value)) is not None:
        leaf = packed.describe()
        parts = _array(np.asarray(leaf.pieces[0].array), limit=None)
        return {_NUMBERS: [leaf.details["sequence"], leaf.details["elements"], *parts]}
    if cls is list:
        return list(map(within, value))
    if cls in (tuple, set, frozenset):
        elements = list(map(within, value))
        return {cls.__name__: elements if cls is tuple else sorted(elements, key=repr)}
    if isinstance(value, Mapping) and (cls is dict or cls.__module__ == "collections"):
        return {"dict": [[within(key), within(item)] for key, item in value.items()]}
    if cls in (range, slice):
        return {cls.__name__: list(map(within, (value.start, value.stop, value.step)))}
    if isinstance(value, PurePath):
        return {"path": str(value)}
    if isinstance(value, types.SimpleNamespace):
        return {"namespace": pairs(vars(value))}
    if (name := reference(value)) is not None:
        return {"component": name}
    if (spec := nested(value)) is not None:
        return {_NESTED: spec}
    if isinstance(value, enum.Enum):
        return {"enum": [import_path(cls), value.name]}
    if (of_framework := _encode_of_framework(value)) is not None:
        return of_framework
    if isinstance(value, functools.partial):
        return {"partial": [within(value.func), list(map(within, value.args)), pairs(value.keywords)]}
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType | np.ufunc):
        return {"name": _named(value)}
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        return {"object": [_named(cls), pairs(fields)]}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {"object": [_named(cls), pairs(dict(zip(value._fields, value, strict=True)))]}
    raise NotData(f"is a {cls.__module__}.{cls.__qualname__}, which a constructor spec cannot hold")


def _named(target: Any) -> str:
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        raise NotData(f"is {target!r:.80}, which has no import path")
    if "<lambda>" in name:
        raise NotData("is a lambda, which has no name; use a function of a module")
    if "<locals>" in name and not isinstance(target, type):
        raise NotData(f"is the function {name}, which cannot be imported; define it in a module")
    return f"{module}:{name}"


def _encode_of_framework(value: Any) -> dict[str, Any] | None:
    """Encode an array, dtype, device or random stream of an array library; return None for any other object."""
    if isinstance(value, np.dtype):
        return {"dtype": dtype_name(value)}
    if isinstance(value, np.ndarray | np.generic):
        return {"array": ["scalar" if isinstance(value, np.generic) else "numpy", *_array(np.asarray(value))]}
    torch: Any = loaded("torch")
    if torch is not None and isinstance(value, torch.dtype):
        return {"torch.dtype": str(value).removeprefix("torch.")}
    if torch is not None and isinstance(value, torch.device):
        return {"device": str(value)}
    if is_torch_tensor(value):
        plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
        is_known = str(value.dtype).removeprefix("torch.") in _TORCH_DTYPES
        if not (plain and is_known) or value.numel() * value.element_size() > _ARRAY_LIMIT:
            raise NotData(f"is a {type(value).__name__} of {value.dtype}{list(value.shape)}; it belongs in the state")
        return {"array": ["torch", *_array(value.detach().cpu().numpy())]}
    if is_jax_array(value):
        if not value.is_fully_addressable or value.size * value.dtype.itemsize > _ARRAY_LIMIT:
            raise NotData(f"is a jax array of {value.dtype}{list(value.shape)}; it belongs in the state")
        if is_key(value):
            jax: Any = loaded("jax")
            return {"key": [str(jax.random.key_impl(value)), *_array(np.asarray(jax.random.key_data(value)))]}
        return {"array": ["jax", *_array(np.asarray(value))]}
    if type(value).__module__ == "jax._src.numpy.scalar_types" and isinstance(value.dtype, np.dtype):
        return {"jax.dtype": value.dtype.name}
    nnx = loaded("flax.nnx")
    if nnx is not None and isinstance(value, nnx.Rngs):
        return {"nnx.Rngs": [name for name in vars(value) if not name.startswith("_")]}
    return None


def _array(array: Any, limit: int | None = _ARRAY_LIMIT) -> list[Any]:
    if limit is not None and array.nbytes > limit:
        raise NotData(f"is an array of {array.nbytes} bytes; it belongs in the state")
    if array.dtype.hasobject or array.dtype.names is not None:
        raise NotData(f"is an array of {array.dtype}")
    little = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False))
    return [dtype_name(array.dtype), list(array.shape), base64.b64encode(little.tobytes()).decode("ascii")]


_DEVICES = ("cuda", "mps", "xpu", "hpu", "tpu", "mtia")


@dataclasses.dataclass
class Missing:
    """A placeholder for an argument that could not be saved."""

    reason: str


class ConstructorFailed(Exception):  # noqa: N818 - carries an error, and is never raised to the user
    """Wraps an error raised by a constructor, so that it is not reported as a damaged checkpoint."""


def construct(cls: Any, args: Sequence[Any], kwargs: Mapping[str, Any], where: str) -> Any:
    try:
        return cls(*args, **kwargs)
    except ConstructorFailed:
        raise
    except Exception as error:
        error.add_note(f"raised by the constructor of {cls.__qualname__}, called with the arguments in {where}")
        raise ConstructorFailed(error) from None


@dataclasses.dataclass(eq=False)
class SpecDecoder:
    """Decodes constructor arguments; callbacks look up components by path and construct objects from nested specs."""

    permissions: Permissions
    component: Callable[[str], Any]
    nested: Callable[[Any], Any]
    where: str

    def __post_init__(self) -> None:
        self._missing: list[str] = []
        self._kinds: dict[str, Callable[[Any, int], Any]] = {
            "float": lambda value, _: {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[value],
            "complex": lambda value, _: complex(*(float.fromhex(part) for part in as_list(value, 2))),
            "bytes": lambda value, _: base64.b64decode(value, validate=True),
            _NUMBERS: lambda value, _: _sequence(*as_list(value, 5)),
            "tuple": lambda value, depth: tuple(self._all(value, depth)),
            "set": lambda value, depth: set(self._all(value, depth)),
            "frozenset": lambda value, depth: frozenset(self._all(value, depth)),
            "dict": lambda value, depth: dict(self._all(pair, depth, 2) for pair in as_list(value)),
            "range": lambda value, depth: range(*self._all(value, depth, 3)),
            "slice": lambda value, depth: slice(*self._all(value, depth, 3)),
            "path": lambda value, _: FilePath(as_text(value)),
            "namespace": lambda value, depth: types.SimpleNamespace(**self._keywords(value, depth)),
            "component": lambda value, _: self._noted(self.component(as_text(value))),
            _NESTED: lambda value, _: self.nested(value),
            "enum": self._enum,
            "partial": self._partial,
            "name": lambda value, _: self.permissions.resolve(value, self.where),
            "object": self._object,
            "dtype": lambda value, _: dtype_from_name(as_text(value)),
            "array": lambda value, _: _array_of(*as_list(value, 4)),
            "key": lambda value, _: _key(*as_list(value, 4)),
            "torch.dtype": lambda value, _: _dtype("torch", _identifier(value)),
            "device": lambda value, _: _device(value),
            "jax.dtype": lambda value, _: _dtype("jax.numpy", dtype_from_name(as_text(value)).name),
            # any seed works, because the streams are restored with the state
            "nnx.Rngs": lambda value, _: _framework("flax.nnx").Rngs(**{_identifier(key): 0 for key in as_list(value)}),
            _MISSING: lambda value, _: self._noted(Missing(as_text(value))),
        }

    def decode(self, value: Any) -> Any:
        """Decode an argument; return a `Missing` if any part of it was not saved."""
        self._missing.clear()
        try:
            argument = self._decode(value, 0)
            return Missing(", ".join(self._missing)) if self._missing else argument
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            if isinstance(error, DamagedCheckpointError | FormatVersionError | OptionError):
                raise
            raise DamagedCheckpointError(
                f"{self.where}: the constructor spec holds {value!r:.120}, which cannot be decoded: {error!r:.200}"
            ) from error

    def _decode(self, value: Any, depth: int) -> Any:
        if depth > _READ_DEPTH:
            raise ValueError("it is nested too deeply")
        if isinstance(value, list):
            return self._all(value, depth)
        if not isinstance(value, dict):
            return value
        if len(value) != 1:
            raise ValueError("a JSON object must have exactly one key")
        ((kind, content),) = value.items()
        if kind not in self._kinds:
            raise ValueError(f"unknown kind {kind!r:.80}")
        return self._kinds[kind](content, depth + 1)

    def _noted(self, value: Any) -> Any:
        if isinstance(value, Missing):
            self._missing.append(value.reason)
        return value

    def _all(self, values: Any, depth: int, count: int | None = None) -> list[Any]:
        return [self._decode(item, depth + 1) for item in as_list(values, count)]

    def _keywords(self, value: Any, depth: int) -> dict[str, Any]:
        pairs = [as_list(pair, 2) for pair in as_list(value)]
        return {_identifier(name): self._decode(item, depth) for name, item in pairs}

    def _enum(self, value: Any, _: int) -> Any:
        path, name = as_list(value, 2)
        cls = self.permissions.resolve(path, self.where)
        if not isinstance(cls, type) or not issubclass(cls, enum.Enum):
            raise ValueError(f"{path} is not an enumeration")
        return cls[as_text(name)]

    def _partial(self, value: Any, depth: int) -> Any:
        function, args, keywords = as_list(value, 3)
        target = self._decode(function, depth)
        if not callable(target):
            raise ValueError(f"{target!r:.80} cannot be called")
        return functools.partial(target, *self._all(args, depth), **self._keywords(keywords, depth))

    def _object(self, value: Any, depth: int) -> Any:
        path, fields = as_list(value, 2)
        cls = self.permissions.resolve(path, self.where, made=True)
        if not isinstance(cls, type):
            raise ValueError(f"{path} is not a class")
        return construct(cls, (), self._keywords(fields, depth), self.where)


def available(text: str) -> str:
    """Return a torch device name unchanged if this machine has the device; otherwise, an available device."""
    device = text.partition(":")[0]
    if device not in _DEVICES:
        return text
    torch: Any = _framework("torch")
    backend = getattr(torch, device, None) if device != "mps" else torch.backends.mps
    there = backend is not None and bool(getattr(backend, "is_available", lambda: False)())
    if there and device == "cuda" and int(text.partition(":")[2] or 0) >= torch.cuda.device_count():
        return "cuda"
    if not there:
        _logger.warning("a constructor argument names the device %r, which this machine lacks; using 'cpu'", text)
    return text if there else "cpu"


def _device(value: Any) -> Any:
    try:
        return _framework("torch").device(available(as_text(value)))
    except RuntimeError as error:  # raised by torch for an unknown device
        raise ValueError(str(error)) from error


def _dtype(library: str, name: str) -> Any:
    dtype = getattr(_framework(library), name, None)
    if dtype is None or (library == "torch" and not isinstance(dtype, _framework("torch").dtype)):
        raise ValueError(f"{name!r:.80} is not a dtype of {library}")
    return dtype


def _array_of(library: Any, *parts: Any) -> Any:
    array = _numpy(*parts)
    if library == "torch":
        return _framework("torch").from_numpy(array)
    if library == "jax":
        return _framework("jax.numpy").asarray(array)
    return array[()] if library == "scalar" else array


def _sequence(sequence: Any, elements: Any, *parts: Any) -> Any:
    details = {"kind": NUMBERS, "sequence": as_text(sequence), "elements": as_text(elements)}
    return unpack_numbers(details, _numpy(*parts, limit=None), "of the constructor spec")


def _key(impl: Any, *parts: Any) -> Any:
    return _framework("jax.random").wrap_key_data(_framework("jax.numpy").asarray(_numpy(*parts)), impl=as_text(impl))


def _numpy(name: Any, shape: Any, data: Any, *, limit: int | None = _ARRAY_LIMIT) -> Any:
    dtype = dtype_from_name(as_text(name))
    sizes = tuple(as_list(shape))
    if not all(type(size) is int and size >= 0 for size in sizes) or len(sizes) > 32:
        raise ValueError(f"the shape {shape!r:.80} is not valid")
    content = base64.b64decode(as_text(data), validate=True)
    if (limit is not None and len(content) > limit) or math.prod(sizes) * dtype.itemsize != len(content):
        raise ValueError(f"{len(content)} bytes are not an array of {dtype}{list(sizes)}")
    return np.frombuffer(content, dtype.newbyteorder("<")).reshape(sizes).astype(dtype)


def _framework(name: str) -> Any:
    """Import a module of an array library. This is safe, because the name never comes from a checkpoint."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise OptionError(f"a constructor argument needs {name}, which cannot be imported: {error}") from error


def as_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, found {value!r:.80}")
    return value


def _identifier(value: Any) -> str:
    if not as_text(value).isidentifier():
        raise ValueError(f"{value!r:.80} is not an identifier")
    return str(value)


def check_spec(value: Any) -> dict[str, Any]:
    """Return a value if it is a spec with positional and keyword arguments; otherwise, raise TypeError."""
    if not (isinstance(value, dict) and isinstance(value.get("args"), list) and isinstance(value.get("kwargs"), dict)):
        raise TypeError(f"expected a constructor spec, found {value!r:.80}")
    return value
