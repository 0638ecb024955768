"""A loop over epochs of a shuffled ``DataLoader``, killed and told to stop in real processes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from tests.starts import Program

pytestmark = pytest.mark.xdist_group("programs")

PROGRAM = """
import os, signal, sys
import torch
from torch.utils.data import DataLoader
import holdfast as hf

directory, killed, told, seed = sys.argv[1], *map(int, sys.argv[2:5])
torch.manual_seed(seed)
dataset = torch.linspace(-1, 1, 30).view(15, 2)
model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Dropout(0.2), torch.nn.Linear(3, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
loader = hf.resumable(DataLoader(dataset, batch_size=3, shuffle=True))
with hf.CheckpointCallback(directory, save_interval_steps=2) as checkpoint:
    state, step = checkpoint.restore_or_initialize({"model": model, "optimizer": optimizer}, data=loader)
    for epoch in range(loader.epoch, 3):
        for batch in loader:
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            print(step, batch.tolist(), file=open(directory + ".log", "a"))
            if step == told:
                os.kill(os.getpid(), signal.SIGTERM)
            checkpoint.on_step(step, state, data=loader, metrics={"loss": loss})
            if step == killed:
                checkpoint.manager.wait_until_finished()
                os.kill(os.getpid(), signal.SIGKILL)
print([one.tolist() for one in model.parameters()], torch.rand(2).tolist(), file=open(directory + ".end", "w"))
sys.exit(checkpoint.exit_status)
"""


def test_a_program_is_killed_in_five_places(tmp_path: Path) -> None:
    def start(name: str, killed: int = 0, told: int = 0, seed: int = 0) -> int:
        return Program("-c", PROGRAM, tmp_path / name, killed, told, seed, backend="torch").wait()

    assert start("whole") == 0
    starts = [(3, 0), (0, 5), (6, 0), (0, 8), (10, 0)]
    statuses = [start("run", *places, seed) for seed, places in enumerate(starts)]
    assert statuses == [-signal.SIGKILL, 75, -signal.SIGKILL, 75, -signal.SIGKILL]
    assert start("run", seed=9) == 0
    assert (tmp_path / "run.end").read_text() == (tmp_path / "whole.end").read_text()
    logs = [(tmp_path / f"{name}.log").read_text().splitlines() for name in ("whole", "run")]
    assert {*logs[0]} == {*logs[1]}
    assert len(logs[0]) == 15
