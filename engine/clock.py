"""The clock, which tests replace; durations, in seconds or as text such as ``"15m"``; rates, such as ``"50 MB/s"``."""

from __future__ import annotations

import contextlib
import datetime
import math
import re
import time
from typing import Protocol

from .errors import OptionError


class Clock(Protocol):
    """The source of the time."""

    def now(self) -> float:
        """Return the wall-clock time in seconds since 1970-01-01 UTC; it may jump in either direction."""

    def monotonic(self) -> float:
        """Return seconds on a clock that never goes backwards; only differences are meaningful."""


class SystemClock:
    """The clock of this machine."""

    def now(self) -> float:
        """Return the wall-clock time in seconds since 1970-01-01 UTC."""
        return time.time()

    def monotonic(self) -> float:
        """Return seconds on a clock that never goes backwards."""
        return time.monotonic()


_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)\s*")

Duration = float | int | str | datetime.timedelta


def seconds(duration: Duration, *, name: str = "duration") -> float:
    """Return a duration in seconds.

    >>> seconds("1h30m")
    5400.0
    """
    value: float | None
    if isinstance(duration, datetime.timedelta):
        value = duration.total_seconds()
    elif isinstance(duration, str):
        value = _parse(duration.strip())
    else:
        value = _number(duration)
    if value is None or not math.isfinite(value) or value <= 0:
        raise OptionError(
            f"{name}={duration!r} is not a duration: give seconds above zero, or text such as '90s', '15m', '1h30m'"
        )
    return value


def _number(value: object) -> float | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        # an int may be too large for a float
        with contextlib.suppress(OverflowError):
            return float(value)
    return None


def _parse(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        pass
    parts = _PART.findall(text)
    if not parts or _PART.sub("", text):
        return None
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


Rate = float | int | str

_SIZES = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmg]i?)?b?(?:/s)?)", re.IGNORECASE)


def bytes_per_second(rate: Rate, *, name: str = "rate") -> float:
    """Return a rate in bytes a second.

    >>> bytes_per_second("50 MB/s"), bytes_per_second("1.5GiB"), bytes_per_second(1000)
    (50000000.0, 1610612736.0, 1000.0)
    """
    if isinstance(rate, str):
        match = _RATE.fullmatch(rate.strip())
        value = None if match is None else float(match[1]) * _SIZES[(match[2] or "").lower()]
    else:
        value = _number(rate)
    if value is None or not math.isfinite(value) or value <= 0:
        raise OptionError(
            f"{name}={rate!r} is not a rate: give bytes a second above zero, or text such as '50 MB/s', '200MiB'"
        )
    return value


def format_duration(seconds: float) -> str:
    """Return a duration as an option spells it.

    >>> format_duration(5400), format_duration(90.5), format_duration(0.25)
    ('1h30m', '1m30.5s', '0.25s')
    """
    rest = round(seconds, 3)
    parts = []
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        count, rest = divmod(rest, size)
        if count:
            parts.append(f"{count:.0f}{unit}")
    rest = round(rest, 3)
    if rest or not parts:
        # Below a millisecond the rounding above would leave nothing.
        parts.append(f"{rest or seconds:.10g}s")
    return "".join(parts)
