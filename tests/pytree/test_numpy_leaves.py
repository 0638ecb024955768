"""Numpy arrays and scalars: every dtype, layout and shape."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.dtypes import DTYPES, EXTENDED

from holdfast.engine.errors import UnsupportedLeafError
from holdfast.engine.format.zarr import dtype_from_name, dtype_name, storage_dtype
from holdfast.engine.pytree import ArrayLeaf, describe
from holdfast.engine.pytree.host_leaves import check_storable, number_kind
from holdfast.engine.pytree.materialization import exact_cast

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
def test_views_of_any_strides_are_taken_as_they_are(view: Any, save: Any) -> None:
    array = view(np.arange(60, dtype=np.float32).reshape(6, 10))
    [leaf] = describe(["a"], [array])
    assert isinstance(leaf, ArrayLeaf)
    assert np.shares_memory(leaf.pieces[0].array, array)
    assert leaf.volatile
    again = save([array]).load()[0]
    assert type(again) is np.ndarray
    np.testing.assert_array_equal(again, np.asarray(array))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name + dtype.str[0])
def test_every_storable_dtype_has_a_name_in_the_format(dtype: np.dtype[Any]) -> None:
    check_storable(dtype)
    assert dtype_from_name(dtype_name(dtype)) == dtype
    assert storage_dtype(dtype).numpy.itemsize > 0


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
