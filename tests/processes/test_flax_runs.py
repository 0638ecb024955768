"""A training loop of several jax processes: preempted on one of them, stopped on all, resumed bit for bit."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.processes.harness import Process, run_processes
from tests.processes.meshes import sharding

import holdfast as hf
from holdfast.integrations.flax import CheckpointCallback

STEPS = 40
WIDTH = 8
NOTICE = 0.3  # seconds a step after the signal: jax tells its processes within a second or two
COUNT = 2


def train(
    process: Process, directory: str, terminate: int | None, mirror: str | None = None
) -> tuple[int, int, list[float], int]:
    """Trains to the end or to a preemption: the first step, the last, this process's part, where its data is."""
    import jax

    mesh = jax.make_mesh((process.count,), ("process",))

    def spread(part: Any) -> Any:
        make: Any = jax.make_array_from_process_local_data  # unannotated in jax
        return make(sharding(mesh, "process"), part)

    @jax.jit
    def update(state: Any, batch: Any) -> Any:
        momentum = 0.9 * state["momentum"] + batch * state["w"]
        return {"w": state["w"] - 0.01 * momentum, "momentum": momentum, "step": state["step"] + 1}

    rng = np.random.default_rng(100 + process.index)  # every process draws its own data
    size = WIDTH // process.count
    first = np.full(size, 1.0 + process.index, np.float32)
    state: Any = {"w": spread(first), "momentum": spread(0 * first), "step": 0}
    step = 0
    rare = None if mirror is None else hf.Mirror(mirror, save_interval_steps=1000)  # otherwise only at the end
    options: Any = {"save_interval_steps": 4, "max_to_keep": 2, "mirror": rare, "witness_steps_after_signal": 0}
    with CheckpointCallback(directory, **options) as checkpoint:
        state, start = checkpoint.restore_or_initialize(state, rng=rng)
        for step in range(start, STEPS):
            state = update(state, spread(rng.normal(size=size).astype(np.float32)))
            if terminate == step + 1 and process.index == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            if terminate is not None and terminate <= step + 1:
                time.sleep(NOTICE)
            if checkpoint.on_step(step + 1, state, rng=rng).should_stop:
                break
    part = np.asarray(state["w"].addressable_shards[0].data).tolist()
    return start, step + 1, part, int(rng.integers(1 << 40))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """A run that nothing stops: its directory, and how each process ended."""
    directory = tmp_path_factory.mktemp("undisturbed")
    return directory, run_processes(train, COUNT, str(directory), None)


@pytest.mark.parametrize(("terminate", "mirrored"), [(3, False), (8, True)])
def test_a_preemption_of_one_process(
    tmp_path: Path, undisturbed: tuple[Path, list[Any]], terminate: int, mirrored: bool
) -> None:
    """With a mirror, the last step is there when the run ends; all processes resume from it on another machine."""
    mirror = str(tmp_path / "mirror") if mirrored else None
    _, whole = undisturbed
    stopped = run_processes(train, COUNT, str(tmp_path / "runs"), terminate, mirror)
    last = {step for _, step, _, _ in stopped}
    assert len(last) == 1
    assert terminate <= last.pop() < STEPS
    if mirror is not None:
        assert hf.list_checkpoints(mirror)[-1].step == stopped[0][1]
        assert hf.verify(mirror).ok
        shutil.rmtree(tmp_path / "runs")
    resumed = run_processes(train, COUNT, str(tmp_path / "runs"), None, mirror)
    assert {start for start, _, _, _ in resumed} == {stopped[0][1]}
    assert [ended[1:] for ended in resumed] == [ended[1:] for ended in whole]
    assert whole[0][3] != whole[1][3]
    assert hf.verify(tmp_path / "runs").ok


def test_what_each_process_has_is_seen_from_outside(tmp_path: Path, undisturbed: tuple[Path, list[Any]]) -> None:
    directory, ended = undisturbed
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    found = hf.load(tmp_path)
    assert sorted(found) == ["extras", "process/0", "process/1", "state"]
    for index, (_, _, part, position) in enumerate(ended):
        rng = np.random.default_rng()
        rng.bit_generator.state = found[f"process/{index}"]["rng"]
        assert int(rng.integers(1 << 40)) == position
        assert found["state"]["w"].reshape(COUNT, -1)[index].tolist() == part
    assert {leaf.item for leaf in hf.describe(tmp_path)} >= {"state", "process/0", "process/1"}
    tree = tmp_path / str(STEPS) / "process" / "0-1.zip"
    tree.write_bytes(tree.read_bytes()[:-2])
    report = hf.verify(tmp_path, STEPS)
    assert [problem.file for problem in report.checkpoints[0].problems] == ["process/0-1.zip"]
