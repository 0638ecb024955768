"""JAX programs whose states are more than trees of arrays of fixed types, as their authors write them.

Each is a function that makes a fresh state, and one that takes a state and a batch.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]  # it ships no types
from flax.training.dynamic_scale import DynamicScale

Program = tuple[Callable[[], Any], Callable[[Any, Any], Any]]


def _numbers(make: Callable[[float], Any]) -> Program:
    """Return a program with parameters of low precision, whose rate is a number that jit makes a weak array."""

    @jax.jit
    def step(state: Any, batch: Any) -> Any:
        loss = (state["params"] * state["rate"]).sum() + batch[0].sum().astype(jnp.bfloat16)
        params = state["params"] - state["params"] * state["rate"]
        average = 0.9 * state["average"] + 0.1 * loss.astype(jnp.float32)
        return {"params": params, "rate": state["rate"] * 0.9, "average": average, "steps": state["steps"] + 1}

    def fresh() -> Any:
        return {"params": jnp.ones(4, jnp.bfloat16), "rate": make(0.1), "average": make(0.0), "steps": 0}

    return fresh, step


def _changing_optimizer() -> Program:
    """States of optax that have other types after the first update."""
    optimizer = optax.chain(optax.scale_by_distance_over_gradients(), optax.apply_every(2), optax.sgd(0.1))

    @jax.jit
    def step(state: Any, batch: Any) -> Any:
        scale = batch[1].mean().astype(jnp.bfloat16)
        gradients = jax.tree.map(lambda w: w * scale + 0.1, state["params"])
        updates, moments = optimizer.update(gradients, state["moments"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "moments": moments}

    def fresh() -> Any:
        params = {"w": jnp.ones(3, jnp.bfloat16)}
        return {"params": params, "moments": optimizer.init(params)}

    return fresh, step


def _dynamic_scale() -> Program:
    @jax.jit
    def step(state: Any, batch: Any) -> Any:
        target = batch[1].mean().astype(jnp.float16)
        scale, _, _, gradient = state["scale"].value_and_grad(lambda w: (w - target) ** 2)(state["w"])
        return {"scale": scale, "w": state["w"] - 0.01 * gradient}

    return lambda: {"scale": DynamicScale(growth_interval=2), "w": jnp.float16(2.0)}, step


def _growing() -> Program:
    """A loop in Python that keeps histories in its state."""

    def step(state: Any, batch: Any) -> Any:
        w = state["w"] * 0.9 + batch[0].mean()
        best = {"w": w} if state["best"] is None or w.sum() > state["best"]["w"].sum() else state["best"]
        return {"w": w, "losses": [*state["losses"], w.sum()], "window": np.append(state["window"], w[0]), "best": best}

    return lambda: {"w": jnp.ones(2), "losses": [], "window": np.zeros(0), "best": None}, step


def _tuple_keys() -> Program:
    """Matrices by groups of parameters, as in states of NumPyro."""

    @jax.jit
    def step(state: Any, batch: Any) -> Any:
        return {key: value * 0.5 + batch[0].mean() for key, value in state.items()}

    return lambda: {("a", "b"): jnp.eye(2), ("c",): jnp.eye(1)}, step


def _equinox() -> Program:
    """A model with activations among its leaves."""
    eqx: Any = importlib.import_module("equinox")
    optimizer = optax.adam(0.05)

    def step(state: Any, batch: Any) -> Any:
        def loss_of(model: Any) -> Any:
            return jnp.square(jax.vmap(model)(batch[0]) - batch[1]).mean()

        gradients = eqx.filter_grad(loss_of)(state["model"])
        updates, moments = optimizer.update(gradients, state["moments"], state["model"])
        return {"model": eqx.apply_updates(state["model"], updates), "moments": moments}

    def fresh() -> Any:
        model = eqx.nn.MLP(4, 1, 8, 1, key=jax.random.key(0))
        return {"model": model, "moments": optimizer.init(eqx.filter(model, eqx.is_inexact_array))}

    return fresh, eqx.filter_jit(step)


PROGRAMS: dict[str, Callable[[], Program]] = {
    "numbers": lambda: _numbers(float),
    "weak arrays": lambda: _numbers(jnp.asarray),
    "numpy's numbers": lambda: _numbers(np.float64),
    "types that change": _changing_optimizer,
    "dynamic scale": _dynamic_scale,
    "growing": _growing,
    "tuples as keys": _tuple_keys,
}
if importlib.util.find_spec("equinox") is not None:
    PROGRAMS["Equinox"] = _equinox
