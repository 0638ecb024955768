"""How numbers are written in the reasons that people read."""

from __future__ import annotations

_UNITS = (("d", 86400), ("h", 3600), ("m", 60))


def duration(seconds: float) -> str:
    """Returns a duration the way an option would spell it.

    Args:
        seconds: The duration in seconds, not negative.

    >>> duration(5400), duration(90.5), duration(0.25)
    ('1h30m', '1m30.5s', '0.25s')
    """
    rest = round(seconds, 3)
    parts = []
    for unit, size in _UNITS:
        count, rest = divmod(rest, size)
        if count:
            parts.append(f"{count:.0f}{unit}")
    rest = round(rest, 3)
    if rest or not parts:
        # Below a millisecond the rounding above would leave nothing.
        parts.append(f"{rest or seconds:.10g}s")
    return "".join(parts)


def ordinal(number: int) -> str:
    """Returns a number from 1 on as its place in a sequence.

    >>> ordinal(1), ordinal(2), ordinal(11), ordinal(23)
    ('1st', '2nd', '11th', '23rd')
    """
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def measure(value: float) -> str:
    """Returns a metric's value with at most six significant digits.

    >>> measure(0.9312345678), measure(2.0)
    ('0.931235', '2')
    """
    return f"{value:.6g}"
