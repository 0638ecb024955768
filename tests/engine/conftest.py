"""What the tests of the engine share: a place without a disk, and what "exactly the same" means."""

from __future__ import annotations

import dataclasses
import math
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from holdfast.engine.storage import as_location


@pytest.fixture
def place() -> Iterator[str]:
    """A URL below which nothing is yet; in memory, so that syncing costs nothing."""
    url = f"memory://tests/{uuid.uuid4().hex}"
    yield url
    as_location(url).remove_tree()


@pytest.fixture(scope="session")
def assert_same() -> Callable[[Any, Any], None]:
    """Compares two trees: the types of all containers and leaves, the order of keys, every bit of every value."""
    return _assert_same


def _assert_same(found: Any, expected: Any, where: str = "root") -> None:
    assert type(found) is type(expected), where
    if isinstance(expected, np.ndarray | np.generic):
        assert found.dtype == expected.dtype, where
        assert found.shape == expected.shape, where
        if expected.dtype.char in "gG":  # their elements have bytes that mean nothing
            np.testing.assert_array_equal(found, expected)
        else:
            assert found.tobytes() == expected.tobytes(), where
    elif isinstance(expected, float):
        assert math.copysign(1.0, found) == math.copysign(1.0, expected), where
        assert found == expected or (math.isnan(found) and math.isnan(expected)), where
    elif isinstance(expected, complex):
        _assert_same(found.real, expected.real, where)
        _assert_same(found.imag, expected.imag, where)
    elif isinstance(expected, Mapping):
        assert [(type(key), key) for key in found] == [(type(key), key) for key in expected], where
        for key, value in expected.items():
            _assert_same(found[key], value, f"{where}/{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            _assert_same(one, other, f"{where}/{index}")
    elif dataclasses.is_dataclass(expected):
        for field in dataclasses.fields(expected):
            _assert_same(getattr(found, field.name), getattr(expected, field.name), f"{where}/{field.name}")
    else:
        assert found == expected, where
