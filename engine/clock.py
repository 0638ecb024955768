"""The clock, which tests replace; durations such as ``"15m"``; rates and sizes; the progress of a long call."""

from __future__ import annotations

import contextlib
import datetime
import math
import re
import time
from typing import Protocol, Self

from .errors import OptionError
from .forks import Lock


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
_PART = r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)\s*"

Duration = float | int | str | datetime.timedelta


def seconds(duration: Duration, *, name: str = "duration") -> float:
    """Return a duration in seconds, such as 5400.0 for "1h30m"."""
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
        with contextlib.suppress(OverflowError):  # An int may be too large for a float.
            if math.isfinite(value) and value > 0:
                return float(value)
    raise OptionError(refusal)


Rate = float | int | str

_SIZES = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}
_RATE = r"(\d+(?:\.\d+)?)\s*(?:([kmg]i?)?b?(?:/s)?)"


def bytes_per_second(rate: Rate, *, name: str = "rate") -> float:
    """Return a rate, such as "50 MB/s", "1.5GiB" or 1000, in bytes a second."""
    value: object = rate
    if isinstance(rate, str):
        match = re.fullmatch(_RATE, rate.strip(), re.IGNORECASE)
        value = None if match is None else float(match[1]) * _SIZES[(match[2] or "").lower()]
    return _positive(
        value, f"{name}={rate!r} is not a rate: give bytes a second above zero, or text such as '50 MB/s', '200MiB'"
    )


def format_size(number: int) -> str:
    """Return bytes as readable text, in powers of 1000, such as "1.2 MB"."""
    if number < 1000:
        return f"{number} B"
    value = float(number)
    for unit in ("", "kB", "MB", "GB", "TB"):
        if unit and value < 999.95:
            return f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} PB"


def format_duration(seconds: float) -> str:
    """Return a duration as an option spells it, such as "1h30m", "1m30.5s" or "0.25s"."""
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


class Progress(Protocol):
    """Receives the progress of a long call in bytes; several threads of the call use it at the same time, and often.

    An exception of a method ends the call, as an interrupt would. When a call returns, it has advanced by all the bytes
    that it has expected.

    >>> import tempfile, numpy as np
    >>> import holdfast as hf
    >>> class Percent:
    ...     expected = done = 0
    ...     def expect(self, nbytes: int) -> None:
    ...         self.expected += nbytes
    ...     def advance(self, nbytes: int) -> None:
    ...         self.done += nbytes
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     report = hf.save(f"{directory}/a", {"w": np.arange(3)})
    ...     percent = Percent()
    ...     hf.verify(f"{directory}/a", progress=percent).ok, percent.done == percent.expected > 24
    (True, True)
    """

    def expect(self, nbytes: int) -> None:
        """Add to the bytes that the call will process; called before they are, and perhaps several times."""

    def advance(self, nbytes: int) -> None:
        """Add to the bytes that the call has processed."""


class Unheard:
    """Ignores the progress of a call."""

    def expect(self, nbytes: int) -> None:
        return

    def advance(self, nbytes: int) -> None:
        return


UNHEARD = Unheard()


class Portion:
    """A part of a call, of so many bytes, all of which are reported once it has succeeded; work has other units."""

    def __init__(self, progress: Progress, nbytes: int, units: int = 0) -> None:
        self._progress = progress
        self._nbytes = nbytes
        self._units = units
        self._done = self._reported = 0
        self._lock = Lock()

    def work(self, units: int) -> None:
        """Add to the expected work."""
        with self._lock:
            self._units += units

    def advance(self, units: int) -> None:
        """Add to the work that is done."""
        with self._lock:
            self._done = min(self._done + units, self._units)
            self._report(self._nbytes * self._done // max(1, self._units))

    def _report(self, reached: int) -> None:
        if reached > self._reported:
            new, self._reported = reached - self._reported, reached
            self._progress.advance(new)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            with self._lock:
                self._report(self._nbytes)
