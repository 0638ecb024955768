"""The document's section on getting started: its calls, on small real data.

Each test is named after the part whose example it is the counterpart of.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from sklearn.datasets import load_iris  # type: ignore[import-untyped]  # it comes without type information

from holdfast import ArrayRestoreArgs, CheckpointManager, CheckpointManagerOptions, PyTreeCheckpointer, checkpoint_utils

Spec: Any = PartitionSpec
INPUTS, LABELS = load_iris(return_X_y=True)
MESH = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))


def same(found: Any, expected: Any) -> bool:
    """Whether two trees have the same containers, and leaves that are equal."""
    equal = jax.tree.map(lambda one, other: bool(np.array_equal(one, other)), found, expected)
    return all(jax.tree.leaves(equal))


def do_training(train_state: Any) -> Any:
    """One step of gradient descent: logistic regression of the first kind of iris against the others."""

    def loss(params: Any) -> Any:
        logits = jnp.asarray(INPUTS, jnp.float32) @ params["w"][:, 0] + params["b"][0]
        return jnp.mean(jnp.log1p(jnp.exp(-logits * jnp.where(LABELS == 0, 1.0, -1.0))))

    gradients = jax.grad(loss)(train_state)
    return jax.tree.map(lambda param, gradient: param - 0.1 * gradient, train_state, gradients)


def initialized() -> dict[str, Any]:
    """Parameters that are spread over four devices."""
    return {
        "w": jax.device_put(jnp.zeros((4, 2)), NamedSharding(MESH, Spec("data", "model"))),
        "b": jax.device_put(jnp.zeros(2), NamedSharding(MESH, Spec())),
    }


def standard_recipe(directory: Path, num_steps: int, *, by_hand: bool) -> dict[str, Any]:
    """The recipe from beginning to end; a second call continues where the first one stopped."""
    train_state = initialized()
    options = CheckpointManagerOptions(max_to_keep=3, keep_period=2)
    mngr = CheckpointManager(directory, PyTreeCheckpointer(), options=options)

    latest_step = mngr.latest_step()
    if latest_step is not None:
        shardings = jax.tree.map(lambda x: x.sharding, train_state)
        restore_args = checkpoint_utils.construct_restore_args(train_state, shardings)
        if by_hand:
            restore_args = jax.tree.map(
                lambda x: ArrayRestoreArgs(
                    restore_type=jax.Array,
                    dtype=np.float32,
                    mesh=x.sharding.mesh,
                    mesh_axes=x.sharding.spec,
                    global_shape=x.shape,
                ),
                train_state,
            )
        restored = mngr.restore(latest_step, items=train_state, restore_kwargs={"restore_args": restore_args})
        assert list(restored) == list(train_state)
        assert all(
            one.sharding == other.sharding
            for one, other in zip(jax.tree.leaves(restored), jax.tree.leaves(train_state), strict=True)
        )
        train_state = restored

    start_step = 0 if latest_step is None else latest_step + 1
    for step in range(start_step, start_step + num_steps):
        train_state = do_training(train_state)
        mngr.save(step, train_state)
    mngr.close()
    return train_state


@pytest.mark.parametrize("by_hand", [False, True], ids=["constructed", "by hand"])
def test_a_standard_recipe(tmp_path: Path, by_hand: bool) -> None:
    standard_recipe(tmp_path / "interrupted", 3, by_hand=by_hand)
    interrupted = standard_recipe(tmp_path / "interrupted", 2, by_hand=by_hand)
    whole = standard_recipe(tmp_path / "whole", 5, by_hand=by_hand)
    assert same(interrupted, whole)
    assert float(jnp.abs(whole["w"]).max()) > 0
    with CheckpointManager(tmp_path / "interrupted") as mngr:
        assert mngr.all_steps() == [0, 2, 3, 4]
