"""Every example in the README runs as it is printed."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
PROGRAMS = [text for language, text in BLOCKS if language == "python"]
COMMANDS = [
    line.removeprefix("$ ").split("  #")[0].strip()
    for language, text in BLOCKS
    if language == "console"
    for line in text.splitlines()
    if line.startswith("$ holdfast")
]


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, env=os.environ, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_there_are_examples_of_every_use() -> None:
    assert len(PROGRAMS) >= 3
    assert [shlex.split(command)[1] for command in COMMANDS] == ["recipes", "run", "run", "ls", "show", "verify"]


@pytest.mark.parametrize("program", PROGRAMS, ids=["flax", "torch", "lightning", "engine", "import"])
def test_a_program_runs_twice(program: str, tmp_path: Path) -> None:
    for _ in range(2):
        run([sys.executable, "-W", "ignore", "-c", program], tmp_path)
    assert any((tmp_path / "runs").rglob("checkpoint.json"))


def test_the_commands_run_in_their_order(tmp_path: Path) -> None:
    holdfast = [sys.executable, "-m", "holdfast.cli.main"]
    outputs = [run([*holdfast, *shlex.split(command)[1:]], tmp_path) for command in COMMANDS]
    assert "flax_text" in outputs[0]
    assert "600" in outputs[3]
