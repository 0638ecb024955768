"""The benchmark that forks programs whose threads work, with a few forks."""

from __future__ import annotations

import sys

import pytest
from benchmarks.forks import main


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_children_inherit_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--forks", "5", "--each", "3"]) == 0
    assert "5  right" in capfd.readouterr().out
