"""Programs of jax, flax, grain and numpy that hide state; the last ones are trained by Lightning."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import flax.linen as linen
import jax
import jax.numpy as jnp
import lightning.pytorch as lightning
import numpy as np
import optax  # type: ignore[import-untyped]  # it ships no types
import torch
from flax import nnx, struct
from flax.training.train_state import TrainState
from jax.experimental import io_callback
from torch import nn
from torch.utils.data import DataLoader, default_collate

from holdfast.integrations.lightning import CheckpointCallback

from .cases import InterruptionError
from .hidden_case import Run, program
from .hidden_programs import FEATURES, SIZE, Batches, examples
from .lightning_runs import QUIET

RATE = 0.05


def train(run: Run, state: Any, update: Callable[[Any], tuple[Any, Any]], **extras: Any) -> None:
    """Train with an update that returns the state and the loss."""
    with run.callback() as checkpoint:
        state, start = checkpoint.restore_or_initialize(state, **extras)
        for step in range(start + 1, run.total + 1):
            state, loss = update(state)
            if run.report(checkpoint, step, state, loss, **extras):
                break


def new_params() -> dict[str, Any]:
    """Return the parameters of a linear model."""
    return {"w": jnp.linspace(-1, 1, FEATURES), "b": jnp.zeros(())}


def error_of(params: Any, x: Any) -> Any:
    """Return the loss of a batch."""
    return jnp.square(x @ params["w"] + params["b"] - x.sum(1)).mean()


def descend(params: Any, loss_of: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Return the parameters after a step of gradient descent, and the loss before it."""
    loss, gradients = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda one, gradient: one - RATE * gradient, params, gradients), loss


@program("a value that jit has captured")
def _captured(run: Run) -> None:
    """The compiled function has the scale of the first batch in it, as it was when it was traced."""
    batches, scale = Batches(), {"of inputs": 1.0}

    @jax.jit
    def compiled(params: Any, x: Any) -> Any:
        return descend(params, lambda params: error_of(params, x / scale["of inputs"]))

    def update(state: Any) -> Any:
        x = next(batches).numpy()
        scale["of inputs"] = float(np.abs(x).mean())
        return compiled(state, x)

    train(run, new_params(), update, data=batches)


@program("a key beside the state")
def _key(run: Run) -> None:
    batches, key = Batches(), jax.random.key(0)

    @jax.jit
    def compiled(params: Any, x: Any, key: Any) -> Any:
        return descend(params, lambda params: error_of(params, x * jax.random.bernoulli(key, 0.7, x.shape)))

    def update(state: Any) -> Any:
        nonlocal key
        key, now = jax.random.split(key)
        return compiled(state, next(batches).numpy(), now)

    train(run, new_params(), update, data=batches)


@program("noise of a callback to the host")
def _callback(run: Run) -> None:
    batches, generator = Batches(), np.random.default_rng(4)
    shape = jnp.zeros(FEATURES)  # of what it returns

    def draw() -> Any:
        return generator.normal(size=FEATURES).astype(np.float32) / 10

    @jax.jit
    def compiled(params: Any, x: Any) -> Any:
        noise = io_callback(draw, shape, ordered=True)
        return descend(params, lambda params: error_of(params, x + noise))

    train(run, new_params(), lambda state: compiled(state, next(batches).numpy()), data=batches)


class Normed(linen.Module):
    """Divides its weights by their spectral norm, which a vector in ``batch_stats`` follows."""

    @linen.compact
    def __call__(self, x: Any) -> Any:
        return linen.SpectralNorm(linen.Dense(8))(x, update_stats=True).sum(1)


MODEL, OPTIMIZER = Normed().apply, optax.adam(RATE)


def new_train_state() -> tuple[Any, Any]:
    """Return a ``TrainState``, and the other variables of its model."""
    create = TrainState.create
    variables = Normed().init(jax.random.key(0), jnp.zeros((SIZE, FEATURES)))
    state = create(apply_fn=MODEL, params=variables["params"], tx=OPTIMIZER)  # type: ignore[no-untyped-call]
    return state, variables["batch_stats"]


@jax.jit
def step_with_statistics(state: Any, statistics: Any, x: Any) -> Any:
    """Return the state and the statistics after an update, and the loss."""

    def loss_of(params: Any) -> Any:
        variables = {"params": params, "batch_stats": statistics}
        found, changed = state.apply_fn(variables, x, mutable=["batch_stats"])
        return jnp.square(found - x.sum(1)).mean(), changed["batch_stats"]

    (loss, statistics), gradients = jax.value_and_grad(loss_of, has_aux=True)(state.params)
    return state.apply_gradients(grads=gradients), statistics, loss


@program("statistics beside a TrainState")
def _statistics(run: Run) -> None:
    batches = Batches()
    state, statistics = new_train_state()

    def update(state: Any) -> Any:
        nonlocal statistics
        state, statistics, loss = step_with_statistics(state, statistics, next(batches).numpy())
        return state, loss

    train(run, state, update, data=batches)


