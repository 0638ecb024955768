"""Small leaves in one file, and leaves that are cast on their way to disk."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
import torch
from flax import serialization
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray
from tests.equality import assert_same

import holdfast as hf
from holdfast.engine.arrays import MsgpackHandler
from holdfast.engine.handlers import args

Spec: Any = PartitionSpec
NAN = float("nan")
msgpack: Any = importlib.import_module("msgpack")  # it has no types
ALL = hf.SaveArgs(aggregate=True)
LEAVES: dict[str, Any] = {
    "w": np.arange(6, dtype=np.float32).reshape(2, 3),
    "half": np.ones(3, ml_dtypes.bfloat16),
    "big": np.arange(3, dtype=">i4"),
    "day": np.array(["2026-01-01", "NaT"], "datetime64[D]"),
    "text": np.array(["a", "bcd"]),
    "none": np.zeros((0, 3), np.int8),
    "flag": np.array([True, False]),
    "scalar": np.float16(1.5),
    "columns": np.arange(6.0).reshape(2, 3).T,
    "int": 7,
    "float": -0.0,
    "complex": 1 + 2j,
    "str": "text",
    "nothing": None,
    "long": 1 << 80,
    "a.b/c": [np.int64(1)],
}


@pytest.fixture
def pytrees() -> hf.PyTreeCheckpointer:
    return hf.PyTreeCheckpointer()


def test_everything_in_one_file(place: str, pytrees: hf.PyTreeCheckpointer, stored: Any) -> None:
    pytrees.save(place, LEAVES, save_args=ALL)
    hf.save(f"{place}/plain", LEAVES)
    assert_same(hf.load(place), hf.load(f"{place}/plain"))
    assert_same(pytrees.restore(place, LEAVES), pytrees.restore(f"{place}/plain", LEAVES))
    assert hf.verify(place).ok
    assert hf.describe(place) == hf.describe(f"{place}/plain")
    assert sorted(stored(f"{place}/state").read()) == ["aggregate.msgpack", "d/index", "manifest.ocdbt", "tree.json"]


def test_some_in_one_file(tmp_path: Any, pytrees: hf.PyTreeCheckpointer, stored: Any) -> None:
    place = f"{tmp_path}/one"
    tree = {"params": {"kernel": np.ones((4, 4)), "bias": np.zeros(4)}, "opt": [np.arange(2), np.arange(3)]}
    save_args = {"params": {"bias": ALL}, "opt": [ALL, None]}
    pytrees.save(place, tree, save_args=save_args)
    assert_same(hf.load(place), tree)
    assert_same(hf.load(place, select="params/*"), {"params": tree["params"]})
    assert_same(hf.load(place, select="opt/0"), {"opt": {0: np.arange(2)}})
    found = serialization.msgpack_restore(stored(f"{place}/state").read()["aggregate.msgpack"])  # other tools read it
    assert sorted(found) == ["opt.0", "params.bias"]
    assert_same(found["params.bias"], np.zeros(4))
    base = {"driver": "ocdbt", "base": f"file://{place}/state/"}  # and tensorstore the arrays beside it
    opt = ts.open({"driver": "zarr3", "kvstore": {**base, "path": "opt.1/"}}).result()
    assert opt.read().result().tolist() == [0, 1, 2]
    keys = ts.KvStore.open(base).result().list().result()
    assert sorted(keys) == [b"opt.1/c/0", b"opt.1/zarr.json", b"params.kernel/c/0/0", b"params.kernel/zarr.json"]


def test_arrays_of_three_libraries(place: str, pytrees: hf.PyTreeCheckpointer) -> None:
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    tree = {
        "jax": jnp.arange(4.0),
        "copies": jax.device_put(jnp.arange(4.0), NamedSharding(mesh, Spec())),
        "torch": torch.nn.Parameter(torch.arange(3, dtype=torch.bfloat16)),
        "key": jax.random.key(3),
    }
    pytrees.save(place, tree, save_args=ALL)
    found = pytrees.restore(place, tree)
    assert found["jax"].tolist() == found["copies"].tolist() == [0, 1, 2, 3]
    assert found["copies"].sharding == tree["copies"].sharding
    assert isinstance(found["torch"], torch.nn.Parameter)
    assert torch.equal(found["torch"], tree["torch"])
    assert jax.random.uniform(found["key"]) == jax.random.uniform(tree["key"])
    with pytest.raises(hf.TreeMismatchError, match=r"jax: expected float32\[5\] \(template\), found float32\[4\]"):
        pytrees.restore(place, {**tree, "jax": jnp.zeros(5)})


def test_leaves_that_are_refused(place: str, pytrees: hf.PyTreeCheckpointer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(args, "AGGREGATE_LIMIT", 1000)
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    for leaf, message in (
        (jax.device_put(jnp.arange(4.0), NamedSharding(mesh, Spec("x"))), "is sharded over devices; leave out"),
        (np.zeros(1001, np.uint8), "makes the aggregate larger than 1000 bytes"),
    ):
        with pytest.raises(hf.errors.UnsupportedLeafError, match=rf"(?s)nothing was written.*a/w: {message}"):
            pytrees.save(place, {"a": {"w": leaf}, "b": 1}, save_args=ALL)
        with pytest.raises(hf.CheckpointNotFoundError):
            hf.load(place)


def test_damage_is_found(place: str, pytrees: hf.PyTreeCheckpointer, stored: Any, look: Callable[..., Any]) -> None:
    pytrees.save(place, {"a": np.arange(100), "b": 1}, save_args={"a": ALL})
    files = stored(place)
    content = files.read()["state/aggregate.msgpack"]
    files.write("state/aggregate.msgpack", content[:50] + bytes([content[50] ^ 1]) + content[51:])
    assert all("aggregate.msgpack" in error for error in look(place))
    assert not hf.verify(place).ok
    files.remove("state/aggregate.msgpack")
    assert len(look(place)) == 3


def extension(*content: Any) -> Any:
    return msgpack.ExtType(1, msgpack.packb(content))


DEEP = b"\x91" * 2000 + b"\xc0"
FORGED: dict[str, bytes] = {
    "nothing": b"",
    "no dictionary": msgpack.packb(3),
    "no arrays": msgpack.packb({"a": 3}),
    "nested lists": DEEP,
    "many claimed": b"\xdf\xff\xff\xff\xff\xa1a",
    "another extension": msgpack.packb({"a": msgpack.ExtType(7, b"")}),
    "empty extension": msgpack.packb({"a": msgpack.ExtType(1, b"")}),
    "lists inside": msgpack.packb({"a": msgpack.ExtType(1, DEEP)}),
    "too short": msgpack.packb({"a": extension((100,), "int64", b"12345678")}),
    "huge": msgpack.packb({"a": extension((1 << 40, 1 << 40), "int64", b"")}),
    "negative": msgpack.packb({"a": extension((-1, -1), "int64", b"12345678")}),
    "no sizes": msgpack.packb({"a": extension("ab", "int64", b"12345678")}),
    "objects": msgpack.packb({"a": extension((1,), "object", b"12345678")}),
    "no dtype": msgpack.packb({"a": extension((1,), 7, b"12345678")}),
    "another name": msgpack.packb({"b": extension((1,), "int64", b"12345678")}),
    "another dtype": msgpack.packb({"a": extension((1,), "<U2", b"12345678")}),
}


@pytest.mark.parametrize("content", FORGED.values(), ids=FORGED)
def test_forged_files(
    place: str,
    content: bytes,
    pytrees: hf.PyTreeCheckpointer,
    stored: Any,
    look: Callable[..., Any],
    little_memory: int,
) -> None:
    pytrees.save(place, {"a": 1}, save_args=ALL)
    stored(place).reseal("aggregate.msgpack", content)
    errors = look(place, loads=content == FORGED["another dtype"])
    assert len(errors) == 3 or content == FORGED["another dtype"]
    assert not hf.verify(place).ok or content == FORGED["another dtype"]


@settings(deadline=None, max_examples=50)
@given(st.dictionaries(st.text(max_size=4), hnp.arrays(hnp.scalar_dtypes(), hnp.array_shapes(min_side=0)), max_size=4))
def test_any_arrays_in_msgpack(leaves: dict[str, NDArray[Any]]) -> None:
    handler = MsgpackHandler()
    found = handler.deserialize(handler.serialize(leaves))
    assert found.keys() == leaves.keys()
    for name, array in leaves.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()


class Lines(hf.type_handlers.AggregateHandler):
    """Another format: one line of numbers for each leaf."""

    name = "lines"
    filename = "leaves.txt"

    def serialize(self, leaves: Mapping[str, NDArray[Any]]) -> bytes:
        return "\n".join(f"{name} {' '.join(map(str, array.tolist()))}" for name, array in leaves.items()).encode()

    def deserialize(self, content: bytes) -> dict[str, NDArray[Any]]:
        rows = [line.split() for line in content.decode().splitlines()]
        return {name: np.array(list(map(int, numbers))) for name, *numbers in rows}


def test_another_aggregate_handler(place: str, stored: Any) -> None:
    tree = {"a": {"n": np.arange(3)}, "b": np.ones(2)}
    lines = hf.Checkpointer(hf.PyTreeCheckpointHandler(aggregate_handler=Lines()))
    lines.save(place, tree, save_args={"a": ALL})
    assert stored(place).read()["state/leaves.txt"] == b"a.n 0 1 2"
    assert lines.restore(place)["a"]["n"].tolist() == [0, 1, 2]
    with pytest.raises(hf.errors.OptionError, match="a/n is in a file of the AggregateHandler 'lines'"):
        hf.load(place)
    assert hf.load(place, select="b")["b"].tolist() == [1, 1]
    assert hf.verify(place).ok


@pytest.mark.parametrize("aggregate", [False, True])
def test_casting(place: str, pytrees: hf.PyTreeCheckpointer, aggregate: bool) -> None:
    numbers = np.linspace(-3, 3, 40_000).reshape(200, 200)
    tree = {
        "numpy": numbers,
        "columns": numbers.T,
        "jax": jnp.asarray(numbers, jnp.float32),
        "torch": torch.from_numpy(numbers.copy()).requires_grad_(),
        "float": 0.1,
        "int": 3,
        "bool": True,
        "str": "text",
        "nothing": None,
        "day": np.array(["2026-01-01"], "datetime64[D]"),
        "scalar": np.float64(0.1),
    }
    save_args = hf.SaveArgs(dtype=jnp.bfloat16, aggregate=aggregate)
    pytrees.save(place, {**tree, "key": jax.random.key(1)}, save_args=save_args)
    found = hf.load(place)
    half = np.dtype(ml_dtypes.bfloat16)
    for name, expected in [("numpy", numbers), ("columns", numbers.T), ("torch", numbers)]:
        assert found[name].dtype == half
        np.testing.assert_array_equal(found[name], expected.astype(half))
    np.testing.assert_array_equal(found["jax"], np.asarray(tree["jax"]).astype(half))
    assert found["float"] == float(half.type(0.1))
    assert isinstance(found["int"], float)
    assert isinstance(found["bool"], float)
    assert found["str"] == "text"
    assert found["nothing"] is None
    assert found["day"].dtype == np.dtype("datetime64[D]")
    assert found["scalar"] == half.type(0.1)
    assert found["key"].dtype == np.uint32
    assert hf.verify(place).ok


@pytest.mark.parametrize(
    "dtype",
    [
        *(np.float16, jnp.bfloat16, np.float32, np.longdouble, ml_dtypes.float8_e4m3),
        *(np.int8, np.bool_, np.complex64, ">f4"),
    ],
    ids=str,
)
def test_casts_of_saves_and_restores_are_those_of_numpy(place: str, pytrees: hf.PyTreeCheckpointer, dtype: Any) -> None:
    tree = {"a": np.arange(100).reshape(4, 25) % (2 if dtype is np.bool_ else 7)}
    if dtype in (np.float16, jnp.bfloat16, np.float32):
        tree |= {"w": np.array([0.1, NAN, np.inf, -np.inf]), "n": np.array([3, (1 << 15) + 1])}
    expected = {name: array.astype(dtype) for name, array in tree.items()}
    pytrees.save(place, tree, save_args=hf.SaveArgs(dtype=dtype))
    assert_same(hf.load(place), expected)
    pytrees.save(place, tree, force=True)
    assert_same(pytrees.restore(place, restore_args=hf.RestoreArgs(dtype=dtype)), expected)


def test_complex_numbers_are_not_cut(place: str, pytrees: hf.PyTreeCheckpointer) -> None:
    with pytest.raises(hf.errors.UnsupportedLeafError, match="a: complex128 cannot be cast to float32, which"):
        pytrees.save(place, {"a": np.ones(2, complex)}, save_args=hf.SaveArgs(dtype=np.float32))


# ---- a value that does not fit is an error, and nothing is committed


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
def test_saving_what_does_not_fit(place: str, value: Any, dtype: Any, message: str, options: dict[str, Any]) -> None:
    save_args = {"a": {"b": hf.SaveArgs(dtype=dtype, **options)}}
    with pytest.raises(hf.errors.UnsupportedLeafError, match=f"a/b: expected values that .*{message}"):
        hf.PyTreeCheckpointer().save(place, {"a": {"b": value}, "c": np.zeros(3)}, save_args=save_args)
    with pytest.raises(hf.CheckpointNotFoundError):
        hf.load(place)


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
