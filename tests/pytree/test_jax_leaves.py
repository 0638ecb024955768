"""Jax arrays on one and several devices, typed keys, and flax's and optax's states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.versions import enable_x64, unchecked_shard_map

import holdfast as hf
from holdfast.engine.errors import UnsupportedLeafError
from holdfast.engine.pytree import ArrayLeaf, Saved, compare, describe, describe_template

jax = pytest.importorskip("jax")
jnp: Any = jax.numpy
PartitionSpec = jax.sharding.PartitionSpec


def assert_same(one: Any, other: Any) -> None:
    assert one.dtype == other.dtype
    assert one.shape == other.shape
    assert one.sharding == other.sharding
    assert one.committed == other.committed
    assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def leaf_of(value: Any) -> ArrayLeaf:
    [leaf] = describe(["x"], [value])
    assert isinstance(leaf, ArrayLeaf)
    return leaf


@pytest.fixture(scope="module")
def mesh() -> Any:
    if jax.device_count() < 4:
        pytest.skip("needs four devices")
    return jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))


def test_64_bit_arrays_come_back_where_jax_has_them(place: str) -> None:
    with enable_x64():
        array = jnp.arange(3, dtype=jnp.int64)
        hf.save(place, [array])
        assert_same(hf.load(place, like=[array])[0], array)
    [target] = describe_template(["w"], [array])
    line = compare(target, Saved({"kind": "jax"}, np.dtype(np.int64), (3,)))
    assert line is not None
    assert "w: expected int64[3] (template)" in line
    assert "jax_enable_x64" in line


@pytest.mark.parametrize(
    ("spec", "pieces", "told"),
    [
        (PartitionSpec(), 1, []),
        (PartitionSpec("x"), 2, ["x"]),
        (PartitionSpec(None, "x"), 2, [None, "x"]),
        (PartitionSpec("x", "y"), 4, ["x", "y"]),
        (PartitionSpec(("x", "y")), 4, [["x", "y"]]),
        (PartitionSpec(None, ("y", "x")), 4, [None, ["y", "x"]]),
    ],
    ids=str,
)
def test_arrays_over_several_devices_come_in_pieces(spec: Any, pieces: int, told: Any, mesh: Any) -> None:
    array = jax.device_put(jnp.arange(64.0).reshape(8, 8), jax.sharding.NamedSharding(mesh, spec))
    leaf = leaf_of(array)
    assert len(leaf.pieces) == pieces
    assert not leaf.volatile
    assert leaf.details == {
        "kind": "jax",
        "sharding": {"type": "NamedSharding", "mesh": {"axes": [["x", 2], ["y", 2]]}, "spec": told},
    }


def test_weak_types_come_back_as_the_template_has_them(mesh: Any, place: str) -> None:
    """Weakly typed arrays take the dtype of what they meet: without the mark, products would have another dtype."""
    rows = jax.sharding.NamedSharding(mesh, PartitionSpec("x"))
    placed = jax.device_put(jnp.full((4, 2), 2), rows)
    weak = {"rate": jnp.asarray(0.1), "there": jax.device_put(jnp.asarray(1), jax.devices()[1]), "placed": placed}
    strong = jax.tree.map(lambda value: jax.lax.convert_element_type(value, value.dtype), weak)
    described = [leaf_of(value).details.get("weak") for value in (*weak.values(), *strong.values())]
    assert described == [True, True, True, None, None, None]
    for saved in (strong, weak):
        hf.save(place, saved, overwrite=True)
        for template in (weak, strong, jax.eval_shape(lambda: weak)):
            loaded = hf.load(place, like=template)
            for name, like in template.items():
                assert loaded[name].weak_type == like.weak_type, name
                if isinstance(like, jax.Array):
                    assert_same(loaded[name], like)
    assert (hf.load(place, like=weak)["rate"] * jnp.ones(2, jnp.bfloat16)).dtype == jnp.bfloat16


def test_arrays_go_where_those_of_the_template_are(place: str) -> None:
    """Also where these are deleted, as those of a step before are."""
    there = jax.device_put(jnp.ones(2), jax.devices()[-1])
    sharding = {"type": "SingleDeviceSharding", "device": f"cpu:{jax.devices()[-1].id}"}
    described = describe(["a", "b"], [there, there])
    assert described[0].details["sharding"] == sharding
    assert described[0].details is described[1].details
    tree = [jnp.ones(2), jax.device_put(jnp.ones(2), jax.devices()[0]), there, jax.random.key(0)]
    hf.save(place, tree)
    tree[0].delete()
    jax.random.key_data(tree[3]).delete()
    again = hf.load(place, like=tree)
    assert [array.committed for array in again[:3]] == [False, True, True]
    assert_same(again[2], there)
    assert again[0].tolist() == [1, 1]
    assert again[3] == jax.random.key(0)
    hf.save(place, [there], overwrite=True)
    assert not hf.load(place, like=[jax.ShapeDtypeStruct((2,), jnp.float32)])[0].committed


def test_a_snapshot_survives_deletion_and_donation(mesh: Any) -> None:
    sharding = jax.sharding.NamedSharding(mesh, PartitionSpec("x"))
    overwrite = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    for placement in (None, sharding):
        donated, deleted = (jax.device_put(jnp.arange(4096.0), placement) for _ in range(2))
        leaves = [leaf_of(donated), leaf_of(deleted)]
        overwrite(donated).block_until_ready()
        deleted.delete()
        overwrite(jax.device_put(jnp.ones(4096), placement)).block_until_ready()
        for leaf in leaves:
            for piece in leaf.pieces:
                begin = piece.start[0]
                np.testing.assert_array_equal(piece.array, np.arange(begin, begin + piece.array.size))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64", "int8"])
@pytest.mark.parametrize("first", [1, 3], ids="the devices differ from step {}".format)
def test_replicas_that_differ_are_named_once(
    dtype: str, first: int, mesh: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each device keeps the statistics of its own rows, in an array that is declared to be the same on all devices."""

    def moved(rows: Any, statistics: Any) -> Any:
        return statistics + rows.sum(0).astype(dtype)

    step = jax.jit(unchecked_shard_map(moved, mesh, (PartitionSpec("x"), PartitionSpec()), PartitionSpec()))
    rows = jnp.arange(4.0)[:, None] * jnp.ones(3)
    everywhere = jax.sharding.NamedSharding(mesh, PartitionSpec())
    state = {
        "mean": jax.device_put(jnp.zeros(3, dtype), everywhere),
        "nan": jax.device_put(jnp.full(2, jnp.nan), everywhere),
        "key": jax.device_put(jax.random.key(0), everywhere),
        "rows": jax.device_put(rows, jax.sharding.NamedSharding(mesh, PartitionSpec("x"))),
    }
    with hf.CheckpointManager(str(tmp_path)) as manager:
        for number in range(1, 9):
            state["mean"] = step(rows if number >= first else rows[:1].repeat(4, 0), state["mean"])
            manager.save(number, state)
            if number >= first and number.bit_count() == 1:
                [said] = [record.getMessage() for record in caplog.records]
    ids = [device.id for device in mesh.devices.flat]
    assert f"mean (cpu:{ids[2]}, cpu:{ids[3]} unlike cpu:{ids[0]}). A save" in said


