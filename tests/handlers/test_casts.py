"""Casts by save_args and restore_args: a value that does not fit is an error, and nothing is committed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import holdfast as hf

NAN = float("nan")
MISFITS: dict[str, tuple[Any, Any, str]] = {
    "int": (np.array([1, 1 << 40]), np.int32, r"can hold, found 1099511627776 \(int64\)"),
    "sign": (np.array([-1], np.int64), np.uint64, r"can hold, found -1 \(int64\)"),
    "nan": (np.array([0, NAN], np.float32), np.int8, r"int8 can hold, found nan \(float32\)"),
    "fraction": (jnp.array([1.5]), np.int32, r"int32 can hold, found 1\.5 \(float32\)"),
    "range": (jnp.array([1.0, 1e30]), np.float16, r"float16 can hold, found 1e\+30 \(float32\)"),
    "bool": (torch.tensor([0, 2]), bool, r"bool can hold, found 2 \(int64\)"),
    "bfloat16": (torch.tensor([1e30], dtype=torch.bfloat16), np.float16, r"float16 can hold, found .*bfloat16"),
    "to bfloat16": (np.array([1e300]), jnp.bfloat16, r"bfloat16 can hold, found 1e\+300"),
    "to float8": (np.array([1e6]), ml_dtypes.float8_e4m3fn, "float8_e4m3fn can hold, found 1000000"),
    "number": (300, np.int8, "int8.*300"),
    "strides": (np.full((300, 400), 1e9).T, np.int8, r"int8 can hold, found 1000000000\.0 \(float64\)"),
}


@pytest.mark.parametrize("options", [{}, {"compression": 3}, {"aggregate": True}], ids=["plain", "packed", "aggregate"])
@pytest.mark.parametrize(("value", "dtype", "message"), MISFITS.values(), ids=MISFITS)
def test_saving_values_that_do_not_fit(
    place: str, value: Any, dtype: Any, message: str, options: dict[str, Any]
) -> None:
    save_args = {"a": {"b": hf.SaveArgs(dtype=dtype, **options)}}
    with pytest.raises(hf.errors.UnsupportedLeafError, match=f"a/b: expected values that .*{message}"):
        hf.PyTreeCheckpointer().save(place, {"a": {"b": value}, "c": np.zeros(3)}, save_args=save_args)
    with pytest.raises(hf.CheckpointNotFoundError):
        hf.load(place)


def test_saving_values_that_do_not_fit_in_the_background(place: str) -> None:
    with hf.CheckpointManager(place) as manager:
        manager.save(1, {"w": np.array([1 << 40])})
        manager.wait_until_finished()
        manager.save(2, {"w": np.array([1 << 40])}, save_kwargs={"save_args": hf.SaveArgs(dtype=np.int32)})
        with pytest.raises(hf.SaveFailedError, match="w: expected values that int32 can hold, found 1099511627776"):
            manager.wait_until_finished()
        assert manager.all_steps() == [1]


@pytest.mark.parametrize(("value", "dtype", "message"), MISFITS.values(), ids=MISFITS)
@pytest.mark.parametrize("template", [False, True])
def test_restoring_values_that_do_not_fit(place: str, value: Any, dtype: Any, message: str, template: bool) -> None:
    tree = {"a": {"b": value}, "c": np.zeros(3)}
    checkpointer = hf.PyTreeCheckpointer()
    checkpointer.save(place, tree)
    restore_args = {
        "a": {"b": hf.RestoreArgs(dtype=dtype, restore_type=np.ndarray if value is MISFITS["number"][0] else None)}
    }
    with pytest.raises(hf.TreeMismatchError, match="a/b: expected values that") as caught:
        checkpointer.restore(place, tree if template else None, restore_args=restore_args)
    assert len(caught.value.differences) == 1
    assert re.search(message, caught.value.differences[0])


def test_a_bool_is_no_nan(place: str) -> None:
    checkpointer = hf.PyTreeCheckpointer()
    checkpointer.save(place, {"x": NAN})
    for kind in (bool, int):
        with pytest.raises(hf.TreeMismatchError, match=r"x: expected a Python .*found nan"):
            checkpointer.restore(place, restore_args=hf.RestoreArgs(restore_type=kind))
    assert np.isnan(checkpointer.restore(place, restore_args=hf.RestoreArgs(dtype=np.float32))["x"])


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16, np.float32], ids=["float16", "bfloat16", "float32"])
def test_precision_is_the_requested_one(place: str, dtype: Any, assert_same: Callable[[Any, Any], None]) -> None:
    tree = {"w": np.array([0.1, NAN, np.inf, -np.inf]), "n": np.array([3, (1 << 15) + 1])}
    checkpointer = hf.PyTreeCheckpointer()
    checkpointer.save(place, tree, save_args=hf.SaveArgs(dtype=dtype))
    expected = {name: array.astype(dtype) for name, array in tree.items()}
    assert_same(hf.load(place), expected)
    checkpointer.save(place, tree, force=True)
    assert_same(checkpointer.restore(place, restore_args=hf.RestoreArgs(dtype=dtype)), expected)
