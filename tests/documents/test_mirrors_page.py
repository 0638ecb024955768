"""The page on mirrors: its program runs as printed, its YAML is read, and its numbers are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.documents.examples import Examples

import holdfast as hf
from holdfast.cli.main import main
from holdfast.engine.storage import as_location
from holdfast.integrations.loop.preemption import WITHOUT_GRACE
from holdfast.recipes.configuration import load_configuration

PAGE = (Path(__file__).parents[2] / "docs" / "mirrors.md").read_text(encoding="utf-8")


@pytest.mark.examples("docs/mirrors.md", "python 1")
def test_the_program(
    examples: Examples, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(examples["python 1"].replace("memory://bucket", place), "page.py", "exec"), {"__name__": "__main__"})
    assert f"This prints `{capsys.readouterr().out.strip()}`." in PAGE
    assert len(hf.list_checkpoints(f"{place}/digits")) <= 3
    as_location(f"{place}/digits").remove_tree()


@pytest.mark.examples("docs/mirrors.md", "console 1")
def test_the_command(place: str, examples: Examples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with hf.CheckpointManager("runs/digits") as manager:
        manager.save(1200, {"w": 1.5})
    (command,) = examples.commands()
    assert main(command.replace("s3://bucket", place).split()[1:]) == 0
    assert hf.load(f"{place}/digits/1200") == {"w": 1.5}
    as_location(f"{place}/digits").remove_tree()


@pytest.mark.examples("docs/mirrors.md", "yaml 1")
def test_the_yaml(examples: Examples, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("recipe: flax_digits\n" + examples["yaml 1"], encoding="utf-8")
    options = load_configuration(str(tmp_path / "recipe.yaml")).config.checkpoint.options()
    assert options.mirror == hf.Mirror(
        "s3://bucket/digits", save_interval_steps=1000, max_to_keep=3, max_bandwidth="50 MB/s"
    )


@pytest.mark.parametrize(
    "said",
    [
        f"`wait_secs` ({str(hf.Mirror('x').wait_secs).removesuffix('m')} minutes)",
        f"({WITHOUT_GRACE:.0f} seconds if that is not set)",
        f"up to {hf.Layout().data_file_bytes >> 30} GiB",
    ],
)
def test_its_numbers(said: str) -> None:
    assert said in re.sub(r"\s+", " ", PAGE)
