"""SIGTERM to every process of a job, as SLURM, torchrun and ``timeout`` send it: workers survive until the save."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest

import holdfast as hf

ROOT = Path(__file__).resolve().parents[2]

pytest.importorskip("lightning")
pytestmark = pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="needs signals of POSIX")

Job = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Runs a program as a job, which gets the signal in all its processes; returns its status and what it said."""
    said = tmp_path_factory.mktemp("jobs") / "stderr"
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "tests.integrations.jobs"]
    with said.open("w") as stderr:
        server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment
        )

    def run(kind: str, directory: Path, signal_at: int | None = None, number: int = signal.SIGTERM) -> tuple[int, str]:
        assert server.stdin is not None
        assert server.stdout is not None
        before = len(said.read_text())
        _say(server.stdin, json.dumps([kind, str(directory), signal_at]))
        word, found = server.stdout.readline().split()
        if word == "ready":
            os.killpg(int(found), number)
            _say(server.stdin, "")
            word, found = server.stdout.readline().split()
        assert word == "ended"
        return int(found), said.read_text()[before:]

    with server:
        yield run


def _say(pipe: IO[str], line: str) -> None:
    print(line, file=pipe, flush=True)


SWEPT = {"torch, spawned", "torch, by a fork server", "a process", "a process of a fork server"}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.sweep] if kind in SWEPT else [])
        for kind in ("torch", "torch, persistent", "a spawned process", *sorted(SWEPT))
    ],
)
def test_a_loop_saves_its_step_and_goes_on(job: Job, tmp_path: Path, kind: str) -> None:
    status, said = job(kind, tmp_path, signal_at=3)
    assert (status, "Traceback" in said, "killed" in said) == (75, False, False), said
    assert [entry.step for entry in hf.list_checkpoints(tmp_path)] == [4]
    status, said = job(kind, tmp_path)
    assert (status, "Traceback" in said) == (0, False), said
    assert [entry.step for entry in hf.list_checkpoints(tmp_path)] == [4, 6]


@pytest.mark.parametrize("kind", ["lightning", pytest.param("lightning, persistent", marks=pytest.mark.sweep)])
def test_lightning_saves_its_step(job: Job, tmp_path: Path, kind: str) -> None:
    status, said = job(kind, tmp_path, signal_at=2)
    assert status == 143, said
    assert "DataLoader worker" not in said
    assert [entry.step for entry in hf.list_checkpoints(tmp_path)] == [3]
