"""Constructor arguments read back from JSON, which is not trusted in any way."""

from __future__ import annotations

import base64
import binascii
import enum
import functools
import importlib
import logging
import math
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from ..errors import DamagedCheckpointError, FormatVersionError, OptionError
from ..format import dtype_from_name
from .permissions import Permissions
from .recipes import ARRAY_LIMIT, MISSING

_logger = logging.getLogger("holdfast")

_DEPTH = 200
_DEVICES = ("cuda", "mps", "xpu", "hpu", "tpu", "mtia")


class Missing:
    """Stands for an argument that could not be kept.

    Attributes:
        reason: Why.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason


class ConstructorFailed(Exception):  # noqa: N818 - carries an error, and is none that anybody sees
    """Carries what a constructor of the program has raised past those who look for damage.

    Attributes:
        error: What it raised.
    """

    def __init__(self, error: Exception) -> None:
        self.error = error


def construct(kind: Any, args: Sequence[Any], kwargs: Mapping[str, Any], where: str) -> Any:
    """Makes an object of a class of the program.

    Raises:
        ConstructorFailed: The class has raised an error.
    """
    try:
        return kind(*args, **kwargs)
    except ConstructorFailed:
        raise
    except Exception as error:
        error.add_note(f"while a {kind.__qualname__} was made as {where} says")
        raise ConstructorFailed(error) from None


class ValueDecoder:
    """Makes arguments of JSON.

    Args:
        permissions: Which classes and functions may be named.
        component: Returns the component that a recipe refers to.
        nested: Makes an object from a recipe within a recipe.
        where: What the recipe belongs to, for messages.
    """

    def __init__(
        self,
        permissions: Permissions,
        component: Callable[[str], Any],
        nested: Callable[[Any], Any],
        where: str,
    ) -> None:
        self._permissions = permissions
        self._component = component
        self._nested = nested
        self._where = where
        self._missing: list[str] = []
        self._kinds: dict[str, Callable[[Any, int], Any]] = {
            "float": lambda value, _: _float(value),
            "complex": lambda value, _: complex(*(float.fromhex(part) for part in _items(value, 2))),
            "bytes": lambda value, _: base64.b64decode(value, validate=True),
            "tuple": lambda value, depth: tuple(self._all(value, depth)),
            "set": lambda value, depth: set(self._all(value, depth)),
            "frozenset": lambda value, depth: frozenset(self._all(value, depth)),
            "dict": self._dict,
            "range": lambda value, depth: range(*self._all(_items(value, 3), depth)),
            "slice": lambda value, depth: slice(*self._all(_items(value, 3), depth)),
            "path": lambda value, _: FilePath(_text(value)),
            "namespace": lambda value, depth: types.SimpleNamespace(**self._named(value, depth)),
            "component": lambda value, _: self._noted(self._component(_text(value))),
            "recipe": lambda value, _: self._nested(value),
            "enum": self._enum,
            "partial": self._partial,
            "name": lambda value, _: self._permissions.resolve(value, self._where),
            "object": self._object,
            "dtype": lambda value, _: dtype_from_name(_text(value)),
            "array": lambda value, _: _array(value),
            "key": lambda value, _: _key(value),
            "torch.dtype": lambda value, _: _torch_dtype(value),
            "device": lambda value, _: _device(value),
            "jax.dtype": lambda value, _: _jax_dtype(value),
            # Any seed will do: what has been drawn from is part of the state.
            "nnx.Rngs": lambda value, _: _framework("flax.nnx").Rngs(**{_identifier(one): 0 for one in _items(value)}),
            MISSING: lambda value, _: self._noted(Missing(_text(value))),
        }

    def decode(self, value: Any) -> Any:
        """Makes one argument; a `Missing` where it, or a part of it, was not kept.

        Raises:
            DamagedCheckpointError: It is not what a recipe holds.
            NotAllowedError: It names something that is not allowed.
        """
        self._missing.clear()
        try:
            found = self._decode(value, 0)
            return Missing(", ".join(self._missing)) if self._missing else found
        except (ValueError, TypeError, KeyError, OverflowError, binascii.Error, RecursionError) as error:
            if isinstance(error, DamagedCheckpointError | FormatVersionError | OptionError):
                raise
            raise DamagedCheckpointError(
                f"{self._where}: the recipe holds {value!r:.120}, which makes no sense: {error!r:.200}"
            ) from error

    def _decode(self, value: Any, depth: int) -> Any:
        if depth > _DEPTH:
            raise ValueError("it is nested too deeply")
        if isinstance(value, list):
            return self._all(value, depth)
        if not isinstance(value, dict):
            return value
        if len(value) != 1:
            raise ValueError("it says of a value that it is several things, or nothing")
        ((kind, content),) = value.items()
        if kind not in self._kinds:
            raise ValueError(f"values of the kind {kind!r:.80} are not known")
        return self._kinds[kind](content, depth + 1)

    def _noted(self, value: Any) -> Any:
        if isinstance(value, Missing):
            self._missing.append(value.reason)
        return value

    def _all(self, values: Any, depth: int) -> list[Any]:
        return [self._decode(item, depth + 1) for item in _items(values)]

    def _dict(self, value: Any, depth: int) -> dict[Any, Any]:
        pairs = [self._all(_items(pair, 2), depth) for pair in _items(value)]
        return dict(pairs)

    def _named(self, value: Any, depth: int) -> dict[str, Any]:
        pairs = [_items(pair, 2) for pair in _items(value)]
        return {_identifier(name): self._decode(item, depth) for name, item in pairs}

    def _enum(self, value: Any, _: int) -> Any:
        path, name = _items(value, 2)
        kind = self._permissions.resolve(path, self._where)
        if not isinstance(kind, type) or not issubclass(kind, enum.Enum):
            raise ValueError(f"{path} is no enumeration")
        return kind[_text(name)]

    def _partial(self, value: Any, depth: int) -> Any:
        function, args, keywords = _items(value, 3)
        found = self._decode(function, depth)
        if not callable(found):
            raise ValueError(f"{found!r:.80} cannot be called")
        return functools.partial(found, *self._all(args, depth), **self._named(keywords, depth))

    def _object(self, value: Any, depth: int) -> Any:
        path, fields = _items(value, 2)
        kind = self._permissions.resolve(path, self._where, made=True)
        if not isinstance(kind, type):
            raise ValueError(f"{path} is no class")
        return construct(kind, (), self._named(fields, depth), self._where)


def on_this_machine(name: str, value: Any) -> Any:
    """Returns an argument called ``device`` with a device that there is.

    Args:
        name: The name of the argument.
        value: Its value; a name of a device that this machine lacks becomes ``"cpu"``.
    """
    if name.endswith("device") and isinstance(value, str) and "torch" in sys.modules:
        return _available(value)
    return value


def _available(text: str) -> str:
    kind = text.partition(":")[0]
    if kind not in _DEVICES:
        return text
    torch: Any = _framework("torch")
    backend = getattr(torch, kind, None) if kind != "mps" else torch.backends.mps
    there = backend is not None and bool(getattr(backend, "is_available", lambda: False)())
    if there and kind == "cuda" and int(text.partition(":")[2] or 0) >= torch.cuda.device_count():
        return "cuda"
    if not there:
        _logger.warning("a constructor argument says device %r, which this machine lacks; it gets 'cpu'", text)
    return text if there else "cpu"


def _device(value: Any) -> Any:
    try:
        return _framework("torch").device(_available(_text(value)))
    except RuntimeError as error:  # which is what torch raises for a name that it does not know
        raise ValueError(str(error)) from error


def _torch_dtype(value: Any) -> Any:
    torch: Any = _framework("torch")
    found = getattr(torch, _identifier(value), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{value!r:.80} is no dtype of torch")
    return found


def _jax_dtype(value: Any) -> Any:
    name = dtype_from_name(_text(value)).name
    found = getattr(_framework("jax.numpy"), name, None)
    if found is None:
        raise ValueError(f"{name} is no dtype of jax")
    return found


def _array(value: Any) -> Any:
    library, *rest = _items(value, 4)
    array = _numpy(rest)
    if library == "torch":
        return _framework("torch").from_numpy(array)
    if library == "jax":
        return _framework("jax.numpy").asarray(array)
    return array[()] if library == "scalar" else array


def _key(value: Any) -> Any:
    impl, *rest = _items(value, 4)
    return _framework("jax.random").wrap_key_data(_framework("jax.numpy").asarray(_numpy(rest)), impl=_text(impl))


def _numpy(parts: list[Any]) -> Any:
    name, shape, data = parts
    dtype = dtype_from_name(_text(name))
    sizes = tuple(_items(shape))
    if not all(type(size) is int and size >= 0 for size in sizes) or len(sizes) > 32:
        raise ValueError(f"the shape {shape!r:.80}")
    content = base64.b64decode(_text(data), validate=True)
    if len(content) > ARRAY_LIMIT or math.prod(sizes) * dtype.itemsize != len(content):
        raise ValueError(f"an array of {dtype}{list(sizes)} in {len(content)} bytes")
    return np.frombuffer(content, dtype.newbyteorder("<")).reshape(sizes).astype(dtype)


def _framework(name: str) -> Any:
    """Imports a module of an array library, which only code of ours has named."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise OptionError(f"a constructor argument needs {name}, which cannot be imported: {error}") from error


def _items(value: Any, count: int | None = None) -> list[Any]:
    if not isinstance(value, list) or (count is not None and len(value) != count):
        raise TypeError(f"expected a list{'' if count is None else f' of {count}'}, found {value!r:.80}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, found {value!r:.80}")
    return value


def _identifier(value: Any) -> str:
    if not _text(value).isidentifier():
        raise ValueError(f"{value!r:.80} is no name")
    return str(value)


def _float(value: Any) -> float:
    if value not in ("nan", "inf", "-inf"):
        raise ValueError(f"{value!r:.80} is no number")
    return float(value)
