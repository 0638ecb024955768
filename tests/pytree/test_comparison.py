"""Comparison of templates with saved leaves: what fits, and the line about what does not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.ids import plain_id

from holdfast.engine.errors import UnsupportedLeafError
from holdfast.engine.pytree import Saved, compare, describe_template

F4 = np.dtype(np.float32)
ARRAY = np.zeros((10, 3), F4)


def line(template: Any, kind: str, dtype: Any = None, shape: Any = None, **details: Any) -> str | None:
    [target] = describe_template(["params.Dense_0.kernel"], [template])
    return compare(target, Saved({"kind": kind, **details}, None if dtype is None else np.dtype(dtype), shape))


@pytest.mark.parametrize(
    ("template", "saved", "said"),
    [
        (ARRAY, ("numpy", "f4", (10, 4)), "expected float32[10, 3] (template), found float32[10, 4] (checkpoint)"),
        (ARRAY, ("jax", "f8", (10, 3)), "expected float32[10, 3] (template), found float64[10, 3] (checkpoint)"),
        (ARRAY, ("torch", "f4", (3, 10)), "expected float32[10, 3] (template), found float32[3, 10] (checkpoint)"),
        (ARRAY, ("none",), "expected float32[10, 3] (template), found None (checkpoint)"),
        (np.zeros(1), ("float", "f8", ()), "expected float64[1] (template), found float (checkpoint)"),
        (np.zeros(()), ("int", "i8", ()), "expected float64[] (template), found int (checkpoint)"),
        (np.zeros((), "<U3"), ("str",), "expected <U3[] (template), found str (checkpoint)"),
        (None, ("numpy", "f4", (2,)), "expected None (template), found float32[2] (checkpoint)"),
        ("text", ("bytes",), "expected str (template), found bytes (checkpoint)"),
        ({1}, ("frozenset",), "expected set (template), found frozenset (checkpoint)"),
        (1, ("float", "f8", ()), "expected int (template), found float (checkpoint)"),
        (1, ("bool", "?", ()), "expected int (template), found bool (checkpoint)"),
        (True, ("int", "i8", ()), "expected bool (template), found int (checkpoint)"),
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
    found = line(template, *saved)
    assert found is not None
    assert found.startswith(f"params/Dense_0/kernel: {said}")
    assert "\n" not in found
    [target] = describe_template(["w"], [template])
    expected = said.partition(" (")[0]
    assert str(compare(target, Saved({"kind": "frozenset"}), "state:w")).startswith(f"state:w: {expected}")


FIT: list[tuple[Any, tuple[Any, ...]]] = [
    *((ARRAY, (kind, "f4", (10, 3))) for kind in ("numpy", "jax", "torch")),
    (ARRAY, ("numpy", ">f4", (10, 3))), (np.zeros(3, "M8[ns]"), ("numpy", "M8[ns]", (3,))),
    (np.zeros((0, 2)), ("torch", "f8", (0, 2))),
    (1, ("int", "i8", ())), (1, ("int",)), (1, ("jax", "i4", ())), (1, ("torch", "u1", ())),
    (1.0, ("numpy_scalar", "f2", ())), (True, ("numpy", "?", ())),
    (np.zeros((), "i4"), ("int", "i8", ())), (np.zeros((), "u8"), ("int",)),
    (np.int16(3), ("int", "i8", ())), (np.float32(1), ("jax", "f4", ())),
    ("a", ("str",)), ("a", ("str", "u1", (99,))), (None, ("none",)), (..., ("none",)), (..., ("key", "u4", (2,))),
]  # fmt: skip


@pytest.mark.parametrize(("template", "saved"), FIT, ids=plain_id)
def test_leaves_that_fit(template: Any, saved: Any) -> None:
    assert line(template, *saved) is None


def test_typed_keys_want_typed_keys_of_their_implementation() -> None:
    jax = pytest.importorskip("jax")
    keys = jax.random.split(jax.random.key(0), 3)
    assert line(keys, "key", "u4", (3, 2), impl="threefry2x32") is None
    assert line(keys, "key", "u4", (3, 2), impl="rbg") == (
        "params/Dense_0/kernel: expected key<threefry2x32>[3] (template), found key<rbg>[3] (checkpoint)"
    )
    assert line(keys, "jax", "u4", (3, 2)) == (
        "params/Dense_0/kernel: expected key<threefry2x32>[3] (template), found uint32[3, 2] (checkpoint)"
    )


def test_all_leaves_that_cannot_be_templates_are_named() -> None:
    with pytest.raises(UnsupportedLeafError) as caught:
        describe_template(["a.b", "c", "d", "e"], [object(), 1, np.zeros(1, object), len])
    text = str(caught.value)
    assert "a/b: is of type object" in text
    assert "d: has dtype object" in text
    assert "e: is of type builtin_function_or_method" in text
    assert "c:" not in text
