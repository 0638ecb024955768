"""States in msgpack as RLlib writes them: msgpack (https://github.com/msgpack/msgpack/blob/master/spec.md) in which
numpy's arrays are maps, as the package msgpack-numpy defines them: ``{b"nd": True, b"type": "<f4", b"shape": [2],
b"data": ...}``.

Read by hand, so that a few bytes cannot claim memory for millions of elements.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import DamagedCheckpointError
from ..tree.structure import MAX_DEPTH

_NUMBERS: dict[int, struct.Struct] = {
    0xCA: struct.Struct(">f"),
    0xCB: struct.Struct(">d"),
    0xCC: struct.Struct(">B"),
    0xCD: struct.Struct(">H"),
    0xCE: struct.Struct(">I"),
    0xCF: struct.Struct(">Q"),
    0xD0: struct.Struct(">b"),
    0xD1: struct.Struct(">h"),
    0xD2: struct.Struct(">i"),
    0xD3: struct.Struct(">q"),
}
_SIZES = {1: struct.Struct(">B"), 2: struct.Struct(">H"), 4: struct.Struct(">I")}
_SINGLES = {0xC0: None, 0xC2: False, 0xC3: True}
_AXES = 32
_DTYPE = re.compile(r"[<>|=]?[biufcSU][0-9]{1,9}|\?")


def decode_state(content: bytes) -> Any:
    """Reads a state.

    Args:
        content: The file's content, not trusted in any way.

    Returns:
        Plain containers (lists in the place of tuples), plain values, arrays and scalars of numpy.

    Raises:
        DamagedCheckpointError: It is no such state.
    """
    reader = _Reader(memoryview(content))
    value = reader.value(0)
    if reader.position != len(content):
        raise DamagedCheckpointError(f"{len(content) - reader.position} bytes follow the state")
    return value


class _Reader:
    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.position = 0

    def value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise DamagedCheckpointError("it is nested too deeply")
        code = self._take(1)[0]
        if code <= 0x7F:
            return code
        if code >= 0xE0:
            return code - 0x100
        if code <= 0x8F:
            return self._map(code & 0x0F, depth)
        if code <= 0x9F:
            return self._list(code & 0x0F, depth)
        if code <= 0xBF:
            return self._text(code & 0x1F)
        if code in _SINGLES:
            return _SINGLES[code]
        if code in _NUMBERS:
            form = _NUMBERS[code]
            return form.unpack(self._take(form.size))[0]
        sized: dict[int, tuple[int, Callable[[int], Any]]] = {
            **{0xC4 + number: (1 << number, self._bytes) for number in range(3)},
            **{0xD9 + number: (1 << number, self._text) for number in range(3)},
            **{0xDC + number: (2 << number, lambda size: self._list(size, depth)) for number in range(2)},
            **{0xDE + number: (2 << number, lambda size: self._map(size, depth)) for number in range(2)},
        }
        if code not in sized:
            raise DamagedCheckpointError(f"it has the type {code:#04x} at byte {self.position - 1}, which is not known")
        width, action = sized[code]
        size: int = _SIZES[width].unpack(self._take(width))[0]
        return action(size)

    def _take(self, count: int) -> memoryview:
        if count > len(self._data) - self.position:
            raise DamagedCheckpointError("it is cut off")
        self.position += count
        return self._data[self.position - count : self.position]

    def _bytes(self, size: int) -> bytes:
        return bytes(self._take(size))

    def _text(self, size: int) -> str:
        try:
            return str(self._take(size), "utf-8")
        except UnicodeDecodeError as error:
            raise DamagedCheckpointError(f"text is no UTF-8: {error}") from error

    def _list(self, size: int, depth: int) -> list[Any]:
        return [self.value(depth + 1) for _ in range(size)]

    def _map(self, size: int, depth: int) -> Any:
        found: dict[Any, Any] = {}
        for _ in range(size):
            key = self.value(depth + 1)
            if not isinstance(key, str | int | bytes) or key in found:
                raise DamagedCheckpointError(f"a map has the key {key!r:.80}, which is twice there or no key")
            found[key] = self.value(depth + 1)
        if b"nd" in found:
            return _array(found)
        if b"complex" in found:
            return _complex(found)
        return found


def _array(found: dict[Any, Any]) -> Any:
    """Makes the array or scalar of numpy that a map describes."""
    name, data, shape = found.get(b"type"), found.get(b"data"), found.get(b"shape", [])
    name = name.decode("ascii", "replace") if isinstance(name, bytes) else name
    if found.get(b"kind", b"") not in (b"", "") or not isinstance(name, str) or not _DTYPE.fullmatch(name):
        raise DamagedCheckpointError(f"an array of numpy has the type {name!r:.80}, which is no plain data")
    try:
        dtype = np.dtype(name)
    except (TypeError, ValueError) as error:
        raise DamagedCheckpointError(f"an array of numpy has the type {name!r:.80}") from error
    if not dtype.itemsize or not isinstance(data, bytes):
        raise DamagedCheckpointError(f"an array of numpy has the type {name!r:.80}, or no elements")
    if not isinstance(shape, list) or len(shape) > _AXES or not all(type(one) is int and one >= 0 for one in shape):
        raise DamagedCheckpointError(f"an array of numpy has the shape {shape!r:.80}")
    if math.prod(shape) * dtype.itemsize != len(data):
        raise DamagedCheckpointError(f"an array of {dtype}{shape} has {len(data)} bytes")
    array = np.frombuffer(data, dtype)
    return array.reshape(shape).copy() if found[b"nd"] is True else array[0]


def _complex(found: dict[Any, Any]) -> complex:
    try:
        return complex(found[b"data"])
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedCheckpointError(f"a complex number makes no sense: {error!r}") from error
