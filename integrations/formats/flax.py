"""State trees in msgpack, as Flax writes them and early versions of Orbax wrote them beside their arrays.

Arrays are extension 1, ``(shape, dtype name, bytes)`` packed once more; complex numbers 2; numpy scalars 3; tuples 4.
Arrays above a gigabyte are dictionaries with the member ``__msgpack_chunked_array__``. See
https://flax.readthedocs.io/en/latest/api_reference/flax.serialization.html
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...engine.arrays import MemoryTree, SavedLeaf, naming, read_checked
from ...engine.errors import DamagedCheckpointError, ObjectNotFoundError
from ...engine.format import ARRAY_EXTENSION, decode_array, decode_msgpack
from ...engine.pytree import Saved, encode_value
from ...engine.sources import FoundSteps, Path, SingleTree, first_bytes, nested_tree, storage_name, total_bytes
from ...engine.storage import Entry, Location

_LIMIT = 1 << 36  # bytes of a file; all of it is held in memory
_COMPLEX, _SCALAR, _TUPLE = 2, 3, 4
_CHUNKED = "__msgpack_chunked_array__"


class Decoded(NamedTuple):
    """A tree taken apart."""

    values: list[tuple[Path, Any]]  # path and value of every leaf: an array, a numpy scalar or a Python value
    empties: list[tuple[Path, str]]  # path and kind of every container without leaves


def looks_like_msgpack(place: Location) -> bool:
    """Whether a file begins as a msgpack dictionary does."""
    try:
        first = first_bytes(place, 1)
    except ObjectNotFoundError:
        return False
    return bool(first) and (0x80 <= first[0] <= 0x8F or first[0] in (0xDE, 0xDF))


def decode_file(place: Location) -> Decoded:
    content = read_checked(place, None, limit=_LIMIT)
    with naming(place):
        found = Decoded([], [])
        _walk(decode_flax(content), (), found)
        return found


def leaf_of(path: Path, value: Any) -> SavedLeaf:
    name = storage_name(path)
    if isinstance(value, np.ndarray):
        return SavedLeaf(name, Saved({"kind": "numpy"}, value.dtype, value.shape))
    if isinstance(value, np.generic):
        return SavedLeaf(name, Saved({"kind": "numpy_scalar"}, value.dtype, ()))
    return SavedLeaf(name, Saved(encode_value(value)))


def open_msgpack(location: Location) -> MemoryTree:
    """Read the tree in one msgpack file."""
    decoded = decode_file(location)
    with naming(location):
        tree, order = nested_tree([path for path, _ in decoded.values], decoded.empties)
    values = [decoded.values[index] for index in order]
    leaves = [leaf_of(*pair) for pair in values]
    pairs = zip(leaves, values, strict=True)
    arrays = {leaf.name: np.asarray(value) for leaf, (_, value) in pairs if leaf.saved.dtype is not None}
    return MemoryTree(location, tree, leaves, arrays)


def decode_flax(content: bytes, depth: int = 0) -> Any:
    """Read the content of a file: nested containers of arrays, numpy scalars and Python values."""
    return decode_msgpack(content, extension=_extension, depth=depth)


def _extension(code: int, data: bytes, depth: int) -> Any:
    if code == _TUPLE:
        found = decode_flax(data, depth)
        return tuple(found) if isinstance(found, list) else found
    if code == _COMPLEX:
        parts = decode_msgpack(data)
        if not isinstance(parts, list) or len(parts) != 2 or not all(isinstance(part, float) for part in parts):
            raise DamagedCheckpointError("a complex number is damaged: expected two floats")
        return complex(*parts)
    if code not in (ARRAY_EXTENSION, _SCALAR):
        raise DamagedCheckpointError(f"it holds an extension of the unknown type {code}")
    array = decode_array(data)
    return array[()] if code == _SCALAR and array.shape == () else array


def _walk(value: Any, path: Path, found: Decoded) -> None:
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
    """Put the parts of a large array together."""
    try:
        shape = [int(value["shape"][str(axis)]) for axis in range(len(value["shape"]))]
        parts = [value["chunks"][str(index)] for index in range(len(value["chunks"]))]
        return np.concatenate([np.asarray(part).reshape(-1) for part in parts]).reshape(shape)
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedCheckpointError(f"an array in parts is damaged: {error!r}") from error


_STEP = re.compile(r"checkpoint_([0-9]{1,18})")


def recognise(location: Location, names: frozenset[str]) -> SingleTree | None:
    if names or location.is_directory() or not looks_like_msgpack(location):
        return None
    match = _STEP.fullmatch(location.name)
    step = None if match is None else int(match[1])
    return SingleTree("Flax", location, open_msgpack(location), total_bytes(location), step)


def recognise_steps(location: Location, entries: Sequence[Entry]) -> FoundSteps:
    names = [entry.name for entry in entries if not entry.is_directory]
    found = {int(match[1]): location / name for name in names if (match := _STEP.fullmatch(name)) is not None}
    files = {step: place for step, place in found.items() if looks_like_msgpack(place)}
    return FoundSteps.of("Flax", files)
