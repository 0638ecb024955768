"""One plain loop with jax for each way to save."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]  # ships no types
from flax.training.train_state import TrainState

import holdfast as hf

from .stopwatch import Stopwatch

if TYPE_CHECKING:
    from pathlib import Path

    from . import Plan

Save = Callable[[int, Any], object]


class Model(nn.Module):
    """A decoder-only transformer."""

    plan: Plan

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Return the logits of the next tokens, of shape ``[batch, length, vocabulary]``."""
        plan = self.plan
        x = nn.Embed(plan.vocabulary, plan.width)(tokens)
        mask = nn.make_causal_mask(tokens)
        for _ in range(plan.layers):
            x = x + nn.MultiHeadDotProductAttention(plan.heads)(nn.LayerNorm()(x), mask=mask)
            x = x + nn.Dense(plan.width)(nn.gelu(nn.Dense(4 * plan.width)(nn.LayerNorm()(x))))
        logits: jax.Array = nn.Dense(plan.vocabulary)(x)
        return logits


@partial(jax.jit, donate_argnums=0)
def _step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
    def loss(params: Any) -> jax.Array:
        logits = state.apply_fn(params, tokens[:, :-1])
        mean: jax.Array = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
        return mean

    value, gradients = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=gradients), value


def _train(plan: Plan, path: Path, save: Save, wait: Callable[[], object]) -> dict[str, float]:
    keys = jax.random.split(jax.random.key(0))
    tokens = jax.random.randint(keys[0], (plan.batch, plan.length + 1), 0, plan.vocabulary)
    model = Model(plan)
    params = jax.jit(model.init)(keys[1], tokens[:, :-1])
    state: Any = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-3))  # type: ignore[no-untyped-call]
    stopwatch = Stopwatch(plan, path)
    for step in range(1, plan.last + 1):
        state, loss = _step(state, tokens)
        loss.block_until_ready()
        save(step, state)
        stopwatch.step_ends(step)
    wait()
    return stopwatch.finish()


def no_saving(plan: Plan, path: Path) -> dict[str, float]:
    """Train and save nothing."""
    return _train(plan, path, lambda *_: None, lambda: None)


def holdfast(plan: Plan, path: Path) -> dict[str, float]:
    """Save with holdfast's callback."""
    checkpoint = hf.CheckpointCallback(path, save_interval_steps=plan.interval, max_to_keep=1)
    return _train(plan, path, checkpoint.on_step, checkpoint.close)


def orbax(plan: Plan, path: Path) -> dict[str, float]:
    """Save with Orbax's manager as it is documented: OCDBT, compressed, asynchronous."""
    import orbax.checkpoint as ocp  # type: ignore[import-untyped]  # ships no types

    return _orbax(plan, path, ocp.StandardCheckpointHandler(), ocp.args.StandardSave)


def orbax_tuned(plan: Plan, path: Path) -> dict[str, float]:
    """Save with Orbax's manager, uncompressed and a file for each array."""
    import orbax.checkpoint as ocp

    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False)
    return _orbax(plan, path, handler, ocp.args.PyTreeSave)


def _orbax(plan: Plan, path: Path, handler: Any, arguments: Any) -> dict[str, float]:
    import orbax.checkpoint as ocp

    options = ocp.CheckpointManagerOptions(save_interval_steps=plan.interval, max_to_keep=1)
    with ocp.CheckpointManager(path, options=options, item_handlers=handler) as manager:

        def save(step: int, state: Any) -> None:
            if manager.should_save(step):
                manager.save(step, args=arguments(_plain(state)))

        return _train(plan, path, save, manager.wait_until_finished)


def _plain(state: TrainState) -> dict[str, Any]:
    return {"step": jnp.asarray(state.step), "params": state.params, "opt_state": state.opt_state}