@pytest.mark.parametrize("backend", ["cpu", "gpu"], ids=["read at once", "where copies start early"])
def test_deleted_arrays_are_named(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    array, key = jnp.ones(3), jax.random.key(0)
    array.delete()
    jax.random.key_data(key).delete()
    with pytest.raises(UnsupportedLeafError) as caught:
        describe(["a", "fine", "b"], [array, jnp.ones(1), key])
    assert str(caught.value).splitlines()[1:] == [
        "  a: was deleted or donated; save the array that replaced it",
        "  b: was deleted or donated; save the array that replaced it",
    ]


def test_tracers_and_abstract_arrays_are_refused() -> None:
    with pytest.raises(UnsupportedLeafError, match="a: is a tracer"):
        jax.jit(lambda x: describe(["a"], [x]))(1.0)
    with pytest.raises(UnsupportedLeafError, match="rng: is a tracer"):
        jax.jit(lambda x: describe(["rng"], [x]))(jax.random.key(0))
    with pytest.raises(UnsupportedLeafError, match="a: is a tracer"):
        jax.jit(lambda x: describe_template(["a"], [x]))(1.0)
    with pytest.raises(UnsupportedLeafError, match=r"a: is a jax\.ShapeDtypeStruct, which has no values"):
        describe(["a"], [jax.ShapeDtypeStruct((2,), jnp.float32)])


def test_typed_keys_want_typed_keys() -> None:
    [target] = describe_template(["rng"], [jax.random.split(jax.random.key(0), 3)])
    found = compare(target, Saved({"kind": "jax"}, np.dtype(np.uint32), (3, 2)))
    assert found == "rng: expected key<threefry2x32>[3] (template), found uint32[3, 2] (checkpoint)"
