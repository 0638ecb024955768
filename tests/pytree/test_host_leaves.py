"""Numpy arrays and scalars, Python values, and casts between them: values stay what they are, or are refused."""

from __future__ import annotations

import enum
import math
import struct
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.dtypes import EXTENDED
from tests.ids import plain_id

from holdfast.engine.errors import DamagedCheckpointError, TreeMismatchError, UnsupportedLeafError
from holdfast.engine.pytree import (
    ArrayLeaf,
    CastProblem,
    Saved,
    ValueLeaf,
    cast_checked,
    describe,
    describe_template,
    materialize,
)
from holdfast.engine.pytree.host_leaves import number_kind
from holdfast.engine.pytree.materialization import cast_number, exact_cast

VARIABLE_WIDTH = [np.dtypes.StringDType()] if hasattr(np.dtypes, "StringDType") else []  # since numpy 2


@pytest.mark.parametrize(
    "view",
    [
        lambda base: base.T,
        lambda base: base[::-1, 1::2],
        lambda base: np.asfortranarray(base),
        lambda base: np.broadcast_to(base[0], (5, *base.shape[1:])),
        lambda base: base[1, 2, ...],
        lambda base: base.view(np.matrix) if base.ndim == 2 else base,
    ],
    ids=["transposed", "strided", "fortran", "broadcast", "row", "matrix"],
)
def test_views_of_any_strides_are_taken_as_they_are(view: Any) -> None:
    array = view(np.arange(60, dtype=np.float32).reshape(6, 10))
    [leaf] = describe(["a"], [array])
    assert isinstance(leaf, ArrayLeaf)
    assert np.shares_memory(leaf.pieces[0].array, array)
    assert leaf.volatile


@pytest.mark.parametrize("name", ["complex32", "bcomplex32"])
def test_dtypes_without_a_name_in_the_format_are_refused(name: str) -> None:
    if hasattr(ml_dtypes, name):
        with pytest.raises(UnsupportedLeafError, match=f"a: has dtype {name}, which cannot be stored"):
            describe(["a"], [np.zeros(2, getattr(ml_dtypes, name))])


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
    ],
    ids=["object", "structured", "structured with objects", "void", "masked", "raw", "record"]
    + ["string" for _ in VARIABLE_WIDTH],
)
def test_arrays_that_cannot_be_stored_are_named(value: Any, said: str) -> None:
    with pytest.raises(UnsupportedLeafError, match=f"opt/state: {said}"):
        describe(["ok", "opt.state"], [np.ones(1), value])


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [("?", "bool"), ("i1", "int"), ("u8", "int"), ("f2", "float"), ("G", "complex"), ("U3", None), ("M8[s]", None)]
    + [("bfloat16", "float"), ("float8_e4m3fn", "float"), ("int4", "int"), ("uint4", "int")],
    ids=str,
)
def test_the_python_number_like_a_dtype(dtype: Any, kind: str | None) -> None:
    assert number_kind(np.dtype(dtype)) == kind


@pytest.mark.parametrize("name", EXTENDED)
def test_small_numbers_are_cast_only_exactly(name: str) -> None:
    dtype = np.dtype(getattr(ml_dtypes, name))
    python = {"int": int, "float": float}[str(number_kind(dtype))]
    one = python(-1 if name == "int1" else 1)
    exact = exact_cast(one, dtype)
    assert exact is not None
    assert exact.dtype == dtype
    assert python(exact) == one
    assert exact_cast(python(100_001), dtype) is None


# ---- Python values: the same value and type comes back, with a template and without


class Phase(enum.IntEnum):
    WARMUP = 1
    MAIN = 2


def bits(value: Any) -> Any:
    """A key that is equal only for the same value of the same type, NaN and -0.0 included."""
    if isinstance(value, float):
        return struct.pack("<d", value)
    if isinstance(value, complex):
        return struct.pack("<dd", value.real, value.imag)
    return type(value), value


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(True, "bool"), (-5, "int64"), (2**63 - 1, "int64"), (0.5, "float64"), (1j, "complex128"), (Phase.MAIN, "int64")],
)
def test_numbers_are_arrays_that_every_tool_can_read(value: Any, dtype: str) -> None:
    [leaf] = describe(["x"], [value])
    assert isinstance(leaf, ArrayLeaf)
    assert (leaf.dtype, leaf.shape, leaf.volatile) == (np.dtype(dtype), (), False)
    assert leaf.pieces[0].array == value


@pytest.mark.parametrize("value", [2**63, "text", b"bytes", None, {1}])
def test_other_values_stand_in_the_document(value: Any) -> None:
    assert isinstance(describe(["x"], [value])[0], ValueLeaf)


