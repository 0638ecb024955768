"""JAX loops that are interrupted: every state of optax in trees, Flax's ``TrainState`` and nnx modules."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]  # it ships no types
from flax import nnx
from flax.training.train_state import TrainState

from holdfast.integrations.flax import CheckpointCallback

from .cases import Batches, Case, InterruptionError, Run, bits, run_interrupted
from .jax_programs import PROGRAMS

TOTAL, BATCHES, FEATURES = 7, 3, 4  # steps, batches of an epoch, features
EXAMPLES = np.random.default_rng(0).normal(size=(2 * BATCHES, FEATURES)).astype(np.float32)


def be_quiet() -> None:
    """Silence what holdfast says of every run."""
    logging.getLogger("holdfast").setLevel(logging.WARNING)


def _matrices(tree: Any) -> Any:
    return jax.tree.map(lambda value: value.ndim > 1, tree)


def _labels(tree: Any) -> Any:
    return jax.tree.map(lambda value: "matrix" if value.ndim > 1 else "vector", tree)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(0.05),
    "adam, bfloat16 moments": lambda: optax.adam(0.05, mu_dtype=jnp.bfloat16),
    "adamw, schedule": lambda: optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 0.1, 3, TOTAL)),
    "amsgrad": lambda: optax.amsgrad(0.05),
    "nadam": lambda: optax.nadam(0.05),
    "radam": lambda: optax.radam(0.05),
    "adabelief": lambda: optax.adabelief(0.05),
    "adan": lambda: optax.adan(0.05),
    "adafactor": lambda: optax.adafactor(0.05, min_dim_size_to_factor=2),
    "adagrad": lambda: optax.adagrad(0.1),
    "lion": lambda: optax.lion(0.01),
    "lamb": lambda: optax.lamb(0.05),
    "lars": lambda: optax.lars(0.1),
    "novograd": lambda: optax.novograd(0.05),
    "rmsprop": lambda: optax.rmsprop(0.01, momentum=0.9, centered=True),
    "sm3": lambda: optax.sm3(0.1),
    "yogi": lambda: optax.yogi(0.05),
    "noisy sgd": lambda: optax.noisy_sgd(0.1, seed=3),
    "clipping": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.05)),
    "accumulation": lambda: optax.MultiSteps(optax.adam(0.05), 2),
    "only finite": lambda: optax.apply_if_finite(optax.adam(0.05), 3),
    "masked": lambda: optax.chain(optax.masked(optax.add_decayed_weights(0.1), _matrices), optax.adam(0.05)),
    "one for each kind": lambda: optax.multi_transform({"matrix": optax.adam(0.05), "vector": optax.sgd(0.1)}, _labels),
    "hyperparameters in the state": lambda: optax.inject_hyperparams(optax.adamw)(
        learning_rate=optax.exponential_decay(0.1, 2, 0.5)
    ),
    "average of updates": lambda: optax.chain(optax.sgd(0.1), optax.ema(0.9)),
    "plateau": lambda: optax.chain(optax.adam(0.05), optax.contrib.reduce_on_plateau(patience=1, accumulation_size=1)),
    "schedule-free": lambda: optax.contrib.schedule_free_adamw(0.05, warmup_steps=2),
}


# ---- states: each makes a fresh state, and a step that takes a state and a batch


def _tree(optimizer: Any) -> tuple[Callable[[], Any], Callable[[Any, Any], Any]]:
    def make() -> Any:
        keys = jax.random.split(jax.random.key(0), 2)
        params = {"in": jax.random.normal(keys[0], (FEATURES, 8)), "bias": jnp.zeros(8), "out": jnp.ones((8, 1)) / 8}
        return {"params": params, "moments": optimizer.init(params), "key": keys[1]}

    def loss_of(params: Any, batch: Any, key: Any) -> Any:
        hidden = jnp.tanh(batch[0] @ params["in"] + params["bias"])
        hidden *= jax.random.bernoulli(key, 0.5, hidden.shape)
        return jnp.square(hidden @ params["out"] - batch[1]).mean()

    @jax.jit
    def step(state: Any, batch: Any) -> Any:
        key, now = jax.random.split(state["key"])
        loss, gradients = jax.value_and_grad(loss_of)(state["params"], batch, now)
        updates, moments = _update(optimizer, gradients, state["moments"], state["params"], loss)
        return {"params": optax.apply_updates(state["params"], updates), "moments": moments, "key": key}

    return make, step


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = linen.tanh(linen.Dense(8)(x))
        return linen.Dense(1)(linen.Dropout(0.5, deterministic=False)(x))


def _train_state(optimizer: Any) -> tuple[Callable[[], Any], Callable[[Any, Any], Any]]:
    model = Linen()
    create: Any = TrainState.create  # untyped in flax

    def make() -> Any:
        variables = model.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, jnp.zeros((2, FEATURES)))
        return create(apply_fn=model.apply, params=variables["params"], tx=optax.with_extra_args_support(optimizer))

    @jax.jit
    def step(state: Any, batch: Any) -> Any:
        key = jax.random.fold_in(jax.random.key(2), state.step)

        def loss_of(params: Any) -> Any:
            return jnp.square(state.apply_fn({"params": params}, batch[0], rngs={"dropout": key}) - batch[1]).mean()

        loss, gradients = jax.value_and_grad(loss_of)(state.params)
        updates, moments = _update(state.tx, gradients, state.opt_state, state.params, loss)
        return state.replace(step=state.step + 1, params=optax.apply_updates(state.params, updates), opt_state=moments)

    return make, step


class Module(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(FEATURES, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.last(self.dropout(nnx.tanh(self.norm(self.first(x)))))


def _nnx(optimizer: Any) -> tuple[Callable[[], Any], Callable[[Any, Any], Any]]:
    def make() -> Any:
        model = Module(nnx.Rngs(0, dropout=1))
        return {"model": model, "optimizer": nnx.Optimizer(model, optimizer, wrt=nnx.Param)}

    @nnx.jit
    def train(model: Module, moments: Any, batch: Any) -> None:
        def loss_of(model: Module) -> Any:
            return jnp.square(model(batch[0]) - batch[1]).mean()

        loss, gradients = nnx.value_and_grad(loss_of)(model)
        moments.update(model, gradients, value=loss)

    def step(state: Any, batch: Any) -> Any:
        train(state["model"], state["optimizer"], batch)
        return state

    return make, step


def _update(optimizer: Any, gradients: Any, moments: Any, params: Any, loss: Any) -> tuple[Any, Any]:
    found: tuple[Any, Any] = optax.with_extra_args_support(optimizer).update(gradients, moments, params, value=loss)
    return found


PROGRAM = "program"
STATES = {"tree": _tree, "TrainState": _train_state, "nnx": _nnx}


# ---- runs


def run(make: Callable[[], Any], step: Callable[[Any, Any], Any], start: Run) -> Any:
    """Train, and return the state and the batches as values to compare; None where it was told to stop."""
    state, batches = make(), Batches(EXAMPLES, 2)
    with CheckpointCallback(start.directory, save_interval_steps=start.every) as checkpoint:
        state, done = checkpoint.restore_or_initialize(state, data=batches)
        for number in range(done + 1, start.total + 1):
            x = next(batches)
            state = step(state, (x, np.sin(x.sum(1, keepdims=True))))
            if start.report(checkpoint, number, state, data=batches):
                return None
    return {"state": bits(state), "batches": repr(batches.get_state())}


def groups() -> list[tuple[str, str]]:
    """Return pairs of a state and an optimizer, and the programs."""
    return [*itertools.product(STATES, OPTIMIZERS), *((PROGRAM, name) for name in PROGRAMS)]


def run_group(state: str, optimizer: str, only: tuple[str, ...] = ()) -> Iterator[Case]:
    """Yield the cases of one state and optimizer, or of one program, whose names contain one of ``only``."""
    make, step = PROGRAMS[optimizer]() if state == PROGRAM else STATES[state](OPTIMIZERS[optimizer]())

    def start(directory: str, turn: int = 0, *, total: int = TOTAL, **options: Any) -> Any:
        try:
            return run(make, step, Run(directory, turn, total=total, **options))
        except (InterruptionError, SystemExit):  # A loop that ends in the steps after a signal ends all.
            return None

    signals = {"SIGTERM in step 4": [{"told": 4}], "SIGTERM in steps 1 and 6": [{"told": 1}, {"told": 6}]}
    yield from run_interrupted(f"jax/{state}/{optimizer}", start, TOTAL, signals, only)