class Annealed(nnx.Module):
    """Counts its calls in a number, for a noise that declines."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layer, self.calls = nnx.Linear(FEATURES, 1, rngs=rngs), 0

    def __call__(self, x: Any) -> Any:
        self.calls += 1
        return self.layer(x * (1 + 1 / self.calls))


def step_of_nnx(model: Any, x: Any) -> tuple[Any, Any]:
    """Return the module, which is trained in place, and the loss."""
    loss, gradients = nnx.value_and_grad(lambda model: jnp.square(model(x)[:, 0] - x.sum(1)).mean())(model)
    nnx.update(model, jax.tree.map(lambda one, to: one - RATE * to, nnx.state(model, nnx.Param), gradients))
    return model, loss


@program("a number in a module of nnx")
def _nnx_number(run: Run) -> None:
    batches = Batches()
    train(run, Annealed(nnx.Rngs(0)), lambda model: step_of_nnx(model, next(batches).numpy()), data=batches)


@struct.dataclass
class Clipped:
    """Parameters, and a limit for the norm of gradients: half of the first."""

    params: Any
    limit: float = struct.field(pytree_node=False, default=0.0)  # type: ignore[no-untyped-call]


@program("a static field that the first step sets")
def _static_field(run: Run) -> None:
    batches = Batches()

    def update(state: Any) -> Any:
        loss, gradients = jax.value_and_grad(error_of)(state.params, next(batches).numpy())
        norm = float(jnp.linalg.norm(gradients["w"]))
        if not state.limit:
            state = replace(state, limit=norm / 2)
        rate = RATE * min(1.0, state.limit / norm)
        return replace(state, params=jax.tree.map(lambda one, to: one - rate * to, state.params, gradients)), loss

    train(run, Clipped(new_params()), update, data=batches)


@program("an iterator of grain, begun anew")
def _grain(run: Run) -> None:
    import grain  # type: ignore[import-untyped]  # there is none for Windows

    source = grain.MapDataset.source(list(examples().numpy())).seed(3).shuffle().repeat().batch(SIZE)
    batches = iter(source.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=1)))
    compiled = jax.jit(lambda params, x: descend(params, lambda params: error_of(params, x)))
    train(run, new_params(), lambda state: compiled(state, np.stack(next(batches))))


@program("a default argument that grows")
def _default_argument(run: Run) -> None:
    """Numpy only: gradients are averaged over all steps, as in dual averaging."""
    batches = Batches()

    def average(gradient: Any, seen: list[Any] = []) -> Any:  # noqa: B006 - this is what it shows
        seen.append(gradient)
        return np.mean(seen, axis=0)

    def update(state: Any) -> Any:
        x = next(batches).numpy()
        difference = x @ state["w"] - x.sum(1)
        return {"w": state["w"] - RATE * average(2 * x.T @ difference / SIZE)}, np.square(difference).mean()

    train(run, {"w": np.zeros(FEATURES, np.float32)}, update, data=batches)


# ---- Lightning


class Recorder(lightning.Callback):
    """Notes what each step gives, and interrupts the run."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if trainer.global_step and trainer.global_step == self.run.error:
            raise InterruptionError
        if trainer.global_step + 1 == self.run.told:
            self.run.tell()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        state = {"model": module, "optimizer": trainer.optimizers[0]}
        self.run.note(trainer.global_step, state, outputs["loss"], batch=batch)


class Regression(lightning.LightningModule):
    """A linear model; the others are its subclasses."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=RATE, momentum=0.9)

    def loss_of(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss of a batch, and log it."""
        loss = nn.functional.mse_loss(self.layer(x), x.sum(1, keepdim=True))
        self.log("loss", loss)
        return loss

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.loss_of(batch)


def fit(run: Run, model: lightning.LightningModule, *callbacks: lightning.Callback, collate: Any = None) -> None:
    """Train by Lightning."""
    data = DataLoader(list(examples()), SIZE, shuffle=True, collate_fn=collate)  # type: ignore[arg-type, var-annotated]
    run.checkpoint = CheckpointCallback(run.directory, save_interval_steps=run.every)
    limits: dict[str, Any] = {**QUIET, "max_epochs": -1, "max_steps": run.total}
    trainer = lightning.Trainer(callbacks=[Recorder(run), *callbacks, run.checkpoint], **limits)
    try:
        trainer.fit(model, data)
    except SystemExit:
        run.stopped = True


class Queue(Regression):
    """Contrasts a batch with the features of earlier ones, as MoCo."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: deque[torch.Tensor] = deque(maxlen=4)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = self.loss_of(batch)
        if self.queue:
            loss = loss + (self.layer(batch).mean() * torch.stack(list(self.queue)).mean()).square()
        self.queue.append(self.layer(batch).detach().mean())
        return loss


@program("a queue of a module of Lightning")
def _queue(run: Run) -> None:
    fit(run, Queue())


class WarmUp(lightning.Callback):
    """Raises the rate batch by batch, and keeps no state."""

    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        self.batches += 1
        trainer.optimizers[0].param_groups[0]["lr"] = RATE * min(1.0, self.batches / 15)


@program("a callback of Lightning without a state")
def _lightning_callback(run: Run) -> None:
    fit(run, Regression(), WarmUp())


@program("a collate function that counts")
def _collate(run: Run) -> None:
    counts = itertools.count(1)
    fit(run, Regression(), collate=lambda rows: default_collate(rows) * (1 + 1 / next(counts)))