@pytest.mark.parametrize(
    "details",
    [
        {"kind": "int"},
        {"kind": "int", "value": 5},
        {"kind": "int", "value": "zz"},
        {"kind": "int", "value": None},
        {"kind": "int", "value": "0x" + "f" * 2_000_000},
        {"kind": "str", "value": 5},
        {"kind": "str", "base64": "?"},
        {"kind": "str", "base64": "/w=="},
        {"kind": "bytes"},
        {"kind": "bytes", "value": "abc"},
        {"kind": "bytes", "base64": 5},
        {"kind": "bytes", "base64": "é"},
        {"kind": "float", "value": "0x1p99999"},
        {"kind": "float", "value": 1.5},
        {"kind": "complex", "value": ["0x1p0"]},
        {"kind": "complex", "value": "ab"},
        {"kind": "bool", "value": 1},
        {"kind": "set", "value": 5},
        {"kind": "set", "value": [5]},
        {"kind": "set", "value": [{"kind": "set", "value": []}]},
        {"kind": "frozenset", "value": [{}]},
        {"kind": "os.system", "value": "true"},
        {"kind": "numpy"},
        {"kind": "jax", "value": []},
    ],
    ids=lambda details: repr(details)[:50],
)
def test_a_forged_value_is_damage(details: Any) -> None:
    with pytest.raises(DamagedCheckpointError, match="a/b"):
        materialize([None], [Saved(details)], [None], ["a.b"])


@pytest.mark.parametrize(
    ("details", "array"),
    [
        ({"kind": "int"}, np.zeros((2,), np.int64)),
        ({"kind": "int"}, np.zeros((), np.float64)),
        ({"kind": "bool"}, np.zeros((), np.int64)),
        ({"kind": "float"}, np.zeros((), "<U3")),
        ({"kind": "numpy_scalar"}, np.zeros((1,), np.int64)),
        ({"kind": "none"}, np.zeros((1,), np.int64)),
        ({"kind": "pickle"}, np.zeros((1,), np.uint8)),
        ({"kind": "bytes"}, np.zeros((2, 2), np.uint8)),
        ({"kind": "bytes"}, np.zeros((2,), np.int8)),
        ({"kind": "str"}, np.full((2,), 255, np.uint8)),
    ],
    ids=plain_id,
)
def test_a_kind_that_contradicts_its_array_is_damage(details: Any, array: Any) -> None:
    with pytest.raises(DamagedCheckpointError, match="a/b"):
        materialize([None], [Saved(details, array.dtype, array.shape)], [array], ["a.b"])


@pytest.mark.parametrize(
    ("template", "array", "expected"),
    [
        (0, np.array(7, np.int32), 7),
        (0, np.array(200, np.uint8), 200),
        (0, np.array(2**64 - 1, np.uint64), 2**64 - 1),
        (0.0, np.array(0.5, np.float16), 0.5),
        (0.0, np.array(1.5, ">f4"), 1.5),
        (0.0, np.array(0.5, np.longdouble), 0.5),
        (False, np.array(True), True),
        (0j, np.array(1 + 2j, np.complex64), 1 + 2j),
    ],
    ids=plain_id,
)
def test_a_python_number_takes_a_saved_array_of_its_kind(template: Any, array: Any, expected: Any, save: Any) -> None:
    for saved in (array, array[()]):
        assert bits(save([saved]).load(like=[template])[0]) == bits(expected)


@pytest.mark.parametrize(
    ("template", "value"),
    [
        (np.zeros((), np.int32), 5),
        (np.zeros((), np.uint64), 2**64 - 1),
        (np.zeros((), np.float32), 0.5),
        (np.zeros((), np.float32), math.nan),
        (np.zeros((), np.float16), -math.inf),
        (np.zeros((), ">f8"), -0.0),
        (np.zeros((), np.bool_), True),
        (np.zeros((), np.complex64), complex(-0.0, math.nan)),
        (np.int8(0), -128),
        (np.float16(0), 0.25),
    ],
    ids=plain_id,
)
def test_an_array_takes_a_saved_python_number_of_its_kind(template: Any, value: Any, save: Any) -> None:
    again = save([value]).load(like=[template])[0]
    assert type(again) is type(template)
    assert again.dtype == template.dtype
    assert bits(type(value)(again)) == bits(value)


@pytest.mark.parametrize(
    ("template", "value"),
    [
        (np.zeros((), np.int8), 128),
        (np.zeros((), np.int32), 2**31),
        (np.zeros((), np.int64), 2**63),
        (np.zeros((), np.uint8), -1),
        (np.zeros((), np.uint64), 2**64),
        (np.zeros((), np.float32), 0.1),
        (np.zeros((), np.float32), 1e39),
        (np.zeros((), np.float16), 1e-10),
        (np.zeros((), np.complex64), complex(math.nan, 0.1)),
        (0.0, np.array(1, np.longdouble) / 3),
    ],
    ids=plain_id,
)
def test_a_number_that_does_not_fit_is_an_error_that_names_it(template: Any, value: Any, save: Any) -> None:
    if np.dtype(np.longdouble).itemsize == 8 and isinstance(value, np.ndarray | np.longdouble):
        pytest.skip("long double is double here")
    with pytest.raises(TreeMismatchError, match=r"a/b: expected .* \(template\), found .* \(checkpoint\)") as caught:
        save({"a": {"b": value}}).load(like={"a": {"b": template}})
    assert len(caught.value.differences) == 1


def test_the_plain_python_template_kinds() -> None:
    values = [True, 1, 1.0, 1j, "s", b"b", None, {1}, frozenset(), ..., np.float32(1)]
    kinds = [target.kind for target in describe_template(["x"] * len(values), values)]
    assert kinds == [
        "bool", "int", "float", "complex", "str", "bytes", "none", "set", "frozenset", "any", "numpy_scalar",
    ]  # fmt: skip


# ---- casts on request: they may lose precision, but never change a value silently


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
