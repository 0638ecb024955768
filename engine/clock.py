"""A clock that tests can replace, and functions that parse and format durations, rates and sizes."""

from __future__ import annotations

import contextlib
import datetime
import math
import re
import time
from typing import Protocol

from .errors import OptionError


class Clock(Protocol):
    """Protocol for time sources."""

    def now(self) -> float:
        """Return the wall-clock time in seconds since 1970-01-01 UTC; it may jump in either direction."""

    def monotonic(self) -> float:
        """Return the time in seconds on a clock that never goes backwards; only differences are meaningful."""


class SystemClock:
    """The system clock."""

    def now(self) -> float:
        """Return the wall-clock time in seconds since 1970-01-01 UTC."""
        return time.time()

    def monotonic(self) -> float:
        """Return the time in seconds on a clock that never goes backwards."""
        return time.monotonic()


_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PART = r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)\s*"

Duration = float | int | str | datetime.timedelta


def seconds(duration: Duration, *, name: str = "duration") -> float:
    """Convert a duration, such as "1h30m", to seconds."""
    value: object = duration
    if isinstance(duration, datetime.timedelta):
        value = duration.total_seconds()
    elif isinstance(duration, str):
        try:
            value = float(duration)
        except ValueError:
            parts = [] if re.sub(_PART, "", duration.strip()) else re.findall(_PART, duration)
            value = sum(float(number) * _UNITS[unit] for number, unit in parts)
    return _positive(
        value, f"{name}={duration!r} is not a duration: give seconds above zero, or text such as '90s', '15m', '1h30m'"
    )


def _positive(value: object, refusal: str) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):  # an int may be too large for a float
            if math.isfinite(value) and value > 0:
                return float(value)
    raise OptionError(refusal)


Rate = float | int | str

_SIZES = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}
_RATE = r"(\d+(?:\.\d+)?)\s*(?:([kmg]i?)?b?(?:/s)?)"


def bytes_per_second(rate: Rate, *, name: str = "rate") -> float:
    """Convert a rate, such as "50 MB/s", "1.5GiB" or 1000, to bytes per second."""
    value: object = rate
    if isinstance(rate, str):
        match = re.fullmatch(_RATE, rate.strip(), re.IGNORECASE)
        value = None if match is None else float(match[1]) * _SIZES[(match[2] or "").lower()]
    return _positive(
        value, f"{name}={rate!r} is not a rate: give bytes a second above zero, or text such as '50 MB/s', '200MiB'"
    )


def format_size(number: int) -> str:
    """Format a number of bytes with a decimal unit, such as "1.2 MB"."""
    if number < 1000:
        return f"{number} B"
    value = number / 1000
    for unit in ("kB", "MB", "GB", "TB"):
        if value < 999.95:
            return f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} PB"


def format_duration(seconds: float) -> str:
    """Format a duration in the syntax that options accept, such as "1h30m", "1m30.5s" or "0.25s"."""
    rest = round(seconds, 3)
    parts = []
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        count, rest = divmod(rest, size)
        if count:
            parts.append(f"{count:.0f}{unit}")
    rest = round(rest, 3)
    if rest or not parts:
        # If rounding has reduced a tiny duration to zero, format the original value.
        parts.append(f"{rest or seconds:.10g}s")
    return "".join(parts)
