"""Restore arguments applied to saved leaves by a handler, with and without a template."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]  # it comes without type information
import pytest
import torch
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tests.equality import assert_same

import holdfast as hf

Spec: Any = PartitionSpec
MESH = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
TREE = {"w": np.arange(24, dtype=np.float32).reshape(4, 6), "n": np.arange(3), "step": 7, "name": "run", "none": None}


@pytest.fixture
def checkpointer(place: str) -> hf.PyTreeCheckpointer:
    checkpointer = hf.PyTreeCheckpointer()
    checkpointer.save(place, TREE)
    return checkpointer


def test_one_for_all(place: str, checkpointer: hf.PyTreeCheckpointer) -> None:
    found = checkpointer.restore(
        place, select=["w", "n"], restore_args=hf.RestoreArgs(restore_type=jax.Array, dtype=np.float32)
    )
    assert all(isinstance(leaf, jax.Array) for leaf in found.values())
    found = checkpointer.restore(place, restore_args=hf.RestoreArgs(dtype=np.float16))
    assert (found["w"].dtype, found["n"].dtype, found["name"], found["none"]) == (np.float16, np.float16, "run", None)


def test_kinds_and_shardings(place: str, checkpointer: hf.PyTreeCheckpointer) -> None:
    def restored(args: hf.RestoreArgs, name: str = "w") -> Any:
        return checkpointer.restore(place, select=name, restore_args=args)[name]

    for kind in (np.ndarray, jnp.ndarray, torch.Tensor):
        assert isinstance(restored(hf.RestoreArgs(restore_type=kind)), kind)
    assert isinstance(restored(hf.RestoreArgs(restore_type=torch.nn.Parameter)), torch.Tensor)
    assert type(restored(hf.RestoreArgs(restore_type=float), "step")) is float
    assert isinstance(restored(hf.ArrayRestoreArgs()), jax.Array)
    assert isinstance(restored(hf.ArrayRestoreArgs(restore_type=np.ndarray)), np.ndarray)
    assert restored(hf.ArrayRestoreArgs(global_shapes=(4, 6))).shape == (4, 6)
    for axes in (Spec("x", None), ("x", None), ["x", None], "x"):
        found = restored(hf.ArrayRestoreArgs(mesh=MESH, mesh_axes=axes))
        assert found.sharding.is_equivalent_to(NamedSharding(MESH, Spec("x")), 2)
    assert restored(hf.ArrayRestoreArgs(sharding=NamedSharding(MESH, Spec("y")))).sharding.spec == Spec("y")


def test_arguments_come_before_the_template(place: str, checkpointer: hf.PyTreeCheckpointer) -> None:
    template = {**TREE, "w": jnp.zeros((4, 6)), "n": torch.zeros(3, dtype=torch.int64)}
    restore_args = {"w": hf.ArrayRestoreArgs(dtype=jnp.bfloat16, mesh=MESH, mesh_axes=("x", "y"))}
    found = checkpointer.restore(place, template, restore_args=restore_args)
    assert found["w"].dtype == jnp.bfloat16
    assert found["w"].sharding == NamedSharding(MESH, Spec("x", "y"))
    assert isinstance(found["n"], torch.Tensor)
    assert (found["step"], found["name"], found["none"]) == (7, "run", None)


@pytest.mark.parametrize("template", [None, ..., {name: object() for name in TREE}, dict.fromkeys(TREE, ...)])
def test_as_it_was_saved(place: str, checkpointer: hf.PyTreeCheckpointer, template: Any) -> None:
    assert_same(checkpointer.restore(place, template), TREE)
    assert_same(hf.load(place, like=template), TREE)


def test_templates_of_some_entries(place: str, checkpointer: hf.PyTreeCheckpointer) -> None:
    found = checkpointer.restore(place, entries={"w": jnp.zeros((4, 6)), "absent": jnp.zeros(2)})
    assert isinstance(found["w"], jax.Array)
    assert list(found) == list(TREE)
    assert_same({**found, "w": np.asarray(found["w"])}, TREE)
    with pytest.raises(hf.TreeMismatchError, match=r"w: expected float32\[4, 7\].*, found float32\[4, 6\]"):
        checkpointer.restore(place, entries={"w": jnp.zeros((4, 7))})


def test_arguments_for_leaves_that_there_are_not(place: str, checkpointer: hf.PyTreeCheckpointer) -> None:
    with pytest.raises(hf.errors.OptionError, match="restore_args: the tree has no v"):
        checkpointer.restore(place, restore_args={"v": hf.RestoreArgs()})
    with pytest.raises(hf.errors.OptionError, match="restore_args: the tree has no w/x"):
        checkpointer.restore(place, {"w": {"y": object()}}, restore_args={"w": {"x": hf.RestoreArgs()}})
    axes = {"w": hf.ArrayRestoreArgs(mesh=MESH, mesh_axes=Spec("q"))}
    with pytest.raises(hf.errors.OptionError, match=r"w: mesh_axes=.*'q'.* axes of the mesh.* the axes x, y"):
        checkpointer.restore(place, restore_args=axes)
    template = {**TREE, "v": np.zeros(2)}
    args = hf.checkpoint_utils.construct_restore_args(template)
    with pytest.raises(hf.TreeMismatchError, match=r"v: expected .*not in the checkpoint"):
        checkpointer.restore(place, template, restore_args=args)


def test_shapes(place: str, checkpointer: hf.PyTreeCheckpointer) -> None:
    def restored(**kwargs: Any) -> Any:
        return checkpointer.restore(place, select="w", restore_args={"w": hf.ArrayRestoreArgs(**kwargs)})["w"]

    np.testing.assert_array_equal(restored(), TREE["w"])
    np.testing.assert_array_equal(restored(global_shape=(4, 6)), TREE["w"])
    with pytest.raises(hf.TreeMismatchError, match=r"w: expected float32\[5, 2\].*, found float32\[4, 6\]"):
        restored(global_shape=(5, 2))
    sharding = NamedSharding(MESH, Spec("y"))
    found = restored(global_shape=(6, 2), strict=False, sharding=sharding)
    assert found.sharding == sharding
    np.testing.assert_array_equal(found, np.pad(TREE["w"], ((0, 2), (0, 0)))[:, :2])  # type: ignore[call-overload]  # it is an array


def test_a_train_state_on_another_mesh(place: str) -> None:
    params = {f"Dense_{i}": {"kernel": jnp.full((4, 8), i + 0.5), "bias": jnp.arange(8.0)} for i in range(2)}
    state = TrainState.create(apply_fn=print, params=params, tx=optax.adam(1e-3))  # type: ignore[no-untyped-call]
    state = state.apply_gradients(grads=params)
    save_args = jax.tree.map(lambda leaf: hf.SaveArgs(aggregate=leaf.size < 10), jax.tree.map(jnp.asarray, state))
    checkpointer = hf.PyTreeCheckpointer()
    checkpointer.save(place, state, save_args=save_args)

    abstract: Any = jax.eval_shape(lambda: state)
    shardings = jax.tree.map(lambda leaf: NamedSharding(MESH, Spec("x" if leaf.ndim == 2 else None)), abstract)
    args = hf.checkpoint_utils.construct_restore_args(abstract, shardings)
    found = checkpointer.restore(place, abstract, restore_args=args)
    assert type(found) is TrainState
    assert jax.tree.map(lambda leaf: leaf.sharding, found.params) == shardings.params
    equal = jax.tree.map(lambda one, other: bool(np.array_equal(one, other)), found, state)
    assert all(jax.tree.leaves(equal))
    assert len(jax.tree.leaves(found)) == len(jax.tree.leaves(state))


SAVED: dict[str, Any] = {
    "jax": jnp.arange(8.0).reshape(4, 2),
    "half": jnp.ones(4, jnp.bfloat16),
    "numpy": [np.arange(3), np.array(["a", "bc"])],
    "torch": torch.ones(2, 3),
    "scalar": np.float64(0.5),
    "key": jax.random.key(3),
    "values": (1, 0.5, True, "text", None, b"bytes"),
}


def test_a_structure_is_a_template_and_makes_args(place: str) -> None:
    checkpointer = hf.PyTreeCheckpointer()
    checkpointer.save(place, SAVED)
    metadata = checkpointer.structure(place)
    assert_same(checkpointer.restore(place, metadata), checkpointer.restore(place))
    assert_same(hf.load(place, like=metadata), hf.load(place))
    sharding = NamedSharding(MESH, Spec("x"))
    made = hf.checkpoint_utils.construct_restore_args(metadata, sharding)
    for template in (None, metadata):
        found = checkpointer.restore(place, template, restore_args=made)
        assert found["jax"].sharding == found["half"].sharding == sharding
        assert found["half"].dtype == jnp.bfloat16
        assert isinstance(found["torch"], torch.Tensor)
        assert [type(one) for one in found["numpy"]] == [np.ndarray, np.ndarray]
        assert (found["values"], found["scalar"]) == (SAVED["values"], 0.5)
        assert jax.random.bits(found["key"]) == jax.random.bits(SAVED["key"])
    shapes = {"half": hf.reports.LeafMetadata("jax", (5,), "bfloat16"), "key": hf.reports.LeafMetadata("str", (), None)}
    for args in (None, hf.RestoreArgs()):
        with pytest.raises(hf.TreeMismatchError) as caught:
            checkpointer.restore(place, {**metadata, **shapes}, restore_args=args)
        half, key = caught.value.differences
        assert half == "half: expected bfloat16[5] (template), found bfloat16[4] (checkpoint)"
        assert key.startswith("key: expected str (template), found key")
    with pytest.raises(hf.errors.UnsupportedLeafError, match="half: is a LeafMetadata, which has no values"):
        hf.save(place + "-other", metadata)


def test_metadata_as_the_new_tree_of_transformations(place: str) -> None:
    hf.save(place, {"a": np.arange(4.0)})
    transforms = {"z": hf.Transform(original_key="a")}
    found = hf.load_transformed(place, transforms, {"z": hf.reports.LeafMetadata("numpy", (4,), "float64")})
    np.testing.assert_array_equal(found["z"], np.arange(4.0))
    with pytest.raises(hf.TreeMismatchError, match=r"z: expected float64\[9\] \(template\)|a.*expected float64\[9\]"):
        hf.load_transformed(place, transforms, {"z": hf.reports.LeafMetadata("numpy", (9,), "float64")})
