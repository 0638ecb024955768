"""What type checkers know of restores: each has the type of its template.

Nothing runs this program: `make check` reads it with mypy, and ``test_types.py`` with pyright.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray

import holdfast as hf
from holdfast.integrations.flax import CheckpointCallback

Array = NDArray[np.float32]


@dataclass
class State:
    w: Array
    step: int


class Net:
    """As torch's modules: it can be called with anything, and has a state_dict."""

    def __call__(self, *args: Any) -> Any:
        return args

    def state_dict(self, *, prefix: str = "") -> dict[str, Array]:
        return {}


def make() -> State:
    return State(np.zeros(3, np.float32), 0)


def restores() -> None:
    state = State(np.zeros(3, np.float32), 0)
    tree = {"a": {"b": 1.0}}
    pair = (Net(), len(tree))  # a number of no literal type

    assert_type(hf.load("x", like=state), State)
    assert_type(hf.load("x", like=tree), dict[str, dict[str, float]])
    assert_type(hf.load("x"), Any)
    assert_type(hf.load("x", select="a/**"), Any)

    with hf.CheckpointManager("x") as manager:
        assert_type(manager.restore(3, state), State)
        assert_type(manager.restore(None, tree), dict[str, dict[str, float]])
        assert_type(manager.restore(3, {"state": state}), dict[str, State])
        assert_type(manager.restore(3, {"config": None}), dict[str, Any])
        assert_type(manager.restore(items=state), State)
        assert_type(manager.restore(), Any)
        assert_type(manager.restore(3), Any)

    for kind in (hf.CheckpointCallback, CheckpointCallback):
        with kind("x", save_interval_steps=3, resume="best", best_fn="loss", best_mode="min") as checkpoint:
            assert_type(checkpoint.restore_or_initialize(state), tuple[State, int])
            assert_type(checkpoint.restore_or_initialize(state, data=[1]), tuple[State, int])
            assert_type(checkpoint.restore_or_initialize(make), tuple[State, int])
            assert_type(checkpoint.restore_or_initialize(make, like=state), tuple[State, int])
            assert_type(checkpoint.restore_or_initialize(lambda: tree), tuple[dict[str, dict[str, float]], int])
            assert_type(checkpoint.restore_or_initialize(Net()), tuple[Net, int])
            assert_type(checkpoint.restore_or_initialize(pair), tuple[tuple[Net, int], int])
    hf.CheckpointCallback("x", resume=1200, partial="initialize")
