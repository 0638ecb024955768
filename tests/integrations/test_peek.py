"""A look at what a restore would take, for programs that have to be built for the step that they resume from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast as hf
from holdfast import graph
from holdfast.engine.manager import EVENTS, read_events

pytestmark = pytest.mark.usefixtures("default_sigterm")
TOTAL, GROWS = 6, 3


class Growing:
    """A model that gets a second layer, in a group of parameters of its own, after some steps."""

    def __init__(self, step: int) -> None:
        torch.manual_seed(1)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(3, 3)])
        self.optimizer = torch.optim.Adam(self.layers.parameters(), lr=0.1)
        if step > GROWS:
            self.grow()

    def grow(self) -> None:
        torch.manual_seed(2)
        self.layers.append(torch.nn.Linear(3, 3))
        self.optimizer.add_param_group({"params": list(self.layers[1].parameters()), "lr": 0.01})

    def update(self, x: torch.Tensor) -> None:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        self.optimizer.zero_grad()
        loss: Any = x.square().sum()
        loss.backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {"layers": self.layers, "optimizer": self.optimizer}


def run(directory: Path, stop: int = TOTAL) -> dict[str, Any]:
    with hf.CheckpointCallback(directory, save_interval_steps=1, metadata={"width": 3}) as checkpoint:
        found = checkpoint.peek()
        program = Growing(0 if found is None or found.step is None else found.step)
        data = np.random.default_rng(7)
        _, start = checkpoint.restore_or_initialize(program.state(), data=data, phase="first")
        for step in range(start + 1, stop + 1):
            if step == GROWS + 1:
                program.grow()
            program.update(torch.from_numpy(data.normal(size=(2, 3)).astype(np.float32)))
            phase = "first" if step <= GROWS else "second"
            checkpoint.on_step(step, program.state(), data=data, phase=phase, metrics={"loss": float(step)})
    return {name: value.clone() for name, value in program.layers.state_dict().items()}


@pytest.mark.parametrize("stop", [2, GROWS, GROWS + 1, 5])
def test_a_program_that_grows_resumes_as_it_was(tmp_path: Path, stop: int) -> None:
    whole = run(tmp_path / "whole")
    run(tmp_path / "cut", stop)
    resumed = run(tmp_path / "cut")
    assert resumed.keys() == whole.keys()
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


def test_what_is_seen_is_what_is_restored(tmp_path: Path) -> None:
    with hf.CheckpointCallback(tmp_path) as checkpoint:
        assert checkpoint.peek() is None
    run(tmp_path, 5)
    _, before = read_events(tmp_path / EVENTS)
    with hf.CheckpointCallback(tmp_path) as checkpoint:
        found = checkpoint.peek()
        assert found is not None
        assert (found.step, found.metrics, found.metadata) == (5, {"loss": 5.0}, {"width": 3})
        assert set(found.extras) == {"data", "phase"}
        assert found.extras["phase"] == "second"
        data = np.random.default_rng(0)
        data.bit_generator.state = found.extras["data"]
        again = np.random.default_rng(1)
        _, start = checkpoint.restore_or_initialize(Growing(5).state(), data=again, phase="")
        assert start == 5
        assert data.normal() == again.normal()
    events, _ = read_events(tmp_path / EVENTS, before)
    assert [event["event"] for event in events].count("restored") == 1
    with hf.CheckpointCallback(tmp_path, resume=2) as checkpoint:
        found = checkpoint.peek()
        assert found is not None
        assert (found.step, found.extras["phase"]) == (2, "first")
    with hf.CheckpointCallback(tmp_path, resume="never") as checkpoint:
        assert checkpoint.peek() is None
    with (
        hf.CheckpointCallback(tmp_path / "none", resume="must") as checkpoint,
        pytest.raises(hf.CheckpointNotFoundError),
    ):
        checkpoint.peek()


def test_a_damaged_step_is_passed_over(tmp_path: Path) -> None:
    run(tmp_path, 3)
    (tmp_path / "3" / "extras" / "tree.json").write_bytes(b"{")
    with hf.CheckpointCallback(tmp_path) as checkpoint:
        found = checkpoint.peek()
        assert found is not None
        assert found.step == 2
    for step in (1, 2):
        (tmp_path / str(step) / "extras" / "tree.json").write_bytes(b"{")
    with hf.CheckpointCallback(tmp_path) as checkpoint, pytest.raises(hf.errors.NoWholeCheckpointError, match="step 3"):
        checkpoint.peek()


def test_graphs(tmp_path: Path) -> None:
    program = Growing(5)
    checkpoint = graph.Checkpoint(program=program, epoch=3, names=["a", "b"])
    with graph.CheckpointManager(checkpoint, tmp_path / "run", 2) as manager:
        assert manager.peek() is None
        manager.save()
        manager.save()
        found = manager.peek()
        assert found is not None
        assert (found.step, found.extras) == (2, {"epoch": 3, "names/0": "a", "names/1": "b"})
    fresh = graph.Checkpoint(epoch=0)
    assert fresh.peek(tmp_path / "run").extras["epoch"] == 3
    assert fresh.epoch == 0
    with pytest.raises(hf.CheckpointNotFoundError):
        fresh.peek(tmp_path / "none")
