"""Flax runs that are interrupted anywhere end bit for bit where the uninterrupted run does."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]  # it ships no types
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from tests.versions import nnx_list, nnx_update

from holdfast.integrations.flax import CheckpointCallback

pytestmark = pytest.mark.usefixtures("default_sigterm")

TOTAL = 7
BATCHES = 3  # an epoch; TOTAL ends within the third
EXAMPLES = np.random.default_rng(0).normal(size=(BATCHES * 2, 4)).astype(np.float32)
LABELS = np.arange(BATCHES * 2) % 3
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(0.1, 0.01, TOTAL)))


class Interrupted(Exception):  # noqa: N818 - stands for any error that ends a run
    """Ends a loop."""


class ShuffledBatches:
    """Batches of two examples, shuffled anew in every epoch with a generator of its own."""

    def __init__(self) -> None:
        self._generator = np.random.default_rng(5)
        self._order = np.zeros(0, np.int64)
        self.drawn = 0

    def __next__(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        place = self.drawn % BATCHES
        if place == 0:
            self._order = self._generator.permutation(len(EXAMPLES))
        self.drawn += 1
        chosen = self._order[2 * place : 2 * place + 2]
        return EXAMPLES[chosen], LABELS[chosen]

    def get_state(self) -> dict[str, Any]:
        return {"generator": self._generator.bit_generator.state, "order": self._order, "drawn": self.drawn}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._generator.bit_generator.state = state["generator"]
        self._order = state["order"]
        self.drawn = state["drawn"]


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.relu(nn.Dense(8)(x))
        return nn.Dense(3)(nn.Dropout(0.5, deterministic=False)(x))


LINEN = Linen()


@functools.partial(jax.jit, donate_argnums=0)  # a save under way must not see the memory being used again
def linen_step(state: TrainState, batch: Any, key: Any) -> tuple[TrainState, Any]:
    def loss_of(params: Any) -> Any:
        logits = state.apply_fn({"params": params}, batch[0], rngs={"dropout": key})
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    loss, gradients = jax.value_and_grad(loss_of)(state.params)
    apply: Any = state.apply_gradients  # untyped in flax
    return apply(grads=gradients), loss


class Module(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx_list([nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)])
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.layers[1](self.dropout(nnx.relu(self.norm(self.layers[0](x)))))


@nnx.jit
def nnx_step(model: Module, optimizer: nnx.Optimizer[Module], batch: Any, noise: Any) -> Any:
    def loss_of(model: Module) -> Any:
        logits = model(batch[0] + noise)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    nnx_update(optimizer, model, gradients)
    return loss


def linen_state() -> TrainState:
    create: Any = TrainState.create  # untyped in flax
    state: TrainState = create(apply_fn=LINEN.apply, params=jax.tree.map(jnp.copy, linen_params()), tx=OPTIMIZER)
    return state


@functools.cache
def linen_params() -> Any:
    return LINEN.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, EXAMPLES[:2])["params"]


class Run:
    """One process's worth of a training run: fresh objects, a loop, and perhaps an interruption.

    Args:
        directory: Where the checkpoints are.
        stop: The step around which the run is interrupted, or None.
        how: "torn" raises after the update, before it is reported; "raised" raises right after the report; "preempted"
            sends SIGTERM during the update.
        **options: For the callback.
    """

    def __init__(self, directory: Path, *, stop: int | None = None, how: str = "raised", **options: Any) -> None:
        self.stop = stop
        self.how = how
        self.callback = CheckpointCallback(directory, witness_steps_after_signal=0, **options)
        self.data = ShuffledBatches()
        self.start = -1

    def interrupt(self, step: int, how: str) -> None:
        if step == self.stop and how == self.how:
            if how == "preempted":
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                raise Interrupted

    def loop(self, update: Callable[[int], tuple[Any, Any, dict[str, Any]]]) -> None:
        for step in range(self.start + 1, TOTAL + 1):
            self.interrupt(step, "preempted")
            state, loss, extras = update(step)
            self.interrupt(step, "torn")
            outcome = self.callback.on_step(step, state, metrics={"loss": loss}, **extras)
            self.interrupt(step, "raised")
            assert outcome.should_stop == (self.how == "preempted" and step == self.stop)
            if outcome.should_stop:
                raise Interrupted

    def linen(self) -> dict[str, Any]:
        key = jax.random.key(2)
        state = linen_state()
        with self.callback as checkpoint:
            state, self.start = checkpoint.restore_or_initialize(state, data=self.data, rng=key)
            key = checkpoint.extras["rng"]

            def update(step: int) -> Any:
                nonlocal state, key
                key, dropout = jax.random.split(key)
                state, loss = linen_step(state, next(self.data), dropout)
                return state, loss, {"data": self.data, "rng": key}

            self.loop(update)
        # The template of a fresh state counts with a Python int; a jitted update turns it into an array.
        end = state.replace(step=int(state.step))
        return {"state": end, "rng": jax.random.key_data(key), "data": self.data.get_state()}

    def nnx(self) -> dict[str, Any]:
        model = Module(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)
        rngs = nnx.Rngs(noise=3)
        with self.callback as checkpoint:
            restored, self.start = checkpoint.restore_or_initialize((model, optimizer), data=self.data, rngs=rngs)
            assert restored[0] is model
            assert restored[1] is optimizer

            def update(step: int) -> Any:
                noise = jax.random.normal(rngs.noise(), (2, 4)) / 10
                loss = nnx_step(model, optimizer, next(self.data), noise)
                return (model, optimizer), loss, {"data": self.data, "rngs": rngs}

            self.loop(update)
        objects = nnx.to_pure_dict(nnx.state((model, optimizer, rngs)))
        return {"objects": objects, "data": self.data.get_state()}


def bits(tree: Any) -> list[tuple[str, str, bytes]]:
    """Every leaf of a run's end, to the bit."""
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        array = np.asarray(leaf) if not isinstance(leaf, (str, int)) else np.array(str(leaf))
        found.append((jax.tree_util.keystr(path), str(array.dtype), array.tobytes()))
    return found


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {
        kind: bits(getattr(Run(tmp_path_factory.mktemp(kind), save_interval_steps=100), kind)())
        for kind in ("linen", "nnx")
    }


