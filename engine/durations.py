"""Durations as people write them: seconds, or ``"15m"``, ``"1h"``, ``"1h30m"``."""

from __future__ import annotations

import contextlib
import datetime
import math
import re

from .errors import OptionError

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)\s*")

Duration = float | int | str | datetime.timedelta


def seconds(duration: Duration, *, name: str = "duration") -> float:
    """Returns a duration in seconds.

    Args:
        duration: Seconds as a number, a ``timedelta``, or text such as ``"90s"``, ``"15m"``, ``"1h30m"``, ``"2d"``.
        name: The option's name, for the error message.

    Returns:
        The duration in seconds, greater than zero.

    Raises:
        OptionError: It is something else, the text cannot be read, or the duration is not positive and finite.

    >>> seconds("1h30m")
    5400.0
    """
    value = None
    if isinstance(duration, datetime.timedelta):
        value = duration.total_seconds()
    elif isinstance(duration, str):
        value = _parse(duration.strip())
    elif isinstance(duration, (int, float)) and not isinstance(duration, bool):
        # A whole number may be too large for a float.
        with contextlib.suppress(OverflowError):
            value = float(duration)
    if value is None or not math.isfinite(value) or value <= 0:
        raise OptionError(
            f"{name}={duration!r} is not a duration: give seconds above zero, or text such as '90s', '15m', '1h30m'"
        )
    return value


def _parse(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        pass
    parts = _PART.findall(text)
    if not parts or _PART.sub("", text):
        return None
    return sum(float(number) * _UNITS[unit] for number, unit in parts)
