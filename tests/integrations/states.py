"""The values of states of any kind: a tree for ``assert_same`` of ``tests/equality.py``, and their bits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from holdfast import graph


def contents(state: Any) -> Any:
    """Returns a tree of the values, in which modules, optimizers, generators and other objects are dictionaries."""
    if isinstance(state, torch.nn.Module):
        return dict(state.state_dict())
    if isinstance(state, torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler):
        return contents(state.state_dict())
    if isinstance(state, nnx.State):
        return nnx.to_pure_dict(state)
    if isinstance(state, nnx.Module | nnx.Optimizer):
        return nnx.to_pure_dict(nnx.state(state))
    if isinstance(state, np.random.Generator):
        return state.bit_generator.state
    if isinstance(state, graph.Value):
        return state.value
    if isinstance(state, dict) and type(state) is not dict:
        return type(state), contents(dict(state))
    if isinstance(state, dict):
        return {name: contents(value) for name, value in state.items()}
    if isinstance(state, list | tuple):
        values = map(contents, state)
        return (
            type(state)(*values)
            if hasattr(state, "_fields")
            else tuple(values)
            if isinstance(state, tuple)
            else [*values]
        )
    if type(state).__module__.startswith("tests.") or isinstance(state, graph.Node):
        return {name: contents(value) for name, value in vars(state).items() if not name.startswith("_")}
    return state


def bits(state: Any) -> dict[str, bytes]:
    """Returns the bytes of every leaf by its path; a number of Python is that of an array that jit makes of it."""
    found = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(contents(state))[0]:
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        array = np.asarray(leaf, np.int32 if isinstance(leaf, int) else None)
        found[jax.tree_util.keystr(path, simple=True, separator="/")] = array.tobytes()
    return found
