from __future__ import annotations

import fcntl
import os
import re
import signal
from pathlib import Path

import pytest
from tests.cli.commands import output_of
from tests.starts import Program

import holdfast as hf

pytestmark = pytest.mark.xdist_group("programs")

SMALL = [
    "model.hidden=[8]",
    "train={steps: 800, eval_interval_steps: 400}",
    "checkpoint={save_interval_steps: 50, max_to_keep: 3}",
    "logging.interval_steps=1",
]


def run_until(directory: Path, step: int, number: signal.Signals) -> tuple[int, list[str]]:
    """Sends a signal to ``holdfast run`` when it reports a step; returns its status, and its lines without the time."""
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)  # the program is at most some dozens of lines ahead
    command = ["-m", "holdfast.cli.main", "run", "flax_digits", *SMALL]
    program = Program(*command, backend="jax", cwd=directory, stdout=write, stderr=f"{directory}/errors")
    os.close(write)
    lines: list[str] = []
    with os.fdopen(read) as output:
        for line in output:
            lines.append(line.split(" ", 1)[1].rstrip("\n"))
            if re.match(rf"step {step} of", lines[-1]):
                program.send_signal(number)
    return program.wait(), lines


def saved_steps(lines: list[str]) -> list[int]:
    return [int(found[1]) for line in lines if (found := re.match(r"saved step (\d+) \(", line))]


def test_preempted_killed_and_resumed_by_the_same_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, lines = run_until(tmp_path, 100, signal.SIGTERM)
    assert (status, (tmp_path / "errors").read_text()) == (75, "")
    assert lines[0] == "flax_digits: 800 steps of flax_digits in runs/flax_digits"
    assert lines[1].startswith("started fresh: ")
    step = saved_steps(lines)[-1]
    assert 100 <= step < 400
    assert re.fullmatch(
        rf"saved step {step} \(preempted\): [\d.]+ kB, blocked [\d.]+ s, [\d.]+ s in all, [\d.]+ GB/s",
        next(line for line in lines if line.startswith(f"saved step {step} ")),
    )
    assert lines[-1].endswith(f"resumes from step {step} of 800 in runs/flax_digits/checkpoints")

    status, killed = run_until(tmp_path, step + 200, signal.SIGKILL)
    assert status == -signal.SIGKILL
    assert f"resumed from step {step} in {tmp_path}/runs/flax_digits/checkpoints" in killed

    monkeypatch.chdir(tmp_path)
    lines = [line.split(" ", 1)[1] for line in output_of(capsys, "run", "flax_digits", *SMALL).splitlines()]
    start = int(next(line for line in lines if line.startswith("resumed from step ")).split()[3])
    assert start >= saved_steps(killed)[-1]
    assert lines[-1].endswith("step 800 of 800 is saved in runs/flax_digits/checkpoints")
    with hf.CheckpointManager(tmp_path / "runs/flax_digits/checkpoints") as manager:
        assert manager.all_steps() == [700, 750, 800]
