"""Every dtype that numpy and ml_dtypes have and a checkpoint can hold."""

from __future__ import annotations

import ml_dtypes
import numpy as np

EXTENDED = sorted(
    name
    for name in dir(ml_dtypes)
    if isinstance(getattr(ml_dtypes, name), type)
    and issubclass(getattr(ml_dtypes, name), np.generic)
    and "complex" not in name
)
# The names of zarr for types of numpy, and for those of ml_dtypes that it knows.
ZARR_BUILT_IN = [
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
    "complex64", "complex128",
]  # fmt: skip
ZARR_EXTENDED = [
    "bfloat16", "float4_e2m1fn", "float8_e3m4", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float8_e8m0fnu", "int2", "int4",
]  # fmt: skip
BUILT_IN = [
    "?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16", "g", "G",
    ">i2", ">u8", ">f4", ">f8", ">c16", "M8[ns]", "M8", "m8[D]", ">M8[s]", "U5", ">U3", "S4",
]  # fmt: skip
DTYPES = [np.dtype(name) for name in BUILT_IN] + [np.dtype(getattr(ml_dtypes, name)) for name in EXTENDED]
EMPTY = [np.dtype("U0"), np.dtype("S0")]  # of no bytes
