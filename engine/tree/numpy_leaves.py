"""Leaves that are numpy arrays or numpy scalars, and what can be asked of dtypes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from .leaves import ArrayLeaf, Details, LeafProblem, Piece

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NUMPY: Details = {"kind": "numpy"}
_SCALAR: Details = {"kind": "numpy_scalar"}
# The real number types of ml_dtypes, with the Python kind of each. Its complex ones have no name in the format.
_EXTENDED: dict[np.dtype[Any], str] = {
    np.dtype(found): "int" if "int" in name else "float"
    for name, found in vars(ml_dtypes).items()
    if isinstance(found, type) and issubclass(found, np.generic) and re.fullmatch(r"(bfloat|float|u?int)\d+\w*", name)
}
_BUILT_IN = {"b": "bool", "i": "int", "u": "int", "f": "float", "c": "complex"}


def number_kind(dtype: np.dtype[Any]) -> str | None:
    """Gives the Python type that elements of a dtype are like: "bool", "int", "float" or "complex"; None for others."""
    return _BUILT_IN.get(dtype.kind) or _EXTENDED.get(dtype)


def why_not_storable(dtype: np.dtype[Any]) -> str | None:
    """Says why arrays of a dtype cannot be stored, or None if they can."""
    if dtype.names is not None:
        return f"has the structured dtype {dtype}; store its fields as arrays of their own"
    if dtype.kind == "T":
        return f"has dtype {dtype}, whose elements vary in size; convert it with astype(str)"
    if dtype.hasobject:
        return f"has dtype {dtype}, whose elements are Python objects; convert it to numbers, strings or bytes"
    if dtype.kind in "biufcmMUS" or dtype in _EXTENDED:
        return None
    return f"has dtype {dtype}, which cannot be stored"


def describe_numpy(value: Any) -> ArrayLeaf:
    """Describes a numpy array or scalar.

    Raises:
        LeafProblem: Object and structured dtypes, masked arrays.
    """
    if isinstance(value, np.ma.MaskedArray):
        raise LeafProblem("is a masked array; store its data and its mask as arrays of their own")
    problem = why_not_storable(value.dtype)
    if problem is not None:
        raise LeafProblem(problem)
    if isinstance(value, np.generic):
        return ArrayLeaf(value.dtype, (), [Piece((), np.array(value))], False, _SCALAR)
    array = value if type(value) is np.ndarray else np.asarray(value)
    return ArrayLeaf(array.dtype, array.shape, [Piece((0,) * array.ndim, array)], True, _NUMPY)


def native(array: NDArray[Any]) -> NDArray[Any]:
    """Gives the array in this machine's byte order, itself if it is so already."""
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def exact_cast(value: Any, dtype: np.dtype[Any]) -> NDArray[Any] | None:
    """Makes a 0-d array of a Python number.

    Args:
        value: bool, int, float or complex.
        dtype: A dtype of the same `number_kind`.

    Returns:
        The array, or None if the dtype cannot hold exactly this value.
    """
    if isinstance(value, int):
        return _exact_int(value, dtype)
    with np.errstate(all="ignore"):
        array = np.array(value).astype(dtype)
        back = complex(array) if isinstance(value, complex) else float(array)
    return array if _identical(back, value) else None


def _exact_int(value: int, dtype: np.dtype[Any]) -> NDArray[Any] | None:
    if not -(1 << 63) <= value < 1 << 64:
        return None
    # By way of the widest integers; narrower ones wrap around without a word.
    array = np.array(value, np.int64 if value < 1 << 63 else np.uint64).astype(dtype)
    return array if int(array) == value else None


def _identical(one: complex, other: complex) -> bool:
    """Whether two numbers are the same, NaN being NaN, and 0.0 not being -0.0."""
    if isinstance(one, complex) and isinstance(other, complex):
        return _identical(one.real, other.real) and _identical(one.imag, other.imag)
    return repr(one) == repr(other)
