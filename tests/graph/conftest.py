"""A clock that tests of object graphs set."""

from __future__ import annotations

import pytest
from tests.clocks import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    """A clock that shows 3 seconds."""
    return FakeClock(3.0)
