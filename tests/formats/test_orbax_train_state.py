"""The state of a Flax model's training that orbax-checkpoint saved, restored with holdfast on another mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from tests.equality import assert_same
from tests.versions import nnx_list

import holdfast as hf

jax: Any = pytest.importorskip("jax")
jnp: Any = pytest.importorskip("jax.numpy")
optax: Any = pytest.importorskip("optax")
ocp: Any = pytest.importorskip("orbax.checkpoint")


class KeyedState(TrainState):  # type: ignore[no-untyped-call]  # flax says nothing of its hook's types
    key: Any
    averages: Any = None


def on_mesh(state: Any, *shape: int, names: tuple[str, str]) -> Any:
    """Spreads a state over the four devices, along the last axis of every array that can be cut."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(shape), names)

    def place(leaf: Any) -> Any:
        ends = leaf.shape[-1:] if leaf.ndim and not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else ()
        cut = [None] * (leaf.ndim - 1) + [names[1]] if ends and ends[0] % shape[1] == 0 else []
        return jax.device_put(leaf, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*cut)))

    return jax.tree.map(place, state)


def trained() -> Any:
    """A state after two updates: parameters of two dtypes, nested and empty optimizer states, a key, a None."""
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 10)),
        optax.MultiSteps(optax.sgd(0.1, momentum=0.9), 2).gradient_transformation(),
    )
    create: Any = KeyedState.create
    normal, half = jax.random.normal, jnp.bfloat16
    params = {
        "Dense_0": {"kernel": normal(jax.random.key(0), (12, 16)).astype(half), "bias": jnp.zeros(16, half)},
        "Dense_1": {"kernel": normal(jax.random.key(1), (16, 8)), "bias": jnp.zeros(8)},
    }

    def run() -> Any:
        state = create(apply_fn=print, params=params, tx=optimizer, key=jax.random.key(7))
        for _ in range(2):
            state = state.apply_gradients(grads=jax.tree.map(jnp.sin, state.params))
        return state

    return jax.jit(run)()


@pytest.fixture(scope="module")
def state() -> Any:
    return on_mesh(trained(), 2, 2, names=("data", "model"))


@pytest.mark.parametrize("save", [ocp.args.StandardSave, ocp.args.PyTreeSave], ids=["StandardSave", "PyTreeSave"])
def test_a_managed_train_state_comes_back_bit_for_bit_and_trains_on(tmp_path: Path, state: Any, save: Any) -> None:
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(2, args=save(state))
    like = on_mesh(jax.tree.map(jnp.zeros_like, state), 1, 4, names=("replica", "shard"))
    found = hf.load(tmp_path / "run", like=like)
    assert_same(found, state)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(like), strict=True):
        assert one.sharding == other.sharding
    assert found.averages is None
    kernel = found.params["Dense_0"]["kernel"]
    assert kernel.sharding.spec == jax.sharding.PartitionSpec(None, "shard")

    def next_update(current: Any) -> Any:
        return current.apply_gradients(grads=jax.tree.map(jnp.ones_like, current.params))

    here = hf.load(tmp_path / "run", like=state)
    assert_same(jax.jit(next_update)(here), jax.jit(next_update)(state), "the next update")
    only = hf.load(tmp_path / "run", like={"params": state.params}, select="params/**")
    assert_same(only, {"params": state.params})


def test_the_state_of_an_nnx_module(tmp_path: Path) -> None:
    class Small(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.layers = nnx_list([nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 2, rngs=rngs)])
            self.norm = nnx.BatchNorm(2, rngs=rngs)

    saved = nnx.state(Small(nnx.Rngs(1)))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "one", saved)
    found = hf.load(tmp_path / "one", like=nnx.state(Small(nnx.Rngs(2))))
    assert_same(nnx.to_pure_dict(found), nnx.to_pure_dict(saved))
