"""Fixtures of the tests of object graphs: a place in memory, and a clock that the test sets."""

from __future__ import annotations

import pytest


class Hands:
    """A clock whose hands are moved by the test.

    Args:
        time: The time it shows.
    """

    def __init__(self, time: float) -> None:
        self.time = time

    def now(self) -> float:
        """Returns the time it shows."""
        return self.time

    def monotonic(self) -> float:
        """Returns the time it shows."""
        return self.time


@pytest.fixture
def clock() -> Hands:
    """A clock that shows 3 seconds."""
    return Hands(3.0)
