"""Casts that somebody has asked for: they may lose precision, but what comes out is never another number.

To integers and bool only values are cast that are the same afterwards; there is no NaN, infinity or fraction among
these, and nothing wraps around. To floating and complex numbers values are rounded; but a finite one stays finite, and
NaN and infinities stay what they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from .numpy_leaves import number_kind

if TYPE_CHECKING:
    from numpy.typing import NDArray

_INFO: Any = ml_dtypes  # iinfo and finfo of all dtypes, which come without types themselves
_STEP = 1 << 16  # elements that are cast and looked at together, so that this happens in the cache


class CastProblem(ValueError):  # noqa: N818 - becomes one line of an error that names the leaf
    """A value that the dtype that was asked for cannot hold; says which one, and what to do."""


def cast_checked(array: NDArray[Any], dtype: np.dtype[Any], out: NDArray[Any] | None = None) -> NDArray[Any]:
    """Casts an array.

    Args:
        array: Of numbers or bool; any strides.
        dtype: Of numbers or bool; one with an imaginary part if the array has one.
        out: Where to put the result: an array of the same shape and of this dtype; a new one by default.

    Returns:
        The array with that dtype.

    Raises:
        CastProblem: The dtype cannot hold a value.
    """
    array = np.asarray(array)  # whoever indexes an array without axes has a scalar
    if out is None:
        out = np.empty(array.shape, dtype)
    with np.errstate(all="ignore"):  # an overflow becomes an error that says more
        if not _may_fail(array.dtype, dtype):
            out[...] = array
            return out
        whole = array.size <= _STEP or array.ndim == 0
        blocks = [(array, out)] if whole else _blocks(array, out)
        for source, result in blocks:
            result[...] = source
            bad = _bad(source, result)
            if bad.any():
                raise CastProblem(_message(source[bad].reshape(-1)[0], array.dtype, dtype))
    return out


def cast_number(value: complex, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Casts a Python number.

    Args:
        value: bool, int, float or complex.
        dtype: As for `cast_checked`.

    Returns:
        A 0-d array.

    Raises:
        CastProblem: The dtype cannot hold the value.
    """
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        try:
            if number_kind(dtype) in {"float", "complex"}:
                return cast_checked(np.array(float(value)), dtype)
        except OverflowError:
            pass  # it is longer than any float
        short = value.bit_length() <= 200
        raise CastProblem(_message(value if short else f"one of {value.bit_length()} bits", np.dtype(object), dtype))
    return cast_checked(np.asarray(value), dtype)


def _may_fail(source: np.dtype[Any], dtype: np.dtype[Any]) -> bool:
    return not np.can_cast(source, dtype, "safe")


def _blocks(array: NDArray[Any], out: NDArray[Any]) -> Any:
    """Generates views of parts of two arrays of one shape, each of at most about ``_STEP`` elements."""
    if array.size <= _STEP or array.ndim == 0:
        yield array, out
        return
    row = array.size // array.shape[0]
    if row > _STEP:
        for one, other in zip(array, out, strict=True):
            yield from _blocks(one, other)
        return
    step = max(1, _STEP // max(1, row))
    for start in range(0, array.shape[0], step):
        yield array[start : start + step], out[start : start + step]


def _bad(source: NDArray[Any], result: NDArray[Any]) -> NDArray[np.bool_]:
    """Says which elements have become other numbers."""
    before, after = number_kind(source.dtype), number_kind(result.dtype)
    if after == "bool":
        return np.asarray(source != result.astype(source.dtype))
    if after == "int":
        return _bad_int(source, result) if before in {"bool", "int"} else _bad_whole(source, result.dtype)
    return _bad_float(source, result)


def _bad_int(source: NDArray[Any], result: NDArray[Any]) -> NDArray[np.bool_]:
    bad = np.asarray(result.astype(source.dtype) != source)
    for one in (source, result):
        if one.dtype.kind != "b" and _INFO.iinfo(one.dtype).min < 0:
            continue
        other = result if one is source else source
        bad |= other < np.zeros((), other.dtype)  # the same bits, but the sign is lost
    return bad


def _bad_whole(source: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[np.bool_]:
    info = _INFO.iinfo(dtype)
    # Both bounds are powers of two or zero, which floating numbers hold exactly.
    wide = source if source.dtype.kind == "f" and source.dtype.itemsize >= 8 else source.astype(np.float64)
    fits = (wide >= float(info.min)) & (wide < float(int(info.max) + 1)) & (np.trunc(wide) == wide)
    return np.asarray(~fits)


def _bad_float(source: NDArray[Any], result: NDArray[Any]) -> NDArray[np.bool_]:
    saturates = _saturates(result.dtype)
    if not saturates and bool(np.isfinite(result).all()) and bool(np.isfinite(source).all()):
        return np.zeros(source.shape, bool)
    before, after = _wide(source), _wide(result)
    bad = (np.isnan(before) != np.isnan(after)) | (np.isinf(before) != np.isinf(after))
    if saturates:
        bad |= np.abs(before) > float(_INFO.finfo(result.dtype).max)
    return np.asarray(bad)


def _wide(array: NDArray[Any]) -> NDArray[Any]:
    return array if array.dtype.kind in "fc" else array.astype(np.float64)


def _saturates(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype has neither infinities nor NaN, so that its largest number stands for whatever is larger."""
    return dtype.kind not in "fc" and bool(np.isfinite(np.array([np.inf], np.float64).astype(dtype)).all())


def _message(value: object, source: np.dtype[Any], dtype: np.dtype[Any]) -> str:
    if number_kind(dtype) in {"int", "bool"}:
        need = "whole numbers in its range" if number_kind(dtype) == "int" else "0 and 1"
        advice = f"it holds {need} only; ask for a dtype that can hold the value, or round and clip the values before"
    else:
        advice = "it holds no such number; ask for a dtype of a larger range, or clip the values before"
    found = "an int" if source.hasobject else source
    return f"expected values that {dtype} can hold, found {value!s} ({found}): {advice}"
