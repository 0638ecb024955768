"""Casts of numbers: exact ones, and those on request, which may lose precision but never give another number.

On request, a cast to integers or bool takes only values that stay the same: no NaN, infinity or fraction, and none that
would wrap around. A cast to floating or complex numbers rounds, but a finite value stays finite, and NaN and infinities
stay.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from .host_leaves import number_kind

_INFO: Any = ml_dtypes  # iinfo and finfo of all dtypes, which come without types themselves
_STEP = 1 << 16  # elements that are cast and checked together, so that they stay in the cache


class CastProblem(ValueError):  # noqa: N818 - becomes one line of an error that names the leaf
    """A value that the requested dtype cannot hold, and what to do about it."""


def cast_checked(array: NDArray[Any], dtype: np.dtype[Any], out: NDArray[Any] | None = None) -> NDArray[Any]:
    array = np.asarray(array)  # an array without axes may come as a scalar
    if out is None:
        out = np.empty(array.shape, dtype)
    with np.errstate(all="ignore"):  # an overflow becomes a CastProblem
        if np.can_cast(array.dtype, dtype, "safe"):
            out[...] = array
            return out
        for source, result in _blocks(array, out):
            result[...] = source
            bad = _bad(source, result)
            if bad.any():
                raise CastProblem(_message(source[bad].reshape(-1)[0], array.dtype, dtype))
    return out


def cast_number(value: complex, dtype: np.dtype[Any]) -> NDArray[Any]:
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        try:
            if number_kind(dtype) in {"float", "complex"}:
                return cast_checked(np.array(float(value)), dtype)
        except OverflowError:
            pass  # it is larger than any float
        short = value.bit_length() <= 200
        raise CastProblem(_message(value if short else f"one of {value.bit_length()} bits", np.dtype(object), dtype))
    return cast_checked(np.asarray(value), dtype)


def exact_cast(value: Any, dtype: np.dtype[Any]) -> NDArray[Any] | None:
    """Return a 0-d array that holds exactly a Python number, or None where the dtype cannot."""
    if isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 64:
            return None
        # By way of the widest integers; narrower ones wrap around silently.
        array = np.array(value, np.int64 if value < 1 << 63 else np.uint64).astype(dtype)
        return array if int(array) == value else None
    with np.errstate(all="ignore"):
        array = np.array(value).astype(dtype)
        back = complex(array) if isinstance(value, complex) else float(array)
    return array if _identical(back, value) else None


def _identical(one: complex, other: complex) -> bool:
    """Whether two numbers are the same: NaN equals NaN, and 0.0 differs from -0.0."""
    if isinstance(one, complex) and isinstance(other, complex):
        return _identical(one.real, other.real) and _identical(one.imag, other.imag)
    return repr(one) == repr(other)


def _blocks(array: NDArray[Any], out: NDArray[Any]) -> Any:
    """Generate views of the same parts of two arrays, each of about ``_STEP`` elements at most."""
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
        bad |= other < np.zeros((), other.dtype)  # the same bits with another sign
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
    """Whether a dtype has neither infinities nor NaN, so that larger numbers become its largest."""
    return dtype.kind not in "fc" and bool(np.isfinite(np.array([np.inf], np.float64).astype(dtype)).all())


def _message(value: object, source: np.dtype[Any], dtype: np.dtype[Any]) -> str:
    if number_kind(dtype) in {"int", "bool"}:
        need = "whole numbers in its range" if number_kind(dtype) == "int" else "0 and 1"
        advice = f"it holds {need} only; ask for a dtype that can hold the value, or round and clip the values before"
    else:
        advice = "it holds no such number; ask for a dtype of a larger range, or clip the values before"
    found = "an int" if source.hasobject else source
    return f"expected values that {dtype} can hold, found {value!s} ({found}): {advice}"
