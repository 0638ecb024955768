"""States of torch and of jax that several processes train together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from tests.processes.harness import Backend, Process
from tests.processes.meshes import spread

State = tuple[Any, Callable[[Any], Any], Callable[[Any], list[Any]]]


def of_torch(process: Process) -> State:
    """Returns a state, the update of a step, and what gives the values of a state."""
    import torch

    torch.manual_seed(process.index)
    model = torch.nn.Linear(300, 200)
    for parameter in model.parameters():
        torch.distributed.broadcast(parameter.data, 0)
    optimizer = torch.optim.Adam(model.parameters())

    def update(state: Any) -> Any:
        model(torch.randn(4, 300)).square().mean().backward()
        for parameter in model.parameters():
            torch.distributed.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        return state

    return {"model": model, "optimizer": optimizer}, update, lambda _: model.weight.tolist()


def of_jax(process: Process) -> State:
    """The same, with an array of which each process has a part."""
    import jax
    import jax.numpy as jnp

    @jax.jit
    def update(state: Any) -> Any:
        return {"w": jnp.sin(state["w"]) + state["step"], "step": state["step"] + 1}

    parts = spread(np.ones((8, 500), np.float32), jax.make_mesh((jax.device_count(),), ("data",)), "data")
    return {"w": parts, "step": 0}, update, lambda state: [one.data.tolist() for one in state["w"].addressable_shards]


STATES: dict[Backend, Callable[[Process], State]] = {"torch": of_torch, "jax": of_jax}
