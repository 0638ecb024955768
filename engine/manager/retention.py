"""Retention rules: pure functions that return the steps to keep and the reasons.

A step is kept if any rule keeps it. Rules depend only on the list of steps, so they keep the same steps after a
restart. "Newest" always means the highest step rather than the latest time, because clocks differ and may jump.
"""

from __future__ import annotations

import abc
import heapq
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from .metrics import BestMode, Metric, metric_name, metric_value

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from ..format import CheckpointRecord
    from ..steps import StepEntry

NEWEST = "newest"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInfo:
    """A committed checkpoint, as passed to a :class:`KeepPolicy`.

    Attributes:
        step: The number of optimizer updates completed when the checkpoint was saved.
        time: The time of the commit in seconds since 1970-01-01 UTC, according to the saving machine's clock.
        metrics: The metrics stored with the checkpoint, or None.
        pinned: Whether the checkpoint is kept even if no policy keeps it.
        items: The names of the items in the checkpoint.
    """

    step: int
    time: float
    metrics: Mapping[str, Any] | None = None
    pinned: bool = False
    items: Collection[str] = ()
    # Caches the last requested metric, so that a metric function is not called again for every step at each save.
    _value: tuple[Metric, float | None] | None = field(default=None, init=False, repr=False, compare=False)

    def value(self, metric: Metric) -> float | None:
        """Return one metric as a number, or None if it is missing or not a number.

        Args:
            metric: The name of the metric, or a function of the metrics.
        """
        cached = self._value
        if cached is None or cached[0] is not metric:
            cached = metric, metric_value(self.metrics, metric)
            object.__setattr__(self, "_value", cached)
        return cached[1]


def info_of(step: int, record: CheckpointRecord) -> StepInfo:
    return StepInfo(
        step=step, time=record.time, metrics=record.metrics, pinned=record.pinned, items=frozenset(record.items)
    )


def infos_of(entries: Iterable[StepEntry]) -> list[StepInfo]:
    """Return the intact steps of a directory as :class:`StepInfo` objects for the retention rules."""
    return [info_of(entry.step, entry.record) for entry in entries if entry.record is not None]


# ---- rules


@runtime_checkable
class KeepPolicy(Protocol):
    """A policy for ``keep=`` that selects steps to keep. Other policies may keep more; the newest step is always kept.

    Steps that no policy keeps are permanently deleted, so a policy should still select the same steps after the
    others have been deleted.

    >>> class KeepEven(KeepPolicy):
    ...     def kept(self, steps):
    ...         return {info.step: "even" for info in steps if info.step % 2 == 0}
    """

    @abc.abstractmethod
    def kept(self, steps: Sequence[StepInfo]) -> dict[int, str]:
        """Return the steps that this policy keeps, each mapped to a reason that is shown to users.

        Args:
            steps: All committed steps, in any order.
        """


@dataclass(frozen=True)
class KeepAll:
    def kept(self, steps: Sequence[StepInfo]) -> dict[int, str]:
        return {info.step: "nothing limits what is kept" for info in steps}


@dataclass(frozen=True)
class KeepLatest:
    n: int

    def kept(self, steps: Sequence[StepInfo]) -> dict[int, str]:
        newest = sorted((info.step for info in steps), reverse=True)[: self.n]
        return {step: f"one of the newest {self.n}" if index else NEWEST for index, step in enumerate(newest)}


@dataclass(frozen=True)
class KeepBest:
    """Keeps the ``n`` best steps; newer steps win ties. If too few have the metric, keeps the newest others as well."""

    n: int
    metric: Metric
    mode: BestMode = "max"

    def kept(self, steps: Sequence[StepInfo]) -> dict[int, str]:
        name = metric_name(self.metric)
        kept = {}
        for number, (step, value) in enumerate(_ranked(steps, self.metric, self.mode, self.n), start=1):
            rank = "best" if number == 1 else f"{_ordinal(number)} best"
            kept[step] = f"{rank} {name} ({value:.6g})"
        if missing := self.n - len(kept):
            others = (info.step for info in steps if info.value(self.metric) is None)
            reason = f"one of {self.n}, as too few have {name}"
            kept.update(dict.fromkeys(heapq.nlargest(missing, others), reason))
        return kept


@dataclass(frozen=True)
class KeepItem:
    """Keeps the newest step that has a given item; other steps may lack the item."""

    item: str

    def kept(self, steps: Sequence[StepInfo]) -> dict[int, str]:
        newest = max((info.step for info in steps if self.item in info.items), default=None)
        return {} if newest is None else {newest: f"the newest with {self.item}"}


@dataclass(frozen=True)
class KeepWithoutMetrics:
    def kept(self, steps: Sequence[StepInfo]) -> dict[int, str]:
        return {info.step: "no metrics" for info in steps if not info.metrics}


@dataclass(frozen=True)
class KeepSteps:
    steps: Collection[int]

    def kept(self, steps: Sequence[StepInfo]) -> dict[int, str]:
        return {info.step: "chosen step" for info in steps if info.step in self.steps}


# ---- all rules


def reasons(steps: Sequence[StepInfo], rules: Sequence[KeepPolicy]) -> dict[int, tuple[str, ...]]:
    """Return the steps to keep in ascending order, each with all the reasons: a rule, or it is the newest or pinned."""
    if not steps:
        return {}
    newest, pinned = max(info.step for info in steps), {info.step: "pinned" for info in steps if info.pinned}
    by_step: dict[int, list[str]] = {}
    for kept in ({newest: NEWEST}, *(rule.kept(steps) for rule in rules), pinned):
        for step, reason in kept.items():
            by_step.setdefault(step, []).append(reason)
    return {step: tuple(dict.fromkeys(by_step[step])) for step in sorted(by_step)}


def newest_with(item: str, steps: Sequence[StepInfo], before: float = math.inf) -> int | None:
    """Return the newest step below ``before`` that has an item, or None. ``steps`` must be in ascending order."""
    return next((info.step for info in reversed(steps) if item in info.items and info.step < before), None)


def best(steps: Sequence[StepInfo], metric: Metric, mode: BestMode = "max") -> int | None:
    """Return the step with the best value of a metric, or the newest of several equally good steps."""
    ranked = _ranked(steps, metric, mode, 1)
    return ranked[0][0] if ranked else None


def _ranked(steps: Sequence[StepInfo], metric: Metric, mode: BestMode, n: int) -> list[tuple[int, float]]:
    sign = 1 if mode == "max" else -1
    # Newest first, because newer steps are usually better, and nlargest is faster if the best values come first.
    ranks = ((sign * value, info.step) for info in reversed(steps) if (value := info.value(metric)) is not None)
    return [(step, sign * rank) for rank, step in heapq.nlargest(n, ranks)]


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
