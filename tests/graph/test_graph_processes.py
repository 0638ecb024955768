"""Graphs that several processes save together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.graph.held import Held
from tests.processes.harness import Logged, Process, run_processes

import holdfast as hf
from holdfast import graph


def batches_of(process: int) -> Held:
    """Returns a data iterator whose position and randomness differ from process to process."""
    return Held({"words": np.full(1000, process), "position": 0, "text": "shuffled"})


def place_in(batches: Held) -> tuple[set[int], int]:
    return set(batches.state["words"].tolist()), batches.state["position"]


def schedule(process: Process, directory: str, own: bool) -> tuple[int, list[str]]:
    """Counts on, with or without a place in the data of each process; returns the count and the warnings."""
    import torch

    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters())
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    parts = {"batches": batches_of(process.index)} if own else {}
    checkpoint = graph.Checkpoint(net=net, optimizer=optimizer, scheduler=scheduler, **parts)
    with Logged() as logged:
        checkpoint.restore(graph.latest_checkpoint(directory))
    optimizer.step()
    scheduler.step()
    checkpoint.save(f"{directory}/run")
    return scheduler.last_epoch, logged.warnings


@pytest.mark.parametrize("own", [False, True])
def test_states_that_are_the_same_in_all_processes_fit_any_count(tmp_path: Path, own: bool) -> None:
    """No process warns of a scheduler, nor says that a new one keeps a fresh scheduler."""
    for number, count in enumerate((2, 3, 1), 1):
        for index, (epoch, warnings) in enumerate(run_processes(schedule, count, str(tmp_path), own, backend="torch")):
            assert epoch == number
            assert bool(warnings) == (own and number > 1)
            is_new = own and number == 2 and index == 2
            assert any("has no tree there, and gets the states of process 0" in text for text in warnings) == is_new


def train(process: Process, directory: str) -> Any:
    import torch

    torch.manual_seed(0)
    net, batches = torch.nn.Linear(200, 30), batches_of(process.index)
    optimizer = torch.optim.Adam(net.parameters(), 0.1)
    checkpoint = graph.Checkpoint(step=graph.Value(0), net=net, optimizer=optimizer, batches=batches)
    with graph.CheckpointManager(checkpoint, f"{directory}/run", max_to_keep=2, background=True) as manager:
        started = manager.restore_or_initialize()
        if manager.status is not None and started is not None:
            manager.status.assert_consumed()
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.ones(4, 200)).square().mean().backward()
            optimizer.step()
            checkpoint.step.assign_add(1)
            batches.state["position"] += 1 + process.index
            manager.save()
    by_hand = checkpoint.save(f"{directory}/hand")
    return started, by_hand, manager.checkpoints, place_in(batches), net.weight.detach().numpy().tobytes()


def test_processes_save_together_and_go_on_each_at_its_own_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    first = run_processes(train, 2, str(tmp_path), backend="torch")
    assert {found[:2] for found in first} == {(None, str(tmp_path / "hand-4"))}
    assert all(found[2] == [str(run / f"ckpt-{number}") for number in (2, 3)] for found in first)
    assert hf.verify(run).ok
    again = run_processes(train, 2, str(tmp_path), backend="torch")
    assert {found[0] for found in again} == {str(run / "ckpt-3")}
    assert [found[3] for found in first + again] == [({0}, 3), ({1}, 6), ({0}, 6), ({1}, 12)]
    reader = graph.load_checkpoint(run)
    assert (reader.get_tensor("step"), reader.get_tensor("batches/position")) == (6, 6)
    assert reader.get_tensor("batches")["position"] == 6
    assert reader.get_tensor("net/weight").tobytes() == again[0][4] == again[1][4]
    shown = {(leaf.item, leaf.path) for leaf in hf.describe(reader.path)}
    names = ("words", "position", "text")
    assert shown >= {(f"state/own/{index}", f"batches/{name}") for index in range(2) for name in names}
    batches = batches_of(5)
    graph.Checkpoint(batches=batches).restore(run).expect_partial()
    assert place_in(batches) == ({0}, 6)
    assert "was saved by 2 processes" in caplog.text
