"""What tests of the command do again and again: run it, and look at what it says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from holdfast.cli.main import main


def output_of(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> str:
    """Runs the command, which says nothing on standard error; returns what it prints."""
    capsys.readouterr()  # what the test itself has said before
    found = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    assert (found, captured.err) == (status, ""), captured.err
    return captured.out


def error_of(capsys: pytest.CaptureFixture[str], *arguments: object, status: int) -> str:
    """Runs the command, which fails; returns what it says on standard error, and nowhere else."""
    capsys.readouterr()  # what the test itself has said before
    found = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    assert (found, captured.out) == (status, ""), captured.out
    assert "Traceback" not in captured.err
    return captured.err


class Cli:
    """The command in this process, whose output is captured."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._capture = capture

    def output(self, *arguments: object, status: int = 0) -> str:
        return output_of(self._capture, *arguments, status=status)

    def json(self, *arguments: object, status: int = 0) -> Any:
        return json.loads(self.output(*arguments, "--json", status=status))

    def error(self, *arguments: object, status: int) -> str:
        return error_of(self._capture, *arguments, status=status)
