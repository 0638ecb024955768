"""The line about a leaf that does not fit its template."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.ids import plain_id

from holdfast.engine.pytree import Saved, compare, describe_template

ARRAY = np.zeros((10, 3), np.float32)


@pytest.mark.parametrize(
    ("template", "saved", "said"),
    [
        (ARRAY, ("numpy", "f4", (10, 4)), "expected float32[10, 3] (template), found float32[10, 4] (checkpoint)"),
        (ARRAY, ("none",), "expected float32[10, 3] (template), found None (checkpoint)"),
        (np.zeros(1), ("float", "f8", ()), "expected float64[1] (template), found float (checkpoint)"),
        (np.zeros(()), ("int", "i8", ()), "expected float64[] (template), found int (checkpoint)"),
        (np.zeros((), "<U3"), ("str",), "expected <U3[] (template), found str (checkpoint)"),
        (None, ("numpy", "f4", (2,)), "expected None (template), found float32[2] (checkpoint)"),
        ("text", ("bytes",), "expected str (template), found bytes (checkpoint)"),
        ({1}, ("frozenset",), "expected set (template), found frozenset (checkpoint)"),
        (1, ("float", "f8", ()), "expected int (template), found float (checkpoint)"),
        (1.0, ("int",), "expected float (template), found int (checkpoint)"),
        (1.0, ("numpy", "f4", (1,)), "expected float (template), found float32[1] (checkpoint)"),
        (1, ("none",), "expected int (template), found None (checkpoint)"),
        (1, ("numpy", "M8[s]", ()), "expected int (template), found datetime64[s][] (checkpoint)"),
        (1, ("key", "u4", ()), "expected int (template), found key[] (checkpoint)"),
        (np.float32(1), ("numpy_scalar", "f8", ()), "expected numpy scalar float32[] (template), found numpy scalar"),
        (np.zeros(2, "u4"), ("key", "u4", (2,)), "expected uint32[2] (template), found key[] (checkpoint)"),
        (np.zeros(2, "u1"), ("bytes", "u1", (2,)), "expected uint8[2] (template), found bytes (checkpoint)"),
    ],
    ids=plain_id,
)
def test_a_difference_is_one_line_with_the_expected_and_the_found_leaf(template: Any, saved: Any, said: str) -> None:
    kind, dtype, shape = (*saved, None, None)[:3]
    [target] = describe_template(["params.Dense_0.kernel"], [template])
    found = str(compare(target, Saved({"kind": kind}, None if dtype is None else np.dtype(dtype), shape)))
    assert found.startswith(f"params/Dense_0/kernel: {said}")
    assert "\n" not in found
    expected = said.partition(" (")[0]
    assert str(compare(target, Saved({"kind": "frozenset"}), "state:w")).startswith(f"state:w: {expected}")
