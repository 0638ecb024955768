"""The page on local steps: its program runs as printed, and its YAML is read."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.documents.examples import Examples

import holdfast as hf
from holdfast.engine.manager import peers
from holdfast.recipes.configuration import load_configuration

PAGE = (Path(__file__).parents[2] / "docs" / "local_tier.md").read_text(encoding="utf-8")


@pytest.mark.examples("docs/local_tier.md", "python 1")
def test_the_program(
    examples: Examples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    program = examples["python 1"].replace("/dev/shm/holdfast", str(tmp_path / "memory"))
    exec(compile(program, "page.py", "exec"), {"__name__": "__main__"})
    assert f"This prints `{capsys.readouterr().out.strip()}`." in PAGE
    assert [one.step for one in hf.list_checkpoints("runs/digits")] == [25]
    assert list((tmp_path / "memory").iterdir()) == [], "the run has ended, and its last step is in the directory"


@pytest.mark.examples("docs/local_tier.md", "yaml 1")
def test_the_yaml(examples: Examples, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("recipe: flax_digits\n" + examples["yaml 1"], encoding="utf-8")
    options = load_configuration(str(tmp_path / "recipe.yaml")).config.checkpoint.options()
    assert options.local == hf.Local("/dev/shm/holdfast", every=10)
    assert options.mirror == hf.Mirror("s3://bucket/digits")


def test_its_numbers() -> None:
    assert f"silent for {peers.PATIENCE:.0f} seconds" in " ".join(PAGE.split())
