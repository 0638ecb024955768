"""jax arrays, keys and Flax states, saved and loaded with and without a template, on one device and several."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.equality import assert_same

import holdfast as hf

jax: Any = pytest.importorskip("jax")
flax: Any = pytest.importorskip("flax")
optax: Any = pytest.importorskip("optax")
flax_state: Any = pytest.importorskip("flax.training.train_state")

jnp = jax.numpy
NamedSharding, P = jax.sharding.NamedSharding, jax.sharding.PartitionSpec
SMALL = hf.Layout(chunk_bytes=4096, segment_bytes=8192, data_file_bytes=32768)

DTYPES = [
    "bool", "int2", "int4", "int8", "int16", "int32", "uint2", "uint4", "uint8", "uint16", "uint32", "float16",
    "bfloat16", "float32", "complex64", "float8_e4m3fn", "float8_e4m3b11fnuz", "float8_e5m2", "float8_e4m3",
    "float8_e3m4", "float8_e8m0fnu", "float4_e2m1fn",
]  # fmt: skip


def as_numpy(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)


def mesh(**axes: int) -> Any:
    devices = np.array(jax.devices()[: int(np.prod(list(axes.values())))])
    return jax.sharding.Mesh(devices.reshape(tuple(axes.values())), tuple(axes))


def assert_placed(found: Any, expected: Any) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert isinstance(one, jax.Array)
        assert one.sharding == other.sharding
        assert one.committed == other.committed
        assert one.weak_type == other.weak_type or not one.weak_type


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype: str, place: str) -> None:
    values = np.random.default_rng(0).integers(0, 2, (5, 7)).astype(np.float32)
    array = jnp.asarray(values.astype(jnp.dtype(dtype)))
    tree = {"array": array, "empty": array[:, :0], "scalar": array[2, 3]}
    hf.save(place, tree)
    assert_same(hf.load(place), as_numpy(tree))
    found = hf.load(place, like=tree)
    assert_placed(found, tree)
    assert_same(as_numpy(found), as_numpy(tree))
    abstract = jax.eval_shape(lambda: tree)
    assert_same(as_numpy(hf.load(place, like=abstract)), as_numpy(tree))


def own_implementation() -> Any:
    own: Any = pytest.importorskip("jax.extend.random")
    known = own.threefry_prng_impl
    methods = {name: getattr(known, name) for name in ("key_shape", "seed", "split", "random_bits", "fold_in")}
    return own.define_prng_impl(**methods, name="holdfast_test", tag="own")


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg", "unsafe_rbg", "own"])
def test_typed_keys(implementation: Any, place: str) -> None:
    if implementation == "own":
        implementation = own_implementation()
    tree = {
        "one": jax.random.key(3, impl=implementation),
        "many": jax.random.split(jax.random.key(4, impl=implementation), (2, 3)),
        "spread": jax.device_put(jax.random.split(jax.random.key(5), 8), NamedSharding(mesh(x=4), P("x"))),
        "old": jax.random.PRNGKey(5),
    }
    hf.save(place, tree)
    plain = hf.load(place)
    assert_same(plain["many"], np.asarray(jax.random.key_data(tree["many"])))
    for template in (tree, jax.eval_shape(lambda: tree)):
        found = hf.load(place, like=template)
        assert found["many"].dtype == tree["many"].dtype
        assert found["many"].shape == (2, 3)
        assert jax.random.bits(found["one"]) == jax.random.bits(tree["one"])
        assert_same(as_numpy(jax.random.key_data(found["many"])), plain["many"])
        assert_same(found["spread"], tree["spread"])
    assert hf.load(place, like=tree)["spread"].sharding == tree["spread"].sharding
    other = "rbg" if implementation != "rbg" else "threefry2x32"
    with pytest.raises(hf.TreeMismatchError, match=f"one: expected key<{other}>.*found key<{implementation}>"):
        hf.load(place, like={**tree, "one": jax.random.key(0, impl=other)})


SHARDINGS: dict[str, tuple[dict[str, int], tuple[int, ...], Any]] = {
    "rows": ({"x": 4}, (400, 30), P("x")),
    "columns": ({"x": 4}, (30, 400), P(None, "x")),
    "both": ({"x": 2, "y": 2}, (60, 100), P("x", "y")),
    "crossed": ({"x": 2, "y": 2}, (60, 100), P("y", "x")),
    "together": ({"x": 2, "y": 2}, (80, 60), P(("x", "y"))),
    "partly_replicated": ({"x": 2, "y": 2}, (60, 100), P("x")),
    "replicated": ({"x": 4}, (60, 100), P()),
    "replicated_scalar": ({"x": 4}, (), P()),
    "one_device": ({"x": 1}, (60, 100), P("x")),
    "third_axis": ({"x": 2}, (3, 50, 40), P(None, None, "x")),
    "empty": ({"x": 4}, (0, 8), P(None, "x")),
}


@pytest.mark.parametrize("name", SHARDINGS)
def test_shardings_come_back_and_never_matter(name: str, place: str) -> None:
    axes, shape, spec = SHARDINGS[name]
    values = np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)
    sharded = jax.device_put(values, NamedSharding(mesh(**axes), spec))
    hf.save(place, {"w": sharded}, layout=SMALL)
    assert_same(hf.load(place), {"w": values})
    for template in (sharded, jax.ShapeDtypeStruct(shape, np.float32, sharding=sharded.sharding)):
        found = hf.load(place, like={"w": template})
        assert_placed(found, {"w": sharded})
        assert_same(as_numpy(found["w"]), values)
    elsewhere = jax.ShapeDtypeStruct(shape, np.float32, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[3]))
    found = hf.load(place, like={"w": elsewhere})
    assert found["w"].devices() == {jax.devices()[3]}
    assert_same(as_numpy(found["w"]), values)
    assert_same(hf.load(place, like={"w": np.zeros(shape, np.float32)}), {"w": values})


def make_state(value: float) -> Any:
    params = {f"Dense_{i}": {"bias": jnp.full(3, value), "kernel": jnp.full((3, 3), value)} for i in range(2)}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-3, 10)))
    return flax_state.TrainState.create(apply_fn=print, params=params, tx=optimizer)


def test_train_state_with_its_optimizer(place: str) -> None:
    update = jax.jit(lambda state: state.apply_gradients(grads=state.params))
    state = update(update(make_state(0.5)))
    hf.save(place, state)
    fresh = make_state(0.0)
    for template in (fresh, jax.eval_shape(lambda: state)):
        found = hf.load(place, like=template)
        assert isinstance(found, flax_state.TrainState)
        assert found.tx is template.tx
        assert jax.tree.structure(found) == jax.tree.structure(template)
        assert_same(as_numpy(found.params), as_numpy(state.params))
        assert_same(as_numpy(found.opt_state), as_numpy(state.opt_state))
    plain = hf.load(place)
    assert set(plain) == {"step", "params", "opt_state"}
    assert int(plain["step"]) == 2
    assert_same(plain["params"], as_numpy(state.params))
    assert [leaf.path for leaf in hf.describe(place)][:2] == ["step", "params/Dense_0/bias"]


def test_a_fresh_step_fits_a_saved_one_and_the_other_way_round(place: str) -> None:
    hf.save(f"{place}/int", {"step": 0})
    hf.save(f"{place}/array", {"step": jnp.asarray(7, jnp.int32)})
    found = hf.load(f"{place}/int", like={"step": jnp.asarray(7, jnp.int32)})["step"]
    assert found.dtype == jnp.int32
    assert int(found) == 0
    found = hf.load(f"{place}/array", like={"step": 0})["step"]
    assert type(found) is int
    assert found == 7


class _Fields:
    x: Any
    name: str = flax.struct.field(pytree_node=False, default="")  # static


Batch: Any = flax.struct.dataclass(_Fields)


def test_registered_types(place: str) -> None:
    tree = {
        "frozen": flax.core.FrozenDict({"a": jnp.ones(2), "b": {"c": jnp.zeros(3)}}),
        "batch": Batch(jnp.arange(3.0), name="static"),
        "empty": optax.EmptyState(),
        "adam": optax.adam(1e-3).init({"w": jnp.ones(4)}),
    }
    hf.save(place, tree)
    template = jax.tree.map(jnp.zeros_like, tree)
    found = hf.load(place, like=template)
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    assert found["batch"].name == "static"
    assert_same([np.asarray(leaf) for leaf in jax.tree.leaves(found)], as_numpy(jax.tree.leaves(tree)))
    plain = hf.load(place)
    assert_same(plain["frozen"], {"a": np.ones(2, np.float32), "b": {"c": np.zeros(3, np.float32)}})
    assert_same(plain["batch"], {"x": np.arange(3, dtype=np.float32)})
    assert_same(plain["empty"], {})
    assert_same(plain["adam"][0]["mu"], {"w": np.zeros(4, np.float32)})


def test_loaded_arrays_are_independent_of_the_checkpoint(place: str) -> None:
    tree = {"w": jnp.arange(200_000.0)}
    hf.save(place, tree)
    one = hf.load(place, like=tree)
    other = jax.jit(lambda tree: {"w": tree["w"] * 2}, donate_argnums=0)(hf.load(place, like=tree))
    assert float(other["w"][-1]) == 2 * float(one["w"][-1]) == 2 * 199_999


@pytest.mark.needs("jax", "0.9")
def test_arrays_that_are_marked_as_reduced_over_an_axis(tmp_path: Path) -> None:
    """A sum of which each device still has a part is refused: there is no array yet to save."""
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        rows = jax.device_put(jnp.arange(8.0).reshape(4, 2), jax.P("x", None))
        partly = jnp.einsum("ab,ac->bc", rows, rows, out_sharding=jax.P(None, None, unreduced={"x"}))
        with pytest.raises(hf.errors.UnsupportedLeafError, match=r"w: is not reduced over x: .*jax\.reshard"):
            hf.save(tmp_path / "1", {"w": partly})
        whole = jax.reshard(partly, jax.P())
        copied = jax.device_put(jnp.ones(4), jax.P(None, reduced={"x"}))
        tree = {"whole": whole, "copied": copied}
        hf.save(tmp_path / "2", tree)
        found = hf.load(tmp_path / "2", like=tree)
        assert [one.sharding for one in found.values()] == [one.sharding for one in tree.values()]
        assert found["whole"].tolist() == whole.tolist() == [[56, 68], [68, 84]]


def test_what_a_program_forbids_in_its_own_code(tmp_path: Path) -> None:
    tree = {"w": jnp.ones(4), "key": jax.random.key(1), "weak": jnp.asarray(float("nan")), "far": jnp.asarray(math.inf)}
    hf.save(tmp_path / "1", tree)
    with jax.transfer_guard("disallow_explicit"), jax.debug_nans(True), jax.debug_infs(True):
        found = hf.load(tmp_path / "1", like=tree)
    assert [one.weak_type for one in (found["weak"], found["far"])] == [True, True]
    assert [math.isnan(float(found["weak"])), float(found["far"])] == [True, math.inf]
