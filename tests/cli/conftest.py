from __future__ import annotations

import pytest
from tests.cli.commands import Cli


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)
