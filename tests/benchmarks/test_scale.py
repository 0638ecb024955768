"""The simulation of many processes plans and merges what real ones would, and its work grows with their number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks import faults, scale
from benchmarks.lost_host import lose_a_host
from benchmarks.protocol import Simulation

import holdfast as hf


def test_a_small_simulation() -> None:
    few, more = scale.measure(4, 200), scale.measure(16, 200)
    assert (few.chunks, more.chunks) == (800, 3200)
    assert few.index_bytes < more.index_bytes < 4 * few.index_bytes
    assert few.fragments_bytes < more.fragments_bytes < 8 * few.fragments_bytes
    text = scale.table([few, more])
    assert [line.split()[:2] for line in text.splitlines()[1:]] == [["4", "200"], ["16", "200"]]


def test_the_checkpoint_that_is_opened_is_a_whole_one_but_for_the_data_of_other_leaves(tmp_path: Path) -> None:
    name = scale.write_checkpoint(tmp_path / "saved", 3, 90)
    assert name == "params/layers_1/block_0/kernel"
    found = hf.load(tmp_path / "saved", select=name)
    np.testing.assert_array_equal(found["params"]["layers_1"]["block_0"]["kernel"], np.zeros((12, 64), np.float32))
    (checkpoint,) = hf.verify(tmp_path / "saved").checkpoints
    assert len({problem.leaf for problem in checkpoint.problems}) == 89


def test_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(scale, "measure_apart", scale.measure)
    folders = (tmp_path / str(number) for number in range(9))

    def open_here(processes: int, leaves: int) -> Any:
        folder = next(folders)
        return scale.open_one(folder, scale.write_checkpoint(folder, processes, leaves))

    monkeypatch.setattr(scale, "open_apart", open_here)
    lines: list[str] = []
    monkeypatch.setattr(scale, "outcomes", lambda timeout: [])
    scale.main(["--processes", "3", "--processes", "5", "--leaves", "50"], lines.append)
    assert [len(text.splitlines()) for text in lines[1:8:2]] == [3, 3, 5, 3]
    assert [line.split()[:5] for line in lines[-1].splitlines()[1:]] == [
        ["3", "4", "6", "6", "0"],
        ["5", "4", "6", "6", "0"],
    ]
    lines.clear()
    scale.main(["--processes", "3", "--leaves", "50", "--json"], lines.append)
    facts = json.loads(lines[0])
    assert facts["chunks"] == 150
    assert 3 * 12 * 64 * 4 < facts["open_bytes"] < 200_000
    assert facts["files"] == 3 + 3 + 1 + 1  # data files, the tree's own, that of all processes, the record
    assert 0 < facts["primary_bytes_out"] < 3000
    assert facts["replicas"] == 3
    assert 1 <= facts["restore_store_ratio"] < 1.1
    assert facts["hosts"] == 3
    assert facts["lost_host_store_step"] < facts["lost_host_resumed"] == facts["lost_host_local_step"]
    assert facts["lost_host_store_bytes"] == 0
    assert facts["lost_host_peer_bytes"] > 0


@pytest.mark.parametrize("lost", [0, pytest.param(32, marks=pytest.mark.sweep)])
def test_any_one_of_64_hosts_is_lost_without_a_byte_from_the_store(lost: int) -> None:
    found = lose_a_host(64, lost)
    assert (found.lost_host_resumed, found.lost_host_store_bytes) == (6, 0)
    assert found.lost_host_peer_bytes > 0


def test_a_save_of_many_processes_takes_simulated_seconds() -> None:
    few, _ = Simulation(4, latency=30.0, measured=False).save()
    more, processes = Simulation(32, latency=30.0, measured=False).save()
    # Nine requests to the store wait for each other; six of them follow after the last share.
    assert 270 < few.save_seconds < more.save_seconds < 271
    assert 180 < few.commit_seconds < more.commit_seconds < 181
    assert (more.processes, more.files) == (32, 32 + 3 + 1 + 1)
    assert more.primary_bytes_out < 11 * few.primary_bytes_out  # there are 31 others instead of three
    assert not any(process.error for process in processes)
    again, _ = Simulation(4, latency=30.0, measured=False).save()
    assert (again.coordinator_requests, again.store_requests) == (few.coordinator_requests, few.store_requests)


def test_whatever_happens_to_a_process_at_any_call_the_checkpoint_is_whole_or_there_is_none() -> None:
    found = list(faults.outcomes(3, timeout=20.0))
    told = [(one.what, one.told, one.committed) for one in found]
    assert told == [
        ("process 0 dies", "PeerFailedError", False),
        ("process 0 dies", "PeerFailedError", True),
        ("process 2 dies", "BarrierTimeoutError", False),
        ("process 2 dies", "", True),
        ("process 2 is slow", "", True),
        ("process 2 hangs", "BarrierTimeoutError", False),
        ("process 2 hangs", "", True),
        ("process 2 is cut off", "BarrierTimeoutError", False),
        ("process 2 is cut off", "", True),
        ("processes 1 to 2 are cut off", "BarrierTimeoutError", False),
        ("processes 1 to 2 are cut off", "", True),
    ]
    assert found[0].last == "write run/1/checkpoint.json"
    assert found[2].last == "put gather/written/0/2"
    assert "process 2 of 3 did not reach 'written' within 20 s" in found[2].message
    assert 20 < found[2].seconds < 22
    lines = scale.fault_table(found).splitlines()
    assert len(lines) == 12
    assert lines[1].split()[:4] == ["process", "0", "dies", str(found[0].points)]
