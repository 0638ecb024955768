"""Time, injected so that policies and crashes can be tested as tables."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Where the engine reads the time."""

    def now(self) -> float:
        """Returns the wall-clock time in seconds since 1970-01-01 UTC; it may jump in either direction."""
        ...

    def monotonic(self) -> float:
        """Returns seconds on a clock that never goes backwards; only differences have a meaning."""
        ...


class SystemClock:
    """The clock of this machine."""

    def now(self) -> float:
        """Returns the wall-clock time in seconds since 1970-01-01 UTC."""
        return time.time()

    def monotonic(self) -> float:
        """Returns seconds on a clock that never goes backwards."""
        return time.monotonic()
