"""A Flax nnx character transformer trained on Python's own help texts."""

from __future__ import annotations

import pydoc_data.topics
import zlib
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]  # it has no type information
from flax import nnx
from numpy.typing import NDArray

from ..engine.errors import OptionError
from ..integrations.flax import CheckpointCallback
from .registry import MissingExtraError, Outcome, RunContext
from .schema import FlaxText, TextModel


@dataclass(frozen=True, slots=True)
class Corpus:
    """A text encoded as character indices."""

    alphabet: str  # all distinct characters, sorted
    training: NDArray[np.int32]  # character indices of the training text
    validation: NDArray[np.int32]  # character indices of the validation text
    fingerprint: int  # CRC-32 of the text, which differs between Python versions


def help_texts(validation_fraction: float) -> Corpus:
    """Return Python's ``help()`` topics in alphabetical order, holding out the end of the text for validation."""
    topics: dict[str, str] = pydoc_data.topics.topics
    text = "\n\n".join(topics[name] for name in sorted(topics))
    alphabet = "".join(sorted(set(text)))
    index = {character: number for number, character in enumerate(alphabet)}
    numbers = np.fromiter((index[character] for character in text), np.int32, len(text))
    cut = round(len(numbers) * (1 - validation_fraction))
    return Corpus(alphabet, numbers[:cut], numbers[cut:], zlib.crc32(text.encode()))


def windows(numbers: NDArray[np.int32], context: int, count: int) -> NDArray[np.int32]:
    """Return windows spaced evenly over the text, as int32[count, context + 1]."""
    starts = np.linspace(0, len(numbers) - context - 1, count).astype(np.int64)
    return _cut(numbers, starts, context)


class Windows:
    """An endless iterator over int32[batch_size, context + 1] batches. Batches depend on the seed and their index."""

    def __init__(self, corpus: Corpus, batch_size: int, context: int, seed: int) -> None:
        self._corpus = corpus
        self._batch_size = batch_size
        self._context = context
        self._seed = seed
        self._batch = 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> NDArray[np.int32]:
        numbers = self._corpus.training
        draw = np.random.default_rng([self._seed, self._batch])
        starts = draw.integers(0, len(numbers) - self._context, self._batch_size)
        self._batch += 1
        return _cut(numbers, starts, self._context)

    def get_state(self) -> dict[str, Any]:
        """Return the number of batches drawn, and the fingerprint of the text."""
        return {"batch": self._batch, "fingerprint": self._corpus.fingerprint}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore a position returned by :meth:`get_state`; raise OptionError if the text has changed."""
        if state["fingerprint"] != self._corpus.fingerprint:
            raise OptionError(
                f"the checkpoint was trained on a different text: expected CRC-32 {self._corpus.fingerprint:08x}, "
                f"found {int(state['fingerprint']):08x}; resume with the Python version that began the run"
            )
        self._batch = int(state["batch"])


def _cut(numbers: NDArray[np.int32], starts: NDArray[np.int64], context: int) -> NDArray[np.int32]:
    chosen: NDArray[np.int32] = numbers[starts[:, None] + np.arange(context + 1)]
    return chosen


if not hasattr(nnx, "List"):
    raise MissingExtraError("the recipe flax_text needs flax 0.12 or newer: pip install 'flax>=0.12'")

VALIDATION_WINDOWS = 128


class Block(nnx.Module):
    """A pre-norm transformer block: attention and a feed-forward layer, each with a residual connection."""

    def __init__(self, model: TextModel, rngs: nnx.Rngs) -> None:
        self.attention_norm = nnx.LayerNorm(model.width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(num_heads=model.heads, in_features=model.width, decode=False, rngs=rngs)
        self.feed_forward_norm = nnx.LayerNorm(model.width, rngs=rngs)
        self.expand = nnx.Linear(model.width, 4 * model.width, rngs=rngs)
        self.contract = nnx.Linear(4 * model.width, model.width, rngs=rngs)
        self.dropout = nnx.Dropout(model.dropout, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array, training: bool) -> jax.Array:
        """Return an array with the shape of `x`, float32[batch, context, width]."""
        attended = self.attention(self.attention_norm(x), mask=mask)
        x = x + self.dropout(attended, deterministic=not training)
        expanded = nnx.gelu(self.expand(self.feed_forward_norm(x)))
        return x + self.dropout(self.contract(expanded), deterministic=not training)


class Transformer(nnx.Module):
    """Predicts the next character from up to ``context`` characters of an alphabet of size ``characters``."""

    def __init__(self, model: TextModel, characters: int, context: int, rngs: nnx.Rngs) -> None:
        self.tokens = nnx.Embed(characters, model.width, rngs=rngs)
        self.positions = nnx.Embed(context, model.width, rngs=rngs)
        self.blocks = nnx.List([Block(model, rngs) for _ in range(model.layers)])
        self.norm = nnx.LayerNorm(model.width, rngs=rngs)
        self.logits = nnx.Linear(model.width, characters, rngs=rngs)

    def __call__(self, characters: jax.Array, training: bool) -> jax.Array:
        """Return next-character logits, float32[batch, context, alphabet], for int32[batch, context] characters."""
        x = self.tokens(characters) + self.positions(jnp.arange(characters.shape[1]))
        mask = nnx.make_causal_mask(characters)
        for block in self.blocks:
            x = block(x, mask, training)
        return self.logits(self.norm(x))


def loss_of(model: Transformer, batch: jax.Array, training: bool) -> jax.Array:
    """Return the mean next-character cross-entropy in nats over int32[batch, context + 1] windows."""
    logits = model(batch[:, :-1], training)
    losses: jax.Array = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])
    return losses.mean()


@nnx.jit
def train_step(model: Transformer, optimizer: nnx.Optimizer[Transformer], batch: jax.Array) -> dict[str, jax.Array]:
    """Perform one update of the model and the optimizer, in place."""
    loss, gradients = nnx.value_and_grad(loss_of)(model, batch, training=True)
    optimizer.update(model, gradients)
    return {"loss": loss}


@nnx.jit
def evaluate(model: Transformer, batch: jax.Array) -> dict[str, jax.Array]:
    return {"val_loss": loss_of(model, batch, training=False)}


def run(config: FlaxText, context: RunContext) -> Outcome:
    """Train from the newest checkpoint, or from scratch if there is none."""
    total = step = config.train.steps
    with CheckpointCallback(context.checkpoints, **context.callback_arguments) as checkpoint:
        corpus = help_texts(config.data.validation_fraction)
        batches = Windows(corpus, config.data.batch_size, config.data.context, config.seed)
        validation = jnp.asarray(windows(corpus.validation, config.data.context, VALIDATION_WINDOWS))
        model = Transformer(config.model, len(corpus.alphabet), config.data.context, nnx.Rngs(config.seed))
        optimizer = nnx.Optimizer(model, config.optimizer.adamw(), wrt=nnx.Param)
        state = {"model": model, "optimizer": optimizer}
        state, start = checkpoint.restore_or_initialize(state, data=batches)
        progress = context.progress(start, total)
        for step in range(start + 1, total + 1):
            metrics = train_step(model, optimizer, jnp.asarray(next(batches)))
            if step % config.train.eval_interval_steps == 0 or step == total:
                metrics |= evaluate(model, validation)
            progress.update(step, metrics)
            if checkpoint.on_step(step, state, metrics=metrics, data=batches).should_stop:
                break
    return Outcome(start=start, step=step, preempted=checkpoint.should_stop)
