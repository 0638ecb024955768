from __future__ import annotations

import fcntl
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.starts import Program

import holdfast as hf
from holdfast.cli.main import main

pytestmark = pytest.mark.xdist_group("programs")

SMALL = [
    "model.hidden=[8]",
    "train={steps: 800, eval_interval_steps: 400}",
    "checkpoint={save_interval_steps: 50, max_to_keep: 3}",
    "logging.interval_steps=1",
]


class Command:
    """``holdfast run`` in a process of its own.

    Args:
        directory: Its current directory.
        arguments: What follows ``holdfast run``.
    """

    def __init__(self, directory: Path, *arguments: str) -> None:
        self.lines: list[str] = []
        self._errors = directory / "errors"
        self._errors.write_text("")
        read, write = os.pipe()
        fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)  # the program is at most some dozens of lines ahead
        command = ["-m", "holdfast.cli.main", "run", *arguments]
        self._program = Program(*command, backend="jax", cwd=directory, stdout=write, stderr=str(self._errors))
        os.close(write)
        self._output = os.fdopen(read)

    def _read(self) -> Iterator[str]:
        for line in self._output:
            text = line.split(" ", 1)[1].rstrip("\n")  # without the time of day
            self.lines.append(text)
            yield text

    def send_at(self, step: int, number: signal.Signals) -> None:
        """Waits until a step is reported, and sends a signal."""
        for line in self._read():
            found = re.match(r"step (\d+) of", line)
            if found and int(found[1]) >= step:
                self._program.send_signal(number)
                return
        raise AssertionError(f"step {step} was not reported: {self.lines}")

    def end(self) -> tuple[int, str]:
        """Waits for the end, and returns the exit status and what was written to standard error."""
        with self._output:
            for _ in self._read():
                pass
        return self._program.wait(), self._errors.read_text()


def saved_steps(lines: list[str]) -> list[int]:
    return [int(found[1]) for line in lines if (found := re.match(r"saved step (\d+) \(", line))]


def test_preempted_killed_and_resumed_by_the_same_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    preempted = Command(tmp_path, "flax_digits", *SMALL)
    preempted.send_at(100, signal.SIGTERM)
    assert preempted.end() == (75, "")
    assert preempted.lines[0] == "flax_digits: 800 steps of flax_digits in runs/flax_digits"
    assert preempted.lines[1].startswith("started fresh: ")
    step = saved_steps(preempted.lines)[-1]
    assert 100 <= step < 400
    assert re.fullmatch(
        rf"saved step {step} \(preempted\): [\d.]+ kB, blocked [\d.]+ s, [\d.]+ s in all, [\d.]+ GB/s",
        next(line for line in preempted.lines if line.startswith(f"saved step {step} ")),
    )
    assert preempted.lines[-1].endswith(f"resumes from step {step} of 800 in runs/flax_digits/checkpoints")

    killed = Command(tmp_path, "flax_digits", *SMALL)
    killed.send_at(step + 200, signal.SIGKILL)
    assert killed.end()[0] == -signal.SIGKILL
    assert f"resumed from step {step} in {tmp_path}/runs/flax_digits/checkpoints" in killed.lines
    assert saved_steps(killed.lines)

    monkeypatch.chdir(tmp_path)
    assert main(["run", "flax_digits", *SMALL]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = [line.split(" ", 1)[1] for line in out.splitlines()]
    start = int(next(line for line in lines if line.startswith("resumed from step ")).split()[3])
    assert start >= saved_steps(killed.lines)[-1]
    assert lines[-1].endswith("step 800 of 800 is saved in runs/flax_digits/checkpoints")
    with hf.CheckpointManager(tmp_path / "runs/flax_digits/checkpoints") as manager:
        assert manager.all_steps() == [700, 750, 800]
