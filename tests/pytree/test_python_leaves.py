"""Python values: exactly the same value and type comes back, with a template and without."""

from __future__ import annotations

import enum
import math
import struct
from typing import Any

import numpy as np
import pytest
from tests.ids import plain_id

from holdfast.engine.errors import DamagedCheckpointError, TreeMismatchError
from holdfast.engine.pytree import ArrayLeaf, Saved, ValueLeaf, describe, describe_template, materialize


class Phase(enum.IntEnum):
    WARMUP = 1
    MAIN = 2


def bits(value: Any) -> Any:
    """A key that is equal only for the same value of the same type, NaN and -0.0 included."""
    if isinstance(value, float):
        return struct.pack("<d", value)
    if isinstance(value, complex):
        return struct.pack("<dd", value.real, value.imag)
    return type(value), value


def _bits_of(tree: Any) -> Any:
    if isinstance(tree, list):
        return [_bits_of(item) for item in tree]
    if isinstance(tree, dict):
        return [(key, _bits_of(item)) for key, item in tree.items()]
    return bits(tree)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(True, "bool"), (-5, "int64"), (2**63 - 1, "int64"), (0.5, "float64"), (1j, "complex128"), (Phase.MAIN, "int64")],
)
def test_numbers_are_arrays_that_every_tool_can_read(value: Any, dtype: str) -> None:
    [leaf] = describe(["x"], [value])
    assert isinstance(leaf, ArrayLeaf)
    assert (leaf.dtype, leaf.shape, leaf.volatile) == (np.dtype(dtype), (), False)
    assert leaf.pieces[0].array == value


@pytest.mark.parametrize("value", [2**63, "text", b"bytes", None, {1}])
def test_other_values_stand_in_the_document(value: Any) -> None:
    assert isinstance(describe(["x"], [value])[0], ValueLeaf)


@pytest.mark.parametrize(
    "details",
    [
        {"kind": "int"},
        {"kind": "int", "value": 5},
        {"kind": "int", "value": "zz"},
        {"kind": "int", "value": None},
        {"kind": "int", "value": "0x" + "f" * 2_000_000},
        {"kind": "str", "value": 5},
        {"kind": "str", "base64": "?"},
        {"kind": "str", "base64": "/w=="},
        {"kind": "bytes"},
        {"kind": "bytes", "value": "abc"},
        {"kind": "bytes", "base64": 5},
        {"kind": "bytes", "base64": "é"},
        {"kind": "float", "value": "0x1p99999"},
        {"kind": "float", "value": 1.5},
        {"kind": "complex", "value": ["0x1p0"]},
        {"kind": "complex", "value": "ab"},
        {"kind": "bool", "value": 1},
        {"kind": "set", "value": 5},
        {"kind": "set", "value": [5]},
        {"kind": "set", "value": [{"kind": "set", "value": []}]},
        {"kind": "frozenset", "value": [{}]},
        {"kind": "os.system", "value": "true"},
        {"kind": "numpy"},
        {"kind": "jax", "value": []},
    ],
    ids=lambda details: repr(details)[:50],
)
def test_a_forged_value_is_damage(details: Any) -> None:
    with pytest.raises(DamagedCheckpointError, match="a/b"):
        materialize([None], [Saved(details)], [None], ["a.b"])


@pytest.mark.parametrize(
    ("details", "array"),
    [
        ({"kind": "int"}, np.zeros((2,), np.int64)),
        ({"kind": "int"}, np.zeros((), np.float64)),
        ({"kind": "bool"}, np.zeros((), np.int64)),
        ({"kind": "float"}, np.zeros((), "<U3")),
        ({"kind": "numpy_scalar"}, np.zeros((1,), np.int64)),
        ({"kind": "none"}, np.zeros((1,), np.int64)),
        ({"kind": "pickle"}, np.zeros((1,), np.uint8)),
        ({"kind": "bytes"}, np.zeros((2, 2), np.uint8)),
        ({"kind": "bytes"}, np.zeros((2,), np.int8)),
        ({"kind": "str"}, np.full((2,), 255, np.uint8)),
    ],
    ids=plain_id,
)
def test_a_kind_that_contradicts_its_array_is_damage(details: Any, array: Any) -> None:
    with pytest.raises(DamagedCheckpointError, match="a/b"):
        materialize([None], [Saved(details, array.dtype, array.shape)], [array], ["a.b"])


@pytest.mark.parametrize(
    ("template", "array", "expected"),
    [
        (0, np.array(7, np.int32), 7),
        (0, np.array(200, np.uint8), 200),
        (0, np.array(2**64 - 1, np.uint64), 2**64 - 1),
        (0.0, np.array(0.5, np.float16), 0.5),
        (0.0, np.array(1.5, ">f4"), 1.5),
        (0.0, np.array(0.5, np.longdouble), 0.5),
        (False, np.array(True), True),
        (0j, np.array(1 + 2j, np.complex64), 1 + 2j),
    ],
    ids=plain_id,
)
def test_a_python_number_takes_a_saved_array_of_its_kind(template: Any, array: Any, expected: Any, save: Any) -> None:
    for saved in (array, array[()]):
        assert bits(save([saved]).load(like=[template])[0]) == bits(expected)


@pytest.mark.parametrize(
    ("template", "value"),
    [
        (np.zeros((), np.int32), 5),
        (np.zeros((), np.uint64), 2**64 - 1),
        (np.zeros((), np.float32), 0.5),
        (np.zeros((), np.float32), math.nan),
        (np.zeros((), np.float16), -math.inf),
        (np.zeros((), ">f8"), -0.0),
        (np.zeros((), np.bool_), True),
        (np.zeros((), np.complex64), complex(-0.0, math.nan)),
        (np.int8(0), -128),
        (np.float16(0), 0.25),
    ],
    ids=plain_id,
)
def test_an_array_takes_a_saved_python_number_of_its_kind(template: Any, value: Any, save: Any) -> None:
    again = save([value]).load(like=[template])[0]
    assert type(again) is type(template)
    assert again.dtype == template.dtype
    assert bits(type(value)(again)) == bits(value)


@pytest.mark.parametrize(
    ("template", "value"),
    [
        (np.zeros((), np.int8), 128),
        (np.zeros((), np.int32), 2**31),
        (np.zeros((), np.int64), 2**63),
        (np.zeros((), np.uint8), -1),
        (np.zeros((), np.uint64), 2**64),
        (np.zeros((), np.float32), 0.1),
        (np.zeros((), np.float32), 1e39),
        (np.zeros((), np.float16), 1e-10),
        (np.zeros((), np.complex64), complex(math.nan, 0.1)),
        (0.0, np.array(1, np.longdouble) / 3),
    ],
    ids=plain_id,
)
def test_a_number_that_does_not_fit_is_an_error_that_names_it(template: Any, value: Any, save: Any) -> None:
    if np.dtype(np.longdouble).itemsize == 8 and isinstance(value, np.ndarray | np.longdouble):
        pytest.skip("long double is double here")
    with pytest.raises(TreeMismatchError, match=r"a/b: expected .* \(template\), found .* \(checkpoint\)") as caught:
        save({"a": {"b": value}}).load(like={"a": {"b": template}})
    assert len(caught.value.differences) == 1


def test_the_plain_python_template_kinds() -> None:
    values = [True, 1, 1.0, 1j, "s", b"b", None, {1}, frozenset(), ..., np.float32(1)]
    kinds = [target.kind for target in describe_template(["x"] * len(values), values)]
    assert kinds == [
        "bool", "int", "float", "complex", "str", "bytes", "none", "set", "frozenset", "any", "numpy_scalar",
    ]  # fmt: skip
