"""Every example in the README runs as it is printed."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from tests.cli.commands import output_of
from tests.documents.examples import Examples, blocks_of
from tests.starts import run

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.xdist_group("programs")
@pytest.mark.examples("README.md", "python 1")
def test_the_program_is_killed_and_proves_its_resume_as_printed(examples: Examples, tmp_path: Path) -> None:
    program = examples["python 1"]
    report = "            checkpoint.on_step("
    kill = "            if step == 130:\n                checkpoint.manager.wait_until_finished()\n"
    killed = "import os\n" + program.replace(report, f"{kill}                os.kill(os.getpid(), 9)\n{report}")
    said = []
    for name, status in (("killed.py", -9), ("train.py", 0), ("train.py", 0)):
        (tmp_path / name).write_text(killed if status else program, encoding="utf-8")
        done = run("-W", "ignore", name, cwd=tmp_path, backend="torch")
        assert done.returncode == status, done.stderr
        said.append(done.stderr.replace(str(tmp_path), "/home/ada/project"))
    assert "nothing left to do" in said.pop()
    for page in ("README.md", "docs/index.md"):
        [first, *_] = [block.text for block in blocks_of(page) if block.language == "python"]
        assert first == program
        [printed] = [block.text for block in blocks_of(page) if block.text.startswith("$ python train.py\n")]
        assert "Killed\n".join(said) == printed.replace("$ python train.py\n", "")


@pytest.mark.examples("README.md", "console 2")
def test_the_commands_run_in_their_order(
    examples: Examples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    commands = [shlex.split(command) for command in examples.commands()]
    assert {name for name, *_ in commands} == {"holdfast"}
    outputs = [output_of(capsys, *arguments) for _, *arguments in commands]
    assert "600" in outputs[2]


@pytest.mark.examples("CONTRIBUTING.md")
@pytest.mark.examples("README.md", "console 1")
def test_the_targets_of_make(request: pytest.FixtureRequest) -> None:
    """What `make demo` runs is in tests/cli/test_demo.py; the others run all tests, checks and pages."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for mark in request.node.iter_markers("examples"):
        commands = [command.split() for command in Examples(*mark.args).commands()]
        assert commands
        assert [command for command in commands if command[0] != "make" or command[1] not in targets] == []


def test_the_source_distribution_has_what_the_readme_names(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [archive] = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as members:
        names = {name.partition("/")[2] for name in members.getnames()}
    own = {"CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md", "constraints.txt", "minimum.txt"}
    docs = {"mkdocs.yml", "docs/index.md", "docs/schedulers/job.yaml", "docs/tools/prepare.py"}
    assert own | docs | {"benchmarks/compare.py", "src/holdfast/cli/demo.py", "tests/test_readme.py"} <= names
