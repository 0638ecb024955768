"""The measurement of many kept steps runs, and its goals compare the most steps with the fewest."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import steps


def test_a_small_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(steps, "SAVES", 2)
    arguments = ["--steps", "70", "--rounds", "1", "--directory", str(tmp_path), "--markdown"]
    assert steps.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("| 70 |")
    assert any(line.startswith("| save, durable, 70 steps / 70 | <= 2x | 1x | met") for line in lines)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(("durable", "ls", "met"), [(0.02, 2.0, True), (0.021, 2.0, False), (0.02, 2.1, False)])
def test_goals(durable: float, ls: float, met: bool) -> None:
    few = {"blocked": 0.001, "total": 0.01, "open": 0.1, "ls": 0.3}
    found = steps.goals({100: few, 10_000: {**few, "total": durable, "ls": ls}})
    assert all(goal.met for goal in found) is met
