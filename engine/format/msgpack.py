"""Msgpack encoding and decoding, including arrays in the format defined by Flax.

Msgpack is specified at https://github.com/msgpack/msgpack/blob/master/spec.md. An array is an extension of type 1. It
contains the msgpack encoding of the array's shape, the name of its dtype, and its bytes in C order:
https://flax.readthedocs.io/en/latest/api_reference/flax.serialization.html
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import DamagedCheckpointError
from .zarr import dtype_from_name, dtype_name

ARRAY_EXTENSION = 1  # msgpack extension type of arrays

_DEPTH = 200  # maximum nesting depth of containers
_PART = 1 << 20  # bytes passed to the msgpack library at a time
_AXES = 64  # maximum number of axes of a numpy array
_LISTS = frozenset({*range(0x90, 0xA0), 0xDC, 0xDD})  # first bytes of encoded lists
_DICTIONARIES = frozenset({*range(0x80, 0x90), 0xDE, 0xDF})
_KEYS = (str, int, bytes, type(None))

# A function that receives the type, contents and nesting depth of an extension, and returns the decoded value.
Extension = Callable[[int, bytes, int], Any]
Mapper = Callable[[dict[Any, Any]], Any]


def decode_msgpack(
    content: bytes, *, extension: Extension | None = None, mapping: Mapper | None = None, depth: int = 0
) -> Any:
    """Decode a single value. ``mapping`` converts each dictionary to the value that it represents."""
    return _Reader(content, extension, mapping).whole(depth)


def encode_arrays(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Encode a dictionary of arrays in the format that ``flax.serialization.msgpack_restore`` reads."""
    msgpack: Any = importlib.import_module("msgpack")
    packed = {}
    for name, array in arrays.items():
        little = array.astype(array.dtype.newbyteorder("<"), copy=False) if array.dtype.isnative else array
        content = (array.shape, dtype_name(array.dtype), little.tobytes())
        packed[name] = msgpack.ExtType(ARRAY_EXTENSION, msgpack.packb(content))
    return bytes(msgpack.packb(packed))


def decode_array(content: bytes) -> NDArray[Any]:
    """Decode the contents of an array extension; the result is read-only."""
    parts = decode_msgpack(content)
    if not isinstance(parts, list) or len(parts) != 3:
        raise DamagedCheckpointError("an array is damaged: expected its shape, dtype and bytes")
    shape, name, data = parts
    dtype = dtype_from_name(name.decode("ascii", "replace") if isinstance(name, bytes) else name)
    array = array_of(shape, dtype.newbyteorder("<") if dtype.isnative else dtype, data)
    return array.astype(dtype, copy=False)


def array_of(shape: Any, dtype: np.dtype[Any], data: Any) -> NDArray[Any]:
    """Return a view of ``data`` as an array; raise DamagedCheckpointError if dtype, shape and data do not match."""
    if not isinstance(shape, list) or len(shape) > _AXES or not all(type(n) is int and n >= 0 for n in shape):
        raise DamagedCheckpointError(f"an array is damaged: it has the shape {shape!r:.80}")
    expected = math.prod(shape) * dtype.itemsize
    if not isinstance(data, bytes) or len(data) != expected:
        found = f"{len(data)} bytes" if isinstance(data, bytes) else type(data).__name__
        raise DamagedCheckpointError(f"an array of {dtype}{shape} is damaged: expected {expected} bytes, found {found}")
    try:
        return np.ndarray(tuple(shape), dtype, data)
    except ValueError as error:  # the array has zero bytes, but its shape is too large for numpy
        raise DamagedCheckpointError(f"an array of {dtype}{shape} is damaged: {error}") from error


class _Extended(NamedTuple):
    code: int
    data: bytes


class _Reader:
    """A decoder that grows containers element by element; msgpack alone would trust their declared sizes."""

    def __init__(self, content: bytes, extension: Extension | None, mapping: Mapper | None) -> None:
        self._msgpack: Any = importlib.import_module("msgpack")  # imported lazily because few programs read msgpack
        parts = (content[start : start + _PART] for start in range(0, len(content), _PART))
        file = SimpleNamespace(read=lambda _: next(parts, b""))
        limit = max(len(content), 1 << 32)  # buffer limit in bytes; msgpack strings cannot be longer
        self._unpacker = self._msgpack.Unpacker(file, read_size=_PART, max_buffer_size=limit, ext_hook=_Extended)
        self._content = content
        self._extension = extension
        self._mapping = mapping

    def whole(self, depth: int) -> Any:
        try:
            value = self.value(depth)
        except self._msgpack.OutOfData as error:
            raise DamagedCheckpointError(f"it is cut off after {len(self._content)} bytes") from error
        except DamagedCheckpointError:
            raise
        except ValueError as error:
            raise DamagedCheckpointError(f"it is not msgpack: {error!r}") from error
        except RecursionError as error:
            raise DamagedCheckpointError("it is nested too deeply") from error
        if left := len(self._content) - self._unpacker.tell():
            raise DamagedCheckpointError(f"{left} bytes follow the end of its value")
        return value

    def value(self, depth: int) -> Any:
        if depth > _DEPTH:
            raise DamagedCheckpointError(f"it is nested too deeply: more than {_DEPTH} levels")
        position = self._unpacker.tell()
        code = self._content[position] if position < len(self._content) else None
        if code in _LISTS:
            return [self.value(depth + 1) for _ in range(self._unpacker.read_array_header())]
        if code in _DICTIONARIES:
            return self._dictionary(self._unpacker.read_map_header(), depth)
        value = self._unpacker.unpack()
        if isinstance(value, _Extended) and self._extension is not None:
            return self._extension(*value, depth + 1)
        if isinstance(value, _Extended | self._msgpack.Timestamp):
            raise DamagedCheckpointError(f"it holds the unknown type {code:#04x} at byte {position}")
        return value

    def _dictionary(self, size: int, depth: int) -> Any:
        members: dict[Any, Any] = {}
        for _ in range(size):
            key = self.value(depth + 1)
            if not isinstance(key, _KEYS) or key in members:
                raise DamagedCheckpointError(f"a dictionary has the key {key!r:.80} twice, or it is not a key")
            members[key] = self.value(depth + 1)
        return members if self._mapping is None else self._mapping(members)
