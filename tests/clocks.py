"""Clocks for tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping


class TickingClock:
    """Goes on by some seconds whenever it is asked for the time of day.

    Args:
        time: The time at the beginning, in seconds.
        by: How many seconds it advances.
    """

    def __init__(self, time: float = 1000.0, by: float = 1.0) -> None:
        self.time = time
        self._by = by

    def now(self) -> float:
        self.time += self._by
        return self.time

    def monotonic(self) -> float:
        return self.time


class FakeClock:
    """Shows the time that the test sets.

    Args:
        time: The time at the beginning, in seconds.
    """

    def __init__(self, time: float = 1e9) -> None:
        self.wall = self.running = time

    def now(self) -> float:
        return self.wall

    def monotonic(self) -> float:
        return self.running

    def sleep(self, seconds: float) -> None:
        self.wall += seconds
        self.running += seconds


class Waiting(threading.Condition):
    """A condition on which waiting moves a clock, and does what happens at that time.

    The clock goes to the end of the wait, or to the first time before it at which something happens.
    """

    def __init__(self, happens: Mapping[float, Callable[[], None]] | None = None) -> None:
        super().__init__()
        self.now = 0.0
        self._happens = happens or {}

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        assert timeout > 0
        self.now = min([self.now + timeout, *(time for time in self._happens if time > self.now)])
        self._happens.get(self.now, lambda: None)()
        return True
