"""Periods as policies: when to save, and how many of the steps of each period to keep."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from ..clock import Duration, format_duration, seconds
from ..errors import OptionError
from .decisions import Moment, SavePolicy
from .retention import KeepPolicy, StepInfo


@dataclass(frozen=True, kw_only=True)
class Every(SavePolicy, KeepPolicy):
    """A period, in steps or in time: a policy for ``save=`` and for ``keep=``.

    As a :class:`SavePolicy`, it saves whenever the step passes a multiple of ``steps`` (a loop that skips one saves
    right after it), or when ``secs`` have passed since the last save. As a :class:`KeepPolicy`, it keeps the newest
    ``keep`` of the first steps at or past each multiple of ``steps``, or of the steps that are ``secs`` apart.

    >>> CheckpointManagerOptions(save=[Every(steps=100, keep=5), Every(steps=1000)])  # doctest: +SKIP

    Attributes:
        steps: The period in steps.
        secs: The period in time, instead: seconds, or ``"15m"``, ``"1h"``.
        keep: How many of its steps to keep; None keeps all of them.

    Raises:
        OptionError: Not exactly one of ``steps`` and ``secs`` is given, or a number is below 1.
    """

    steps: int | None = None
    secs: Duration | None = None
    keep: int | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.secs is None):
            raise OptionError(f"{self!r}: give either steps= or secs=")
        for name, value in (("steps", self.steps), ("keep", self.keep)):
            if value is not None and (isinstance(value, bool) or not hasattr(value, "__index__") or value < 1):
                raise OptionError(f"Every({name}={value!r}): this must be a whole number of at least 1, or None")
            object.__setattr__(self, name, None if value is None else operator.index(value))
        if self.secs is not None:
            object.__setattr__(self, "secs", seconds(self.secs, name="secs"))

    @property
    def interval_secs(self) -> float | None:
        """The seconds between two saves; None for a period in steps."""
        return self.secs if isinstance(self.secs, float) else None  # __post_init__ has made it a number.

    def reason(self, moment: Moment) -> str | None:
        """Return why a save is due, or None."""
        if self.steps is not None:
            return self._why if passes(self.steps, moment.step, moment.previous) else None
        assert isinstance(self.secs, float)
        is_early = moment.last is None or 0 <= moment.now - moment.last < self.secs
        return None if is_early else self._why

    def kept(self, steps: Sequence[StepInfo]) -> dict[int, str]:
        """Return the steps to keep, each with the reason."""
        ordered = sorted(steps, key=operator.attrgetter("step"))
        found = self._at_multiples(ordered) if self.steps is not None else self._apart(ordered)
        why = "" if self.keep is None else f", one of the newest {self.keep}"
        newest = list(found.items())[-self.keep if self.keep is not None else 0 :]
        return {step: f"{reason}{why}" for step, reason in newest}

    @property
    def _why(self) -> str:
        if self.steps is None:
            return f"every {format_duration(self.interval_secs or 0)}"
        return "every step" if self.steps == 1 else f"every {self.steps} steps"

    def _at_multiples(self, ordered: Sequence[StepInfo]) -> dict[int, str]:
        """Return step 0, and the first step at or past each multiple."""
        assert self.steps is not None
        kept: dict[int, str] = {}
        passed = 0  # how many multiples the last kept step has passed; no step passes 0, where runs begin
        for info in ordered:
            if info.step // self.steps > passed or info.step == 0:
                kept[info.step], passed = self._why, info.step // self.steps
        return kept

    def _apart(self, ordered: Sequence[StepInfo]) -> dict[int, str]:
        """Return the lowest step, and each that was committed some seconds or more after the last of them.

        A higher step with an earlier time shows that the clock was set back; time is measured from it.
        """
        kept: dict[int, str] = {}
        last = math.nan  # the time of the last kept step
        for info in ordered:
            if not math.isfinite(info.time) or 0 <= info.time - last < (self.interval_secs or 0):
                continue
            kept[info.step] = f"{self._why} (the clock was set back)" if info.time < last else self._why
            last = info.time
        return kept


def passes(n: int, step: int, previous: int | None) -> bool:
    """Whether a multiple of ``n`` lies after the previous step, up to this one."""
    if previous is None:
        return step % n == 0
    return step // n != previous // n
