"""Training loops of several processes: preempted on one or all of them, stopped at one step, resumed bit for bit."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.processes.harness import Backend, Process, run_processes
from tests.processes.states import STATES

import holdfast as hf

STEPS = 40
NOTICE = 0.3  # seconds a step after the signal: jax tells its processes within a second or two


def train(
    process: Process, directory: str, backend: Backend, told: dict[int, int], mirror: str | None = None
) -> tuple[int, int, list[Any], int]:
    """Trains to the end or to a preemption: the first step, the last, what this process has, where its data is."""
    state, update, values = STATES[backend](process)
    rng, step = np.random.default_rng(process.index), 0
    rare = None if mirror is None else hf.Mirror(mirror, save_interval_steps=1000)  # otherwise only at the end
    options: Any = {"save_interval_steps": 4, "max_to_keep": 2, "mirror": rare, "witness_steps_after_signal": 0}
    with hf.CheckpointCallback(directory, **options) as checkpoint:
        state, start = checkpoint.restore_or_initialize(state, rng=rng)
        for step in range(start + 1, STEPS + 1):
            rng.random()
            state = update(state)
            if told.get(process.index) == step:
                os.kill(os.getpid(), signal.SIGTERM)
            if told and step >= min(told.values()):
                time.sleep(NOTICE)
            if checkpoint.on_step(step, state, rng=rng).should_stop:
                break
    assert checkpoint.exit_status == (75 if told else 0)
    return start, step, values(state), int(rng.integers(1 << 40))


Undisturbed = Callable[[Backend], tuple[Path, list[Any]]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Gives a run that nothing stops: its directory, and how each process ended."""

    @functools.cache
    def run(backend: Backend) -> tuple[Path, list[Any]]:
        directory = tmp_path_factory.mktemp("undisturbed")
        return directory, run_processes(train, 2, str(directory), backend, {}, backend=backend)

    return run


@pytest.mark.parametrize(
    ("backend", "told", "mirrored"),
    [("jax", {1: 3}, False), ("jax", {1: 8}, True), ("torch", {1: 3}, False), ("torch", {0: 3, 1: 4}, False)],
)
def test_all_processes_stop_at_one_step(
    tmp_path: Path, undisturbed: Undisturbed, backend: Backend, told: dict[int, int], mirrored: bool
) -> None:
    """With a mirror, the last step is there when the run ends; all processes resume from it on another machine."""
    directory, mirror = tmp_path / "runs", str(tmp_path / "mirror") if mirrored else None
    _, whole = undisturbed(backend)
    stopped = run_processes(train, 2, str(directory), backend, told, mirror, backend=backend)
    (last,) = {step for _, step, _, _ in stopped}
    assert min(told.values()) <= last < STEPS
    assert hf.list_checkpoints(mirror or directory)[-1].step == last
    if mirror is not None:
        assert hf.verify(mirror).ok
        shutil.rmtree(directory)
    resumed = run_processes(train, 2, str(directory), backend, {}, mirror, backend=backend)
    assert {start for start, _, _, _ in resumed} == {last}
    assert [ended[1:] for ended in resumed] == [ended[1:] for ended in whole]
    assert whole[0][3] != whole[1][3]
    assert hf.verify(directory).ok


def test_what_each_process_has_is_seen_from_outside(tmp_path: Path, undisturbed: Undisturbed) -> None:
    directory, ended = undisturbed("jax")
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    found = hf.load(tmp_path)
    assert sorted(found) == ["extras", "process/0", "process/1", "state"]
    for index, (_, _, part, position) in enumerate(ended):
        rng = np.random.default_rng()
        rng.bit_generator.state = found[f"process/{index}"]["rng"]
        assert int(rng.integers(1 << 40)) == position
        assert [found["state"]["w"][4 * index : 4 * index + 4].tolist()] == part
    assert {leaf.item for leaf in hf.describe(tmp_path)} >= {"state", "process/0", "process/1"}
    tree = tmp_path / str(STEPS) / "process" / "0-1.zip"
    tree.write_bytes(tree.read_bytes()[:-2])
    report = hf.verify(tmp_path, STEPS)
    assert [problem.file for problem in report.checkpoints[0].problems] == ["process/0-1.zip"]
