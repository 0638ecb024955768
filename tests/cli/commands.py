"""What tests of the command do again and again: run it, and look at what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.main import main


def said_by(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> tuple[str, str]:
    """Runs the command; returns what it says on standard output, and on standard error."""
    capsys.readouterr()  # what the test itself has said before
    found = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    assert found == status, captured.out + captured.err
    assert "Traceback" not in captured.err
    return captured.out, captured.err


def output_of(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> str:
    """Runs the command, which says nothing on standard error; returns what it prints."""
    out, err = said_by(capsys, *arguments, status=status)
    assert err == ""
    return out


def error_of(capsys: pytest.CaptureFixture[str], *arguments: object, status: int) -> str:
    """Runs the command, which fails; returns what it says on standard error, and nowhere else."""
    out, err = said_by(capsys, *arguments, status=status)
    assert out == ""
    return err


def flip_bits(checkpoint: Path) -> None:
    """Damages the data of a checkpoint, leaving the sizes of all files as they are, and files that share it whole.

    One bit is at the beginning and one in the middle, of which one may be between the arrays.
    """
    files = [path for path in checkpoint.glob("**/d/*") if path.name != "index"]
    file = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    for byte in (5, len(content) // 2):
        content[byte] ^= 1
    file.unlink()
    file.write_bytes(content)


def cut_short(file: Path) -> None:
    """Leaves the end of a file out."""
    file.write_bytes(file.read_bytes()[:-20])


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
