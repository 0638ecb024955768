"""The comparison of training loops: a whole run of tiny programs, and how numbers become a table and goals."""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from benchmarks.loop import CONTENDERS, QUICK, runner
from benchmarks.loop.report import goals, relative, report
from benchmarks.loop.stopwatch import Stopwatch
from benchmarks.results import Measurements, Results

ROOT = Path(__file__).resolve().parents[2]


def quick(framework: str, *peers: str, directory: Path) -> list[str]:
    arguments = ["--quick", "--framework", framework, "--only", "holdfast"]
    arguments += [text for peer in peers for text in ("--only", peer)]
    return [*arguments, "--directory", str(directory), "--json", str(directory / "all.json")]


@pytest.mark.sweep  # each of its processes imports a framework
@pytest.mark.parametrize(
    ("framework", "peers"),
    [
        ("jax", ("orbax", "orbax (tuned)")),
        ("lightning", ("ModelCheckpoint", "AsyncCheckpointIO", "torch dcp", "torch dcp (process)")),
    ],
)
def test_a_quick_run(framework: str, peers: tuple[str, ...], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.loop", *quick(framework, *peers, directory=tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # tests run beside each other
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    check_report(framework, peers, done.stdout, tmp_path)


def test_a_quick_run_in_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_here(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        python, option, module, *arguments = command
        assert (python, option) == (sys.executable, "-m")
        printed = io.StringIO()
        with monkeypatch.context() as patch, contextlib.redirect_stdout(printed):
            patch.setattr(sys, "argv", [module, *arguments])
            runpy.run_module(module, run_name="__main__")
        return subprocess.CompletedProcess(command, 0, printed.getvalue(), "")

    monkeypatch.setattr(runner, "subprocess", SimpleNamespace(run=run_here))
    assert runner.main(quick("jax", directory=tmp_path)) == 0
    check_report("jax", (), capsys.readouterr().out, tmp_path)


def check_report(framework: str, peers: tuple[str, ...], printed: str, tmp_path: Path) -> None:
    values = json.loads((tmp_path / "all.json").read_text())["workloads"][framework]["values"]
    assert values.keys() == {"no saving", "holdfast", *peers}
    rows = [line.split("  ")[0] for line in printed.splitlines()]
    assert values.keys() <= set(rows)
    for measured in values.values():
        assert measured.keys() == {"worst_seconds", "mean_seconds", "total_seconds", "cpu_seconds"}
        (worst,), (mean,), (total,) = (measured[f"{name}_seconds"] for name in ("worst", "mean", "total"))
        assert 0 < mean <= worst < total
    assert [path.name for path in tmp_path.iterdir()] == ["all.json"]


def test_every_contender_has_a_program() -> None:
    for framework, contenders in CONTENDERS.items():
        source = (ROOT / "benchmarks" / "loop" / f"{framework}_runs.py").read_text()
        for where in contenders.values():
            module, function = where.split(":")
            assert module == f"{framework}_runs"
            assert f"\ndef {function}(plan: Plan, path: Path)" in source


def test_steps_are_measured_from_half_an_interval_after_the_first_save(tmp_path: Path) -> None:
    stopwatch = Stopwatch(QUICK, tmp_path / "absent")
    for step in range(1, QUICK.last):
        stopwatch.step_ends(step)
    with pytest.raises(AssertionError, match="measured 1 steps, expected 2"):
        stopwatch.finish()
    stopwatch.step_ends(QUICK.last)
    measured = stopwatch.finish()
    assert measured["worst_seconds"] >= measured["mean_seconds"]
    assert measured["total_seconds"] >= 2 * measured["mean_seconds"]


def results_of(ours: float) -> Results:
    def measured(worst: list[float], mean: list[float], total: list[float]) -> dict[str, list[float]]:
        return {"worst_seconds": worst, "mean_seconds": mean, "total_seconds": total, "cpu_seconds": total}

    values = {
        "no saving": measured([3.0, 6.0], [2.0, 4.0], [20.0, 40.0]),
        "holdfast": measured([2.0 * ours, 4.0 * ours], [2.0 * ours, 4.0 * ours], [20.0, 40.0]),
        "orbax": measured([4.0, 8.0], [4.0, 8.0], [40.0, 80.0]),
    }
    return Results(rounds=2, workloads={"jax": Measurements(title="a loop with jax", nbytes=0, values=values)})


def test_numbers_are_relative_to_the_same_round() -> None:
    measurements = results_of(1.5).workloads["jax"]
    assert relative(measurements, "no saving", "worst_seconds", "mean_seconds") == 1.5
    assert relative(measurements, "orbax", "total_seconds", "total_seconds") == 2.0
    assert relative(measurements, "torch dcp", "total_seconds", "total_seconds") is None


@pytest.mark.parametrize(("ours", "met"), [(1.5, [True, True, True]), (2.5, [False, False, True])])
def test_goals(ours: float, met: list[bool]) -> None:
    results = results_of(ours)
    found = goals(results)
    columns = ("worst step", "mean step", "total")
    assert [goal.name for goal in found] == [f"jax, {column}, holdfast / orbax" for column in columns]
    assert [goal.met for goal in found] == met
    text = report(results, found, as_markdown=False)
    assert "A loop with jax, a step of 3000 ms" in text
    assert text.count("MISSED") == met.count(False)


def test_check_fails_without_measurements(tmp_path: Path) -> None:
    (tmp_path / "none.json").write_text(json.dumps({"rounds": 1, "machine": {}, "workloads": {}}))
    assert runner.main(["--report", str(tmp_path / "none.json"), "--check"]) == 1
