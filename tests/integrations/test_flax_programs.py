"""Two programs with the structure of Flax's own examples, adopted by a few lines, interrupted, and resumed exactly.

Each is written as its author would: what its state holds and how its loop counts and saves differ. The lines that
holdfast adds are marked with ``# +``; they take the place of those that saved and restored before.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
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
from flax.training import train_state
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tests import starts
from tests.integrations.states import bits
from tests.versions import nnx_list, nnx_update

import holdfast as hf

pytestmark = [pytest.mark.usefixtures("default_sigterm"), pytest.mark.xdist_group("programs")]

ROOT = Path(__file__).resolve().parents[2]
STEPS, EVERY = 8, 3
VOCABULARY, LENGTH, BATCH = 11, 5, 4
DEVICES = 2

# Is called in every step of a loop, between the update and the save.
Interrupt = Callable[[int, hf.CheckpointCallback], None]


def never(step: int, checkpoint: hf.CheckpointCallback) -> None:
    """Lets the program continue."""


class Pipeline:
    """Shuffled batches without end, as a loader of Grain gives them: an iterator whose position can be saved."""

    def __init__(self) -> None:
        self._seen = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._seen += 1
        return np.random.default_rng(self._seen).integers(VOCABULARY, size=(BATCH, LENGTH))

    def get_state(self) -> Mapping[str, Any]:
        return {"seen": self._seen}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._seen = state["seen"]


# A transformer in nnx, as in the example for Gemma: the checkpoint is a dictionary of the states of model and
# optimizer, put back with nnx.update.


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attention = nnx.MultiHeadAttention(
            num_heads=2, in_features=8, dropout_rate=0.1, deterministic=False, decode=False, rngs=rngs
        )
        self.norm = nnx.RMSNorm(8, rngs=rngs)
        self.mlp = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return x + self.mlp(nnx.gelu(self.attention(self.norm(x))))


class Transformer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCABULARY, 8, rngs=rngs)
        self.blocks = nnx_list([Block(rngs) for _ in range(1)])

    def __call__(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(x)


GEMMA_OPTIMIZER = optax.adamw(optax.warmup_cosine_decay_schedule(0, 0.1, 2, STEPS))


@nnx.jit
def transformer_step(model: Transformer, optimizer: nnx.Optimizer[Any], tokens: Any) -> Any:
    def loss_of(model: Transformer) -> Any:
        logits = model(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    nnx_update(optimizer, model, gradients)
    return loss


def gemma(directory: str, interrupt: Interrupt = never) -> Any:
    model = Transformer(nnx.Rngs(0, dropout=1))
    optimizer = nnx.Optimizer(model, GEMMA_OPTIMIZER, wrt=nnx.Param)
    batches = Pipeline()
    with hf.CheckpointCallback(directory, save_interval_steps=EVERY, max_to_keep=1) as checkpoint:  # +
        saved = {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}
        saved, start_step = checkpoint.restore_or_initialize(saved, data=batches)  # +
        nnx.update(model, saved["model"])
        nnx.update(optimizer, saved["optimizer"])
        for step in range(start_step, STEPS):
            loss = transformer_step(model, optimizer, next(batches))
            interrupt(step, checkpoint)
            saved = {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}
            if checkpoint.on_step(step + 1, saved, metrics={"loss": loss}, data=batches).should_stop:  # +
                break  # +
    return model, optimizer


# A language model in linen, as in the example for lm1b: a TrainState that is made under jit, with shardings over a
# mesh; the step is the state's own, and the key of each step's dropout is folded from it.


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        embed = nn.Embed(VOCABULARY, 8)
        x = embed(tokens)
        y = nn.MultiHeadDotProductAttention(2, dropout_rate=0.1, deterministic=False)(
            x, mask=nn.make_causal_mask(tokens)
        )
        return embed.attend(x + nn.Dropout(0.1, deterministic=False)(y))


DECODER = Decoder()
LM_OPTIMIZER = optax.adamw(lambda step: 0.1 / jnp.sqrt(step + 1), b2=0.98, weight_decay=0.1)


def initial_decoder() -> Any:
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    params = DECODER.init(keys, jnp.zeros((BATCH, LENGTH), jnp.int32))["params"]
    create: Any = train_state.TrainState.create
    return create(apply_fn=DECODER.apply, params=params, tx=LM_OPTIMIZER)


def decoder_step(state: Any, tokens: Any, key: Any) -> tuple[Any, Any]:
    key = jax.random.fold_in(key, state.step)

    def loss_of(params: Any) -> Any:
        logits = state.apply_fn({"params": params}, tokens[:, :-1], rngs={"dropout": key})
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, gradients = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=gradients), {"loss": loss, "learning_rate": 0.1}


@functools.cache
def on_mesh(mesh: Mesh) -> tuple[Any, Any]:
    """Returns the abstract state, the last axis of large arrays divided over the mesh, and the step that keeps that."""
    spec: Any = PartitionSpec
    struct: Any = jax.ShapeDtypeStruct

    def placed(leaf: Any) -> Any:
        divided = leaf.ndim > 1 and leaf.shape[-1] % DEVICES == 0
        axes = spec(*[None] * (leaf.ndim - 1), "model") if divided else spec()
        return struct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, axes))

    abstract = jax.tree.map(placed, jax.eval_shape(initial_decoder))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    return abstract, jax.jit(decoder_step, out_shardings=(shardings, None), donate_argnums=0)


def lm1b(directory: str, interrupt: Interrupt = never) -> Any:
    mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("model",))
    batches = Pipeline()
    key = jax.random.key(7)
    abstract, step_on_mesh = on_mesh(mesh)
    with hf.CheckpointCallback(directory, save_interval_steps=EVERY, keep_period=2 * EVERY) as checkpoint:  # +
        state, start = checkpoint.restore_or_initialize(initial_decoder, like=abstract, data=batches)  # +
        assert start == int(state.step)
        assert jax.tree.leaves(state.params)[-1].sharding.mesh == mesh
        for step in range(start, STEPS):
            state, metrics = step_on_mesh(state, next(batches), key)
            interrupt(step, checkpoint)
            if checkpoint.on_step(step + 1, state, metrics=metrics, data=batches).should_stop:  # +
                break  # +
            if (step + 1) % 4 == 0:
                checkpoint.on_eval(step + 1, {"eval_loss": float(metrics["loss"]) + 1})  # +
    return {"params": state.params, "opt": state.opt_state, "step": state.step}


PROGRAMS: dict[str, Callable[[str, Interrupt], Any]] = {"gemma": gemma, "lm1b": lm1b}


def train_until_killed(directory: str, kill: int, programs: tuple[str, ...] = tuple(PROGRAMS)) -> None:
    """Runs the programs, each in this step of the loop of the one before, and kills the process in the last loop."""
    program, *others = programs

    def interrupt(step: int, checkpoint: hf.CheckpointCallback) -> None:
        if step == kill:
            checkpoint.manager.wait_until_finished()  # so that the test knows the last step
            if not others:
                os.kill(os.getpid(), signal.SIGKILL)
            train_until_killed(directory, kill, tuple(others))

    PROGRAMS[program](f"{directory}/{program}", interrupt)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """The ends of the programs that nothing interrupts."""
    return {name: bits(train(str(tmp_path_factory.mktemp(name)), never)) for name, train in PROGRAMS.items()}


def test_programs_that_are_killed_and_started_again_end_with_the_same_bits(
    tmp_path: Path, whole: dict[str, dict[str, bytes]], every: bool
) -> None:
    for kill in (1, 4, 7) if every else (4,):  # before the first save, and after each save
        command = f"from {__name__} import train_until_killed; train_until_killed({str(tmp_path)!r}, {kill})"
        died = starts.run("-c", command, cwd=ROOT, backend="jax")
        assert died.returncode == -signal.SIGKILL, died.stderr
    for name, train in PROGRAMS.items():
        run = str(tmp_path / name)
        assert hf.list_checkpoints(run)[-1].step == (6 if every else 3), name
        assert bits(train(run, never)) == whole[name], name
        assert hf.verify(run).ok, name


class InterruptedProgramError(Exception):
    """Stands for any error that ends a program, between an update and its report."""


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_that_end_at_every_step_by_an_error_or_a_signal(
    place: str, whole: dict[str, dict[str, bytes]], program: str, every: bool
) -> None:
    ways = ["error", "signal"]
    for first in (0, 1) if every else (len(program) % 2,):
        run = f"{place}/{first}"
        for stop in range(STEPS):
            how = ways[(stop + first) % 2]

            def interrupt(step: int, _: hf.CheckpointCallback, stop: int = stop, how: str = how) -> None:
                if step == stop and how == "error":
                    raise InterruptedProgramError
                if step == stop:
                    os.kill(os.getpid(), signal.SIGTERM)

            with contextlib.suppress(InterruptedProgramError, SystemExit):  # at the end of the steps after a signal
                PROGRAMS[program](run, interrupt)
            saved = stop + (how == "signal")
            assert [one.step for one in hf.list_checkpoints(run)][-1:] == [saved][: saved > 0]
        assert bits(PROGRAMS[program](run, never)) == whole[program]


@pytest.mark.parametrize("what", ["its arrays", "arrays of its extras"])
def test_a_loop_that_donated_what_it_has_reported_last_says_what_is_lost(
    what: str, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    donating = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)
    donated = {"w": jnp.zeros(1000)}
    with hf.CheckpointCallback(place, save_interval_steps=2) as checkpoint:
        for step in range(1, 4):
            donated = donating(donated)
            if what == "its arrays":
                checkpoint.on_step(step, donated)
            else:
                checkpoint.on_step(step, {"n": step}, average=donated)
        donating(donated)
    assert checkpoint.manager.all_steps() == [2]
    assert f"step 3 is not saved at the end: {what} were donated" in caplog.text


def test_nnx_objects_that_only_passed_through_a_jitted_function_are_saved(place: str) -> None:
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    with hf.CheckpointCallback(place) as checkpoint:
        checkpoint.on_step(1, [model, optimizer])
        nnx.jit(lambda model, optimizer: optimizer.step[...] + 1)(model, optimizer)
    assert checkpoint.manager.all_steps() == [1]