@pytest.fixture
def directory() -> Iterator[Path]:
    """A place in memory where there is one: these tests save some hundred times, and not for the disk's sake."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as path:
        yield Path(path)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("how", ["torn", "raised", "preempted"])
@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_interrupted_at_any_step(
    directory: Path, uninterrupted: dict[str, Any], kind: str, how: str, interval: int, every: bool
) -> None:
    # Each kind of interruption occurs at every step with one of the intervals, and at every phase of the longer one.
    first = 1 + (["torn", "raised", "preempted"].index(how) + (interval == 3)) % 2
    for stop in range(1, TOTAL + 1) if every else range(first, TOTAL + 1, 2):
        place = directory / str(stop)
        with pytest.raises(Interrupted):
            getattr(Run(place, stop=stop, how=how, save_interval_steps=interval), kind)()
        resumed = Run(place, save_interval_steps=interval)
        assert bits(getattr(resumed, kind)()) == uninterrupted[kind]
        last_update = stop - 1 if how == "torn" else stop
        assert resumed.start == (stop if how == "preempted" else last_update - last_update % interval)


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_interrupted_twice_in_a_row(directory: Path, uninterrupted: dict[str, Any], kind: str, every: bool) -> None:
    for first, second in list(itertools.combinations(range(1, TOTAL + 1, 2), 2))[:: 1 if every else 4]:
        place = directory / f"{first}-{second}"
        for stop, how in [(first, "raised"), (second, "preempted")]:
            with pytest.raises(Interrupted):
                getattr(Run(place, stop=stop, how=how, save_interval_steps=2), kind)()
        assert bits(getattr(Run(place, save_interval_steps=2), kind)()) == uninterrupted[kind]


# What the objects of Flax need besides


@pytest.mark.parametrize("what", ["its arrays", "arrays of its extras"])
def test_a_loop_that_donated_what_it_has_reported_last_says_what_is_lost(
    what: str, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    donating = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)
    donated = {"w": jnp.zeros(1000)}
    with CheckpointCallback(directory, save_interval_steps=2) as checkpoint:
        for step in range(1, 4):
            donated = donating(donated)
            if what == "its arrays":
                checkpoint.on_step(step, donated)
            else:
                checkpoint.on_step(step, {"n": step}, average=donated)
        donating(donated)
    assert checkpoint.manager.all_steps() == [2]
    assert f"step 3 is not saved at the end: {what} were donated" in caplog.text


def test_nnx_objects_that_were_trained_further_are_not_saved_under_an_older_step(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Module(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)
    data = ShuffledBatches()
    with CheckpointCallback(directory, save_interval_steps=2) as checkpoint:
        for step in range(1, 4):
            nnx_step(model, optimizer, next(data), 0.0)
            checkpoint.on_step(step, {"model": model, "optimizer": optimizer})
        nnx_step(model, optimizer, next(data), 0.0)
    assert checkpoint.manager.all_steps() == [2]
    assert "step 3 is not saved at the end: its objects were updated since" in caplog.text


def test_nnx_objects_that_only_passed_through_a_jitted_function_are_saved(directory: Path) -> None:
    model = Module(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)
    with CheckpointCallback(directory, save_interval_steps=2) as checkpoint:
        nnx_step(model, optimizer, next(ShuffledBatches()), 0.0)
        checkpoint.on_step(1, [model, optimizer])
        nnx.jit(lambda model, optimizer: optimizer.step[...] + 1)(model, optimizer)
    assert checkpoint.manager.all_steps() == [1]
