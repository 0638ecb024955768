"""``holdfast supervise`` as the parent of torchrun, and of the processes of a program of jax.distributed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.cli.commands import Cli
from tests.documents.examples import Examples

import holdfast as hf
from holdfast.engine.manager import read_events

PROGRAM = str(Path(__file__).with_name("launched.py"))
SUPERVISE = [sys.executable, "-m", "holdfast.cli.main", "supervise", "--pause", "10ms", "--grace", "5s"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "--max-restarts=0"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def torchrun(directory: Path, *arguments: object) -> list[str]:
    return [*TORCHRUN, PROGRAM, "torch", str(directory), *map(str, arguments)]


def supervised(log: Path, command: list[str], *options: str, status: int = 0) -> list[dict[str, Any]]:
    """Supervises a launcher to its end; returns the events."""
    command = [*SUPERVISE, *options, "--events", str(log), "--", *command]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == status, done.stderr
    return read_events(log)[0]


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """What ended a start, or the run; what is said of resumes is that they are exact."""
    names = [event["event"] for event in events]
    assert all(event["exact"] for event in events if event["event"] == "witness"), events
    others = ("started", "restarting", "hangs", "forwarded", "slow_save", "witness")
    return [name for name in names if name not in others]


@pytest.mark.examples("docs/operations.md", "console 2")
def test_torchrun_is_preempted_with_its_supervisor(examples: Examples, tmp_path: Path) -> None:
    """Torchrun itself ends with 1; the run's own record says that it was preempted."""
    ours = ["holdfast", "supervise", "--grace", "90s", "--", "torchrun", "--nproc-per-node=8", "--max-restarts=0"]
    assert [command.split() for command in examples.commands()] == [[*ours, "train.py"]]
    events = supervised(tmp_path / "log", torchrun(tmp_path / "run", 400, "supervisor@5"), status=75)

    assert kinds(events) == ["preempted", "ended"]
    assert [event["signal"] for event in events if event["event"] == "forwarded"] == ["SIGTERM"]
    [newest] = [event["newest"] for event in events if event["event"] == "preempted"]
    step = newest[str(tmp_path / "run")]
    assert 5 <= step < 400
    assert hf.list_checkpoints(tmp_path / "run")[-1].reason == "preempted"


@pytest.mark.sweep
def test_torchrun_with_every_trouble_ends_as_without(tmp_path: Path, cli: Cli) -> None:
    troubles = (
        "crash@3",
        "parent@5",
        "hang@400",
        "kill@500",
    )  # steps are short; torchrun looks at its processes now and then
    events = supervised(tmp_path / "log", torchrun(tmp_path / "run", 600, *troubles), "--hang-timeout", "20s")
    subprocess.run(torchrun(tmp_path / "whole", 600), check=True, capture_output=True, env=ENVIRONMENT)

    found = kinds(events)
    assert found[0] == "crashed"
    assert found[-2:] == ["finished", "ended"]
    assert {"hung", "preempted"} <= set(found)
    assert "bit for bit" in cli.output("diff", tmp_path / "run", tmp_path / "whole")


def jax_programs(directory: Path, steps: int, *troubles: str) -> list[list[dict[str, Any]]]:
    """Supervises both processes of a program of jax.distributed; returns the events of each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, PROGRAM, "jax", str(directory), str(steps), *troubles]
    running = [
        subprocess.Popen(
            [*SUPERVISE, "--hang-timeout", "20s", "--events", f"{directory}.{process}.log", "--", *command],
            env={**ENVIRONMENT, "PROCESS": str(process), "PORT": str(port), "JAX_PLATFORMS": "cpu"},
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        for process in range(2)
    ]
    said = [process.communicate()[1] for process in running]
    assert [process.returncode for process in running] == [0, 0], "\n".join(said)
    return [read_events(Path(f"{directory}.{process}.log"))[0] for process in range(2)]


@pytest.mark.sweep
@pytest.mark.parametrize(("steps", "troubles"), [(12, ["crash@3", "kill@5", "hang@8"]), (400, ["term@5"])], ids=str)
def test_programs_of_jax_with_troubles_end_as_without(
    tmp_path: Path, cli: Cli, steps: int, troubles: list[str]
) -> None:
    both = [kinds(events) for events in jax_programs(tmp_path / "run", steps, *troubles)]
    jax_programs(tmp_path / "whole", steps)

    if troubles == ["term@5"]:
        assert both == [["preempted", "finished", "ended"]] * 2
    else:
        assert [found[-2:] for found in both] == [["finished", "ended"]] * 2
        assert min(map(len, both)) >= 5, "each trouble of one process is one of the other"
        assert "hung" in both[0] + both[1]
    assert "bit for bit" in cli.output("diff", tmp_path / "run", tmp_path / "whole")
