"""Leaves that are plain Python values, and numpy's scalars.

Numbers that fit an array element become 0-d arrays, which every tool can read; all else becomes JSON that gives back
exactly the same value.
"""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import DamagedCheckpointError
from .external import EXTERNAL, PLACEHOLDER, ExternalLeaf
from .leaves import ArrayLeaf, Details, LeafProblem, Piece, ValueLeaf
from .names import display

if TYPE_CHECKING:
    from numpy.typing import NDArray

_INT64 = range(-(1 << 63), 1 << 63)
_LARGEST_INT = 1 << 22  # bits
_LONG = 1 << 16  # bytes; longer text and bytes are stored as arrays, which are written and read in bulk
_KINDS: dict[Any, tuple[Details, np.dtype[Any]]] = {
    bool: ({"kind": "bool"}, np.dtype(np.bool_)),
    int: ({"kind": "int"}, np.dtype(np.int64)),
    float: ({"kind": "float"}, np.dtype(np.float64)),
    complex: ({"kind": "complex"}, np.dtype(np.complex128)),
}


def is_python_value(value: object) -> bool:
    """Whether `describe_python` takes the value (not its elements, if it is a set)."""
    return value is None or isinstance(value, bool | int | float | complex | str | bytes | set | frozenset)


def describe_python(value: Any) -> ArrayLeaf | ValueLeaf:
    """Describes a Python value. A subclass (of an enumeration, say) counts as the plain value that it equals.

    Raises:
        LeafProblem: A set holds something that is not a plain scalar.
    """
    for kind, (details, dtype) in _KINDS.items():
        if isinstance(value, kind):
            if kind is int and int(value) not in _INT64:
                break
            return ArrayLeaf(dtype, (), [Piece((), np.array(kind(value), dtype))], False, details)
    if isinstance(value, str | bytes) and len(value) > _LONG:
        content = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
        data = np.frombuffer(content, np.uint8)
        long_kind = "str" if isinstance(value, str) else "bytes"
        return ArrayLeaf(data.dtype, data.shape, [Piece((0,), data)], False, {"kind": long_kind})
    return ValueLeaf(encode_value(value))


def decode_bytes(kind: str, array: NDArray[Any], name: str) -> str | bytes:
    """Gives back long text or bytes that `describe_python` made an array of.

    Raises:
        DamagedCheckpointError: The array is not that of text or bytes.
    """
    if array.dtype != np.uint8 or array.ndim != 1:
        raise DamagedCheckpointError(
            f"leaf {display(name)} is said to be {kind}, but {array.dtype}{list(array.shape)} is stored"
        )
    if kind == "bytes":
        return array.tobytes()
    try:
        return array.tobytes().decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise DamagedCheckpointError(f"leaf {display(name)}: its text is not UTF-8 ({error})") from error


def encode_value(value: Any) -> Details:
    """Gives the JSON form of a Python value; floats are spelled in hexadecimal, as JSON has no NaN.

    Raises:
        LeafProblem: A set holds something that is not a plain scalar.
    """
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
        elements = []
        for element in value:
            if not is_python_value(element) or isinstance(element, set | frozenset):
                raise LeafProblem(f"is a {type(value).__name__} with an element of type {type(element).__name__}")
            elements.append(encode_value(element))
        elements.sort(key=repr)  # the same set always gives the same document
        return {"kind": "frozenset" if isinstance(value, frozenset) else "set", "value": elements}
    raise LeafProblem(f"is of type {type(value).__name__}")


def decode_value(details: Details, name: str) -> Any:
    """Gives back what `encode_value` was given.

    Args:
        details: A value leaf's details, not trusted.
        name: Of the leaf, for the error.

    Raises:
        DamagedCheckpointError: The details do not describe a value.
    """
    if details["kind"] == EXTERNAL:
        return ExternalLeaf(name, details)
    if details["kind"] == PLACEHOLDER and details.keys().isdisjoint({"value", "base64"}):
        return ...
    try:
        return _decode(details, True)
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, AttributeError, binascii.Error) as error:
        raise DamagedCheckpointError(
            f"leaf {display(name)}: its stored value makes no sense ({error!r:.200})"
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


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
