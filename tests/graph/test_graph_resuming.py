"""The training example saves every two steps and is built anew, and continues bit for bit as without a break."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]  # it has no types
import pytest
import torch
from flax import nnx
from tests.equality import assert_same
from tests.versions import nnx_update

from holdfast import graph


class Batches:
    """An endless iterator over shuffled examples, which can be put back to where it was."""

    def __init__(self) -> None:
        self._position = 0
        self._generator = np.random.default_rng(0)

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        self._position += 1
        x = self._generator.permutation(10)[:2, None].astype(np.float32)
        return x, x * 5 + np.arange(5, dtype=np.float32)

    def get_state(self) -> dict[str, Any]:
        return {"position": self._position, "generator": self._generator.bit_generator.state}

    def set_state(self, state: dict[str, Any]) -> None:
        self._position = state["position"]
        self._generator.bit_generator.state = state["generator"]


class Run:
    """A net, its optimizer and its data, made anew."""

    def __init__(self, net: Any, optimizer: Any) -> None:
        self.net, self.optimizer, self.batches = net, optimizer, Batches()
        self.checkpoint = graph.Checkpoint(step=graph.Value(0), optimizer=optimizer, net=net, iterator=self.batches)


class TorchRun(Run):
    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        net = torch.nn.Linear(1, 5)
        super().__init__(net, torch.optim.Adam(net.parameters(), 0.1))

    def train(self) -> None:
        x, y = map(torch.from_numpy, next(self.batches))
        self.optimizer.zero_grad()
        (self.net(x) - y).abs().mean().backward()
        self.optimizer.step()


class NnxNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.l1 = nnx.Linear(1, 5, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(self.l1(x))


@nnx.jit
def nnx_step(net: NnxNet, optimizer: Any, x: jax.Array, y: jax.Array) -> None:
    nnx_update(optimizer, net, nnx.grad(lambda net: jnp.abs(net(x) - y).mean())(net))


class NnxRun(Run):
    """With dropout, whose random stream is a part of the state."""

    def __init__(self, seed: int) -> None:
        net = NnxNet(nnx.Rngs(seed))
        super().__init__(net, nnx.Optimizer(net, optax.adam(0.1), wrt=nnx.Param))

    def train(self) -> None:
        nnx_step(self.net, self.optimizer, *map(jnp.asarray, next(self.batches)))


def train_and_checkpoint(run: Any, manager: graph.CheckpointManager) -> list[str | None]:
    """Run the loop of the example for ten steps; return where it began, and all that it saved."""
    paths = [manager.latest_checkpoint]
    run.checkpoint.restore(manager.latest_checkpoint)
    for _ in range(10):
        run.train()
        run.checkpoint.step.assign_add(1)
        if int(run.checkpoint.step) % 2 == 0:
            paths.append(manager.save())
    return paths


@pytest.mark.parametrize("background", [False, True], ids=["at once", "in the background"])
@pytest.mark.parametrize("make", [TorchRun, NnxRun])
def test_a_resumed_run_ends_as_one_without_a_break(
    make: Callable[[int], Any], background: bool, place: str, tmp_path: Path
) -> None:
    def state(run: Any) -> Any:
        parts = graph.Checkpoint(net=run.net, optimizer=run.optimizer, batches=run.batches)
        reader = graph.load_checkpoint(parts.write(tmp_path / "state", overwrite=True))
        return {name: reader.get_tensor(name) for name in sorted(reader.get_variable_to_shape_map())}

    paths = [None, *(f"{place}/ckpt-{number}" for number in range(1, 11))]
    run, resumed = make(1), make(2)
    with graph.CheckpointManager(run.checkpoint, place, max_to_keep=3, background=background) as manager:
        assert train_and_checkpoint(run, manager) == paths[:6]
    with graph.CheckpointManager(resumed.checkpoint, place, max_to_keep=3, background=background) as manager:
        resumed.checkpoint.restore(manager.latest_checkpoint).assert_consumed()
        assert int(resumed.checkpoint.step) == 10
        assert_same(state(resumed), state(run))
        assert train_and_checkpoint(resumed, manager) == paths[5:]
        manager.wait_until_finished()
        assert manager.checkpoints == paths[8:]
    for _ in range(10):
        run.train()  # the first run continues, without a break
    assert_same(state(resumed), state(run))
