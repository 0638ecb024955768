"""What to keep: a union of rules, each of which names the steps it keeps and says why.

No rule looks at anything but the list of steps, so a restart changes nothing, and applying the rules again to what they
kept keeps all of it. "Newest" always means the highest step, never the latest time: clocks differ and jump.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from .checks import metric_and_mode, positive_seconds, whole_number
from .metrics import Metric, Mode, metric_name, metric_value
from .wording import duration, measure, ordinal

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

NEWEST = "newest"


@dataclass(frozen=True, kw_only=True)
class StepInfo:
    """What retention knows of one committed checkpoint.

    Attributes:
        step: The number of optimizer updates in it.
        time: When it was committed, in seconds since 1970-01-01 UTC, by the clock of the machine that wrote it.
        metrics: The metrics stored with it, or None.
        pinned: Whether somebody asked for it to stay.
    """

    step: int
    time: float
    metrics: Mapping[str, Any] | None = None
    pinned: bool = False


class Rule(Protocol):
    """Names the steps that must be kept."""

    def keep(self, steps: Sequence[StepInfo]) -> dict[int, str]:
        """Returns the steps that this rule keeps, each with the reason for it.

        Args:
            steps: All committed steps, each once, in any order.
        """
        ...


@dataclass(frozen=True)
class KeepAll:
    """Keeps everything."""

    def keep(self, steps: Sequence[StepInfo]) -> dict[int, str]:
        """Returns all steps."""
        return {info.step: "nothing limits what is kept" for info in steps}


@dataclass(frozen=True)
class KeepLatest:
    """Keeps the newest steps.

    Attributes:
        n: How many, at least 1.
    """

    n: int

    def __post_init__(self) -> None:
        whole_number(self, "n", self.n)

    def keep(self, steps: Sequence[StepInfo]) -> dict[int, str]:
        """Returns the ``n`` highest steps."""
        newest = sorted((info.step for info in steps), reverse=True)[: self.n]
        return {step: f"one of the newest {self.n}" if place else NEWEST for place, step in enumerate(newest)}


@dataclass(frozen=True)
class KeepBest:
    """Keeps the steps with the best values of a metric; a step without a value is no candidate, and not kept for it.

    Attributes:
        n: How many, at least 1.
        metric: The metric's name, or a function of the metrics.
        mode: Whether larger or smaller is better.
    """

    n: int
    metric: Metric
    mode: Mode = "max"

    def __post_init__(self) -> None:
        whole_number(self, "n", self.n)
        metric_and_mode(self, self.metric, self.mode)

    def keep(self, steps: Sequence[StepInfo]) -> dict[int, str]:
        """Returns the ``n`` best steps; of two with the same value, the newer one is better."""
        name = metric_name(self.metric)
        kept = {}
        for place, (step, value) in enumerate(_ranked(steps, self.metric, self.mode)[: self.n], start=1):
            rank = "best" if place == 1 else f"{ordinal(place)} best"
            kept[step] = f"{rank} {name} ({measure(value)})"
        return kept


@dataclass(frozen=True)
class KeepPeriod:
    """Keeps every step that is a multiple of a number of steps, 0 among them.

    Attributes:
        period: In steps, at least 1.
    """

    period: int

    def __post_init__(self) -> None:
        whole_number(self, "period", self.period)

    def keep(self, steps: Sequence[StepInfo]) -> dict[int, str]:
        """Returns the multiples of the period."""
        reason = "every step" if self.period == 1 else f"every {self.period} steps"
        return {info.step: reason for info in steps if info.step % self.period == 0}


@dataclass(frozen=True)
class KeepTimeInterval:
    """Keeps one step in every interval of time: the oldest, and each committed an interval or more after the last kept.

    A clock that was set back in between shows as a step older than the last kept one, though its number is higher; it
    is kept, and time is measured from it.

    Attributes:
        seconds: The interval in seconds, above zero.
    """

    seconds: float

    def __post_init__(self) -> None:
        positive_seconds(self, self.seconds)

    def keep(self, steps: Sequence[StepInfo]) -> dict[int, str]:
        """Returns the steps that are an interval apart, going upwards from the lowest."""
        reason = f"every {duration(self.seconds)}"
        kept: dict[int, str] = {}
        last: float | None = None
        for info in sorted(steps, key=lambda info: info.step):
            if not math.isfinite(info.time):
                continue
            if last is None or info.time - last >= self.seconds:
                kept[info.step] = reason
            elif info.time < last:
                kept[info.step] = f"{reason} (the clock was set back)"
            else:
                continue
            last = info.time
        return kept


@dataclass(frozen=True)
class KeepPinned:
    """Keeps the steps that somebody pinned."""

    def keep(self, steps: Sequence[StepInfo]) -> dict[int, str]:
        """Returns the pinned steps."""
        return {info.step: "pinned" for info in steps if info.pinned}


@dataclass(frozen=True)
class KeepWithoutMetrics:
    """Keeps the steps that no metrics were recorded for."""

    def keep(self, steps: Sequence[StepInfo]) -> dict[int, str]:
        """Returns the steps without any metrics."""
        return {info.step: "no metrics" for info in steps if not info.metrics}


@dataclass(frozen=True)
class KeepSteps:
    """Keeps chosen steps.

    Attributes:
        steps: Their numbers; those that were never saved do no harm.
    """

    steps: Collection[int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", frozenset(self.steps))

    def keep(self, steps: Sequence[StepInfo]) -> dict[int, str]:
        """Returns those of the chosen steps that exist."""
        return {info.step: "chosen step" for info in steps if info.step in self.steps}


def reasons(steps: Sequence[StepInfo], rules: Sequence[Rule]) -> dict[int, tuple[str, ...]]:
    """Returns the steps to keep, which are those that any rule keeps, and the newest one in any case.

    Args:
        steps: All committed steps, each once, in any order.
        rules: The rules; without any, everything is kept.

    Returns:
        For every step to keep, in ascending order, why it is kept, in the order of the rules. A step that is not among
        them may be deleted.
    """
    if not steps:
        return {}
    found: dict[int, list[str]] = {max(info.step for info in steps): [NEWEST]}
    for rule in rules or (KeepAll(),):
        for step, reason in rule.keep(steps).items():
            said = found.setdefault(step, [])
            if reason not in said:
                said.append(reason)
    return {step: tuple(found[step]) for step in sorted(found)}


def best(steps: Sequence[StepInfo], metric: Metric, mode: Mode = "max") -> int | None:
    """Returns the step with the best value of a metric; of several with the same value, the newest.

    Args:
        steps: All committed steps, each once, in any order.
        metric: The metric's name, or a function of the metrics.
        mode: Whether larger or smaller is better.

    Returns:
        The step, or None when no step has a value: it is missing, NaN or not a number everywhere.
    """
    ranked = _ranked(steps, metric, mode)
    return ranked[0][0] if ranked else None


def _ranked(steps: Sequence[StepInfo], metric: Metric, mode: Mode) -> list[tuple[int, float]]:
    sign = 1.0 if mode == "max" else -1.0
    valued = [(info.step, value) for info in steps if (value := metric_value(info.metrics, metric)) is not None]
    return sorted(valued, key=lambda pair: (sign * pair[1], pair[0]), reverse=True)
