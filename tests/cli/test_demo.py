from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import holdfast as hf
from holdfast.cli.demo import _same, main


def make(directory: Path, name: str, value: object) -> str:
    hf.save(directory / name / "checkpoints" / "9", {"a": 1})
    hf.save(directory / name / "checkpoints" / "10", {"tree": [{"x": value}, 1.0]})
    return str(directory / name)


def test_equal_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = (make(tmp_path, name, np.array([0.0, np.nan])) for name in ("one", "other"))

    assert _same(one, other)
    assert "2 leaves, 24 bytes, all equal" in capsys.readouterr().out


@pytest.mark.parametrize(
    "value", [np.array([-0.0]), np.array([0.0], np.float32), np.array([0]), np.array([[0.0]]), 0.0, None]
)
def test_runs_that_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str], value: object) -> None:
    assert not _same(make(tmp_path, "one", np.array([0.0])), make(tmp_path, "other", value))
    captured = capsys.readouterr()
    assert captured.out.startswith("  tree/0/x: ")
    assert captured.err == "demo: 1 of 2 leaves differ\n"


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["a", "b"]) == 2
    assert "usage" in capsys.readouterr().err
