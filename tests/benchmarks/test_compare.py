"""The comparison's harness: a whole run of a tiny workload, and the goals as a table."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks import results, runner, worker
from benchmarks.compare import main
from benchmarks.goals import Goal, goals

ROOT = Path(__file__).resolve().parents[2]


TINY = ["--workload", "tiny", "--rounds", "1"]


def only(contenders: list[str]) -> list[str]:
    return [argument for name in contenders for argument in ("--only", name)]


def check_rows(contenders: list[str], printed: str) -> None:
    for contender in contenders:
        assert any(line.startswith(f"{contender}  ") for line in printed.splitlines()), printed


def test_tiny_run_in_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The raw disk is measured by processes of its own here, as everything is outside of tests."""
    real = runner.run_worker

    def run_worker(contender: str, workload: str, operation: str, path: Path, reserve: Any) -> dict[str, Any]:
        if contender == "raw disk":
            return real(contender, workload, operation, path, reserve)
        return worker.measure(contender, workload, operation, path)

    monkeypatch.setattr(runner, "run_worker", run_worker)
    monkeypatch.setattr(worker, "wait_for_start", lambda: None)
    contenders = ["raw disk", "holdfast (torch)"]
    assert main([*TINY, *only(contenders), "--directory", str(tmp_path), "--json", str(tmp_path / "all.json")]) == 0
    check_rows(contenders, capsys.readouterr().out)
    values = json.loads((tmp_path / "all.json").read_text())["workloads"]["tiny"]["values"]
    names = ["save_seconds", "blocked_seconds", "memcpy_seconds", "load_numpy_seconds", "load_native_seconds"]
    assert values["holdfast (torch)"].keys() >= {*names, "disk_bytes"}
    assert [path.name for path in tmp_path.iterdir()] == ["all.json"]


@pytest.mark.parametrize(
    "contenders",
    [
        pytest.param(["raw disk", "raw disk, new memory"], id="disk"),
        # Every one of its processes imports torch.
        pytest.param(["raw disk", "holdfast (torch)"], marks=pytest.mark.sweep, id="torch"),
    ],
)
def test_tiny_run_of_two_processes(contenders: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.compare", *TINY, *only(contenders), "--directory", str(tmp_path)]
    finished = subprocess.run([*command, "--processes", "2"], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert finished.returncode == 0, finished.stderr
    check_rows(contenders, finished.stdout)
    assert "sharded over 2 processes" in finished.stdout


def test_check_fails_when_nothing_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--only", "raw disk", "--directory", str(tmp_path), "--check", "--markdown"]) == 1
    assert "| not measured |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("ours", "orbax", "met"),
    [
        pytest.param([0.1], [4.1], True, id="quicker than asked"),
        pytest.param([0.1], [3.9], False, id="not quick enough"),
        pytest.param([9.0, 0.1, 0.1], [4.1, 4.1, 0.1], True, id="medians count"),
        pytest.param([], [4.1], False, id="ours not measured"),
        pytest.param([0.1], [], False, id="theirs not measured"),
    ],
)
def test_goal_of_many_leaves(ours: list[float], orbax: list[float], met: bool) -> None:
    measured = results.Measurements(title="", nbytes=1)
    for contender, values in (("holdfast (jax)", ours), ("orbax", orbax)):
        for value in values:
            measured.add(contender, {"save_seconds": value})
    found = goals(results.Results(rounds=1, workloads={"leaves": measured}))
    (goal,) = [goal for goal in found if goal.name.startswith("10,000 leaves, save")]
    assert goal.met is met


@pytest.mark.parametrize(("ours", "met"), [(1.3, True), (1.31, False)])
def test_goals_of_two_processes_are_ratios_to_the_disk(ours: float, met: bool) -> None:
    measured = results.Measurements(title="", nbytes=1)
    for name, seconds in (("raw disk", 1.0), ("raw disk, new memory", 1.0), ("holdfast (torch)", ours)):
        measured.add(name, {"save_seconds": seconds, "load_native_seconds": seconds})
    found = goals(results.Results(rounds=1, workloads={"model, 2 processes": measured}))
    about = [one for one in found if "2 processes" in one.name and one.value is not None]
    assert [one.name.rpartition(" / ")[2] for one in about] == ["raw disk", "raw disk, new memory"]
    assert all(one.met is met for one in about)


def test_limits_bound_the_right_side() -> None:
    values = {(1.3, False): True, (1.31, False): False, (1.3, True): True, (1.29, True): False}
    for (value, at_least), met in values.items():
        assert Goal(name="", value=value, limit=1.3, at_least=at_least).met is met
