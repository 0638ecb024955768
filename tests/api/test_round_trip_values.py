"""Numpy arrays and Python values, saved and loaded: every bit comes back."""

from __future__ import annotations

import enum
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.dtypes import DTYPES, EMPTY
from tests.equality import assert_same

import holdfast as hf

SHAPES: list[tuple[int, ...]] = [(), (7,), (3, 4), (0,), (2, 0, 3), (1, 1, 1), (30, 50)]
SMALL = hf.Layout(chunk_bytes=4096, segment_bytes=8192, data_file_bytes=16384)


def sample(dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
    """An array of arbitrary bytes that are legal for its dtype."""
    count = int(np.prod(shape))
    if dtype.kind == "U":
        return np.array(["größe", "", "😀x"] * count, dtype)[:count].reshape(shape)
    if dtype.char in "?gG" or (dtype in map(np.dtype, (ml_dtypes.int4, ml_dtypes.uint4)) or "t2" in dtype.name):
        return (np.arange(count) % 2).astype(dtype).reshape(shape)
    bits = 1 if dtype.name.endswith("1") else 4 if "float4" in dtype.name else 6 if "float6" in dtype.name else 8
    data = np.random.default_rng(0).integers(0, 1 << bits, count * dtype.itemsize, np.uint8).tobytes()
    return np.frombuffer(bytearray(data), dtype, count).reshape(shape) if dtype.itemsize else np.zeros(shape, dtype)


@pytest.mark.parametrize("dtype", [*DTYPES, *EMPTY], ids=lambda dtype: dtype.name + dtype.str[0])
def test_arrays_of_every_dtype_and_shape_and_numpy_scalars(dtype: np.dtype[Any], place: str) -> None:
    arrays = {str(shape): sample(dtype, shape) for shape in SHAPES}
    tree = {**arrays, "scalar": sample(dtype, (3,))[1]}
    hf.save(place, tree, layout=SMALL)
    assert_same(hf.load(place), tree)
    like = {name: np.zeros_like(array) for name, array in arrays.items()}
    assert_same(hf.load(place, like={**like, "scalar": tree["scalar"]}), tree)
    assert hf.verify(place).ok


BASE = np.arange(60_000, dtype=np.float32)
LAYOUTS = {
    "fortran": np.asfortranarray(BASE.reshape(200, 300)),
    "every_third": BASE[::3],
    "backwards": BASE[::-1].reshape(300, 200),
    "transposed": BASE.reshape(10, 20, 300).transpose(2, 0, 1),
    "broadcast": np.broadcast_to(BASE[:100], (50, 100)),
    "unaligned": np.frombuffer(b"x" + BASE.tobytes(), np.uint8)[1:].view(np.float32),
    "read_only": np.frombuffer(BASE.tobytes(), np.float32),
    "no_axes": BASE[3, ...],
    "matrix": BASE.reshape(200, 300).view(np.matrix),
    "uneven_chunks": BASE[:59_999].reshape(1, -1),
    "five_axes": BASE.reshape(2, 3, 10, 5, 200),
    "big_endian_fortran": np.asfortranarray(BASE.reshape(200, 300).astype(">f4")),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_any_layout_in_memory_in_several_chunks(name: str, place: str) -> None:
    array = LAYOUTS[name]
    hf.save(place, {"a": array}, layout=SMALL)
    found = hf.load(place)["a"]
    assert_same(found, np.array(array, order="C"))
    assert found.flags.writeable
    assert found.flags.c_contiguous


def test_arrays_of_a_megabyte_and_more(place: str) -> None:
    tree = {
        "one_chunk": np.random.default_rng(0).random((512, 513)),
        "many": np.random.default_rng(1).integers(0, 255, 3_000_001, np.uint8),
        "as_bytes": np.arange(300_000).astype("M8[s]"),
    }
    hf.save(place, tree, layout=hf.Layout(chunk_bytes=1 << 20, segment_bytes=2 << 20, data_file_bytes=3 << 20))
    found = hf.load(place)
    assert_same(found, tree)
    found["one_chunk"][:] = 0  # the caller's own
    assert_same(hf.load(place), tree)


class Named(np.ndarray):
    """An array class of a program."""


NAN = float("nan")
VALUES: dict[str, Any] = {
    "true": True, "false": False, "zero": 0, "one": 1, "minus": -1, "int64": (1 << 63) - 1, "below": -(1 << 63),
    "above": 1 << 63, "uint64": (1 << 64) - 1, "huge": -(3**5000), "beyond_str": 1 << 20_000,
    "float": 0.1, "minus_zero": -0.0, "nan": NAN, "inf": float("inf"), "minus_inf": float("-inf"), "tiny": 5e-324,
    "complex": 1.5 - 2j, "complex_nan": complex(NAN, -0.0), "complex_inf": complex(-0.0, float("-inf")),
    "empty": "", "text": "größe 😀\n\0", "surrogate": "a\ud800b", "long_text": "ü\ud800" * 70_000, "quotes": '"\\',
    "no_bytes": b"", "bytes": bytes(range(256)), "long_bytes": bytes(range(256)) * 400, "none": None,
    "set": {1, "a", None, 2.5, b"x", True + 1j}, "no_set": set(), "frozenset": frozenset({(1 << 70), "b"}),
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_python_values(name: str, place: str) -> None:
    tree = {"a": [VALUES[name]], "b": VALUES[name]}
    hf.save(place, tree)
    assert_same(hf.load(place), tree)
    assert_same(hf.load(place, like=tree), tree)
    bare = f"{place}/bare"
    hf.save(bare, VALUES[name])
    assert_same(hf.load(bare), VALUES[name])
    assert hf.verify(place).ok


def test_subclasses_come_back_as_the_base_type(place: str) -> None:
    class Color(enum.IntEnum):
        RED = 3

    class Name(str):
        pass

    arrays = {"records": np.rec.array(np.arange(3.0)), "names": np.array(["x", "yz"]).view(Named)}
    hf.save(place, {"color": Color.RED, Name("name"): Name("x"), "flag": np.True_, **arrays})
    expected = {"color": 3, "name": "x", "flag": np.True_, "records": np.arange(3.0), "names": np.array(["x", "yz"])}
    assert_same(hf.load(place), expected)
    assert hf.load(place, select="color", like={"color": Color.RED})["color"] is Color.RED


REFUSED: dict[str, tuple[Any, str]] = {
    "objects": (np.array([{}, None], object), "objects"),
    "object": (object(), "type object"),
    "function": (lambda: 1, "code"),
    "range": (range(3), "range"),
    "bytearray": (bytearray(b"x"), "bytearray"),
    "set": ({1, (2, 3)}, "tuple"),
    "gigantic": (1 << (1 << 23), "bits"),
    "tuple_key": ({("a", b"b"): 1}, "keys must be"),
}


@pytest.mark.parametrize(("leaf", "says"), REFUSED.values(), ids=REFUSED)
def test_unsupported_leaves_are_named_and_leave_nothing_behind(leaf: Any, says: str, tmp_path: Any) -> None:
    tree = {"fine": np.ones(3), "layers": [{"odd.one": leaf}, {"other": leaf}]}
    with pytest.raises(hf.errors.UnsupportedLeafError, match=says) as caught:
        hf.save(tmp_path / "deep" / "ckpt", tree)
    assert "layers/0/odd.one" in str(caught.value)
    assert "layers/1/other" in str(caught.value)  # all of them, not only the first
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_is_too_long(tmp_path: Any, place: str) -> None:
    with pytest.raises(hf.errors.UnsupportedLeafError, match=r"the leaf aü+.* has a path of 60001 bytes.* 60000"):
        hf.save(tmp_path / "ckpt", {"fine": 1, "a" + "ü" * 30_000: np.ones(3)})
    assert list(tmp_path.iterdir()) == []
    tree = {"ü" * 30_000: np.arange(2000.0)}
    hf.save(place, tree, layout=SMALL)
    assert_same(hf.load(place), tree)


def test_a_tree_that_is_too_large_to_be_described(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.engine.format.record.DOCUMENT_LIMIT", 10_000)
    with pytest.raises(hf.errors.UnsupportedLeafError, match=r"the tree document has \d+ bytes; the limit is 10000"):
        hf.save(tmp_path / "ckpt", ["x" * 100] * 100)
    assert list(tmp_path.iterdir()) == []


def test_a_tree_that_cannot_be_saved_leaves_the_checkpoint_that_is_there(place: str) -> None:
    hf.save(place, {"a": 1})
    with pytest.raises(hf.errors.UnsupportedLeafError, match="b"):
        hf.save(place, {"b": object()}, overwrite=True)
    assert hf.load(place) == {"a": 1}
