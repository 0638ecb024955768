"""Exact comparison of trees: types, order of keys, dtypes, shapes, and every bit of every value."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np


def assert_same(found: Any, expected: Any, where: str = "root") -> None:
    """Compares two trees: the types of all containers and leaves, the order of keys, every bit of every value."""
    jax, torch = sys.modules.get("jax"), sys.modules.get("torch")
    assert type(found) is type(expected), where
    if isinstance(expected, np.ndarray | np.generic):
        assert found.dtype == expected.dtype, where
        assert found.shape == expected.shape, where
        if expected.dtype.char in "gG":  # their elements have bytes that mean nothing
            np.testing.assert_array_equal(found, expected)
        else:
            assert found.tobytes() == expected.tobytes(), where
    elif torch is not None and isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), where
        assert torch.equal(_bits(found), _bits(expected)), where
    elif jax is not None and isinstance(expected, jax.Array):
        assert found.dtype == expected.dtype, where
        assert getattr(found, "weak_type", False) == getattr(expected, "weak_type", False), where
        if jax.dtypes.issubdtype(expected.dtype, jax.dtypes.prng_key):
            found, expected = jax.random.key_data(found), jax.random.key_data(expected)
        assert_same(np.asarray(found), np.asarray(expected), where)
    elif isinstance(expected, float):
        assert math.copysign(1.0, found) == math.copysign(1.0, expected), where
        assert found == expected or (math.isnan(found) and math.isnan(expected)), where
    elif isinstance(expected, complex):
        assert_same(found.real, expected.real, where)
        assert_same(found.imag, expected.imag, where)
    elif isinstance(expected, Mapping):
        assert [(type(key), key) for key in found] == [(type(key), key) for key in expected], where
        for key, value in expected.items():
            assert_same(found[key], value, f"{where}/{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{where}/{index}")
    elif dataclasses.is_dataclass(expected):
        for field in dataclasses.fields(expected):
            assert_same(getattr(found, field.name), getattr(expected, field.name), f"{where}/{field.name}")
    else:
        assert found == expected, where


def _bits(tensor: Any) -> Any:
    torch = sys.modules["torch"]
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
