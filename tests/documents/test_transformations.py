"""The section on transformations: its calls, on parameters that were trained on real data.

Each test is named after the part of the section whose example it is the counterpart of.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]  # it comes without type information
import pytest
from flax.training.train_state import TrainState
from sklearn.datasets import load_iris  # type: ignore[import-untyped]  # it comes without type information

import holdfast as hf
from holdfast import Transform

structure_of: Any = jax.tree.structure
INPUTS, LABELS = load_iris(return_X_y=True)
WIDTH = INPUTS.shape[1]


class Network(nn.Module):
    """Layers of one width, named Dense_0, Dense_1, ..., so that they can change places."""

    layers: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        for _ in range(self.layers):
            x = nn.tanh(nn.Dense(WIDTH)(x))
        return x


def created(layers: int, seed: int = 0) -> TrainState:
    model = Network(layers)
    params = model.init(jax.random.PRNGKey(seed), jnp.ones([1, WIDTH]))
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
