"""The measurement of blocked time saves what it says, and prints one row for each measurement."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from benchmarks import blocked, devices


def rows_of(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]]


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("torch", "jax"):
        pytest.importorskip(library)
        made: Any = blocked.TREES[library](40)
        tree, copy = made
        assert (len(copy()), tree["step"]) == (40, 1)
    monkeypatch.setattr(blocked, "measure_apart", blocked.measure)
    lines: list[str] = []
    common = ["--library", "torch", "--leaves", "8", "--rounds", "1", "--directory", str(tmp_path)]
    blocked.main([*common, "--leaves", "20"], lines.append)
    assert [row[:2] for row in rows_of(lines[1])] == [["torch", "8"], ["torch", "20"]]
    lines.clear()
    blocked.main([*common, "--json"], lines.append)
    assert json.loads(lines[0])["leaves"] == 8
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables for GPUs, on the CPU: every contender saves, steps and saves again, and each save is noted at once."""
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    monkeypatch.setattr(devices, "measure_apart", devices.measure)
    monkeypatch.setattr(devices, "SETTLED_ON", 1 << 20)
    noted = tmp_path / "lines"
    lines: list[str] = []
    common = ["--device", "cpu", "--gigabytes", "0.008", "--gigabytes", "0.016", "--rounds", "2"]
    common += ["--directory", str(tmp_path / "runs"), "--lines", str(noted)]
    blocked.main(common, lines.append)
    rows = rows_of(lines[-2])
    assert [row[:2] for row in rows] == [[name, size] for size in ("0.008", "0.016") for name in devices.CONTENDERS]
    assert {row[-1] for row in rows} == {"3"}
    for name in devices.OURS:
        assert lines[-1].count(name) == 2 * 3, "three goals for each size"
    found = [json.loads(line) for line in noted.read_text().splitlines()]
    assert len(found) == 2 * 3 * len(devices.CONTENDERS)
    assert not list((tmp_path / "runs").iterdir())
    lines.clear()
    blocked.main([*common[:1], "nonsense", *common[2:]], lines.append)
    assert sum("not measured" in line for line in lines) == 2 * (len(devices.CONTENDERS) - 1)


@pytest.mark.parametrize(
    ("copy", "late", "values"),
    [
        (0.010, 0.0005, [1.05, 0.5, 1.04]),
        (0.0, 0.0005, [None, 0.5, 1.04]),  # the copy took no longer than steps vary
        (0.010, None, [1.05, None, 1.04]),  # the save was over before a step
    ],
)
def test_the_goals_of_a_device(copy: float, late: float | None, values: list[float | None]) -> None:
    """Each goal compares a number of ours with that of a contender; one that was too small to measure is left out."""

    def rounds(contender: str, delay: float, late: float | None, durable: float | None) -> list[dict[str, Any]]:
        one = {"contender": contender, "gigabytes": 1.0, "call": delay, "delay": delay, "late": late}
        return [{**one, "round": number, "durable": durable} for number in range(3)]

    (name, other), *_ = devices.OURS.items()
    found = [*rounds(devices.DISK, 0.0, None, 2.5), *rounds(other, copy, None, None), *rounds(name, 0.0105, late, 2.6)]
    assert [goal.value for goal in devices.goals(found)] == [value and pytest.approx(value) for value in values]


@pytest.mark.parametrize(("gigabytes", "message"), [(1e9, "disk of .*GB are needed"), (0.001, "stopped after")])
def test_a_contender_that_cannot_be_measured(tmp_path: Path, gigabytes: float, message: str) -> None:
    """What does not fit is left out, and so is a process whose time is over; the others continue."""
    found: list[dict[str, Any]] = []
    measure = devices.measure if gigabytes > 1 else devices.measure_apart
    measure(devices.Series("the disk", "cpu", [gigabytes], 1, tmp_path / "d", 0.01), found.append)
    assert len(found) == 1
    assert re.search(message, found[0]["error"])
