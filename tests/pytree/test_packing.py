"""Sequences of numbers as one leaf each, and deques: what was saved comes back, element by element and type by type."""

from __future__ import annotations

import struct
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast as hf
from holdfast.engine.pytree import PACKED_FROM, Saved, describe, materialize, pack_numbers, pack_tree

N = PACKED_FROM
SEQUENCES: dict[str, Any] = {
    "floats": [0.1, -0.0, float("inf"), 5e-324] * N,
    "ints": [0, -1, (1 << 63) - 1, -(1 << 63)] * N,
    "bools": [True, False] * N,
    "complex": [1 - 2j, complex("nan")] * N,
    "mixed": [True, 1, 1.0, False, 0, -0.0, -(1 << 63), 1e300, float("nan")] * N,
    "mixed with large ints": [0.5, (1 << 53) + 1, -(1 << 53) - 1, (1 << 63) - 1, float("-inf"), True] * N,
    "numpy": [np.float32(0.1), np.float32("nan")] * N,
    "numpy bools": [np.bool_(True)] * N,
    "tuple": (1, 2.0) * N,
    "deque": deque([1.5] * N),
    "bounded deque": deque([1, True] * N, maxlen=4 * N),
    "nan with a payload": [struct.unpack("<d", bytes.fromhex("010000000000f87f"))[0]] * N,
}
LEFT_ALONE: dict[str, Any] = {
    "few": [1.0] * (N - 1),
    "texts": ["a"] * N,
    "one text": [1.0] * N + ["a"],
    "large ints": [1 << 63] * N,
    "one large int": [1.0, 1 << 64] * N,
    "an int of 64 bits": [1.0, 1 << 63] * N,
    "an int beyond all floats": [1.0, 1 << 2000] * N,
    "arrays": [np.zeros(2)] * N,
    "numpy of two types": [np.float32(1), np.float64(1)] * N,
    "an array": np.zeros(N),
}


def bits(value: Any) -> Any:
    return [(type(one), one.tobytes() if isinstance(one, np.generic) else _bits(one)) for one in value]


def _bits(one: Any) -> Any:
    return struct.pack("<d", one) if type(one) is float else repr(one)


@pytest.mark.parametrize("name", SEQUENCES)
def test_a_long_sequence_of_numbers_is_one_leaf(name: str, tmp_path: Path) -> None:
    value = SEQUENCES[name]
    packed = pack_numbers(value)
    assert packed is not None
    hf.save(tmp_path / "x", pack_tree({"outer": [{"history": value, "few": [1, 2]}]}))
    [leaf] = [leaf for leaf in hf.describe(tmp_path / "x") if "history" in leaf.path]
    assert leaf.kind == "numbers"
    assert leaf.bytes <= 1.13 * np.array(value, float if name.startswith("mixed") else type(value[0])).nbytes
    found = hf.load(tmp_path / "x")["outer"][0]
    assert found["few"] == [1, 2]
    unpacked = [packed.unpack()]
    packed.describe()
    for one in (*unpacked, packed.unpack(), found["history"]):
        assert type(one) is type(value)
        assert bits(one) == bits(value)
        assert getattr(one, "maxlen", None) == getattr(value, "maxlen", None)


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_other_sequences_stay_what_they_are(name: str) -> None:
    tree = {"a": (LEFT_ALONE[name], None)}
    assert pack_numbers(tree["a"][0]) is None
    assert pack_tree(tree) is tree


def test_elements_of_one_type_load_as_an_array_where_one_is_asked_for(tmp_path: Path) -> None:
    hf.save(tmp_path / "x", pack_tree({"one": [1.5] * N, "mixed": [1, 2.5] * N}))
    found: Any = hf.load(tmp_path / "x", like={"one": np.zeros(N), "mixed": ...})
    assert np.array_equal(found["one"], np.full(N, 1.5))
    assert found["mixed"] == [1, 2.5] * N
    with pytest.raises(hf.TreeMismatchError, match=f"mixed: expected .*, found {2 * N} numbers"):
        hf.load(tmp_path / "x", like={"one": ..., "mixed": np.zeros(2 * N)})


def test_deques_are_containers(tmp_path: Path) -> None:
    tree = {"window": deque([np.arange(2), "text", None], maxlen=5), "empty": deque(maxlen=3), "free": deque([1])}
    hf.save(tmp_path / "x", tree)
    found = hf.load(tmp_path / "x")
    assert {name: (type(one), one.maxlen, len(one)) for name, one in found.items()} == {
        "window": (deque, 5, 3),
        "empty": (deque, 3, 0),
        "free": (deque, None, 1),
    }
    assert found["window"][0].tolist() == [0, 1]
    like: Any = tree
    assert hf.load(tmp_path / "x", like=like)["window"].maxlen == 5


MISFITS: list[tuple[dict[str, Any], tuple[int, ...]]] = [
    *(({"elements": elements}, (4,)) for elements in ("float", ["int"], "object", "mixed")),
    *(({"sequence": sequence}, (4,)) for sequence in ("set", None)),
    *(({"sequence": "deque", "maxlen": maxlen}, (4,)) for maxlen in (3, "4", 1 << 70)),
    ({}, (2, 2)),
    ({}, ()),
]


@pytest.mark.parametrize(("change", "shape"), MISFITS, ids=str)
def test_details_that_do_not_fit_are_damage(change: dict[str, Any], shape: tuple[int, ...]) -> None:
    details = {"kind": "numbers", "sequence": "list", "elements": "int", **change}
    array = np.zeros(shape, np.int64)
    with pytest.raises(hf.DamagedCheckpointError, match="leaf a is of kind numbers"):
        materialize([None], [Saved(details, array.dtype, array.shape)], [array], ["a"])


def test_types_that_do_not_exist_are_damage() -> None:
    [leaf] = describe(["a"], [pack_numbers([1, 2.0] * N)])
    array = leaf.copy()  # type: ignore[union-attr]  # it is an array
    array[0, 0] = 9
    with pytest.raises(hf.DamagedCheckpointError, match="type 9 of an element is unknown"):
        materialize([None], [Saved(leaf.details, array.dtype, array.shape)], [array], ["a"])
