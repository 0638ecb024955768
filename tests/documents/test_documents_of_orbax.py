"""Sections of the documents that programs of Orbax follow: their calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tests.equality import assert_same

import holdfast as hf
from holdfast import Transform

Spec: Any = PartitionSpec
MESH = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
INPUTS = np.arange(12.0).reshape(3, 4)


# ---- getting started


def standard_recipe(directory: Path, num_steps: int) -> dict[str, Any]:
    """The recipe from beginning to end; a second call continues where the first one stopped."""
    train_state = {
        "b": jax.device_put(jnp.zeros(2), NamedSharding(MESH, Spec())),
        "w": jax.device_put(jnp.zeros((4, 2)), NamedSharding(MESH, Spec("data", "model"))),
    }
    options = hf.CheckpointManagerOptions(max_to_keep=3, keep_period=2)
    mngr = hf.CheckpointManager(directory, hf.PyTreeCheckpointer(), options=options)

    latest_step = mngr.latest_step()
    if latest_step is not None:
        shardings = jax.tree.map(lambda x: x.sharding, train_state)
        restore_args = hf.checkpoint_utils.construct_restore_args(train_state, shardings)
        restored = mngr.restore(latest_step, items=train_state, restore_kwargs={"restore_args": restore_args})
        assert jax.tree.map(lambda x: x.sharding, restored) == shardings
        train_state = restored

    start_step = 0 if latest_step is None else latest_step + 1
    for step in range(start_step, start_step + num_steps):
        train_state = jax.tree.map(lambda x: 0.9 * x + jnp.sin(x) + 1, train_state)
        mngr.save(step, train_state)
    mngr.close()
    return train_state


def test_a_standard_recipe(tmp_path: Path) -> None:
    standard_recipe(tmp_path / "interrupted", 3)
    interrupted = standard_recipe(tmp_path / "interrupted", 2)
    assert_same(interrupted, standard_recipe(tmp_path / "whole", 5))
    with hf.CheckpointManager(tmp_path / "interrupted") as mngr:
        assert mngr.all_steps() == [0, 2, 3, 4]


# ---- checkpointers, handlers, and OCDBT


def test_array_checkpoint_handler(tmp_path: Path) -> None:
    checkpointer = hf.AsyncCheckpointer(hf.ArrayCheckpointHandler())
    checkpointer.save(tmp_path / "one", jnp.asarray(INPUTS))
    np.testing.assert_array_equal(checkpointer.restore(tmp_path / "one"), INPUTS.astype(np.float32))
    args = hf.ArrayRestoreArgs(mesh=MESH, mesh_axes=Spec(), dtype=np.float16)
    found = checkpointer.restore(tmp_path / "one", restore_args=args)
    assert (found.dtype, found.sharding) == (np.float16, NamedSharding(MESH, Spec()))
    assert hf.load(tmp_path / "one").shape == INPUTS.shape


def test_enabling_ocdbt(tmp_path: Path) -> None:
    """There is nothing to enable, and no server to keep alive."""
    ocdbt_context, coordinator_server = hf.type_handlers.create_coordinator_server_and_context()
    hf.type_handlers.register_standard_handlers_with_options(use_ocdbt=True, ts_context=ocdbt_context)
    assert coordinator_server is None
    hf.Checkpointer(hf.PyTreeCheckpointHandler(use_ocdbt=True)).save(tmp_path / "one", {"inputs": INPUTS})
    assert (tmp_path / "one" / "state" / "manifest.ocdbt").exists()
    with pytest.raises(hf.errors.OptionError, match="always stores arrays in an OCDBT database"):
        hf.type_handlers.register_standard_handlers_with_options(use_ocdbt=False)


# ---- transformations


def test_examples_with_a_manager(tmp_path: Path) -> None:
    """The handler takes transformations as a restore argument, with a template and other arguments beside them."""
    old = {f"Dense_{i}": {"kernel": np.full((4, 4), i, np.float32)} for i in range(2)}
    new = {f"Dense_{i}": {"kernel": np.full((4, 4), 10 + i, np.float32)} for i in range(4)}
    inserted = {
        r"(.*)Dense_0(.*)": Transform(use_fallback=True),
        r"(.*)Dense_1(.*)": Transform(original_key=r"\1Dense_0\2"),
        r"(.*)Dense_2(.*)": Transform(original_key=r"\1Dense_1\2"),
    }
    with hf.CheckpointManager(tmp_path) as manager:
        manager.save(3, {"params": old, "moments": (old, 2)})
        found = manager.restore(3, {"params": new, "moments": (new, 0)}, restore_kwargs={"transforms": inserted})
        expected = {**new, "Dense_1": old["Dense_0"], "Dense_2": old["Dense_1"]}
        assert_same(found, {"params": expected, "moments": (expected, 2)})

        args = {"params": {"Dense_2": hf.RestoreArgs(dtype=np.float16)}}
        cast = manager.restore(3, {"params": new}, restore_kwargs={"transforms": inserted, "restore_args": args})
        assert_same(cast["params"]["Dense_2"]["kernel"], np.ones((4, 4), np.float16))
        with pytest.raises(hf.errors.OptionError, match="template"):
            manager.restore(3, restore_kwargs={"transforms": inserted})
