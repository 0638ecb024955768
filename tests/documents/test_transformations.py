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
from holdfast import Transform, apply_transformations

structure_of: Any = jax.tree.structure
shape_of: Any = jax.eval_shape
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


MEANS = INPUTS.mean(0)


def test_transform_renames() -> None:
    assert apply_transformations({"mean": MEANS}, {"average": Transform(original_key="mean")}, {"average": ...}) == {
        "average": MEANS
    }


def test_transform_computes() -> None:
    """A new key as twice an old one: of the tree, or of the value alone, which is what ``value_fn`` is given."""
    tree = {"mean": MEANS}
    twice = {"double": Transform(multi_value_fn=lambda kv: kv["mean"] * 2)}
    np.testing.assert_array_equal(apply_transformations(tree, twice, {"double": ...})["double"], MEANS * 2)
    by_value = {"double": Transform(original_key="mean", value_fn=lambda value: value * 2)}
    np.testing.assert_array_equal(apply_transformations(tree, by_value, {"double": ...})["double"], MEANS * 2)
    of_the_tree = {"double": Transform(value_fn=lambda kv: kv["mean"] * 2)}
    with pytest.raises(hf.TreeMismatchError, match=r"value_fn is given the value at this key: .* use multi_value_fn"):
        apply_transformations(tree, of_the_tree, {"double": ...})


def test_transform_substitutes_in_every_key() -> None:
    old = {"encoder": {"w_in": 1, "w_out": 2}, "w_in": [3], "bias": 4}
    new = {"encoder": {"k_in": 0, "k_out": 0}, "k_in": [0], "bias": 0}
    found = apply_transformations(old, {r"(.*)k_(.*)": Transform(original_key=r"\1w_\2")}, new)
    assert found == {"encoder": {"k_in": 1, "k_out": 2}, "k_in": [3], "bias": 4}


def test_using_transformations() -> None:
    """Every kind of transformation at once, with placeholders for the values that the new tree does not have."""
    old = {
        "rate": 0.5,
        "stats": {"count": 150, "columns": [float(mean) for mean in MEANS]},
        "epoch": 2,
        "block1": {"w": INPUTS[0]},
        "block2": {"w": INPUTS[1]},
    }
    by_name = {"learning_rate": Transform(original_key="rate")}
    by_function = {"learning_rate": Transform(multi_value_fn=lambda kv: kv["rate"])}
    others = {
        "stats": {"count": Transform(multi_value_fn=lambda kv: kv["stats"]["count"] * 2)},
        "n1": Transform(original_key="stats/count"),
        "n2": Transform(original_key="stats/count"),
        "first": Transform(multi_value_fn=lambda kv: kv["stats"]["columns"][0]),
        "rest": Transform(multi_value_fn=lambda kv: kv["stats"]["columns"][1:]),
        "total": Transform(multi_value_fn=lambda kv: kv["rate"] * 2 + sum(kv["stats"]["columns"])),
        r"layer(\d.*)": Transform(original_key=r"block\1"),
    }
    new = {
        "learning_rate": ...,
        "stats": {"count": ...},
        "n1": ...,
        "n2": ...,
        "first": ...,
        "rest": ...,
        "total": ...,
        "epoch": ...,
        "momentum": 0.9,
        "layer1": {"w": np.zeros(WIDTH)},
        "layer2": {"w": np.zeros(WIDTH)},
    }
    columns = old["stats"]["columns"]  # type: ignore[index]
    for rename in (by_name, by_function):
        found = apply_transformations(old, {**rename, **others}, new)
        np.testing.assert_array_equal(found.pop("layer1")["w"], INPUTS[0])
        np.testing.assert_array_equal(found.pop("layer2")["w"], INPUTS[1])
        assert found == {
            "learning_rate": 0.5,
            "stats": {"count": 300},
            "n1": 150,
            "n2": 150,
            "first": columns[0],
            "rest": columns[1:],
            "total": 1 + sum(columns),
            "epoch": 2,
            "momentum": 0.9,
        }


@pytest.mark.parametrize("default_to_original", [True, False])
def test_using_transformations_default_to_original(default_to_original: bool) -> None:
    old = {"both": "old", "fallback": "old", "only old": "old"}
    new = {"both": "new", "fallback": "new", "only new": "new"}
    transformations = {"fallback": Transform(use_fallback=True)}
    found = apply_transformations(old, transformations, new, default_to_original=default_to_original)
    preferred, fallback = ("old", "new") if default_to_original else ("new", "old")
    assert found == {"both": preferred, "fallback": fallback, "only new": "new"}


INSERTED = {
    r"(.*)Dense_0(.*)": Transform(use_fallback=True),
    r"(.*)Dense_1(.*)": Transform(original_key=r"\1Dense_0\2"),
    r"(.*)Dense_2(.*)": Transform(original_key=r"\1Dense_1\2"),
}


def test_examples(old_state: TrainState, tmp_path: Path) -> None:
    """Two trained layers become the middle of a network of four; the moments of Adam move with them."""
    with hf.CheckpointManager(tmp_path) as manager:
        manager.save(3, old_state)
        manager.wait_until_finished()
        original = manager.restore(3)
    new = created(4)
    found = apply_transformations(original, INSERTED, new)
    check_inserted(found, old_state, new)


@pytest.mark.parametrize("abstract", [False, True], ids=["state", "abstract state"])
def test_examples_of_a_checkpoint(abstract: bool, old_state: TrainState, tmp_path: Path) -> None:
    """The same without reading what is dropped; layers that come from the checkpoint need not be initialized."""
    with hf.CheckpointManager(tmp_path) as manager:
        manager.save(3, old_state)
    new: Any = created(4)
    template = new
    if abstract:
        keep = ("Dense_0", "Dense_3")
        template = jax.tree_util.tree_map_with_path(
            lambda path, leaf: leaf if any(name in str(path) for name in keep) else shape_of(lambda: leaf), new
        )
    found = hf.load_transformed(tmp_path, INSERTED, template)
    check_inserted(found, old_state, new)
    assert all(isinstance(leaf, jax.Array | int) for leaf in jax.tree.leaves(found))


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
