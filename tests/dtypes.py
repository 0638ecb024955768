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
BUILT_IN = [
    "?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16", "g", "G",
    ">i2", ">u8", ">f4", ">f8", ">c16", "M8[ns]", "M8", "m8[D]", ">M8[s]", "U5", ">U3", "S4",
]  # fmt: skip
DTYPES = [np.dtype(name) for name in BUILT_IN] + [np.dtype(getattr(ml_dtypes, name)) for name in EXTENDED]
EMPTY = [np.dtype("U0"), np.dtype("S0")]  # of no bytes
