"""The callback without a framework: pytrees of numpy arrays."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import holdfast as hf
from holdfast.integrations.loop import CheckpointCallback


@pytest.mark.parametrize("name", ["step", "metrics"])
def test_names_that_an_extra_cannot_have(tmp_path: Path, name: str) -> None:
    checkpoint = CheckpointCallback(tmp_path)
    with pytest.raises(
        hf.errors.OptionError, match=f"an extra cannot be called '{name}', as the callback uses this name"
    ):
        checkpoint.restore_or_initialize({"w": np.zeros(2)}, **{name: 3})
    assert list(tmp_path.iterdir()) == []


class Pair(NamedTuple):
    params: Any
    done: int


@dataclasses.dataclass
class Data:
    params: Any
    done: int


_PROGRAM = """
import sys
import numpy as np
from holdfast.integrations.loop import CheckpointCallback

for first, last in ((0, 3), (3, 5)):
    with CheckpointCallback(sys.argv[1], save_interval_steps=2) as checkpoint:
        state, start = checkpoint.restore_or_initialize({"w": np.zeros(2)}, note="x")
        assert start == first, start
        for step in range(start + 1, last + 1):
            state = {"w": state["w"] + step}
            checkpoint.on_step(step, state, note="x")
print(state["w"].tolist(), sorted({"jax", "flax", "torch", "lightning"} & set(sys.modules)))
"""


def test_it_saves_and_resumes_without_any_framework(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "[15.0, 15.0] []\n"), done.stderr


@pytest.mark.parametrize("make", [dict, Pair, Data])
def test_weights_of_another_checkpoint(make: Any, tmp_path: Path) -> None:
    hf.save(tmp_path / "weights", {"params": {"w": np.ones(2)}})
    with CheckpointCallback(tmp_path / "run", init_from=tmp_path / "weights", save_at_end=False) as checkpoint:
        state, start = checkpoint.restore_or_initialize(make(params={"w": np.zeros(2)}, done=7))
    found = state if make is dict else {"params": state.params, "done": state.done}
    assert (found["params"]["w"].tolist(), found["done"], start) == ([1, 1], 7, 0)
    assert type(state) is make


def test_weights_for_a_state_without_params(tmp_path: Path) -> None:
    hf.save(tmp_path / "weights", {"params": {"w": np.ones(2)}})
    with (
        CheckpointCallback(tmp_path / "run", init_from=tmp_path / "weights", save_at_end=False) as checkpoint,
        pytest.raises(hf.errors.OptionError, match="or one module of nnx, and this is a list without params"),
    ):
        checkpoint.restore_or_initialize([np.zeros(2)])


@pytest.mark.usefixtures("default_sigterm")
def test_the_exit_status_after_a_preemption(tmp_path: Path) -> None:
    statuses = []
    for last in (2, 5):
        with CheckpointCallback(
            tmp_path, signals=["SIGUSR1"], grace_secs="1h", witness_steps_after_signal=0
        ) as checkpoint:
            state, start = checkpoint.restore_or_initialize({"w": np.zeros(2)})
            for step in range(start + 1, 6):
                if last == step == 2:
                    os.kill(os.getpid(), signal.SIGUSR1)
                state = {"w": state["w"] + step}
                if checkpoint.on_step(step, state).should_stop:
                    break
        statuses.append((checkpoint.exit_status, step))
    assert statuses == [(75, 2), (0, 5)]
    assert [entry.reason for entry in hf.list_checkpoints(tmp_path)] == ["preempted", "at the end"]
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
