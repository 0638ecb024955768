"""Casts on request: they may lose precision, but never change a value silently."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from holdfast.engine.pytree import CastProblem, cast_checked
from holdfast.engine.pytree.materialization import cast_number

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("values", "source", "dtype"),
    [
        ([1 << 40], "int64", "int32"),
        ([-1], "int8", "uint16"),
        ([-1], "int64", "uint64"),
        ([1 << 63], "uint64", "int64"),
        ([200], "int64", "int4"),
        ([-1], "int4", "uint8"),
        ([2], "int8", "bool"),
        ([NAN], "float32", "bool"),
        ([0.5], "float32", "bool"),
        ([300.0], "float32", "int8"),
        ([-1e30], "float64", "int8"),
        ([NAN], "float32", "int8"),
        ([INF], "bfloat16", "int32"),
        ([1.5], "float32", "int32"),
        ([float(1 << 63)], "float64", "int64"),
        ([float(1 << 64)], "longdouble", "uint64"),
        ([1e30], "float32", "float16"),
        ([3.4e38], "float64", "bfloat16"),
        ([100_000], "int32", "float16"),
        ([1e300j], "complex128", "complex64"),
        ([1e300], "float64", "complex64"),
        ([1e6], "float32", "float8_e4m3fn"),
        ([INF], "float32", "float8_e4m3fn"),
        ([1e6], "float32", "float4_e2m1fn"),
        ([NAN], "float32", "float4_e2m1fn"),
    ],
    ids=str,
)
def test_values_that_do_not_fit(values: list[Any], source: str, dtype: str) -> None:
    wanted = np.dtype(getattr(ml_dtypes, dtype, dtype))
    array = np.array([0, 1, *values]).astype(np.dtype(getattr(ml_dtypes, source, source)))
    with pytest.raises(CastProblem, match=f"expected values that {wanted} can hold, found"):
        cast_checked(array, wanted)
    cast_checked(array[:2], wanted)


@pytest.mark.parametrize(
    ("values", "source", "dtype"),
    [
        ([NAN, INF, -INF, 1.1], "float32", "float16"),
        ([NAN, INF, -INF, 1.1], "float64", "bfloat16"),
        ([NAN, 1.1, 448.0], "float32", "float8_e4m3fn"),
        ([0.5, 6.0, 1.1], "float32", "float4_e2m1fn"),
        ([127.0, -128.0, -0.0], "float16", "int8"),
        ([255.0], "bfloat16", "uint8"),
        ([-float(1 << 63)], "float64", "int64"),
        ([0, 1], "int64", "bool"),
        ([0.0, 1.0], "float32", "bool"),
        ([True, False], "bool", "int8"),
        ([True, False], "bool", "bfloat16"),
        ([(1 << 53) + 1], "int64", "float32"),
        ([complex(NAN, 1), complex(1, INF)], "complex128", "complex64"),
        ([7, -8], "int8", "int4"),
        ([1.5], "float32", "complex64"),
        ([1, 2], ">i8", "int16"),
    ],
    ids=str,
)
def test_values_that_fit(values: list[Any], source: str, dtype: str) -> None:
    wanted = np.dtype(getattr(ml_dtypes, dtype, dtype))
    array = np.array(values).astype(np.dtype(getattr(ml_dtypes, source, source)))
    found = cast_checked(array, wanted)
    assert found.dtype == wanted
    assert found.tobytes() == array.astype(wanted).tobytes()


@pytest.mark.parametrize("place", [0, 69_999, 140_000, 209_999])
def test_large_arrays_of_any_strides(place: int) -> None:
    array = np.arange(210_000.0).reshape(3, 7, 10_000) % 100
    assert (cast_checked(array.T, np.dtype(np.int8)) == array.T).all()
    assert (cast_checked(array[:, ::-2], np.dtype(np.int8)) == array[:, ::-2]).all()
    array.reshape(-1)[place] = 1000
    with pytest.raises(CastProblem, match=r"found 1000\.0 \(float64\)"):
        cast_checked(array.T, np.dtype(np.int8))


def test_arrays_without_axes_or_elements() -> None:
    assert cast_checked(np.zeros((3, 0)), np.dtype(np.int8)).shape == (3, 0)
    assert cast_checked(np.array(3.0), np.dtype(np.int8))[()] == 3


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(1 << 70, "int64"), (10**400, "float64"), (1 << 70, "float16")],
    ids=["int64", "float64", "float16"],
)
def test_long_integers(value: int, dtype: str) -> None:
    assert cast_number(1 << 70, np.dtype(np.float32)) == 2.0**70
    with pytest.raises(CastProblem, match="can hold, found"):
        cast_number(value, np.dtype(dtype))
