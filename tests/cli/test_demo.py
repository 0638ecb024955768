from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, Self

import pytest
from tests.starts import Program

from holdfast.cli import demo


class Forked(Program):
    """A process as `subprocess.Popen` makes it, forked from one with its imports."""

    returncode: int

    def __init__(self, command: list[str], **_: Any) -> None:
        assert command[0] == sys.executable
        read, write = os.pipe()
        super().__init__(*command[1:], backend="jax", stdout=write, stderr=write)
        os.close(write)
        self.stdout = os.fdopen(read)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.returncode = self.wait()


@pytest.mark.xdist_group("programs")
def test_a_preempted_run_ends_as_the_uninterrupted_one(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    short = ("train.steps=60", "checkpoint.save_interval_steps=5", "logging.interval_steps=10")
    monkeypatch.setattr(demo, "RECIPE", (*demo.RECIPE[:2], *short))
    processes = SimpleNamespace(Popen=Forked, PIPE=subprocess.PIPE, STDOUT=subprocess.STDOUT)
    monkeypatch.setattr(demo, "subprocess", processes)
    assert demo.main([]) == 0
    said = capfd.readouterr().out
    assert "kill -TERM" in said
    assert "are the same, bit for bit" in said
    assert "newest" in said


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["a", "b"]) == 2
    assert "usage" in capsys.readouterr().err
