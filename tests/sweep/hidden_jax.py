"""Programs of jax, flax and grain that keep to themselves what their next steps depend on, or hand it over."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]  # it ships no types
from flax import nnx, struct
from flax.training.train_state import TrainState
from jax.experimental import io_callback
from tests.versions import nnx_assign, nnx_value

from .hidden_case import Run, hides, hiding
from .hidden_programs import FEATURES, SIZE, Batches, examples

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


@hiding("a key beside the state", "metrics", "state")
def _key(run: Run) -> None:
    batches, key = Batches(), jax.random.key(0)

    @jax.jit
    def compiled(state: Any, key: Any, x: Any) -> Any:
        key, now = jax.random.split(key)
        masked = x * jax.random.bernoulli(now, 0.7, x.shape)
        params, loss = descend(state["params"], lambda params: error_of(params, masked))
        return {**state, "params": params}, key, loss

    def update(state: Any) -> Any:
        nonlocal key
        state, key, loss = compiled(state, state.get("key", key), next(batches).numpy())
        return state | run.handed(key=key), loss

    train(run, {"params": new_params()} | run.handed(key=key), update, data=batches)


@hides("a value that jit has captured")
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


@hides("noise of a callback to the host")
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


@hides("a default argument that grows")
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


class Normed(linen.Module):
    """Divides its weights by their spectral norm, which a vector in ``batch_stats`` follows."""

    @linen.compact
    def __call__(self, x: Any) -> Any:
        return linen.SpectralNorm(linen.Dense(8))(x, update_stats=True).sum(1)


@hiding("statistics beside a TrainState", "metrics", "state")
def _statistics(run: Run) -> None:
    batches, create = Batches(), TrainState.create
    variables = Normed().init(jax.random.key(0), jnp.zeros((SIZE, FEATURES)))
    statistics = variables["batch_stats"]
    model = create(apply_fn=Normed().apply, params=variables["params"], tx=optax.adam(RATE))  # type: ignore[no-untyped-call]

    @jax.jit
    def compiled(model: Any, statistics: Any, x: Any) -> Any:
        def loss_of(params: Any) -> Any:
            found, changed = model.apply_fn({"params": params, "batch_stats": statistics}, x, mutable=["batch_stats"])
            return jnp.square(found - x.sum(1)).mean(), changed["batch_stats"]

        (loss, changed), gradients = jax.value_and_grad(loss_of, has_aux=True)(model.params)
        return model.apply_gradients(grads=gradients), changed, loss

    def update(state: Any) -> Any:
        nonlocal statistics
        now = state.get("statistics", statistics)
        model, statistics, loss = compiled(state["model"], now, next(batches).numpy())
        return {"model": model} | run.handed(statistics=statistics), loss

    train(run, {"model": model} | run.handed(statistics=statistics), update, data=batches)


class Annealed(nnx.Module):
    """Counts its calls in a number, or in a variable, for a noise that declines."""

    def __init__(self, has_variable: bool, rngs: nnx.Rngs) -> None:
        self.layer = nnx.Linear(FEATURES, 1, rngs=rngs)
        self.calls: Any = nnx.Variable(jnp.array(0)) if has_variable else 0

    def __call__(self, x: Any) -> Any:
        is_number = isinstance(self.calls, int)
        calls = 1 + (self.calls if is_number else nnx_value(self.calls))
        if is_number:
            self.calls = calls
        else:
            nnx_assign(self.calls, calls)
        return self.layer(x * (1 + 1 / calls))


@hiding("a number in a module of nnx", "metrics", "state")
def _nnx_number(run: Run) -> None:
    batches = Batches()

    def update(model: Any) -> tuple[Any, Any]:
        x = next(batches).numpy()
        loss, gradients = nnx.value_and_grad(lambda model: jnp.square(model(x)[:, 0] - x.sum(1)).mean())(model)
        nnx.update(model, jax.tree.map(lambda one, to: one - RATE * to, nnx.state(model, nnx.Param), gradients))
        return model, loss

    train(run, Annealed(run.is_advised, nnx.Rngs(0)), update, data=batches)


@struct.dataclass
class Static:
    w: Any
    done: Any = struct.field(pytree_node=False, default=0)  # type: ignore[no-untyped-call]  # flax leaves it so


@struct.dataclass
class Leaf:
    w: Any
    done: Any = 0


@hiding("a static field", "metrics", "state")
def _static_field(run: Run) -> None:
    batches = Batches()

    def update(state: Any) -> Any:
        x = next(batches).numpy()[0]
        w = state.w - 0.1 * 0.9**state.done * (state.w - x)
        return state.replace(w=w, done=state.done + 1), jnp.square(w - x).mean()

    train(run, (Leaf if run.is_advised else Static)(jnp.ones(FEATURES)), update, data=batches)


@hiding("an iterator of grain", "batch", "state")
def _grain(run: Run) -> None:
    import grain  # type: ignore[import-untyped]  # there is none for Windows

    source = grain.MapDataset.source(list(examples().numpy())).seed(3).shuffle().repeat().batch(SIZE)
    batches = iter(source.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=1)))
    extras = run.handed(data=batches)
    with run.callback() as checkpoint:
        params, start = checkpoint.restore_or_initialize(new_params(), **extras)
        for step in range(start + 1, run.total + 1):
            batch = np.stack(next(batches))
            params, loss = descend(params, partial(error_of, x=batch))
            if run.report(checkpoint, step, params, loss, batch=batch, **extras):
                break
