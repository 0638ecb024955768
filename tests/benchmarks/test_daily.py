"""The table of everyday operations runs, and its goals are numbers of one row, or ratios within one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks import daily


def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [argument for name in ("managed", "few", "parts") for argument in ("--row", name)]
    options = ["--rounds", "1", "--scale", "0.01", "--directory", str(tmp_path / "runs"), "--markdown"]
    assert daily.main([*rows, *options, "--json", str(tmp_path / "all.json")]) == 0
    cells = [[each.strip() for each in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()[2:6]]
    assert [
        (row[0], row[1].partition(": ")[2], row[3].rpartition(" ")[0].rpartition(" ")[0], row[5]) for row in cells
    ] == [
        ("1", "", "one file", "<= 2x"),
        ("1", "on_step blocks", "one file", "<= 0.001 s"),
        ("2", "", "safetensors", "<= 0.015 s"),
        ("9", "", "all of it", "<= 0.1625x"),
    ]
    assert {row[6] for row in cells} <= {"yes", "NO"}
    values = json.loads((tmp_path / "all.json").read_text())["values"]
    assert list(values["few"]) == ["safetensors", "holdfast"]
    assert {len(each) for each in values["parts"].values()} == {1}
    assert not any((tmp_path / "runs").iterdir())


def test_a_row_that_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is named, with the last line of its traceback, and the others are measured."""
    broken = daily.Row(number=1, title="broken", program="import no_such_package", goals=(("holdfast", "peer", 2.0),))
    fine = daily.Row(number=2, title="fine", program="values['holdfast'] = [0.5]", goals=(("holdfast", None, 1.0),))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(daily, "ROWS", {"broken": broken, "fine": fine})
        assert daily.main(["--directory", str(tmp_path), "--check"]) == 1
    said = capsys.readouterr()
    assert "broken: not measured: ModuleNotFoundError: No module named 'no_such_package'" in said.err + said.out
    table = [line.split() for line in said.out.splitlines() if "broken" in line or "fine" in line]
    assert [line[-1] for line in table[-2:]] == ["NO", "yes"]


def test_goals() -> None:
    """The best peer is the quickest of the others; a floor is no peer, and a line without a limit is no goal."""
    for ours, met in ((2.0, True), (2.1, False)):
        (goal,) = daily.goals({"small": {"one file": 1.0, "holdfast": ours, "safetensors, durable": 9.0}})
        assert (goal.name, goal.met) == ("save 3 MB in 24 leaves: holdfast / one file", met)
    medians = {"safetensors": 3.0, "Arrow": 2.0, "holdfast": 2.5}
    (goal,) = daily.goals({"medium_loaded": medians})
    assert (goal.value, goal.met) == (1.25, False)
    medians = {"one process": 1.0, daily.FLOOR: 1.9, "holdfast": 2.0}
    assert [goal.value for goal in daily.goals({"same_host": medians})] == [2.0, None, None]
    table = daily.report({"same_host": medians}, 9, {}, as_markdown=True).splitlines()
    assert [[cell.strip() for cell in line.split("|")[5:8]] for line in table[2:5]] == [
        ["2.00x", "<= 1.2x", "NO"],
        ["1.90x", "-", "-"],
        ["1.05x", "-", "-"],
    ]
