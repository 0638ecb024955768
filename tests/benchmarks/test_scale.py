"""The simulation of many processes plans and merges what real ones would, and its work grows with their number."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast as hf

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def scale(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.scale")


def test_a_small_simulation(scale: Any) -> None:
    few, more = scale.measure(4, 200), scale.measure(16, 200)
    assert (few.chunks, more.chunks) == (800, 3200)
    assert few.index_bytes < more.index_bytes < 4 * few.index_bytes
    assert few.fragments_bytes < more.fragments_bytes < 8 * few.fragments_bytes
    text = scale.table([few, more])
    assert [line.split()[:2] for line in text.splitlines()[1:]] == [["4", "200"], ["16", "200"]]


def test_the_checkpoint_that_is_opened_is_a_whole_one_but_for_the_data_of_other_leaves(
    scale: Any, tmp_path: Path
) -> None:
    name = scale.write_checkpoint(tmp_path / "saved", 3, 90)
    assert name == "params/layers_1/block_0/kernel"
    found = hf.load(tmp_path / "saved", select=name)
    np.testing.assert_array_equal(found["params"]["layers_1"]["block_0"]["kernel"], np.zeros((12, 64), np.float32))
    (checkpoint,) = hf.verify(tmp_path / "saved").checkpoints
    assert len({problem.leaf for problem in checkpoint.problems}) == 89


def test_the_command(scale: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(scale, "measure_apart", scale.measure)
    folders = (tmp_path / str(number) for number in range(9))

    def open_here(processes: int, leaves: int) -> Any:
        folder = next(folders)
        return scale.open_one(folder, scale.write_checkpoint(folder, processes, leaves))

    monkeypatch.setattr(scale, "open_apart", open_here)
    lines: list[str] = []
    scale.main(["--processes", "3", "--processes", "5", "--leaves", "50", "--patience", "1"], lines.append)
    assert [len(text.splitlines()) for text in lines[1:6:2]] == [3, 3, 3]
    assert lines[-1].startswith("before it learns of the commit: committed")
    assert all("BarrierTimeoutError" in text and "process 15 of 16" in text for text in lines[-3:-1])
    lines.clear()
    scale.main(["--processes", "3", "--leaves", "50", "--json"], lines.append)
    facts = json.loads(lines[0])
    assert facts["chunks"] == 150
    assert 3 * 12 * 64 * 4 < facts["open_bytes"] < 200_000
    assert facts["files"] == 3 + 3 + 3 * 4 + 1  # data files, the tree's own, those of each process, the record
    assert 0 < facts["primary_bytes_out"] < 3000
