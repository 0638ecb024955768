"""Two checkpoints compared leaf by leaf."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import holdfast as hf
from holdfast.engine.sources import LeafDifference, compare_checkpoints, open_at
from holdfast.engine.storage import as_location

NAN = float("nan")
BASE: dict[str, Any] = {"w": np.arange(12.0).reshape(3, 4), "n": 3, "text": "a", "none": None, "list": [1.5, b"x"]}


def compare(directory: Path, one: Any, other: Any, *, rtol: float = 0.0, atol: float = 0.0) -> list[LeafDifference]:
    for name, tree in (("one", one), ("other", other)):
        hf.save(directory / name, tree, overwrite=True)
    pair = [open_at(as_location(directory / name)) for name in ("one", "other")]
    return list(compare_checkpoints(pair[0], pair[1], rtol=rtol, atol=atol))


SPECIAL = np.array([NAN, -0.0, 0.0, np.inf], np.float32)
HALF = np.ones(4, ml_dtypes.bfloat16)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ({}, {}, []),
        ({"w": SPECIAL}, {"w": SPECIAL.copy()}, []),
        ({"w": np.zeros((0, 3))}, {"w": np.zeros((0, 3))}, []),
        ({"n": 4}, {"n": 5}, [("n", "values", 1)]),
        ({"text": "b"}, {}, [("text", "values", 0)]),
        ({"none": 0}, {}, [("none", "type", 0)]),
        ({"list": [2.5, b"y"]}, {}, [("list/0", "values", 1), ("list/1", "values", 0)]),
        ({"more": 1.0}, {}, [("more", "missing", 0)]),
        ({}, {"more": 1.0}, [("more", "added", 0)]),
        ({"w": np.zeros(3)}, {}, [("w", "type", 0)]),
        ({"w": BASE["w"].astype(np.float32)}, {}, [("w", "type", 0)]),
        ({"w": np.array([0.0])}, {"w": np.array([-0.0])}, [("w", "values", 1)]),
        ({"w": np.array([NAN])}, {"w": np.array([1.0])}, [("w", "values", 1)]),
        ({"w": HALF}, {"w": HALF * np.array([1, 2, 1, 2], HALF.dtype)}, [("w", "values", 2)]),
        ({"w": np.array(["a", "b"])}, {"w": np.array(["a", "c"])}, [("w", "values", 1)]),
        ({"w": np.array([1 + 2j])}, {"w": np.array([1 + 3j])}, [("w", "values", 1)]),
    ],
)
def test_bits(tmp_path: Path, one: Any, other: Any, expected: list[tuple[str, str, int]]) -> None:
    found = compare(tmp_path, {**BASE, **one}, {**BASE, **other})
    assert [(difference.path, difference.kind, difference.differing) for difference in found] == expected


def test_what_is_said_of_an_array(tmp_path: Path) -> None:
    other = BASE["w"].copy()
    other[1, 2] += 0.5
    other[2, 0] -= 2.0
    (found,) = compare(tmp_path, BASE, {**BASE, "w": other})
    assert (found.differing, found.size, found.greatest, found.first) == (2, 12, 2.0, (1, 2))
    assert found.relative == 2.0 / 11.0
    assert str(found) == (
        "state/w: 2 of 12 elements differ, by at most 2; the first at [1, 2]: expected 6.0, found 6.5"
    )


@pytest.mark.parametrize(
    ("one", "other", "tolerances", "same"),
    [
        ([1.0, NAN], [1.0 + 1e-9, NAN], {"rtol": 1e-8}, True),
        ([1.0], [1.0 + 1e-7], {"rtol": 1e-8}, False),
        ([1e-9], [0.0], {"rtol": 1.0}, True),  # relative to the expected element
        ([0.0, np.inf], [1e-9, np.inf], {"atol": 1e-8}, True),
        ([0.0, np.inf], [1e-9, -np.inf], {"atol": 1e-8}, False),
        ([NAN], [1.0], {"atol": 9.0}, False),
    ],
)
def test_tolerances(
    tmp_path: Path, one: list[float], other: list[float], tolerances: dict[str, float], *, same: bool
) -> None:
    found = compare(tmp_path, {"w": np.array(one)}, {"w": np.array(other)}, **tolerances)
    assert (found == []) is same


def test_large_arrays_are_compared_in_parts(tmp_path: Path) -> None:
    one = np.arange(10_000_000.0).reshape(-1, 5)  # 80 MB, of which 64 MiB are compared at a time
    other = one.copy()
    other[[3, 1_900_000, 1_999_999], [1, 4, 0]] += [1, -7, 3]
    whole = compare(tmp_path, {"w": one}, {"w": other})
    assert [(found.differing, found.first, found.greatest) for found in whole] == [(3, (3, 1), 7.0)]
    assert math.isclose(whole[0].relative, 7 / 9_999_999, rel_tol=1e-2)


def test_items(tmp_path: Path) -> None:
    """A run's checkpoint of several items: trees, JSON, and one tree for each process."""
    checkpointers = {"state": hf.PyTreeCheckpointer(), "config": hf.Checkpointer(hf.JsonCheckpointHandler())}
    configs: dict[str, Any] = {"one": {"config": {"rate": 0.1}}, "other": {"config": {"rate": 0.2}}, "third": {}}
    for name, config in configs.items():
        items = {"state": BASE, **config}
        with hf.CheckpointManager(tmp_path / name, {item: checkpointers[item] for item in items}) as manager:
            manager.save(1, items)
    one, other, third = (open_at(as_location(tmp_path / name / "1")) for name in ("one", "other", "third"))
    assert [str(found) for found in compare_checkpoints(one, other)] == [
        "config: expected {'rate': 0.1}, found {'rate': 0.2}"
    ]
    assert [(found.item, found.kind) for found in compare_checkpoints(one, third)] == [("config", "missing")]
    assert [(found.item, found.kind) for found in compare_checkpoints(third, one)] == [("config", "added")]
