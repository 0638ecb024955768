"""Host leaves: numpy arrays, numpy scalars and plain Python values.

Numbers that fit into an array element become 0-d arrays, which every tool can read. Other Python values become JSON
that preserves them exactly.
"""

from __future__ import annotations

import base64
import binascii
import re
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DamagedCheckpointError
from .leaves import (
    EXTERNAL,
    NUMBER_TYPES,
    PLACEHOLDER,
    PLAIN,
    STATIC,
    ArrayLeaf,
    Details,
    ExternalLeaf,
    LeafProblem,
    Piece,
    ValueLeaf,
)
from .names import format_path

_ARRAY: Details = {"kind": "numpy"}
_SCALAR: Details = {"kind": "numpy_scalar"}
_NUMBERS: dict[Any, tuple[Details, np.dtype[Any]]] = {
    kind: ({"kind": name}, np.dtype(kind)) for name, kind in NUMBER_TYPES.items()
}
_VALUES = (*PLAIN, set, frozenset)
INT64 = range(-(1 << 63), 1 << 63)
_LARGEST_INT = 1 << 22  # maximum number of bits in an int
_LONG = 1 << 16  # text and bytes longer than this are stored as arrays, which are written and read in bulk
_BUILT_IN = {"b": "bool", "i": "int", "u": "int", "f": "float", "c": "complex"}


@cache
def _extended() -> dict[np.dtype[Any], str]:
    """Map each real dtype in ml_dtypes to "int" or "float"; complex dtypes of ml_dtypes cannot be stored."""
    import ml_dtypes  # imported lazily, because numpy's own dtypes do not need it

    return {
        np.dtype(scalar): "int" if "int" in name else "float"
        for name, scalar in vars(ml_dtypes).items()
        if isinstance(scalar, type)
        and issubclass(scalar, np.generic)
        and re.fullmatch(r"(bfloat|float|u?int)\d+\w*", name)
    }


def number_kind(dtype: np.dtype[Any]) -> str | None:
    """Return the kind of Python number that matches a dtype: "bool", "int", "float", "complex" or None."""
    return _BUILT_IN.get(dtype.kind) or _extended().get(dtype)


def check_storable(dtype: np.dtype[Any]) -> None:
    if dtype.kind in "biufcmMUS":
        return
    if dtype.names is not None:
        raise LeafProblem(f"has the structured dtype {dtype}; store its fields as separate arrays")
    if dtype.kind == "T":
        raise LeafProblem(f"has dtype {dtype}, whose elements vary in size; convert it with astype(str)")
    if dtype.hasobject:
        raise LeafProblem(
            f"has dtype {dtype}, whose elements are Python objects; convert it to numbers, strings or bytes"
        )
    if dtype not in _extended():
        raise LeafProblem(f"has dtype {dtype}, which cannot be stored")


def native(array: NDArray[Any]) -> NDArray[Any]:
    """Convert an array to native byte order; an array already in native order is not copied."""
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def describe_numpy(value: Any) -> ArrayLeaf:
    if type(value) is not np.ndarray:
        if isinstance(value, np.generic):
            check_storable(value.dtype)
            # Take the dtype from the value, because numpy widens an empty string to one character in the array.
            return ArrayLeaf(value.dtype, (), [Piece((), np.array(value))], False, _SCALAR)
        # This test is last because it makes numpy import its masked array module, which takes longer than a small save.
        if isinstance(value, np.ma.MaskedArray):
            raise LeafProblem("is a masked array; store its data and its mask as separate arrays")
        value = np.asarray(value)
    check_storable(value.dtype)
    return ArrayLeaf.of(value, _ARRAY, volatile=True)


def is_python_value(value: object) -> bool:
    """True if `describe_python` accepts the value; elements of a set are not checked."""
    return isinstance(value, _VALUES)


