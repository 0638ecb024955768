"""The page about drills: its program is rehearsed as the page says, and once more with the mistake mended."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
from tests.documents.examples import Examples
from tests.starts import run

from holdfast.cli.drill.interruptions import KINDS

pytestmark = pytest.mark.xdist_group("programs")

TEXT = (Path(__file__).parents[2] / "docs" / "drill.md").read_text(encoding="utf-8")
OUTPUTS = re.findall(r"^```text\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def drill(folder: Path, program: str, command: str, status: int) -> str:
    (folder / "train.py").write_text(program)
    arguments = [part if part != "python" else sys.executable for part in shlex.split(command)[1:]]
    done = run("-m", "holdfast.cli.main", *arguments, cwd=folder)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout.replace(sys.executable, "python")


def without_digits(text: str) -> str:
    """The last digits depend on the processor."""
    return re.sub(r"\d+\.\d+", "0.0", text)


def mended(examples: Examples) -> str:
    program = examples["python 1"]
    program = program.replace('{"weights": np.zeros(2)}', '{"weights": np.zeros(2)}, noise=noise')
    program = program.replace("(step, state)", "(step, state, noise=noise)")
    return program + f"\n{examples['python 2']}assert not log_to_wandb\n"


@pytest.mark.examples("docs/drill.md")
def test_the_example(examples: Examples, tmp_path: Path) -> None:
    _, command = examples.commands()
    assert without_digits(drill(tmp_path, examples["python 1"], command, 1)) == without_digits(OUTPUTS[0])
    assert OUTPUTS[1] in drill(tmp_path, mended(examples), command, 0)


@pytest.mark.sweep
@pytest.mark.examples("docs/drill.md")
def test_the_short_command(examples: Examples, tmp_path: Path) -> None:
    assert "identical: 40 checkpoints" in drill(tmp_path, mended(examples), examples.commands()[0], 0)


def test_the_kinds_in_the_table() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", TEXT, re.MULTILINE)
    assert rows == list(KINDS)
