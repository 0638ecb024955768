from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from holdfast.engine.errors import DamagedCheckpointError, FormatVersionError
from holdfast.engine.format import dtype_from_name, dtype_name, storage_dtype

PLAIN = [
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
]
ML_ZARR = [
    "bfloat16",
    "float4_e2m1fn",
    "float8_e3m4",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "int2",
    "int4",
]
ML_OTHER = ["float6_e2m3fn", "float6_e3m2fn", "float8_e4m3", "uint2", "uint4"]
NUMPY_OTHER = [
    "datetime64",
    "datetime64[ns]",
    "datetime64[25us]",
    ">M8[ns]",
    "timedelta64[s]",
    ">m8[3D]",
    "<U5",
    ">U5",
    "<U0",
    "|S3",
    "|S0",
    "|V7",
]

VARIABLE_WIDTH = [np.dtypes.StringDType()] if hasattr(np.dtypes, "StringDType") else []  # since numpy 2


def ml(name: str) -> np.dtype[np.generic]:
    dtype: np.dtype[np.generic] = np.dtype(getattr(ml_dtypes, name))
    return dtype


@pytest.mark.parametrize("name", PLAIN)
def test_plain_dtypes(name: str) -> None:
    dtype = np.dtype(name)
    assert dtype_name(dtype) == name
    assert dtype_from_name(name) == dtype
    stored = storage_dtype(dtype)
    assert stored.data_type == name
    assert stored.numpy == dtype.newbyteorder("<")
    assert stored.extra is None


@pytest.mark.parametrize("name", [name for name in PLAIN if np.dtype(name).itemsize > 1])
def test_big_endian_dtypes_keep_their_order_and_are_stored_little_endian(name: str) -> None:
    dtype = np.dtype(name).newbyteorder(">")
    assert dtype_name(dtype) == dtype.str
    assert dtype_from_name(dtype.str).str == dtype.str
    assert storage_dtype(dtype) == (name, np.dtype(name).newbyteorder("<"), None)


@pytest.mark.parametrize("name", ML_ZARR)
def test_ml_dtypes_that_zarr_knows(name: str) -> None:
    assert dtype_name(ml(name)) == name
    assert dtype_from_name(name) is ml(name)
    assert storage_dtype(ml(name)) == (name, ml(name), None)


@pytest.mark.parametrize("name", ML_OTHER)
def test_ml_dtypes_that_zarr_does_not_know_are_stored_as_bytes(name: str) -> None:
    assert dtype_name(ml(name)) == name
    assert dtype_from_name(name) is ml(name)
    assert storage_dtype(ml(name)) == ("uint8", np.dtype("u1"), 1)


def test_no_dtype_of_ml_dtypes_is_forgotten() -> None:
    known = {name for name in dir(ml_dtypes) if isinstance(getattr(ml_dtypes, name), type)} - {"finfo", "iinfo"}
    for name in known:
        assert dtype_name(ml(name)) == name


@pytest.mark.parametrize("name", NUMPY_OTHER)
def test_other_dtypes_of_numpy_are_stored_as_bytes(name: str) -> None:
    dtype = np.dtype(name)
    assert dtype_name(dtype) == name
    found = dtype_from_name(name)
    assert found == dtype
    assert found.str == dtype.str
    assert storage_dtype(dtype) == ("uint8", np.dtype("u1"), dtype.itemsize)


@pytest.mark.parametrize("code", ["g", "G"])
def test_names_of_long_doubles_have_their_precision(code: str) -> None:
    for dtype in (np.dtype(code), np.dtype(code).newbyteorder("S")):
        name = dtype_name(dtype)
        assert dtype_from_name(name).str == dtype.str
        assert storage_dtype(dtype).extra == dtype.itemsize
    bits = np.finfo(np.longdouble).nmant
    with pytest.raises(FormatVersionError, match="another kind of machine"):
        dtype_from_name(dtype_name(np.dtype(code)).replace(str(bits), "17"))


def test_aliases_have_one_name() -> None:
    assert dtype_name(np.dtype(np.longlong)) == "int64"
    assert dtype_name(np.dtype("f4", metadata={"a": 1})) == "float32"


@pytest.mark.parametrize(
    "dtype",
    [np.dtype("O"), np.dtype([("a", "f4")]), np.dtype(("f4", (2,))), *VARIABLE_WIDTH],
    ids=["object", "fields", "subarray", *("string" for _ in VARIABLE_WIDTH)],
)
def test_elements_that_are_not_plain_bytes_are_refused(dtype: np.dtype[np.generic]) -> None:
    for function in (dtype_name, storage_dtype):
        with pytest.raises(TypeError, match="plain bytes"):
            function(dtype)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "float31",
        "object",
        "O",
        "|O",
        "float32 ",
        "Float32",
        "f4",
        "<f4",
        "=f4",
        ">i1",
        "<c17",
        "float128",
        "i4,i4",
        "(2,)f4",
        "M8",
        "<m8[s]",
        "datetime64[1s]",
        "datetime64[0s]",  # numpy itself does not survive this one
        ">M8[0s]",
        "datetime64[s",
        "<U99999999999",
        "<U2147483647",
        "<V5",
        "<longdouble9x",
        "numpy.float32",
        "__import__('os').system('true')",
        "x" * 10**6,
        None,
        3,
        ["float32"],
    ],
    ids=lambda value: ascii(value)[:20],
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(DamagedCheckpointError, match="not the name of a dtype") as caught:
        dtype_from_name(name)
    assert len(str(caught.value)) < 200
