"""Periodic policies, and a save interval that is learned from a run's events to minimize the lost training time.

If a save costs ``C`` seconds and saves are ``T`` seconds apart, saving takes the fraction ``C / T`` of the time. If
failures occur every ``M`` seconds on average, each failure loses half an interval, plus the time until a save is
durable and the time to resume, neither of which depends on T. The total loss is minimal for ``T = sqrt(2 * C * M)``
(J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17(9), 1974). J. T. Daly (A higher
order estimate of the optimum checkpoint interval for restart dumps, FGCS 22(3), 2006) shows that the time to resume
does not affect the optimum, and that Young's estimate is within 10 % of the optimum if a save costs less than a seventh
of the time between failures.
"""

from __future__ import annotations

import logging
import math
import operator
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..clock import Duration, format_duration, seconds
from ..errors import OptionError
from .decisions import Moment, SavePolicy, median
from .events import RunEvents, number_in_event
from .retention import KeepPolicy, StepInfo

_logger = logging.getLogger("holdfast")

DAY = 86400.0
_SPREAD = math.log(10)  # prior standard deviation of the log failure rate
_MOST_FREQUENT = 25.0  # logarithm of the maximum number of failures per day
_RECENT = 20  # number of recent saves and resumes used for medians
_NOTABLE = 0.1  # smallest relative change of the interval that is reported
_BOUNDS = (60.0, 3600.0)  # bounds in seconds for a plain "auto"
_AUTO = re.compile(r"\s*auto(?:\s+(?P<least>\S.*?)\s+to\s+(?P<greatest>\S.*?))?\s*")


