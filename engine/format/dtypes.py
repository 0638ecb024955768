"""The names of dtypes in documents, and the zarr data type that stores each."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np

from ..errors import DamagedCheckpointError, FormatVersionError

DType: TypeAlias = "np.dtype[Any]"


class Stored(NamedTuple):
    """How the elements of an array are stored."""

    data_type: str  # the name of the zarr data type
    numpy: DType  # the same as a numpy dtype, little endian
    # None when elements are stored as themselves. Otherwise their bytes in memory are stored along one more trailing
    # axis of this size.
    extra: int | None


_ML_NAMES = (
    ("bfloat16", "float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz")
    + ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
    + ("int1", "int2", "int4", "uint1", "uint2", "uint4")
)
_ML_DTYPES: dict[str, DType] = {
    # Older versions of ml_dtypes lack some of them.
    name: np.dtype(getattr(ml_dtypes, name))
    for name in _ML_NAMES
    if hasattr(ml_dtypes, name)
}
_PLAIN_TYPES: tuple[type[np.generic], ...] = (
    (np.bool_, np.float16, np.float32, np.float64, np.complex64, np.complex128)
    + (np.int8, np.int16, np.int32, np.int64)
    + (np.uint8, np.uint16, np.uint32, np.uint64)
)
_PLAIN: dict[str, DType] = {np.dtype(scalar).name: np.dtype(scalar) for scalar in _PLAIN_TYPES}
# https://google.github.io/tensorstore/driver/zarr3/index.html lists the data types that TensorStore's zarr3 knows; the
# first row are those of the zarr specification.
_ZARR: dict[str, DType] = _PLAIN | {
    name: dtype
    for name, dtype in _ML_DTYPES.items()
    if name not in {"int1", "uint1", "uint2", "uint4", "float6_e2m3fn", "float6_e3m2fn", "float8_e4m3"}
}
_LONG = int(np.finfo(np.longdouble).nmant)
_LONG_NAME = re.compile(r"([<>]?)(c?longdouble)([0-9]{1,3})")
# Zero multiples are not accepted: numpy divides by them, which ends the process.
_UNITS = r"(?:\[(?:[1-9][0-9]{0,8})?(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?"
_NUMPY_NAME = re.compile(
    rf"(?:datetime64|timedelta64){_UNITS}|[<>][iufc][0-9]{{1,2}}|[<>][mM]8{_UNITS}|[<>|][SUV][0-9]{{1,10}}"
)


@lru_cache(maxsize=1024)
def dtype_name(dtype: DType) -> str:
    """Return the name of a dtype, from which `dtype_from_name` restores it, byte order included."""
    name = dtype.name
    known = _PLAIN.get(name) or _ML_DTYPES.get(name)
    if known is not None and known == dtype:
        return name
    if dtype.hasobject or dtype.kind in "OT" or dtype.fields is not None or dtype.subdtype is not None:
        raise TypeError(f"the elements of dtype {dtype} are not plain bytes")
    if dtype.type in (np.longdouble, np.clongdouble):
        order = "" if dtype.isnative else dtype.str[0]
        return f"{order}{'c' if dtype.kind == 'c' else ''}longdouble{_LONG}"
    if dtype.isnative and dtype.kind not in "SUV":
        return name
    if dtype.type.__module__ != "numpy":
        raise TypeError(f"the dtype {dtype} of {dtype.type.__module__} is not known")
    return dtype.str


def dtype_from_name(name: str) -> DType:
    """Return the dtype that `dtype_name` gave a name."""
    return _parse(name) if isinstance(name, str) else _unknown(name)


@lru_cache(maxsize=1024)
def _parse(name: str) -> DType:
    dtype = _PLAIN.get(name) or _ML_DTYPES.get(name)
    if dtype is not None:
        return dtype
    if name in _ML_NAMES:
        raise FormatVersionError(f"the dtype {name} needs a newer version of ml_dtypes than {ml_dtypes.__version__}")
    long = _LONG_NAME.fullmatch(name)
    if long:
        if int(long[3]) != _LONG:
            raise FormatVersionError(
                f"the dtype {name} is the long double of another kind of machine; its mantissa has {long[3]} bits, "
                f"on this machine {_LONG}"
            )
        dtype = np.dtype(long[2])
        if long[1]:
            dtype = dtype.newbyteorder(">" if long[1] == ">" else "<")
    elif _NUMPY_NAME.fullmatch(name):
        try:
            dtype = np.dtype(name)
        except (TypeError, ValueError):
            return _unknown(name)
    if dtype is None or dtype_name(dtype) != name:
        return _unknown(name)
    return dtype


def _unknown(name: object) -> DType:
    raise DamagedCheckpointError(f"{str(name)[:100]!r} is not the name of a dtype that holdfast stores")


def zarr_dtype(data_type: str) -> DType | None:
    """Return the little-endian numpy dtype of a zarr data type, or None for an unknown one."""
    dtype = _ZARR.get(data_type)
    return None if dtype is None else dtype.newbyteorder("<")


@lru_cache(maxsize=1024)
def storage_dtype(dtype: DType) -> Stored:
    dtype_name(dtype)  # refuses a dtype without a name
    little = _ZARR.get(dtype.name)
    if little is not None and dtype.newbyteorder("=") == little:
        return Stored(dtype.name, little.newbyteorder("<"), None)
    return Stored("uint8", np.dtype(np.uint8), dtype.itemsize)
