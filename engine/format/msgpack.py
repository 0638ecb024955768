"""Msgpack, and arrays in it as Flax defined them.

The format is https://github.com/msgpack/msgpack/blob/master/spec.md. This module reads it itself, so that a few bytes
that claim millions of elements take no memory. An array is an extension of type 1 that holds the msgpack of its shape,
the name of its dtype, and its bytes in C order:
https://flax.readthedocs.io/en/latest/api_reference/flax.serialization.html
"""

from __future__ import annotations

import importlib
import math
import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DamagedCheckpointError
from .zarr import dtype_from_name, dtype_name

ARRAY_EXTENSION = 1  # type of the extension that holds an array

_DEPTH = 200  # levels of containers
_AXES = 64  # numpy makes no array of more axes
_SINGLES = {0xC0: None, 0xC2: False, 0xC3: True}
_NUMBERS = {code: struct.Struct(f">{letter}") for code, letter in enumerate("fdBHIQbhiq", 0xCA)}
_KEYS = (str, int, bytes, type(None))

# Makes the value of an extension: takes its type, its content, and the number of containers around it.
Extension = Callable[[int, bytes, int], Any]


def decode_msgpack(
    content: bytes,
    *,
    extension: Extension | None = None,
    mapping: Callable[[dict[Any, Any]], Any] | None = None,
    depth: int = 0,
) -> Any:
    """Read one value; ``mapping`` may replace each dictionary by the value that it represents."""
    reader = _Reader(content, extension, mapping)
    try:
        value = reader.value(depth)
    except RecursionError as error:
        raise DamagedCheckpointError("it is nested too deeply") from error
    if reader.position != len(content):
        raise DamagedCheckpointError(f"{len(content) - reader.position} bytes follow the end of its value")
    return value


def encode_arrays(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Write a dictionary of arrays, as ``flax.serialization.msgpack_restore`` reads it."""
    msgpack: Any = importlib.import_module("msgpack")
    packed = {}
    for name, array in arrays.items():
        little = array.astype(array.dtype.newbyteorder("<"), copy=False) if array.dtype.isnative else array
        content = (array.shape, dtype_name(array.dtype), little.tobytes())
        packed[name] = msgpack.ExtType(ARRAY_EXTENSION, msgpack.packb(content))
    return bytes(msgpack.packb(packed))


def decode_array(content: bytes) -> NDArray[Any]:
    """Read the content of an array's extension; the result is read-only."""
    parts = decode_msgpack(content)
    if not isinstance(parts, list) or len(parts) != 3:
        raise DamagedCheckpointError("an array is damaged: expected its shape, dtype and bytes")
    shape, name, data = parts
    dtype = dtype_from_name(name.decode("ascii", "replace") if isinstance(name, bytes) else name)
    array = array_of(shape, dtype.newbyteorder("<") if dtype.isnative else dtype, data)
    return array.astype(dtype, copy=False)


def array_of(shape: Any, dtype: np.dtype[Any], data: Any) -> NDArray[Any]:
    """Return a view of ``data`` as an array; raise DamagedCheckpointError if dtype, shape and data do not fit."""
    if not isinstance(shape, list) or len(shape) > _AXES or not all(type(n) is int and n >= 0 for n in shape):
        raise DamagedCheckpointError(f"an array is damaged: it has the shape {shape!r:.80}")
    expected = math.prod(shape) * dtype.itemsize
    if not isinstance(data, bytes) or len(data) != expected:
        found = f"{len(data)} bytes" if isinstance(data, bytes) else type(data).__name__
        raise DamagedCheckpointError(f"an array of {dtype}{shape} is damaged: expected {expected} bytes, found {found}")
    try:
        return np.ndarray(tuple(shape), dtype, data)
    except ValueError as error:  # more elements than numpy can count, of no bytes
        raise DamagedCheckpointError(f"an array of {dtype}{shape} is damaged: {error}") from error


class _Reader:
    """Reads values; lists and dictionaries grow as their elements are read."""

    def __init__(
        self, data: bytes, extension: Extension | None, mapping: Callable[[dict[Any, Any]], Any] | None
    ) -> None:
        self._data = data
        self._extension = extension
        self._mapping = mapping
        self.position = 0

    def value(self, depth: int) -> Any:
        if depth > _DEPTH:
            raise DamagedCheckpointError(f"it is nested too deeply: more than {_DEPTH} levels")
        position = self.position
        if position >= len(self._data):
            raise self._cut_off(position + 1)
        code = self._data[position]
        self.position = position + 1
        if code <= 0x7F:
            return code
        if 0xA0 <= code <= 0xBF:
            return self._text(code & 0x1F)
        if 0xC4 <= code <= 0xC6:
            return self._take(self._size(1 << (code - 0xC4)))
        if code >= 0xE0:
            return code - 0x100
        if code <= 0x8F:
            return self._map(code & 0x0F, depth)
        if code <= 0x9F:
            return self._list(code & 0x0F, depth)
        if code in _SINGLES:
            return _SINGLES[code]
        if code in _NUMBERS:
            number = _NUMBERS[code]
            return number.unpack(self._take(number.size))[0]
        if 0xD9 <= code <= 0xDB:
            return self._text(self._size(1 << (code - 0xD9)))
        if 0xDC <= code <= 0xDD:
            return self._list(self._size(2 << (code - 0xDC)), depth)
        if 0xDE <= code <= 0xDF:
            return self._map(self._size(2 << (code - 0xDE)), depth)
        if self._extension is not None and (0xC7 <= code <= 0xC9 or 0xD4 <= code <= 0xD8):
            size = self._size(1 << (code - 0xC7)) if code <= 0xC9 else 1 << (code - 0xD4)
            kind = int.from_bytes(self._take(1), signed=True)
            return self._extension(kind, self._take(size), depth + 1)
        raise DamagedCheckpointError(f"it holds the unknown type {code:#04x} at byte {self.position - 1}")

    def _take(self, count: int) -> bytes:
        start = self.position
        self.position = end = start + count
        if end > len(self._data):
            raise self._cut_off(end)
        return self._data[start:end]

    def _cut_off(self, expected: int) -> DamagedCheckpointError:
        return DamagedCheckpointError(f"it is cut off: expected {expected} bytes, found {len(self._data)}")

    def _size(self, width: int) -> int:
        return int.from_bytes(self._take(width))

    def _text(self, size: int) -> str:
        try:
            return str(self._take(size), "utf-8")
        except UnicodeDecodeError as error:
            raise DamagedCheckpointError(f"it holds text that is not UTF-8: {error}") from error

    def _list(self, size: int, depth: int) -> list[Any]:
        return [self.value(depth + 1) for _ in range(size)]

    def _map(self, size: int, depth: int) -> Any:
        found: dict[Any, Any] = {}
        for _ in range(size):
            key = self.value(depth + 1)
            if not isinstance(key, _KEYS) or key in found:
                raise DamagedCheckpointError(f"a dictionary has the key {key!r:.80} twice, or it is not a key")
            found[key] = self.value(depth + 1)
        return found if self._mapping is None else self._mapping(found)