@dataclass(frozen=True, kw_only=True)
class Every(SavePolicy, KeepPolicy):
    """A policy for ``save=`` and ``keep=`` whose period is a number of steps or a duration.

    As a :class:`SavePolicy`, it saves when the step reaches or passes a multiple of ``steps``, or when ``secs`` have
    elapsed since the last save. As a :class:`KeepPolicy`, it selects the first step at or past each multiple of
    ``steps``, or steps at least ``secs`` apart, and keeps the newest ``keep`` of these steps.

    >>> CheckpointManagerOptions(save=[Every(steps=100, keep=5), Every(steps=1000)])  # doctest: +SKIP

    Attributes:
        steps: The period in steps.
        secs: The period as a duration: a number of seconds, or text such as ``"15m"`` or ``"1h"``.
        keep: The number of selected steps to keep; None keeps all of them.

    Raises:
        OptionError: Both or neither of ``steps`` and ``secs`` are given, or a number is below 1.
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
        """The interval between saves in seconds, or None if the interval is given in steps."""
        return self.secs if isinstance(self.secs, float) else None  # __post_init__ has converted ``secs`` to float

    def reason(self, moment: Moment) -> str | None:
        """Return why a save is due, or None."""
        if self.steps is not None:
            return self._why if passes(self.steps, moment.step, moment.previous) else None
        assert isinstance(self.secs, float)
        is_early = moment.last is None or 0 <= moment.now - moment.last < self.secs
        return None if is_early else self._why

    def kept(self, steps: Sequence[StepInfo]) -> dict[int, str]:
        """Return the steps to keep, each with a reason."""
        ordered = sorted(steps, key=operator.attrgetter("step"))
        if self.steps is None:
            reasons = self._apart(ordered)
        else:  # step 0, and the first step at or past each multiple
            first = {info.step // self.steps: info.step for info in reversed(ordered)}
            reasons = {step: self._why for passed, step in sorted(first.items()) if passed or step == 0}
        why = "" if self.keep is None else f", one of the newest {self.keep}"
        newest = list(reasons.items())[-self.keep if self.keep is not None else 0 :]
        return {step: f"{reason}{why}" for step, reason in newest}

    @property
    def _why(self) -> str:
        if self.steps is None:
            return f"every {format_duration(self.interval_secs or 0)}"
        return "every step" if self.steps == 1 else f"every {self.steps} steps"

    def _apart(self, ordered: Sequence[StepInfo]) -> dict[int, str]:
        """Select the lowest step, and each step committed at least one interval after the previously selected one."""
        kept: dict[int, str] = {}
        last = math.nan  # the time of the last kept step
        for info in ordered:
            if not math.isfinite(info.time) or 0 <= info.time - last < (self.interval_secs or 0):
                continue
            # If the step's time is before ``last``, the clock was set back; keep the step, and measure from its time.
            kept[info.step] = f"{self._why} (the clock was set back)" if info.time < last else self._why
            last = info.time
        return kept


def passes(n: int, step: int, previous: int | None) -> bool:
    """Return whether a multiple of ``n`` lies after the previous step and at or before this one."""
    if previous is None:
        return step % n == 0
    return step // n != previous // n


# ---- the optimal interval


def save_interval(given: Duration) -> float | tuple[float, float]:
    """Return the interval between saves in seconds, or the bounds (least, greatest) of a learned interval."""
    if not isinstance(given, str) or not given.lstrip().startswith("auto"):
        try:
            return seconds(given, name="save_interval_secs")
        except OptionError as error:
            raise OptionError(f"{error}; or 'auto', or 'auto 1m to 1h' with bounds of your own") from None
    match = _AUTO.fullmatch(given)
    if match is None:
        raise OptionError(
            f"save_interval_secs={given!r} must be 'auto', or have the least and the greatest interval, as in "
            "'auto 1m to 1h'"
        )
    if match["least"] is None:
        return _BOUNDS
    try:
        least, greatest = seconds(match["least"], name="the least"), seconds(match["greatest"], name="the greatest")
    except OptionError as error:
        raise OptionError(f"save_interval_secs={given!r}: {error}") from None
    if least > greatest:
        raise OptionError(
            f"save_interval_secs={given!r}: the least interval comes first, and {format_duration(least)} is longer "
            f"than {format_duration(greatest)}"
        )
    return least, greatest


@dataclass(frozen=True, slots=True)
class Loss:
    """The expected loss of training time with a given save interval, in seconds per day."""

    saving: float  # time lost because the loop waits for saves or is slowed down by them
    failing: float  # time lost to failures, that is, to resuming and repeating steps

    @property
    def together(self) -> float:
        return self.saving + self.failing


@dataclass(slots=True)
class _Start:
    began: float
    last: float  # time of the last event
    word: str = ""  # the event that ended this attempt, if any
    restored: int | None = None
    saved: float | None = None  # time at which the last save became durable
    failed_at: float | None = None
    program: Any = None  # token of the process


class Experience:
    """Statistics about a run's failures and the cost of its saves, learned from its events.

    A failure is an attempt that loses work because the program raised an exception after a step, crashed, hung, was
    killed, or ended without an event, for example because its machine was lost. A preemption loses no work if the run
    saved in time, and does not count as a failure.
    """

    def __init__(self, events: Iterable[Mapping[str, Any]] = ()) -> None:
        self.failures = 0
        self.bounds: tuple[float, float] | None = None  # bounds of the learned interval, as last reported
        self._starts: dict[str, _Start] = {}
        self._lost: _Start | None = None  # the last failed attempt; None once a later attempt has resumed
        self._costs: deque[float] = deque(maxlen=_RECENT)
        self._totals: deque[float] = deque(maxlen=_RECENT)
        self._gaps: deque[float] = deque(maxlen=_RECENT)
        self._returns: deque[float] = deque(maxlen=_RECENT)
        for event in events:
            self.add(event)

    # ---- statistics of the events

    @property
    def cost(self) -> float | None:
        """The median cost of recent saves, in seconds of training time; None before the first save.

        The cost of a save is how long the loop waits for it, excluding the wait for the previous save, plus the time
        lost to slower steps while the save is being written.
        """
        return median(self._costs) if self._costs else None

    @property
    def durable(self) -> float:
        """The median time from the start of a recent save until it was durable, in seconds."""
        return median(self._totals) if self._totals else 0.0

    @property
    def interval(self) -> float | None:
        """The median interval between recent saves, in seconds; None before the second save of an attempt."""
        return median(self._gaps) if self._gaps else None

    @property
    def ran(self) -> float:
        """The total running time of all attempts in seconds. An attempt ends with its last event."""
        return sum(max(0.0, start.last - start.began) for start in self._starts.values())

    @property
    def between_failures(self) -> float:
        """The expected time between failures, in seconds.

        Failures are modeled as a Poisson process. Its rate has a log-normal prior: one per day, within a factor of ten.
        The result is the inverse of the maximum a posteriori estimate of the rate.
        """
        days, variance = self.ran / DAY, _SPREAD**2
        # Bisect for the log rate at which the derivative of the log-probability is zero.
        low, high = -variance * days, min(variance * self.failures, _MOST_FREQUENT)
        for _ in range(100):
            middle = (low + high) / 2
            if self.failures - days * math.exp(middle) - middle / variance > 0:
                low = middle
            else:
                high = middle
        return DAY * math.exp(-high)

    @property
    def comeback(self) -> float:
        """The median time from a failure until the state was restored, in seconds; 0 before the first failure.

        If no event reports when the program ended, the time is measured from the start of the next attempt.
        """
        return median(self._returns) if self._returns else 0.0

    # ---- conclusions

    def best(self, least: float = 0.0, greatest: float = math.inf) -> float:
        """Return the optimal interval in seconds within the given bounds, or the lower bound before the first save."""
        if (cost := self.cost) is None:
            return least
        # An interval below ``durable`` gains nothing, because a save waits until the previous one is durable.
        return min(max(least, self.durable, math.sqrt(2 * cost * self.between_failures)), greatest)

    def loss(self, interval: float) -> Loss:
        # A save waits until the previous one is durable.
        waits = max(0.0, self.durable - interval)
        between = interval + waits
        lost = between / 2 + self.durable + self.comeback
        return Loss(
            saving=((self.cost or 0.0) + waits) / between * DAY,
            failing=lost / self.between_failures * DAY,
        )

    # ---- reading the events

    def add(self, event: Mapping[str, Any]) -> None:
        """Update the statistics with the next event of the run; ignore irrelevant events."""
        when = number_in_event(event.get("time"))
        if when is None:
            return
        start = self._start(str(event.get("run", "")), when, event.get("program"))
        match event.get("event"):
            case "saved":
                self._add_save(start, event, when)
            case "restored":
                self._add_restore(start, event, when)
            case "preempted" | "finished" | "closed" as word:
                start.word = start.word if word == "closed" and start.word else word
            case "failed":
                step = number_in_event(event.get("step"))
                trained = step is not None and step > (start.restored or 0)
                self._fail(start, when, counts=trained or start.saved is not None)
                start.word = "failed"
            case "interval":
                least, greatest = number_in_event(event.get("least")), number_in_event(event.get("greatest"))
                self.bounds = None if least is None or greatest is None else (least, greatest)
            case "ended":
                how = event.get("how")
                died = how in ("crashed", "hung") and start.word in ("", "closed")
                if died or (how == "preempted" and not start.word):
                    self._fail(start, when)
                start.word = start.word or "ended"

    def _start(self, run: str, when: float, program: Any) -> _Start:
        """Return the attempt that an event belongs to; the first event of a new attempt ends the previous one."""
        start = self._starts.get(run)
        if start is None:
            before = next(reversed(self._starts.values()), None)
            if before is not None and not before.word:
                # A running program may create another manager, for example in a notebook. This is not a failure.
                lives = program is not None and program == before.program
                self._fail(before, None, counts=not lives)
                before.word = "closed" if lives else "lost"
            start = self._starts[run] = _Start(when, when, program=program)
        start.began, start.last = min(start.began, when), max(start.last, when)
        return start

    def _fail(self, start: _Start, when: float | None, *, counts: bool = True) -> None:
        if counts:
            self.failures += 1
            start.failed_at = when
            self._lost = start

    def _add_save(self, start: _Start, event: Mapping[str, Any], when: float) -> None:
        blocked, total = number_in_event(event.get("blocked_seconds")), number_in_event(event.get("total_seconds"))
        if blocked is None or total is None:
            return
        # Both durations begin with the call of save(), which first waits until the previous save is durable.
        waited = 0.0 if start.saved is None else min(blocked, max(0.0, start.saved - (when - total)))
        self._costs.append(blocked - waited + (number_in_event(event.get("slowed_seconds")) or 0.0))
        self._totals.append(max(0.0, total - waited))
        if start.saved is not None and when > start.saved:
            self._gaps.append(when - start.saved)
        start.saved = when

    def _add_restore(self, start: _Start, event: Mapping[str, Any], when: float) -> None:
        step = event.get("step")
        start.restored = step if isinstance(step, int) else start.restored
        lost, self._lost = self._lost, None
        if lost is not None and lost is not start:
            self._returns.append(max(0.0, when - (start.began if lost.failed_at is None else lost.failed_at)))


@dataclass
class LearnedInterval(SavePolicy):
    """Learns from a run's events which save interval, within bounds, loses the least training time.

    The first interval is the lower bound, because the cost of a save is not yet known.
    """

    least: float
    greatest: float
    experience: Experience = field(default_factory=Experience, compare=False, repr=False)
    # The current trigger, which is replaced rather than modified because events arrive on the saving thread.
    _now: Every = field(init=False, compare=False, repr=False)
    _reported: float | None = field(default=None, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        self.learn(())

    @property
    def interval_secs(self) -> float:
        return self._now.interval_secs or 0.0

    def reason(self, moment: Moment) -> str | None:
        if self._now.reason(moment) is None:
            return None
        return f"every {_short(self.interval_secs)}, learned"

    def follow(self, events: RunEvents) -> None:
        """Learn from the run's earlier events and from every new event."""
        self.learn(events.earlier())
        events.add_listener(lambda event: self.learn([event]))

    def learn(self, events: Iterable[Mapping[str, Any]]) -> None:
        for event in events:
            self.experience.add(event)
        self._now = Every(secs=self.experience.best(self.least, self.greatest))

    def report(self, events: RunEvents, directory: object) -> None:
        """Report the interval in the log and as an event if it has changed significantly since the last report."""
        experience, now = self.experience, self.interval_secs
        if experience.cost is None or (self._reported is not None and abs(now / self._reported - 1) < _NOTABLE):
            return
        self._reported = now
        failures = "1 failure" if experience.failures == 1 else f"{experience.failures} failures"
        why = (
            f"a save costs {_short(experience.cost)} and is durable after {_short(experience.durable)}; {failures} in "
            f"{_short(experience.ran)}, so the next one is expected in {_short(experience.between_failures)}"
        )
        unbounded = experience.best()
        if abs(unbounded / now - 1) >= _NOTABLE:
            why += f"; {_short(unbounded)} would lose least, without the bounds"
        _logger.info("%s: saves every %s from now on: %s", directory, format_duration(round(now, 1)), why)
        events.write(
            "interval",
            seconds=round(now, 3),
            least=self.least,
            greatest=self.greatest,
            cost_seconds=round(experience.cost, 6),
            failures=experience.failures,
            between_failures_seconds=round(experience.between_failures, 3),
            why=why,
        )


def _short(duration: float) -> str:
    """Format a duration in whole seconds or, below 10 seconds, with two significant digits.

    >>> _short(151.2), _short(0.0123)
    ('2m31s', '0.012s')
    """
    return format_duration(round(duration) if duration >= 10 else float(f"{duration:.2g}"))
