"""A Flax linen classifier with BatchNorm and dropout on scikit-learn's digits."""

# mypy: disallow-untyped-calls=False
# Parts of flax have no type information.
from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]  # it has no type information
from flax.training import train_state

from ..integrations.flax import CheckpointCallback
from .digits import CLASSES, Batches, Images, split_digits
from .registry import Outcome, RunContext
from .schema import FlaxDigits


class Classifier(nn.Module):
    """A multilayer perceptron with BatchNorm after every hidden layer."""

    hidden: Sequence[int]  # number of units per hidden layer
    dropout: float  # dropout rate during training

    @nn.compact
    def __call__(self, pixels: jax.Array, training: bool) -> jax.Array:
        """Return the logits, float32[n, 10], for pixels, float32[n, 64]."""
        x = pixels
        for units in self.hidden:
            x = nn.relu(nn.BatchNorm(use_running_average=not training)(nn.Dense(units)(x)))
            x = nn.Dropout(self.dropout, deterministic=not training)(x)
        return nn.Dense(CLASSES)(x)


class TrainState(train_state.TrainState):
    """The parameters, the optimizer state, and the BatchNorm running averages."""

    batch_stats: Any


def initial_state(config: FlaxDigits) -> TrainState:
    model = Classifier(config.model.hidden, config.model.dropout)
    variables = model.init(jax.random.key(config.seed), jnp.zeros((1, 64)), training=False)
    state: TrainState = TrainState.create(
        apply_fn=model.apply,
        params=variables["params"],
        batch_stats=variables["batch_stats"],
        tx=config.optimizer.adamw(),
    )
    return state


@partial(jax.jit, donate_argnums=0)
def train_step(state: TrainState, batch: Images, key: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
    """Perform one update. Dropout depends only on the key and the step, so a resumed run reproduces it."""

    def loss_of(params: Any) -> tuple[jax.Array, Any]:
        logits, changed = state.apply_fn(
            {"params": params, "batch_stats": state.batch_stats},
            batch.pixels,
            training=True,
            mutable=["batch_stats"],
            rngs={"dropout": jax.random.fold_in(key, state.step)},
        )
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels).mean()
        return loss, changed["batch_stats"]

    (loss, batch_stats), gradients = jax.value_and_grad(loss_of, has_aux=True)(state.params)
    return state.apply_gradients(grads=gradients, batch_stats=batch_stats), {"loss": loss}


@jax.jit
def evaluate(state: TrainState, images: Images) -> dict[str, jax.Array]:
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    logits = state.apply_fn(variables, images.pixels, training=False)
    return {
        "val_loss": optax.softmax_cross_entropy_with_integer_labels(logits, images.labels).mean(),
        "val_accuracy": (logits.argmax(-1) == images.labels).mean(),
    }


def run(config: FlaxDigits, context: RunContext) -> Outcome:
    """Train from the newest checkpoint, or from scratch if there is none."""
    total = step = config.train.steps
    with CheckpointCallback(context.checkpoints, **context.callback_arguments) as checkpoint:
        training, validation = split_digits(config.data.validation_fraction, config.seed)
        batches = Batches(training, config.data.batch_size, config.seed)
        key = jax.random.key(config.seed)
        state, start = checkpoint.restore_or_initialize(initial_state(config), data=batches)
        progress = context.progress(start, total)
        for step in range(start + 1, total + 1):
            state, metrics = train_step(state, next(batches), key)
            if step % config.train.eval_interval_steps == 0 or step == total:
                metrics |= evaluate(state, validation)
            progress.update(step, metrics)
            if checkpoint.on_step(step, state, metrics=metrics, data=batches).should_stop:
                break
    return Outcome(start=start, step=step, preempted=checkpoint.should_stop)
