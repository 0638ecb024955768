"""What tests of recipes do again and again: preempt a program, and compare what two have saved."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.recipes.registry import Progress


def preempt_at(monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
    """Sends this process a real SIGTERM when these steps are reported, each of them once."""
    left = set(steps)
    report = Progress.update

    def update(self: Progress, step: int, metrics: Any) -> None:
        report(self, step, metrics)
        if step in left:
            left.remove(step)
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Progress, "update", update)


def values_of(tree: Any, path: str = "") -> dict[str, Any]:
    """Returns every value of a state by its path, arrays as dtype and bytes."""
    if isinstance(tree, dict):
        return {name: one for key, item in tree.items() for name, one in values_of(item, f"{path}/{key}").items()}
    if isinstance(tree, (list, tuple)):
        return values_of(dict(enumerate(tree)), path)
    if isinstance(tree, np.ndarray | torch.Tensor):
        return {path: (str(tree.dtype), np.asarray(tree).tobytes())}
    return {path: repr(tree)}
