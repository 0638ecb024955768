"""The pages on operating a run, reports and benchmarks: their commands do what they say."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.commands import output_of
from tests.documents.examples import ROOT, Examples, blocks_of, pages
from tests.documents.pages import make_shims, run_commands
from tests.starts import run

import holdfast as hf
from holdfast.cli.app import COMMANDS

# A program that crashes once; its arguments do not matter.
PROGRAM = """
import sys
import holdfast as hf

with hf.CheckpointCallback("runs/x", save_interval_steps=2) as checkpoint:
    state, start = checkpoint.restore_or_initialize({"x": 0.0})
    for step in range(start + 1, 7):
        if step == 5 and start == 0:
            checkpoint.manager.wait_until_finished()
            raise RuntimeError("a mistake in the program")
        if checkpoint.on_step(step, {"x": float(step)}).should_stop:
            break
sys.exit(checkpoint.exit_status)
"""


@pytest.mark.examples("docs/operations.md", "console 1")
def test_a_program_is_supervised(examples: Examples, tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "train.py").write_text(PROGRAM)
    shims = make_shims(tmp_path / "project")
    (command,) = examples.commands()
    command = command.replace("supervise ", "supervise --pause 10ms --events events ")
    # `holdfast` and `python` are those of this environment.
    done = subprocess.run(
        ["bash", "-c", f"PATH={shlex.quote(str(shims))}:$PATH; {command}"],
        cwd=tmp_path / "project",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    names = re.findall(r'"event": "(\w+)"', (tmp_path / "project" / "events").read_text())
    assert names == ["started", "crashed", "restarting", "started", "finished", "ended"]
    assert hf.load(tmp_path / "project" / "runs" / "x", item="state") == {"x": 6.0}


@pytest.mark.examples("docs/report.md")
def test_a_run_is_reported(examples: Examples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    hf.save("runs/transformer/1", {"w": 1.5})
    run_commands(examples["console 1"], folder, make_shims(folder))
    assert "transformer" in Path("report.html").read_text()


@pytest.mark.xdist_group("programs")
@pytest.mark.examples("docs/benchmarks.md")
def test_the_programs_of_the_benchmarks_have_their_options(examples: Examples) -> None:
    options: dict[str, list[str]] = {}
    for command in examples.commands():
        python, flag, module, *given = shlex.split(command)
        assert (python, flag) == ("python", "-m")
        options.setdefault(module, []).extend(option for option in given if option.startswith("--"))
    for module, named in options.items():
        if module.rpartition(".")[2] == "loop":
            assert named == []
            assert (ROOT / module.replace(".", "/") / "__main__.py").is_file()
            continue
        done = run("-W", "ignore", "-m", module, "--help", cwd=ROOT)
        assert done.returncode == 0, done.stderr
        assert [option for option in named if option not in done.stdout] == []


# ---- commands anywhere, also in sentences and in blocks for the reader's machine


def commands_in(page: str) -> Iterator[list[str]]:
    """The words of all commands of ours on a page, without what comes after them."""
    content = (ROOT / page).read_text(encoding="utf-8")
    shell = [block.text for block in blocks_of(page) if block.language in ("console", "sh")]
    lines = "".join(shell).splitlines()
    found = [line.removeprefix("$ ").removeprefix("holdfast ") for line in lines if re.match(r"(\$ )?holdfast ", line)]
    found += re.findall(r"`holdfast\s([^`]+)`", content)
    for command in found:
        yield re.split(r"\s+#|\s\|\|?\s|\s--\s|\s&&?\s|\s>\s", command)[0].split()


def test_commands_and_options_exist(capsys: pytest.CaptureFixture[str]) -> None:
    helps: dict[str, str] = {}
    mistakes = []
    for page in pages():
        for name, *words in commands_in(page):
            if name not in helps:
                helps[name] = output_of(capsys, name, "--help") if name in COMMANDS else ""
            known = set(re.findall(r"--[\w-]+|(?<= )-\w\b", helps[name]))
            wrong = [word for word in words if re.match(r"--?[a-z]", word) and word.partition("=")[0] not in known]
            if not helps[name] or wrong:
                mistakes.append(f"{page}: holdfast {name} {' '.join(wrong)}")
    assert mistakes == []
    assert {"supervise", "drill", "report", "prune", "verify"} <= helps.keys()
