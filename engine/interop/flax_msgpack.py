"""The msgpack form of state trees that Flax defined and early versions of Orbax wrote beside their arrays.

Arrays are extension 1, ``(shape, dtype name, bytes)`` packed once more; complex numbers 2; numpy scalars 3; tuples 4.
Arrays above a gigabyte are dictionaries with the member ``__msgpack_chunked_array__``. See
https://flax.readthedocs.io/en/latest/api_reference/flax.serialization.html
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..digests import read_checked
from ..errors import DamagedCheckpointError, FormatVersionError, ObjectNotFoundError
from ..format import dtype_from_name
from ..item import Problem, SavedLeaf
from ..storage import Location
from ..tree import Saved, Skeleton
from ..tree.python_leaves import encode_value
from ..tree.structure import MAX_DEPTH
from .containers import Path, nested_skeleton, storage_name

_LIMIT = 1 << 36  # bytes of a file; all of it is held in memory
_ARRAY, _COMPLEX, _SCALAR, _TUPLE = 1, 2, 3, 4
_CHUNKED = "__msgpack_chunked_array__"


class Decoded(NamedTuple):
    """A tree taken apart.

    Attributes:
        values: Path and value of every leaf: an array, a numpy scalar or a Python value.
        empties: Path and kind of every container without leaves.
    """

    values: list[tuple[Path, Any]]
    empties: list[tuple[Path, str]]


def looks_like_msgpack(place: Location) -> bool:
    """Whether a file begins as a msgpack dictionary does."""
    try:
        with place.open_data() as file:
            first = file.read(0, 1)[0] if file.size else 0
    except ObjectNotFoundError:
        return False
    return 0x80 <= int(first) <= 0x8F or int(first) in (0xDE, 0xDF)


def decode_file(place: Location) -> Decoded:
    """Reads a file.

    Raises:
        DamagedCheckpointError: It is missing, or no such tree.
    """
    content = read_checked(place, None, limit=_LIMIT)
    try:
        return decode(content)
    except (DamagedCheckpointError, FormatVersionError) as error:
        raise type(error)(f"{place}: {error}") from error


def decode(content: bytes) -> Decoded:
    """Reads the content of a file; see :func:`decode_file`."""
    found = Decoded([], [])
    _walk(_unpack(content), (), found)
    return found


def leaf_of(path: Path, value: Any) -> SavedLeaf:
    """Says what a decoded value is."""
    name = storage_name(path)
    if isinstance(value, np.ndarray):
        return SavedLeaf(name, Saved({"kind": "numpy"}, value.dtype, value.shape))
    if isinstance(value, np.generic):
        return SavedLeaf(name, Saved({"kind": "numpy_scalar"}, value.dtype, ()))
    return SavedLeaf(name, Saved(encode_value(value)))


class MsgpackTree:
    """A tree in one msgpack file; all of it is in memory once it is open.

    Args:
        location: The file.

    Raises:
        DamagedCheckpointError: It is missing, or no such tree.

    Attributes:
        location: The file.
        skeleton: The containers.
        leaves: The leaves.
    """

    def __init__(self, location: Location) -> None:
        self.location = location
        decoded = decode_file(location)
        try:
            self.skeleton: Skeleton
            self.skeleton, order = nested_skeleton([path for path, _ in decoded.values], decoded.empties)
            self.leaves = [leaf_of(*decoded.values[index]) for index in order]
        except DamagedCheckpointError as error:
            raise DamagedCheckpointError(f"{location}: {error}") from error
        self._values = {leaf.name: decoded.values[index][1] for leaf, index in zip(self.leaves, order, strict=True)}

    def read(self, leaves: Sequence[SavedLeaf]) -> list[NDArray[Any] | None]:
        """Returns copies of arrays; None for plain values."""
        return [
            None if leaf.saved.dtype is None else np.array(self._values[leaf.name], leaf.saved.dtype) for leaf in leaves
        ]

    def verify(self) -> list[Problem]:
        """There is nothing left to find: the file carries no checksums, and it has been read."""
        return []


def _msgpack() -> Any:
    """Imports msgpack, which has no types of its own."""
    return importlib.import_module("msgpack")


def _unpack(content: bytes) -> Any:
    msgpack = _msgpack()

    try:
        return msgpack.unpackb(content, raw=False, strict_map_key=False, ext_hook=_extension)
    except (DamagedCheckpointError, FormatVersionError):
        raise
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise DamagedCheckpointError(f"it is damaged, or no msgpack: {error or type(error).__name__}") from error


def _extension(code: int, data: bytes) -> Any:
    if code == _TUPLE:
        found = _unpack(data)
        return tuple(found) if isinstance(found, list) else found
    if code == _COMPLEX:
        parts = _unpack(data)
        if not isinstance(parts, list) or len(parts) != 2 or not all(isinstance(part, float) for part in parts):
            raise DamagedCheckpointError("a complex number is damaged")
        return complex(*parts)
    if code not in (_ARRAY, _SCALAR):
        raise DamagedCheckpointError(f"it holds an extension of the unknown kind {code}")
    array = _array(data)
    return array[()] if code == _SCALAR and array.shape == () else array


def _array(data: bytes) -> NDArray[Any]:
    msgpack = _msgpack()

    try:
        shape, name, content = msgpack.unpackb(data, raw=True)
        sizes = tuple(int(size) for size in shape)
        dtype = dtype_from_name(name.decode("ascii"))
    except (ValueError, TypeError, AttributeError, msgpack.exceptions.UnpackException) as error:
        raise DamagedCheckpointError(f"an array is damaged: {error}") from error
    expected = math.prod(sizes) * dtype.itemsize
    if not isinstance(content, bytes) or min(sizes, default=0) < 0 or len(content) != expected:
        raise DamagedCheckpointError(f"an array of shape {sizes} and dtype {dtype} does not have {expected} bytes")
    return np.frombuffer(content, dtype).reshape(sizes)


def _walk(value: Any, path: Path, found: Decoded) -> None:
    if len(path) > MAX_DEPTH:
        raise DamagedCheckpointError(f"the tree is nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, dict) and _CHUNKED in value:
        found.values.append((path, _joined(value)))
    elif isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str | int) or isinstance(key, bool):
                raise DamagedCheckpointError(f"a dictionary has the key {key!r:.80}; keys are str or int")
            _walk(inner, (*path, key if isinstance(key, str) else str(key)), found)
        if not value:
            found.empties.append((path, "dict"))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            _walk(inner, (*path, index), found)
        if not value:
            found.empties.append((path, "list" if isinstance(value, list) else "tuple"))
    elif value is None or isinstance(value, bool | int | float | complex | str | bytes | np.ndarray | np.generic):
        found.values.append((path, value))
    else:
        raise DamagedCheckpointError(f"it holds a value of type {type(value).__name__}")


def _joined(value: dict[Any, Any]) -> NDArray[Any]:
    """Puts the parts of a large array together."""
    try:
        shape = [int(value["shape"][str(axis)]) for axis in range(len(value["shape"]))]
        parts = [value["chunks"][str(index)] for index in range(len(value["chunks"]))]
        return np.concatenate([np.asarray(part).reshape(-1) for part in parts]).reshape(shape)
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedCheckpointError(f"an array in parts is damaged: {error!r}") from error
