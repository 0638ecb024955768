"""Read msgpack trees, as written by Flax. Early versions of Orbax also wrote such trees, alongside array files.

Extension type 1 is an array, encoded in msgpack as ``(shape, dtype name, bytes)``; type 2 is a complex number, type 3 a
numpy scalar, and type 4 a tuple. Arrays larger than a gigabyte are dictionaries with the key
``__msgpack_chunked_array__``. See https://flax.readthedocs.io/en/latest/api_reference/flax.serialization.html
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...engine.arrays import naming, read_checked
from ...engine.errors import DamagedCheckpointError, ObjectNotFoundError
from ...engine.format import ARRAY_EXTENSION, decode_array, decode_msgpack
from ...engine.sources import FoundSteps, SingleTree, StoredTree, first_bytes, total_bytes
from ...engine.storage import Entry, Location

_LIMIT = 1 << 36  # maximum file size, in bytes; the entire file is read into memory
_COMPLEX, _SCALAR, _TUPLE = 2, 3, 4


def looks_like_msgpack(file: Location) -> bool:
    """True if a file starts with the first byte of a msgpack dictionary."""
    try:
        first = first_bytes(file, 1)
    except ObjectNotFoundError:
        return False
    return bool(first) and (0x80 <= first[0] <= 0x8F or first[0] in (0xDE, 0xDF))


def decode_file(file: Location) -> Any:
    """Read a file as nested dictionaries (with string keys), lists, and tuples of arrays and Python values."""
    content = read_checked(file, None, limit=_LIMIT)
    with naming(file):
        return decode_flax(content)


def decode_flax(content: bytes, depth: int = 0) -> Any:
    return decode_msgpack(content, extension=_extension, mapping=_mapping, depth=depth)


def _extension(code: int, data: bytes, depth: int) -> Any:
    if code == _TUPLE:
        elements = decode_flax(data, depth)
        return tuple(elements) if isinstance(elements, list) else elements
    if code == _COMPLEX:
        parts = decode_msgpack(data)
        if not isinstance(parts, list) or len(parts) != 2 or not all(isinstance(part, float) for part in parts):
            raise DamagedCheckpointError("a complex number is damaged: expected two floats")
        return complex(*parts)
    if code not in (ARRAY_EXTENSION, _SCALAR):
        raise DamagedCheckpointError(f"it holds an extension of unknown type {code}")
    array = decode_array(data)
    return array[()] if code == _SCALAR and array.shape == () else array


def _mapping(value: dict[Any, Any]) -> Any:
    """Return a dictionary with string keys or, if the dictionary represents a chunked array, the array."""
    if "__msgpack_chunked_array__" in value:
        return _joined(value)
    for key in value:
        if not isinstance(key, str | int) or isinstance(key, bool):
            raise DamagedCheckpointError(f"a dictionary has the key {key!r:.80}; keys must be str or int")
    named = {str(key): inner for key, inner in value.items()}
    if len(named) < len(value):
        raise DamagedCheckpointError("a dictionary has the same key as text and as a number")
    return named


def _joined(value: dict[Any, Any]) -> NDArray[Any]:
    try:
        shape = [int(value["shape"][str(axis)]) for axis in range(len(value["shape"]))]
        parts = [value["chunks"][str(index)] for index in range(len(value["chunks"]))]
        return np.concatenate([np.asarray(part).reshape(-1) for part in parts]).reshape(shape)
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedCheckpointError(f"a chunked array is damaged: {error!r}") from error


_STEP = re.compile(r"checkpoint_([0-9]{1,18})")


def recognise(location: Location, names: frozenset[str]) -> SingleTree | None:
    if names or location.is_directory() or not looks_like_msgpack(location):
        return None
    nbytes = total_bytes(location)
    tree = StoredTree.of(location, decode_file(location), nbytes)
    match = _STEP.fullmatch(location.name)
    return SingleTree("Flax", location, tree, nbytes, None if match is None else int(match[1]))


def recognise_steps(location: Location, entries: Sequence[Entry]) -> FoundSteps:
    names = [entry.name for entry in entries if not entry.is_directory]
    named = {int(match[1]): location / name for name in names if (match := _STEP.fullmatch(name)) is not None}
    return FoundSteps.of("Flax", {step: file for step, file in named.items() if looks_like_msgpack(file)})