def describe_python(value: Any) -> ArrayLeaf | ValueLeaf:
    """Describe a Python value. An instance of a subclass, such as an enum member, is treated as its plain value."""
    for kind, (details, dtype) in _NUMBERS.items():
        if isinstance(value, kind):
            if kind is int and int(value) not in INT64:
                break
            return ArrayLeaf.of(np.array(kind(value), dtype), details)
    if isinstance(value, str | bytes) and len(value) > _LONG:
        content = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
        return ArrayLeaf.of(np.frombuffer(content, np.uint8), {"kind": "str" if isinstance(value, str) else "bytes"})
    return ValueLeaf(encode_value(value))


def decode_bytes(kind: str, array: NDArray[Any], name: str) -> str | bytes:
    """Decode long text or bytes that `describe_python` stored as an array."""
    if array.dtype != np.uint8 or array.ndim != 1:
        raise DamagedCheckpointError(
            f"leaf {format_path(name)} is of kind {kind}, but {array.dtype}{list(array.shape)} is stored"
        )
    if kind == "bytes":
        return array.tobytes()
    try:
        return array.tobytes().decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise DamagedCheckpointError(f"leaf {format_path(name)}: its text is not UTF-8 ({error})") from error


def encode_value(value: Any) -> Details:
    """Encode a Python value as JSON. Floats are written in hexadecimal, because JSON has no NaN."""
    if value is None:
        return {"kind": "none"}
    if isinstance(value, str):
        text = str.__str__(value)
        if any("\ud800" <= character <= "\udfff" for character in text):
            return {"kind": "str", "base64": _base64(text.encode("utf-8", "surrogatepass"))}
        return {"kind": "str", "value": text}
    if isinstance(value, bytes):
        return {"kind": "bytes", "base64": _base64(value)}
    if isinstance(value, bool):
        return {"kind": "bool", "value": value}
    if isinstance(value, int):
        if value.bit_length() > _LARGEST_INT:
            raise LeafProblem(f"is an integer of {value.bit_length()} bits; at most {_LARGEST_INT} can be stored")
        return {"kind": "int", "value": hex(value)}
    if isinstance(value, float):
        return {"kind": "float", "value": float(value).hex()}
    if isinstance(value, complex):
        return {"kind": "complex", "value": [value.real.hex(), value.imag.hex()]}
    if isinstance(value, set | frozenset):
        for element in value:
            if not is_python_value(element) or isinstance(element, set | frozenset):
                raise LeafProblem(f"is a {type(value).__name__} with an element of type {type(element).__name__}")
        elements = sorted(map(encode_value, value), key=repr)  # sorted, so that equal sets result in equal documents
        return {"kind": "frozenset" if isinstance(value, frozenset) else "set", "value": elements}
    raise LeafProblem(f"is of type {type(value).__name__}")


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def decode_value(details: Details, name: str) -> Any:
    if details["kind"] == EXTERNAL:
        return ExternalLeaf(name, details)
    if details["kind"] == STATIC or (details["kind"] == PLACEHOLDER and details.keys().isdisjoint({"value", "base64"})):
        return ...
    try:
        return _decode(details, True)
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, AttributeError, binascii.Error) as error:
        raise DamagedCheckpointError(
            f"leaf {format_path(name)}: its stored value cannot be decoded ({error!r:.200})"
        ) from error


def _decode(details: Details, outer: bool) -> Any:
    kind = details["kind"]
    if kind == "none":
        return None
    if kind in {"str", "bytes"} and "base64" in details:
        data = base64.b64decode(details["base64"], validate=True)
        return data if kind == "bytes" else data.decode("utf-8", "surrogatepass")
    value = details["value"]
    if kind in {"str", "bool"} and type(value).__name__ == kind:
        return value
    if kind == "int" and len(value) <= _LARGEST_INT // 4 + 3:
        return int(value, 16)
    if kind == "float":
        return float.fromhex(value)
    if kind == "complex" and isinstance(value, list):
        real, imaginary = value
        return complex(float.fromhex(real), float.fromhex(imaginary))
    if kind in {"set", "frozenset"} and outer:
        elements = [_decode(element, False) for element in value]
        return set(elements) if kind == "set" else frozenset(elements)
    raise ValueError(f"unknown kind {kind!r:.80}")
