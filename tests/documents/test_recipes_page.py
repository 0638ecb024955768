"""The page on recipes: its program, its files and its commands."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from tests.cli.commands import output_of

TEXT = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8")


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (program,), (first, second) = blocks("python"), blocks("yaml")
    Path("walks.py").write_text(program, encoding="utf-8")
    Path("walk.yaml").write_text(first, encoding="utf-8")
    Path("long.yaml").write_text(second, encoding="utf-8")
    monkeypatch.delenv("SCRATCH", raising=False)
    try:
        commands = [line[2:].partition("#")[0].split() for block in blocks("console") for line in block.splitlines()]
        mine = [command[1:] for command in commands if "flax_digits" not in command]
        said = [output_of(capsys, *command) for command in mine]
        long = output_of(capsys, "run", "long.yaml", "--dry-run")
    finally:
        sys.modules.pop("walks", None)

    assert [command[0] for command in mine] == ["recipes", "run", "run", "recipes", "run", "ls"]
    assert "done: 200 steps" in said[1]
    assert "done: 100 steps" in said[2]
    assert "The length of a step." in said[3]
    assert [line.split()[:3] for line in said[5].splitlines()[1:]] == [
        [f"seed={seed}", "3", "200"] for seed in (0, 1, 2)
    ]
    assert "walks:train in runs/long_walk: would train steps 1 to 400" in long
