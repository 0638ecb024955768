"""Runs that tests begin with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import holdfast as hf


def tree(step: int) -> dict[str, Any]:
    return {"a": step, "b": {"c": np.full(3, step)}}


def saved(place: object, *steps: int, items: Callable[[int], Any] = tree, **options: Any) -> list[int]:
    """Saves steps by a manager with some options, and returns those that are there in the end."""
    metrics = options.pop("metrics", lambda step: None)
    with hf.CheckpointManager(str(place), options=hf.CheckpointManagerOptions(**options)) as manager:
        for step in steps:
            manager.save(step, items(step), metrics=metrics(step))
        manager.wait_until_finished()
        return manager.all_steps()


def reading(place: object) -> hf.CheckpointManager:
    """A manager that only looks on."""
    return hf.CheckpointManager(str(place), options=hf.CheckpointManagerOptions(read_only=True))
