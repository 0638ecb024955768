from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from tests.dtypes import ZARR_BUILT_IN, ZARR_EXTENDED

from holdfast.engine.errors import DamagedCheckpointError, FormatVersionError
from holdfast.engine.format import dtype_from_name, dtype_name, storage_dtype

ML_OTHER = ["float6_e2m3fn", "float6_e3m2fn", "float8_e4m3", "uint2", "uint4"]
NUMPY_OTHER = [
    *("datetime64", "datetime64[ns]", "datetime64[25us]", ">M8[ns]", "timedelta64[s]", ">m8[3D]"),
    *("<U5", ">U5", "<U0", "|S3", "|S0", "|V7"),
]
VARIABLE_WIDTH = [np.dtypes.StringDType()] if hasattr(np.dtypes, "StringDType") else []  # since numpy 2


def ml(name: str) -> np.dtype[np.generic]:
    dtype: np.dtype[np.generic] = np.dtype(getattr(ml_dtypes, name))
    return dtype


def little(name: str) -> np.dtype[np.generic]:
    return np.dtype(name).newbyteorder("<")


Stored = tuple[str, np.dtype[np.generic], int | None]
# The dtype, its name, and what stores it: a type of zarr, its dtype, and the bytes of an element if those are all.
DTYPES: dict[str, tuple[np.dtype[np.generic], str, Stored]] = {
    **{name: (np.dtype(name), name, (name, little(name), None)) for name in ZARR_BUILT_IN},
    **{
        f"big-endian {name}": (big, big.str, (name, little(name), None))
        for name in ZARR_BUILT_IN
        if (big := np.dtype(name).newbyteorder(">")).itemsize > 1
    },
    **{name: (ml(name), name, (name, ml(name), None)) for name in ZARR_EXTENDED},
    **{name: (ml(name), name, ("uint8", np.dtype("u1"), 1)) for name in ML_OTHER},
    **{name: (np.dtype(name), name, ("uint8", np.dtype("u1"), np.dtype(name).itemsize)) for name in NUMPY_OTHER},
}


@pytest.mark.parametrize(("dtype", "name", "stored"), DTYPES.values(), ids=DTYPES)
def test_a_dtype_has_one_name_and_one_form_in_storage(dtype: np.dtype[np.generic], name: str, stored: Stored) -> None:
    assert dtype_name(dtype) == name
    found = dtype_from_name(name)
    assert (found, found.str) == (dtype, dtype.str)
    assert found is dtype or dtype.type.__module__ != "ml_dtypes"
    assert storage_dtype(dtype) == stored


def test_no_dtype_of_ml_dtypes_is_forgotten() -> None:
    known = {name for name in dir(ml_dtypes) if isinstance(getattr(ml_dtypes, name), type)} - {"finfo", "iinfo"}
    for name in known:
        assert dtype_name(ml(name)) == name


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


NO_NAMES = [
    *("", "float31", "object", "O", "|O", "float32 ", "Float32", "f4", "<f4", "=f4", ">i1", "<c17", "float128"),
    *("i4,i4", "(2,)f4", "M8", "<m8[s]", "datetime64[1s]", ">M8[0s]", "datetime64[s", "<U99999999999", "<U2147483647"),
    *("<V5", "<longdouble9x", "numpy.float32", "__import__('os').system('true')", "x" * 10**6),
    "datetime64[0s]",  # numpy itself does not survive this one
    *(None, 3, ["float32"]),
]


@pytest.mark.parametrize("name", NO_NAMES, ids=lambda value: ascii(value)[:20])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(DamagedCheckpointError, match="not the name of a dtype") as caught:
        dtype_from_name(name)
    assert len(str(caught.value)) < 200
