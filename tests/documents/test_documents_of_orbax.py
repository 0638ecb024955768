"""Sections of the documents that programs of Orbax follow: their calls, on small real data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]  # it comes without type information
import pytest
import tensorstore as ts
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from sklearn.datasets import load_iris  # type: ignore[import-untyped]  # it comes without type information

import holdfast as hf
from holdfast import Transform

Spec: Any = PartitionSpec
INPUTS, LABELS = load_iris(return_X_y=True)
MESH = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))


# ---- getting started


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
    options = hf.CheckpointManagerOptions(max_to_keep=3, keep_period=2)
    mngr = hf.CheckpointManager(directory, hf.PyTreeCheckpointer(), options=options)

    latest_step = mngr.latest_step()
    if latest_step is not None:
        shardings = jax.tree.map(lambda x: x.sharding, train_state)
        restore_args = hf.checkpoint_utils.construct_restore_args(train_state, shardings)
        if by_hand:
            restore_args = jax.tree.map(
                lambda x: hf.ArrayRestoreArgs(
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
    """There is nothing to enable, and no server to keep alive: TensorStore opens what any handler has saved."""
    ocdbt_context, coordinator_server = hf.type_handlers.create_coordinator_server_and_context()
    hf.type_handlers.register_standard_handlers_with_options(use_ocdbt=True, ts_context=ocdbt_context)
    assert coordinator_server is None

    ckptr = hf.Checkpointer(hf.PyTreeCheckpointHandler(use_ocdbt=True))
    ckptr.save(tmp_path / "one", {"inputs": INPUTS})
    spec = {"driver": "ocdbt", "base": f"file://{tmp_path}/one/state/", "path": "inputs/"}
    found = ts.open({"driver": "zarr3", "kvstore": spec}).result().read().result()
    np.testing.assert_array_equal(found, INPUTS)
    with pytest.raises(hf.errors.OptionError, match="always stores arrays in an OCDBT database"):
        hf.type_handlers.register_standard_handlers_with_options(use_ocdbt=False)


# ---- transformations

FEATURES = INPUTS.shape[1]
structure_of: Any = jax.tree.structure


class Network(nn.Module):
    """Layers of one width, named Dense_0, Dense_1, ..., so that they can change places."""

    layers: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        for _ in range(self.layers):
            x = nn.tanh(nn.Dense(FEATURES)(x))
        return x


def created(layers: int, seed: int = 0) -> TrainState:
    model = Network(layers)
    params = model.init(jax.random.PRNGKey(seed), jnp.ones([1, FEATURES]))
    state: TrainState = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-2))  # type: ignore[no-untyped-call]
    return state


def trained(state: TrainState, steps: int) -> TrainState:
    def loss(params: Any) -> Any:
        logits = state.apply_fn(params, jnp.asarray(INPUTS, jnp.float32))
        return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.asarray(LABELS)).mean()

    gradients = jax.jit(jax.grad(loss))
    for _ in range(steps):
        state = state.apply_gradients(grads=gradients(state.params))  # type: ignore[no-untyped-call]
    return state


@pytest.fixture(scope="module")
def old_state() -> TrainState:
    return trained(created(2, seed=1), 3)


INSERTED = {
    r"(.*)Dense_0(.*)": Transform(use_fallback=True),
    r"(.*)Dense_1(.*)": Transform(original_key=r"\1Dense_0\2"),
    r"(.*)Dense_2(.*)": Transform(original_key=r"\1Dense_1\2"),
}


def test_examples_with_a_manager(old_state: TrainState, tmp_path: Path) -> None:
    """The handler takes transformations as a restore argument, with a template and other arguments beside them."""
    with hf.CheckpointManager(tmp_path) as manager:
        manager.save(3, old_state)
    new: Any = created(4)
    with hf.CheckpointManager(tmp_path) as manager:
        found = manager.restore(3, new, restore_kwargs={"transforms": INSERTED})
        check_inserted(found, old_state, new)
        half = hf.RestoreArgs(dtype=np.float16)
        args = {"params": {"params": {"Dense_2": half}}}
        template = jax.tree.map(lambda leaf: leaf, new)
        cast = manager.restore(
            3, {"params": template.params}, restore_kwargs={"transforms": INSERTED, "restore_args": args}
        )
        kernel = cast["params"]["params"]["Dense_2"]["kernel"]
        assert kernel.dtype == np.float16
        np.testing.assert_array_equal(kernel, old_state.params["params"]["Dense_1"]["kernel"].astype(np.float16))
        with pytest.raises(hf.errors.OptionError, match="template"):
            manager.restore(3, restore_kwargs={"transforms": INSERTED})


def parts(state: Any) -> list[Any]:
    """What a state has of every parameter."""
    return [state.params, state.opt_state[0].mu, state.opt_state[0].nu]


def check_inserted(found: Any, old: Any, new: Any) -> None:
    assert type(found) is TrainState
    assert structure_of(found) == structure_of(new)
    assert int(found.step) == 3
    assert int(found.opt_state[0].count) == 3
    sources = {"Dense_0": (new, "Dense_0"), "Dense_1": (old, "Dense_0"), "Dense_2": (old, "Dense_1")}
    for name, (state, source) in {**sources, "Dense_3": (new, "Dense_3")}.items():
        for key in ("kernel", "bias"):
            for value, expected in zip(parts(found), parts(state), strict=True):
                np.testing.assert_array_equal(value["params"][name][key], expected["params"][source][key])
    assert not np.array_equal(found.params["params"]["Dense_1"]["kernel"], new.params["params"]["Dense_1"]["kernel"])
    assert np.any(np.asarray(found.opt_state[0].nu["params"]["Dense_2"]["kernel"]))
    assert int(trained(found, 1).step) == 4
