"""init_from= of the callback: fresh runs that begin with the weights of another."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]  # it comes without type information
import orbax.checkpoint as ocp  # type: ignore[import-untyped]  # it comes without type information
import pytest
import safetensors.numpy
import torch
from flax import nnx
from flax.training.train_state import TrainState
from tests.versions import nnx_assign

import holdfast as hf
from holdfast.integrations.flax import CheckpointCallback


def train_state(seed: int) -> Any:
    kernel, bias = jax.random.normal(jax.random.key(seed), (2, 4, 3))
    params = {"Dense_0": {"kernel": kernel, "bias": bias[0]}, "layers": [{"scale": kernel[0]}]}
    create: Any = TrainState.create
    state = create(apply_fn=None, params=params, tx=optax.adam(1e-3))
    return state.apply_gradients(grads=params) if seed else state


def flat(params: Any) -> dict[str, Any]:
    return {
        "Dense_0.kernel": params["Dense_0"]["kernel"],
        "Dense_0.bias": params["Dense_0"]["bias"],
        "layers.0.scale": params["layers"][0]["scale"],
    }


def orbax_state(path: Path, state: Any) -> Path:
    with ocp.CheckpointManager(path / "orbax") as manager:
        manager.save(7, args=ocp.args.StandardSave(state))
    return path / "orbax"


def orbax_params(path: Path, state: Any) -> Path:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "orbax", state.params)
    return path / "orbax"


def our_run(path: Path, state: Any) -> Path:
    with CheckpointCallback(path / "other") as callback:
        callback.restore_or_initialize(state, extra={"a": 1})
        callback.on_step(1, state, extra={"a": 1})
    return path / "other"


def safetensors_file(path: Path, state: Any) -> Path:
    arrays = {name: np.asarray(value) for name, value in flat(state.params).items()}
    safetensors.numpy.save_file(arrays, path / "x.safetensors")
    return path / "x.safetensors"


def torch_file(path: Path, state: Any) -> Path:
    tensors = {name: torch.from_numpy(np.array(value)) for name, value in flat(state.params).items()}
    torch.save({"epoch": 3, "model": tensors}, path / "x.pt")
    return path / "x.pt"


@pytest.mark.parametrize("write", [orbax_state, orbax_params, our_run, safetensors_file, torch_file])
def test_parameters_come_from_any_checkpoint(tmp_path: Path, write: Any, caplog: pytest.LogCaptureFixture) -> None:
    there, here = train_state(1), train_state(0)
    place = write(tmp_path, there)
    with caplog.at_level(logging.INFO, "holdfast"), CheckpointCallback(tmp_path / "run", init_from=place) as callback:
        state, start = callback.restore_or_initialize(here)
    assert (start, int(state.step)) == (0, 0)
    assert isinstance(state, TrainState)
    assert all(np.array_equal(value, flat(there.params)[name]) for name, value in flat(state.params).items())
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state.params))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), state.opt_state, here.opt_state))
    said = [line for line in caplog.messages if "took the weights from" in line]
    assert len(said) == 1
    assert str(place) in said[0]
    assert "3 arrays" in said[0]


def refused(directory: Path, state: Any, **options: Any) -> hf.TreeMismatchError:
    with (
        pytest.raises(hf.TreeMismatchError, match="the weights in params are not those of the model") as caught,
        CheckpointCallback(directory, **options) as callback,
    ):
        callback.restore_or_initialize(state)
    return caught.value


def test_every_difference_is_named(tmp_path: Path) -> None:
    there = train_state(1)
    params = {
        "Dense_0": {"kernel": jnp.ones((4, 5)), "bias": there.params["Dense_0"]["bias"].astype(jnp.bfloat16)},
        "Dense_1": {"kernel": jnp.ones(2)},
    }
    place = orbax_state(tmp_path, there.replace(params=params))
    differences = refused(tmp_path / "run", train_state(0), init_from=place).differences
    assert sorted(line.partition(":")[0] for line in differences) == [
        "Dense_0/bias",
        "Dense_0/kernel",
        "layers/0/scale",
        "params/Dense_1/kernel",
    ]


def test_the_weights_that_fit_are_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    there, here = train_state(1), train_state(0)
    options: Any = {"init_from": orbax_state(tmp_path, there), "partial": "initialize"}
    changed = {**here.params, "Dense_0": {"kernel": jnp.zeros((4, 5)), "bias": here.params["Dense_0"]["bias"]}}
    with CheckpointCallback(tmp_path / "run", **options) as callback:
        state, start = callback.restore_or_initialize(here.replace(params={**changed, "new": jnp.ones(2)}))
    assert start == 0
    expected = {**there.params, "Dense_0": {**there.params["Dense_0"], "kernel": jnp.zeros((4, 5))}, "new": jnp.ones(2)}
    assert jax.tree.all(jax.tree.map(np.array_equal, state.params, expected))
    (warning,) = [text for text in caplog.messages if "partial='initialize'" in text]
    kept = [line.partition(": ")[2].partition(":")[0] for line in warning.splitlines()[1:] if "kept as" in line]
    assert sorted(kept) == ["Dense_0/kernel", "new"]
    refused(tmp_path / "none", here.replace(params={"other": jnp.ones(7)}), **options)


class Layers(nnx.Module):
    def __init__(self, seed: int, units: int) -> None:
        rngs = nnx.Rngs(seed)
        self.first = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.second = nnx.Linear(4, units, rngs=rngs)


@pytest.mark.parametrize("partial", [None, "initialize"])
@pytest.mark.parametrize("kind", ["torch", "nnx", "nnx, alone"])
def test_the_weights_of_modules(tmp_path: Path, kind: str, partial: Any) -> None:
    """All of them, or those that fit; statistics of nnx are no weights."""

    def module(seed: int, units: int) -> Any:
        if kind != "torch":
            return Layers(seed, units)
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, units))

    def weights(one: Any) -> list[Any]:
        if kind != "torch":
            return [np.asarray(layer.kernel[...]) for layer in (one.first, one.second)]
        return [layer.weight.detach().numpy().copy() for layer in one]

    def held(one: Any) -> Any:
        return one if kind == "nnx, alone" else {"net": one}

    there, here = module(1, 2), module(2, 5 if partial else 2)
    expected = [weights(there)[0], weights(here if partial else there)[1]]
    if kind != "torch":
        nnx_assign(there.norm.mean, jnp.full(4, 5.0))
    with hf.CheckpointCallback(tmp_path / "other") as callback:
        callback.on_step(1, held(there))
    with hf.CheckpointCallback(tmp_path / "run", init_from=tmp_path / "other", partial=partial) as callback:
        callback.restore_or_initialize(held(here))
    assert all(map(np.array_equal, weights(here), expected))
    assert kind == "torch" or np.array_equal(here.norm.mean[...], np.zeros(4))


class Pair(NamedTuple):
    params: Any
    done: int


@dataclasses.dataclass
class Data:
    params: Any
    done: int


@pytest.mark.parametrize("make", [dict, Pair, Data])
def test_states_of_any_class(make: Any, tmp_path: Path) -> None:
    hf.save(tmp_path / "weights", {"params": {"w": np.ones(2)}})
    with CheckpointCallback(tmp_path / "run", init_from=tmp_path / "weights", save_at_end=False) as checkpoint:
        state, start = checkpoint.restore_or_initialize(make(params={"w": np.zeros(2)}, done=7))
    found = state if make is dict else {"params": state.params, "done": state.done}
    assert (found["params"]["w"].tolist(), found["done"], start) == ([1, 1], 7, 0)
    assert type(state) is make


def test_it_is_never_passed_over(tmp_path: Path) -> None:
    with pytest.raises(hf.errors.InvalidLocationError):
        CheckpointCallback("memory://init-from", init_from="what://x")
    with (
        pytest.raises(hf.errors.StateError, match="takes effect in restore_or_initialize"),
        CheckpointCallback(tmp_path / "run", init_from=tmp_path / "x") as callback,
    ):
        callback.on_step(1, {"params": jnp.ones(1)})


def test_weights_lie_where_the_template_does(tmp_path: Path) -> None:
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    spec: Any = jax.sharding.PartitionSpec
    sharding = jax.sharding.NamedSharding(mesh, spec("x"))
    hf.save(tmp_path / "ckpt", {"params": {"w": np.arange(4.0, dtype=np.float32)}})
    with CheckpointCallback(tmp_path / "run", init_from=tmp_path / "ckpt") as callback:
        state, _ = callback.restore_or_initialize({"params": {"w": jax.device_put(jnp.zeros(4), sharding)}})
    assert state["params"]["w"].sharding == sharding
    assert state["params"]["w"].tolist() == [0, 1, 2, 3]
