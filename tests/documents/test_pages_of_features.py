"""Pages on features: their programs run as printed, their files are read, and their numbers are those of the code."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.cli.commands import output_of
from tests.documents.examples import ROOT, Examples

import holdfast as hf
from holdfast.cli.main import main
from holdfast.engine.handlers import DEFAULT_REGISTRY
from holdfast.engine.manager import peers
from holdfast.integrations.loop.preemption import WITHOUT_GRACE
from holdfast.recipes.configuration import load_configuration


def text_of(page: str) -> str:
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.examples("docs/mirrors.md", "python 1")
def test_the_program_with_a_mirror(examples: Examples, place: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(examples["python 1"].replace("memory://bucket", place), "page.py", "exec"), {"__name__": "__main__"})
    assert f"This prints `{capsys.readouterr().out.strip()}`." in text_of("docs/mirrors.md")
    assert len(hf.list_checkpoints(f"{place}/digits")) <= 3


@pytest.mark.examples("docs/mirrors.md", "console 1")
def test_the_command_that_copies_a_run(examples: Examples, place: str) -> None:
    with hf.CheckpointManager("runs/digits") as manager:
        manager.save(1200, {"w": 1.5})
    (command,) = examples.commands()
    assert main(command.replace("s3://bucket", place).split()[1:]) == 0
    assert hf.load(f"{place}/digits/1200") == {"w": 1.5}


@pytest.mark.examples("docs/local_tier.md", "python 1")
def test_the_program_with_local_steps(examples: Examples, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = examples["python 1"].replace("/dev/shm/holdfast", str(tmp_path / "memory"))
    exec(compile(program, "page.py", "exec"), {"__name__": "__main__"})
    assert f"This prints `{capsys.readouterr().out.strip()}`." in text_of("docs/local_tier.md")
    assert [one.step for one in hf.list_checkpoints("runs/digits")] == [25]
    assert list((tmp_path / "memory").iterdir()) == [], "the run has ended, and its last step is in the directory"


@pytest.mark.examples("docs/mirrors.md", "yaml 1")
@pytest.mark.examples("docs/local_tier.md", "yaml 1")
def test_the_yaml_of_a_mirror_and_of_local_steps(request: pytest.FixtureRequest) -> None:
    found = {}
    for mark in request.node.iter_markers("examples"):
        page, name = mark.args
        Path("recipe.yaml").write_text(f"recipe: flax_digits\n{Examples(page, name)[name]}", encoding="utf-8")
        options = load_configuration("recipe.yaml").config.checkpoint.options()
        found[page] = (options.local, options.mirror)
    more: dict[str, Any] = {"save_interval_steps": 1000, "max_to_keep": 3, "max_bandwidth": "50 MB/s"}
    assert found == {
        "docs/mirrors.md": (None, hf.Mirror("s3://bucket/digits", **more)),
        "docs/local_tier.md": (hf.Local("/dev/shm/holdfast", every=10), hf.Mirror("s3://bucket/digits")),
    }


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("docs/mirrors.md", f"`wait_secs` ({str(hf.Mirror('x').wait_secs).removesuffix('m')} minutes)"),
        ("docs/mirrors.md", f"({WITHOUT_GRACE:.0f} seconds if that is not set)"),
        ("docs/mirrors.md", f"up to {hf.Layout().data_file_bytes >> 30} GiB"),
        ("docs/local_tier.md", f"silent for {peers.PATIENCE:.0f} seconds"),
    ],
)
def test_numbers_are_those_of_the_code(page: str, said: str) -> None:
    assert said in text_of(page)


@pytest.mark.examples("docs/handlers.md")
def test_the_page_on_handlers_runs_twice_as_a_program_that_is_run_again(examples: Examples, tmp_path: Path) -> None:
    for _ in range(2):
        names: dict[str, Any] = {}
        try:
            examples.run(names)
        finally:
            DEFAULT_REGISTRY.unregister(names.get("Table", object))
    assert (tmp_path / "runs" / "leaves" / "run" / "1" / "checkpoint.json").exists()


@pytest.mark.examples("docs/recipes.md")
def test_the_page_on_recipes_runs(
    examples: Examples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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
