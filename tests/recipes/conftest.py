"""Every recipe runs in an empty directory, with its log lines captured."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from tests.cli.conftest import cli as cli


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO, "holdfast")
