"""Numpy arrays and scalars, Python values, and casts between them: values stay what they are, or are refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.dtypes import EXTENDED
from tests.equality import assert_same
from tests.ids import plain_id

import holdfast as hf
from holdfast.engine.errors import DamagedCheckpointError, TreeMismatchError, UnsupportedLeafError
from holdfast.engine.pytree import (
    CastProblem,
    Saved,
    cast_checked,
    describe,
    materialize,
)
from holdfast.engine.pytree.host_leaves import number_kind
from holdfast.engine.pytree.materialization import cast_number

NAN, INF = float("nan"), float("inf")
VARIABLE_WIDTH = [np.dtypes.StringDType()] if hasattr(np.dtypes, "StringDType") else []  # since numpy 2
WITHOUT_NAMES = [name for name in ("complex32", "bcomplex32") if hasattr(ml_dtypes, name)]  # in the format


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (np.array([1, "a", None], object), "has dtype object, whose elements are Python objects"),
        (np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")]), "has the structured dtype .*; store its fields"),
        (np.array([(1, 2.0)], [("a", "i4"), ("b", "O")]), "has the structured dtype"),
        (np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")])[0], "has the structured dtype"),
        (np.ma.masked_array([1, 2], [True, False]), "is a masked array; store its data and its mask"),
        (np.zeros(2, "V4"), "has dtype .*V4, which cannot be stored"),
        (np.rec.array([(1, 2)], dtype=[("a", int), ("b", int)]), "has the structured dtype"),
        *((np.zeros(2, one), "has dtype StringDType.*, whose elements vary in size") for one in VARIABLE_WIDTH),
        *((np.zeros(2, getattr(ml_dtypes, name)), f"has dtype {name}, which cannot") for name in WITHOUT_NAMES),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_arrays_that_cannot_be_stored_are_named(value: Any, said: str) -> None:
    with pytest.raises(UnsupportedLeafError, match=f"opt/state: {said}"):
        describe(["ok", "opt.state"], [np.ones(1), value])


def test_long_integers() -> None:
    assert cast_number(1 << 70, np.dtype(np.float32)) == 2.0**70
    for value, dtype in ((1 << 70, "int64"), (10**400, "float64"), (1 << 70, "float16")):
        with pytest.raises(CastProblem, match="can hold, found"):
            cast_number(value, np.dtype(dtype))


# ---- Python values: the same value and type comes back, with a template and without


# What a document says of a leaf without an array, by its kind, and arrays that are none of a kind.
WRONG_VALUES: dict[str, list[dict[str, Any]]] = {
    "int": [{}, {"value": 5}, {"value": "zz"}, {"value": None}, {"value": "0x" + "f" * 2_000_000}],
    "str": [{"value": 5}, {"base64": "?"}, {"base64": "/w=="}],
    "bytes": [{}, {"value": "abc"}, {"base64": 5}, {"base64": "é"}],
    "float": [{"value": "0x1p99999"}, {"value": 1.5}],
    "complex": [{"value": ["0x1p0"]}, {"value": "ab"}],
    "bool": [{"value": 1}],
    "set": [{"value": 5}, {"value": [5]}, {"value": [{"kind": "set", "value": []}]}],
    "frozenset": [{"value": [{}]}],
    "os.system": [{"value": "true"}],
    "numpy": [{}],
    "jax": [{"value": []}],
}
WRONG_ARRAYS: dict[str, list[Any]] = {
    "int": [np.zeros((2,), np.int64), np.zeros((), np.float64)],
    "bool": [np.zeros((), np.int64)],
    "float": [np.zeros((), "<U3")],
    "numpy_scalar": [np.zeros((1,), np.int64)],
    "none": [np.zeros((1,), np.int64)],
    "pickle": [np.zeros((1,), np.uint8)],
    "bytes": [np.zeros((2, 2), np.uint8), np.zeros((2,), np.int8)],
    "str": [np.full((2,), 255, np.uint8)],
}
FORGED = [({"kind": kind, **rest}, None) for kind, several in WRONG_VALUES.items() for rest in several] + [
    ({"kind": kind}, array) for kind, arrays in WRONG_ARRAYS.items() for array in arrays
]


@pytest.mark.parametrize(("details", "array"), FORGED, ids=plain_id)
def test_a_forged_leaf_is_damage(details: Any, array: Any) -> None:
    saved = Saved(details) if array is None else Saved(details, array.dtype, array.shape)
    with pytest.raises(DamagedCheckpointError, match="a/b"):
        materialize([None], [saved], [array], ["a.b"])


def zero(dtype: Any) -> Any:
    return np.zeros((), dtype)


# A template, a saved value, and the number that it gives, in the template's type; None where it does not fit.
NUMBERS: list[tuple[Any, Any, Any]] = [
    (0, np.array(7, "i4"), 7), (0, np.array(200, "u1"), 200), (0, np.array(2**64 - 1, "u8"), 2**64 - 1),
    (0.0, np.array(0.5, "f2"), 0.5), (0.0, np.array(1.5, ">f4"), 1.5), (0.0, np.array(0.5, np.longdouble), 0.5),
    (False, np.array(True), True), (0j, np.array(1 + 2j, "c8"), 1 + 2j),
    (zero("i4"), 5, 5), (zero("u8"), 2**64 - 1, 2**64 - 1), (np.int8(0), -128, -128),
    (zero("f4"), 0.5, 0.5), (zero("f4"), NAN, NAN), (zero("f2"), -INF, -INF), (zero(">f8"), -0.0, -0.0),
    (np.float16(0), 0.25, 0.25), (zero("?"), True, True), (zero("c8"), complex(-0.0, NAN), complex(-0.0, NAN)),
    (zero("i1"), 128, None), (zero("i4"), 2**31, None), (zero("i8"), 2**63, None),
    (zero("u1"), -1, None), (zero("u8"), 2**64, None), (zero("c8"), complex(NAN, 0.1), None),
    (zero("f4"), 0.1, None), (zero("f4"), 1e39, None), (zero("f2"), 1e-10, None),
    (0.0, np.array(1, np.longdouble) / 3, None),
]  # fmt: skip


def small_numbers() -> Iterator[tuple[Any, Any, Any]]:
    """Gives one, and a number that is too large, for every dtype of ml_dtypes."""
    for template in map(zero, (getattr(ml_dtypes, name) for name in EXTENDED)):
        python = {"int": int, "float": float}[str(number_kind(template.dtype))]
        one = python(-1 if template.dtype.name == "int1" else 1)
        yield template, one, one
        yield template, python(100_001), None


@pytest.mark.parametrize(("template", "saved", "number"), [*NUMBERS, *small_numbers()], ids=plain_id)
def test_a_number_takes_a_saved_one_of_its_kind_that_fits(template: Any, saved: Any, number: Any, place: str) -> None:
    if np.dtype(np.longdouble).itemsize == 8 and saved is NUMBERS[-1][1]:
        pytest.skip("long double is double here")
    for value in (saved, saved[()]) if isinstance(saved, np.ndarray) else (saved,):
        hf.save(place, {"a": {"b": value}}, overwrite=True)
        if number is None:
            with pytest.raises(TreeMismatchError, match=r"a/b: expected .* \(template\), found .* \(checkpoint\)"):
                hf.load(place, like={"a": {"b": template}})
            continue
        again = hf.load(place, like={"a": {"b": template}})["a"]["b"]
        assert type(again) is type(template)
        assert getattr(again, "dtype", None) == getattr(template, "dtype", None)
        assert_same(type(number)(again), number)


# ---- casts on request: they may lose precision, but never change a value silently


# The values that are cast together, or one by one where each is refused, by the dtypes before and after.
FIT: dict[tuple[str, str], list[Any]] = {
    ("float32", "float16"): [NAN, INF, -INF, 1.1], ("float64", "bfloat16"): [NAN, INF, -INF, 1.1],
    ("float32", "float8_e4m3fn"): [NAN, 1.1, 448.0], ("float32", "float4_e2m1fn"): [0.5, 6.0, 1.1],
    ("float16", "int8"): [127.0, -128.0, -0.0], ("bfloat16", "uint8"): [255.0], ("float64", "int64"): [-float(1 << 63)],
    ("int64", "bool"): [0, 1], ("float32", "bool"): [0.0, 1.0], ("bool", "int8"): [True, False],
    ("bool", "bfloat16"): [True, False], ("int64", "float32"): [(1 << 53) + 1], ("int8", "int4"): [7, -8],
    ("complex128", "complex64"): [complex(NAN, 1), complex(1, INF)], ("float32", "complex64"): [1.5],
    (">i8", "int16"): [1, 2], ("float64", "int8"): [],
}  # fmt: skip
MISFIT: dict[tuple[str, str], list[Any]] = {
    ("int64", "int32"): [1 << 40], ("int8", "uint16"): [-1], ("int64", "uint64"): [-1], ("uint64", "int64"): [1 << 63],
    ("int64", "int4"): [200], ("int4", "uint8"): [-1], ("int8", "bool"): [2], ("float32", "bool"): [NAN, 0.5],
    ("float32", "int8"): [300.0, NAN], ("float64", "int8"): [-1e30], ("bfloat16", "int32"): [INF],
    ("float32", "int32"): [1.5], ("float64", "int64"): [float(1 << 63)], ("longdouble", "uint64"): [float(1 << 64)],
    ("float32", "float16"): [1e30], ("float64", "bfloat16"): [3.4e38], ("int32", "float16"): [100_000],
    ("complex128", "complex64"): [1e300j], ("float64", "complex64"): [1e300],
    ("float32", "float8_e4m3fn"): [1e6, INF], ("float32", "float4_e2m1fn"): [1e6, NAN],
}  # fmt: skip


def array_of(values: list[Any], dtype: str) -> Any:
    return np.array(values).astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))


@pytest.mark.parametrize(("source", "dtype"), dict.fromkeys([*FIT, *MISFIT]), ids=str)
def test_a_cast_holds_all_values_or_is_refused(source: str, dtype: str) -> None:
    wanted = np.dtype(getattr(ml_dtypes, dtype, dtype))
    array = array_of(FIT.get((source, dtype), [0, 1]), source)
    found = cast_checked(array, wanted)
    assert found.dtype == wanted
    assert found.tobytes() == array.astype(wanted).tobytes()
    for value in MISFIT.get((source, dtype), ()):
        with pytest.raises(CastProblem, match=f"expected values that {wanted} can hold, found"):
            cast_checked(array_of([0, 1, value], source), wanted)


@pytest.mark.parametrize("place", [0, 69_999, 140_000, 209_999])
def test_large_arrays_of_any_strides(place: int) -> None:
    array = np.arange(210_000.0).reshape(3, 7, 10_000) % 100
    assert (cast_checked(array.T, np.dtype(np.int8)) == array.T).all()
    assert (cast_checked(array[:, ::-2], np.dtype(np.int8)) == array[:, ::-2]).all()
    array.reshape(-1)[place] = 1000
    with pytest.raises(CastProblem, match=r"found 1000\.0 \(float64\)"):
        cast_checked(array.T, np.dtype(np.int8))
    assert cast_checked(np.array(3.0), np.dtype(np.int8))[()] == 3
