"""Trees of components in programs of several processes: process 0 saves, each restores for itself."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.processes import threads
from tests.processes.harness import Backend, Process, run_processes

import holdfast as hf
from holdfast.components import Checkpointable, ComponentCheckpointHandler
from holdfast.engine.distributed import Coordinator, run_on_primary
from holdfast.integrations.components import component

COUNT = 3


class Runner(Checkpointable):
    def __init__(self, index: int = -1) -> None:
        self.seen = np.full(1000, index)


class Trainer(Checkpointable):
    def __init__(self, index: int = -1) -> None:
        self.runner = Runner(index)
        self.index = index


together = partial(threads.together, COUNT)


def test_process_0_saves_for_all_and_each_what_is_its_own(tmp_path: Path) -> None:
    def work(one: Coordinator) -> Any:
        trainer = Trainer(one.process_index)
        if one.process_index == 0:  # it may save by itself now and then
            trainer.save_to_path(tmp_path / "alone", coordinator=one)
        paths = [trainer.save_to_path(tmp_path / "x", overwrite=turn > 0, coordinator=one) for turn in range(2)]
        own = trainer.save_to_path(tmp_path / str(one.process_index), coordinator=hf.processes.Alone())
        return [*paths, trainer.save_to_path(coordinator=one), own]

    found = together(work)
    temporary = found[0][2]
    assert found == [[str(tmp_path / "x")] * 2 + [temporary, str(tmp_path / str(index))] for index in range(COUNT)]
    saved = [tmp_path / "x", temporary, *(tmp_path / str(index) for index in range(COUNT))]
    assert [Trainer.from_checkpoint(path).index for path in saved] == [0, 0, 0, 1, 2]


def test_a_failure_is_told_to_all(tmp_path: Path) -> None:
    hf.save(tmp_path / "x", {"taken": 1})
    first, *others = together(lambda one: Trainer(one.process_index).save_to_path(tmp_path / "x", coordinator=one))
    assert isinstance(first, hf.CheckpointExistsError)
    for other in others:
        assert isinstance(other, hf.errors.PeerFailedError)
        assert "process 0 failed: CheckpointExistsError" in str(other)


def test_process_0_saves_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(component, "run_on_primary", partial(run_on_primary, start_secs=0.2))
    first, *others = together(
        lambda one: Trainer(one.process_index).save_to_path(tmp_path / str(one.process_index), coordinator=one)
    )
    assert first == str(tmp_path / "0")
    for other in others:
        assert isinstance(other, hf.errors.BarrierTimeoutError)
        assert other.missing == (0,)
        assert "coordinator=hf.processes.Alone()" in str(other)
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


def manage(process: Process, directory: str) -> list[Any]:
    trainer = Trainer(process.index + 5)
    checkpointer = hf.AsyncCheckpointer(ComponentCheckpointHandler())
    with hf.CheckpointManager(f"{directory}/run", checkpointer) as manager:
        for step in (1, 2):
            manager.save(step, trainer, force=True)
        manager.wait_until_finished()
        found = manager.restore(2, Trainer())
        path = trainer.save_to_path(f"{directory}/all")
        own = trainer.save_to_path(f"{directory}/{process.index}", coordinator=hf.processes.Alone())
    trees = [found, Trainer.from_checkpoint(path), Trainer.from_checkpoint(own)]
    return [tree.index for tree in trees] + [int(tree.runner.seen[0]) for tree in trees]


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_real_processes(tmp_path: Path, backend: Backend) -> None:
    assert run_processes(manage, 2, str(tmp_path), backend=backend) == [[5] * 6, [5, 5, 6] * 2]
    assert hf.verify(tmp_path / "run").ok


class Divided(Checkpointable):
    def __init__(self, weights: Any = None) -> None:
        self.weights = weights


class Around(Checkpointable):
    def __init__(self, weights: Any = None) -> None:
        self.inner = Divided(weights)


def divided(process: Process, directory: str) -> list[str]:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    found = []
    for number, placement in enumerate((Shard(0), Replicate())):
        component = Around(distribute_tensor(torch.arange(8.0), mesh, [placement]))
        try:
            path = component.save_to_path(f"{directory}/{number}")
            found.append(str(hf.load(path)["inner"]["weights"].tolist()))
        except hf.HoldfastError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_arrays_that_are_divided_are_refused(tmp_path: Path) -> None:
    first, second = run_processes(divided, 2, str(tmp_path), backend="torch")
    assert first[0].startswith("UnsupportedLeafError: these arrays are divided among processes")
    assert first[0].endswith(": inner: weights")
    assert second[0].startswith("PeerFailedError")
    assert first[1] == second[1] == str([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1"]
