"""The table of everyday operations runs, and its goals are numbers of one row, or ratios within one."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def daily(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.daily")


def test_a_small_run(daily: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [argument for name in ("managed", "few", "parts") for argument in ("--row", name)]
    options = ["--rounds", "1", "--scale", "0.01", "--directory", str(tmp_path), "--markdown"]
    assert daily.main([*rows, *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[2].strip() for line in lines[2:11]] == [
        *("one file", "holdfast", "on_step and wait", "on_step blocks"),
        *("safetensors", "holdfast"),
        *("all of it", "safetensors", "holdfast"),
    ]
    assert sum(" | met" in line or "MISSED" in line for line in lines) == 4
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(("ours", "met"), [(2.0, True), (2.1, False)])
def test_goals(daily: Any, ours: float, met: bool) -> None:
    (goal,) = daily.goals({"small": {"one file": 1.0, "holdfast": ours, "safetensors, durable": 9.0}})
    assert (goal.name, goal.met) == ("save 3 MB in 24 leaves: holdfast / one file", met)
