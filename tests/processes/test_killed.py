"""One of several processes is killed in the middle of a save: the others say so, and nothing of it is committed."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.processes.harness import Backend, Process, run_outcomes, run_processes, told

import holdfast as hf
from holdfast.engine.arrays import TreeWriter
from holdfast.engine.checkpoint.commit import PendingCheckpoint
from holdfast.engine.checkpoint.save import Worker
from holdfast.engine.distributed import Rendezvous
from holdfast.engine.storage import Location

COUNT = 3
PATIENCE = 3  # seconds; the others are as late as the machine is busy
PHASES: dict[str, tuple[type, str, bool]] = {
    "before anything": (TreeWriter, "__init__", False),
    "when it knows the folders": (Worker, "open", True),
    "before it writes data": (Location, "write_data_files", False),
    "when its data is written": (Location, "write_data_files", True),
    "before it says so": (Rendezvous, "gather", False),
    "after it has said so": (Rendezvous, "gather", True),
    "before putting it together": (TreeWriter, "merge", False),
    "when it is put together": (TreeWriter, "merge", True),
    "before the record": (PendingCheckpoint, "commit", False),
    "after the record": (PendingCheckpoint, "commit", True),
}
LEADER = [phase for phase in PHASES if phase not in ("when it knows the folders", "after it has said so")]
KILLED: list[tuple[Backend, int, str]] = [
    *(("torch", 1, phase) for phase in list(PHASES)[:5]),
    *(("torch", 0, phase) for phase in LEADER),
    *(("jax", 2, phase) for phase in ("before it writes data", "when its data is written")),
]


def tree(step: int) -> dict[str, Any]:
    return {"w": np.full((64, 1000), step, np.float32), "small": [np.full(3, step + i) for i in range(5)], "step": step}


def interrupted(process: Process, directory: str, phase: str) -> tuple[str, list[int]]:
    with hf.CheckpointManager(directory) as manager:
        manager.save(1, tree(1))
    manager = hf.CheckpointManager(directory, options=hf.CheckpointManagerOptions(barrier_timeout_secs=PATIENCE))
    owner, name, after = PHASES[phase]
    process.mark(owner, name, phase, after=after)
    try:
        manager.save(2, tree(2))
        manager.wait_until_finished()
    except hf.HoldfastError as error:
        return str(error), manager.all_steps()
    return "", manager.all_steps()


def resumed(process: Process, directory: str) -> tuple[int, list[int]]:
    with hf.CheckpointManager(directory) as manager:
        restored = manager.restore_latest()
        assert restored is not None
        assert np.array_equal(restored.items["w"], tree(restored.step)["w"])
        manager.save(restored.step + 1, tree(restored.step + 1))
        manager.wait_until_finished()
        return restored.step, manager.all_steps()


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("backend", "killed", "phase"), KILLED)
def test_a_process_is_killed(tmp_path: Path, backend: Backend, killed: int, phase: str) -> None:
    outcomes = run_outcomes(interrupted, COUNT, str(tmp_path), phase, backend=backend, kill=(killed, phase))
    done = phase == "after the record"
    assert outcomes[killed].status == -signal.SIGKILL
    for index in {0, 1, 2} - {killed}:
        assert outcomes[index].value is not None, told(outcomes)
        message, steps = outcomes[index].value
        assert f"process {killed}" in message, told(outcomes)
        assert steps == [1]
    found = hf.CheckpointManager(tmp_path, options=hf.CheckpointManagerOptions(read_only=True)).all_steps()
    assert found == ([1, 2] if done else [1])
    after = run_processes(resumed, COUNT, str(tmp_path), backend=backend)
    assert after == [(2, [1, 2, 3]) if done else (1, [1, 2])] * COUNT
    assert hf.verify(tmp_path).ok
    assert not [each for each in tmp_path.rglob("*") if each.name.startswith(("fragment", "checkpoint.partial"))]
