"""The measurement of blocked time saves what it says, and prints one row for each measurement."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    module = importlib.import_module("benchmarks.blocked")
    monkeypatch.setattr(module, "measure_apart", module.measure)
    return module


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_the_trees(blocked: Any, library: str) -> None:
    pytest.importorskip(library)
    tree, copy = blocked.TREES[library](40)
    assert len(copy()) == 40
    assert tree["step"] == 1


def test_the_command(blocked: Any, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    lines: list[str] = []
    common = ["--library", "torch", "--leaves", "8", "--rounds", "1", "--directory", str(tmp_path)]
    blocked.main([*common, "--leaves", "20"], lines.append)
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in lines[1].splitlines()]
    assert [row[:2] for row in rows[2:]] == [["torch", "8"], ["torch", "20"]]
    lines.clear()
    blocked.main([*common, "--json"], lines.append)
    assert json.loads(lines[0])["leaves"] == 8
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_device(blocked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table for GPUs, on the CPU: every contender saves, steps and saves again."""
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    monkeypatch.setattr(blocked.devices, "measure_apart", blocked.devices.measure)
    lines: list[str] = []
    common = ["--device", "cpu", "--gigabytes", "0.001", "--rounds", "1", "--directory", str(tmp_path)]
    blocked.main(common, lines.append)
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in lines[-1].splitlines()]
    assert [row[:2] for row in rows[2:]] == [[name, "0.001"] for name in blocked.devices.CONTENDERS]
    lines.clear()
    blocked.main([*common[:1], "nonsense", *common[2:]], lines.append)
    assert sum("not measured" in line for line in lines) == len(blocked.devices.CONTENDERS)
