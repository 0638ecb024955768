"""The page on recipes: its program, its files and its commands."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
from tests.cli.commands import output_of
from tests.documents.examples import Examples


@pytest.mark.examples("docs/recipes.md")
def test_the_page_runs(
    examples: Examples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "installed")])
    monkeypatch.delenv("SCRATCH", raising=False)
    for name, text in (("walks.py", "python 1"), ("walk.yaml", "yaml 1"), ("long.yaml", "yaml 2")):
        Path(name).write_text(examples[text], encoding="utf-8")
    metadata = tmp_path / "installed" / "walks-1.0.dist-info"
    metadata.mkdir(parents=True)
    declared = examples["toml 1"].replace('[project.entry-points."holdfast.recipes"]', "[holdfast.recipes]")
    (metadata / "entry_points.txt").write_text(declared.replace('"', ""))
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: walks\nVersion: 1.0\n")
    commands = [shlex.split(command)[1:] for command in examples.commands()]
    try:
        said = {" ".join(command): output_of(capsys, *command) for command in commands}
        long = output_of(capsys, "run", "long.yaml", "--dry-run")
    finally:
        sys.modules.pop("walks", None)

    assert "random_walk" in said["recipes"]
    assert "train.steps" in said["recipes flax_digits"]
    assert "nothing to do" in said["run flax_digits train.steps=400 --dry-run"]
    assert "done: 200 steps" in said["run walk.yaml"]
    assert "done: 100 steps" in said["run walk.yaml train.steps=300"]
    assert "The length of a step." in said["recipes walks:train"]
    assert [line.split()[:3] for line in said["ls runs/many"].splitlines()[1:]] == [
        [f"seed={seed}", "3", "200"] for seed in (0, 1, 2)
    ]
    assert "walks:train in runs/long_walk: would train steps 1 to 400" in long
