"""A run killed at random moments, and the check that would notice if something were wrong afterwards."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from benchmarks import kills_cases, kills_connected
from benchmarks import kills_life as life
from tests.cli.commands import flip_bits
from tests.manager.runs import saved
from tests.starts import run

import holdfast as hf

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.xdist_group("programs")

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("kills", [30, pytest.param(100, marks=pytest.mark.sweep)])
def test_killed_at_random_instants(tmp_path: Path, kills: int) -> None:
    command = [sys.executable, "-m", "benchmarks.kills", "--kills", str(kills), "--directory", str(tmp_path)]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    said = f"{finished.stdout}\n{finished.stderr}"
    assert finished.returncode == 0, said
    for pattern, least in (
        (r"(\d+) commits reported", kills / 4),
        (r"(\d+) times checked", kills / 4),
        (r"(\d+) interrupted saves", 0),
        (r"(\d+) with shared files", 0),
    ):
        (found,) = re.findall(pattern, finished.stdout)
        assert int(found) > least, said


def kills_of_two_processes(directory: Path, *arguments: str) -> str:
    """Run the command for programs of two processes of torch; return what it prints."""
    pytest.importorskip("torch")
    command = ["-m", "benchmarks.kills", "--processes", "2", "--directory", directory, *arguments]
    finished = run(*command, backend="torch")
    assert finished.returncode == 0, f"{finished.stdout}\n{finished.stderr}"
    return finished.stdout


@pytest.mark.parametrize(
    ("lines", "last", "found"),
    [
        pytest.param([f"step {step} 0" for step in range(9, 11)], "10", 0, id="whole"),
        pytest.param([], "8", 2, id="nothing is told, and nothing saved"),
        pytest.param(["step 9 0"], "10", 1, id="ended early"),
        pytest.param(["step 10 0"], "10", 1, id="left a step out"),
        pytest.param(["step 9 0", "step 10 0"], "8", 1, id="the last step is not saved"),
    ],
)
def test_a_next_start_that_does_not_come_to_its_end_is_a_problem(lines: list[str], last: str, found: int) -> None:
    life = kills_connected.Life([["resumed 8 0", *lines] if lines else []])
    assert len(kills_cases.unfinished(life, {"8": b"", last: b""})) == found


def test_connected_processes_are_signalled(tmp_path: Path) -> None:
    """SIGKILL to process 0 at a commit, then SIGTERM to both."""
    said = kills_of_two_processes(tmp_path, "--count", "2", "--seed", "3951", "--barrier", "60")
    assert re.search(r"\| torch \| 2 \| KILL \| process 0 \| 1 \| 0\.\d\d \| 0 \| .* \| 1 \w+Error \|", said), said
    assert re.search(r"\| torch \| 2 \| TERM \| all \| 1 \| 0\.00 \| 0 \| .* \| 1 saved and stopped \|", said), said


@pytest.mark.sweep
def test_connected_processes_lose_hosts(tmp_path: Path) -> None:
    said = kills_of_two_processes(tmp_path, "--local", "--count", "6", "--seed", "1", "--barrier", "8", "--jobs", "2")
    found = re.search(r"resumed (\d+) times from local steps newer than the directory's \((\d+) of them", said)
    assert found is not None, said
    assert int(found[1]) > int(found[2]) > 0, said


def save_something_else(directory: Path) -> None:
    hf.save(directory / "5", {"edition": 0}, overwrite=True)


@pytest.mark.parametrize(
    ("sabotage", "kept", "problem"),
    [
        pytest.param(lambda _: None, {3: 0, 4: 0, 5: 0}, None, id="nothing"),
        pytest.param(lambda _: None, {5: 1}, "step 5 went back to edition 0", id="old edition"),
        pytest.param(
            lambda run: (run / "4/checkpoint.json").unlink(), {4: 0}, "step 4 was reported com", id="lost step"
        ),
        pytest.param(lambda run: flip_bits(run / "5"), {}, "step 5 is listed, but cannot be read", id="flipped bit"),
        pytest.param(save_something_else, {}, "step 5 ", id="other content"),
        pytest.param(lambda run: (run / "5/state/left").touch(), {}, "left behind in step 5", id="stray file"),
        pytest.param(
            lambda run: (run / "6/state").mkdir(parents=True), {}, "left behind in the dir", id="stray folder"
        ),
    ],
)
def test_check_notices(
    tmp_path: Path, sabotage: Callable[[Path], None], kept: dict[int, int], problem: str | None
) -> None:
    saved(tmp_path, 3, 4, 5, items=lambda step: life.content(step, 0), max_to_keep=3)
    sabotage(tmp_path)
    reading, writing = os.pipe()
    checker = life.Life(tmp_path, kept, writing)
    checker.look()
    with hf.CheckpointManager(tmp_path) as manager:
        checker.check(manager)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        problems = [line for line in pipe if line.startswith("problem")]
    if problem is None:
        assert problems == []
    else:
        assert any(problem in line for line in problems), problems
