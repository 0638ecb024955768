"""The values of states of any kind, to be compared with ``assert_same`` of ``tests/equality.py``."""

from __future__ import annotations

from typing import Any

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
