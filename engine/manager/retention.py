"""What to keep: a union of pure rules, each of which names the steps that it keeps, with reasons.

Rules see the list of steps only, so a restart changes nothing, and the rules keep all of what they have kept. "Newest"
always means the highest step, never the latest time: clocks differ and jump.

:func:`reasons` evaluates the rules on all steps. A run that saves again and again asks :class:`Retention`, which
reaches the same decisions from what has changed: each rule has a *follower* that finds what a new step releases.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol

from ..clock import format_duration
from .metrics import Metric, Mode, format_metric, metric_name, metric_value

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from ..format import CheckpointRecord
    from ..steps import StepEntry

NEWEST = "newest"
_FEW = 64  # changes that are followed one by one; more come with a listing of all steps, and are as quick as that


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInfo:
    """One committed checkpoint, as the rules see it."""

    step: int  # the number of optimizer updates in it
    time: float  # when it was committed, in seconds since 1970-01-01 UTC, by the clock of the machine that wrote it
    metrics: Mapping[str, Any] | None = None  # the metrics stored with it, or None
    pinned: bool = False  # whether it stays even if no rule keeps it
    items: Collection[str] = ()  # the names of its items
    # The metric that was asked for last and its value: a function is called once, as each save ranks all steps.
    _value: tuple[Metric, float | None] | None = field(default=None, init=False, repr=False, compare=False)

    def value(self, metric: Metric) -> float | None:
        """Return one metric as a number, or None."""
        known = self._value
        if known is None or known[0] is not metric:
            known = metric, metric_value(self.metrics, metric)
            object.__setattr__(self, "_value", known)
        return known[1]


def info_of(step: int, record: CheckpointRecord) -> StepInfo:
    """Return what the rules see of a step with a commit record."""
    return StepInfo(
        step=step, time=record.time, metrics=record.metrics, pinned=record.pinned, items=frozenset(record.items)
    )


def infos_of(entries: Iterable[StepEntry]) -> list[StepInfo]:
    """Return what the rules see of the steps of a directory; a damaged step is none."""
    return [info_of(entry.step, entry.record) for entry in entries if entry.record is not None]


class StepList:
    """Steps in ascending order, of which few change at a time."""

    def __init__(self, infos: Iterable[StepInfo] = ()) -> None:
        self._infos = sorted(infos, key=attrgetter("step"))
        self._steps = [info.step for info in self._infos]

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[StepInfo]:
        return iter(self._infos)

    def get(self, step: int) -> StepInfo | None:
        """Return a step, or None if it is not there."""
        at = bisect_left(self._steps, step)
        return self._infos[at] if self._steps[at : at + 1] == [step] else None

    def since(self, step: int) -> Iterator[StepInfo]:
        """Generate the steps from one on."""
        return (self._infos[at] for at in range(bisect_left(self._steps, step), len(self._steps)))

    def put(self, info: StepInfo) -> None:
        """Add a step, or replace it."""
        at = bisect_left(self._steps, info.step)
        if self._steps[at : at + 1] == [info.step]:
            self._infos[at] = info
        else:
            self._steps.insert(at, info.step)
            self._infos.insert(at, info)

    def drop(self, step: int) -> None:
        """Remove a step if it is there."""
        at = bisect_left(self._steps, step)
        if self._steps[at : at + 1] == [step]:
            del self._steps[at], self._infos[at]


# ---- followers


class Follower(Protocol):
    """A rule beside steps that come and go: a change costs a few look-ups, however many steps there are."""

    def put(self, info: StepInfo) -> Iterable[int]:
        """Take a step that was added to the list; return the others that the rule may keep no more."""
        ...

    def drop(self, info: StepInfo) -> Iterable[int]:
        """Leave out a step that was removed from the list; return those that the rule may keep no more."""
        ...

    def keeps(self, info: StepInfo) -> bool:
        """Return whether the rule keeps a step of the list."""
        ...


@dataclass(frozen=True, slots=True)
class _Each:
    """Follows a rule that looks at each step alone."""

    rule: Rule

    def put(self, info: StepInfo) -> Iterable[int]:
        return ()

    def drop(self, info: StepInfo) -> Iterable[int]:
        return ()

    def keeps(self, info: StepInfo) -> bool:
        return bool(self.rule.keep((info,)))


class _Whole:
    """Evaluates a rule on all steps after every change."""

    def __init__(self, rule: Rule, steps: StepList) -> None:
        self._rule = rule
        self._steps = steps
        self._kept: Collection[int] | None = None  # None: to be evaluated

    def put(self, info: StepInfo) -> Iterable[int]:
        released, self._kept = self._kept or (), None
        return released

    def drop(self, info: StepInfo) -> Iterable[int]:
        return self.put(info)

    def keeps(self, info: StepInfo) -> bool:
        if self._kept is None:
            self._kept = self._rule.keep(tuple(self._steps))
        return info.step in self._kept


class _Highest:
    """Follows a rule that keeps the ``n`` highest steps by a value that can be compared, None for steps without one.

    Of equal values the newer is higher.
    """

    def __init__(self, steps: StepList, n: int, value: Callable[[StepInfo], Any]) -> None:
        self._n = n
        self._value = value
        self._ranks = {info.step: (found, info.step) for info in steps if (found := value(info)) is not None}
        self._ranked = sorted(self._ranks.values())

    def put(self, info: StepInfo) -> Iterable[int]:
        value = self._value(info)
        if value is None:
            return ()
        rank = self._ranks[info.step] = value, info.step
        insort(self._ranked, rank)
        return [step for _, step in self._ranked[-self._n - 1 : -self._n]]

    def drop(self, info: StepInfo) -> Iterable[int]:
        rank = self._ranks.pop(info.step, None)
        if rank is not None:
            del self._ranked[bisect_left(self._ranked, rank)]
        return ()

    def keeps(self, info: StepInfo) -> bool:
        rank = self._ranks.get(info.step)
        return rank is not None and rank >= self._ranked[-self._n :][0]


class _Climb:
    """Follows a rule that goes up the steps, and keeps each or not because of the last that it has kept."""

    def __init__(self, steps: StepList, reason: Callable[[StepInfo, StepInfo | None], str | None]) -> None:
        self._steps = steps
        self._reason = reason
        self._kept = list(_climb(steps, reason))

    def put(self, info: StepInfo) -> Iterable[int]:
        return self._climb_again(info.step)

    def drop(self, info: StepInfo) -> Iterable[int]:
        at = bisect_left(self._kept, info.step)
        if self._kept[at : at + 1] != [info.step]:
            return ()
        del self._kept[at]
        return self._climb_again(info.step)

    def keeps(self, info: StepInfo) -> bool:
        at = bisect_left(self._kept, info.step)
        return self._kept[at : at + 1] == [info.step]

    def _climb_again(self, start: int) -> list[int]:
        """Decide again from a step on, up to one that is kept as before; later decisions stay the same."""
        first = end = bisect_left(self._kept, start)
        last = self._steps.get(self._kept[first - 1]) if first else None
        kept: list[int] = []
        for info in self._steps.since(start):
            before = end < len(self._kept) and self._kept[end] == info.step
            if self._reason(info, last) is not None:
                if before:
                    break
                kept.append(info.step)
                last = info
            end += before
        released = self._kept[first:end]
        self._kept[first:end] = kept
        return released


def _climb(steps: Iterable[StepInfo], reason: Callable[[StepInfo, StepInfo | None], str | None]) -> dict[int, str]:
    kept: dict[int, str] = {}
    last: StepInfo | None = None
    for info in steps:
        found = reason(info, last)
        if found is not None:
            kept[info.step], last = found, info
    return kept


# ---- rules


class Rule(Protocol):
    """Names steps to keep; gives no others up."""

    def keep(self, steps: Sequence[StepInfo]) -> dict[int, str]:
        """Return the steps that this rule keeps, each with the reason, given all committed steps in any order."""
        ...

    def follow(self, steps: StepList) -> Follower:
        """Return a follower of this rule beside a list of steps, which reaches the same decisions as :meth:`keep`."""
        return _Whole(self, steps)


@dataclass(frozen=True)
class KeepAll:
    """Keeps everything."""

    def keep(self, steps: Sequence[StepInfo]) -> dict[int, str]:
        return {info.step: "nothing limits what is kept" for info in steps}

    def follow(self, steps: StepList) -> Follower:
        return _Each(self)


@dataclass(frozen=True)
class KeepLatest:
    """Keeps the ``n`` highest steps."""

    n: int

    def keep(self, steps: Sequence[StepInfo]) -> dict[int, str]:
        newest = heapq.nlargest(self.n, [info.step for info in steps])
        return {step: f"one of the newest {self.n}" if place else NEWEST for place, step in enumerate(newest)}

    def follow(self, steps: StepList) -> Follower:
        return _Highest(steps, self.n, lambda _: 0.0)


@dataclass(frozen=True)
class KeepBest:
    """Keeps the ``n`` best steps by a metric, of equal ones the newer; where fewer have it, the newest others, too."""

    n: int
    metric: Metric
    mode: Mode = "max"

    def keep(self, steps: Sequence[StepInfo]) -> dict[int, str]:
        name = metric_name(self.metric)
        kept = {}
        for place, (step, value) in enumerate(_ranked(steps, self.metric, self.mode, self.n), start=1):
            rank = "best" if place == 1 else f"{_ordinal(place)} best"
            kept[step] = f"{rank} {name} ({format_metric(value)})"
        if missing := self.n - len(kept):
            others = (info.step for info in steps if info.value(self.metric) is None)
            reason = f"one of {self.n}, as too few have {name}"
            kept.update(dict.fromkeys(heapq.nlargest(missing, others), reason))
        return kept

    def follow(self, steps: StepList) -> Follower:
        def value(info: StepInfo) -> tuple[bool, float]:
            rank = _rank(info, self.metric, self.mode)
            return rank is not None, rank or 0.0  # a step with the metric is above all without it

        return _Highest(steps, self.n, value)


@dataclass(frozen=True)
class KeepPeriod:
    """Keeps the first step at or past each multiple of a number of steps, and step 0: a step that passes none goes."""

    period: int

    def keep(self, steps: Sequence[StepInfo]) -> dict[int, str]:
        return _climb(StepList(steps), self._after)

    def follow(self, steps: StepList) -> Follower:
        return _Climb(steps, self._after)

    @cached_property
    def _why(self) -> str:
        return "every step" if self.period == 1 else f"every {self.period} steps"

    def _after(self, info: StepInfo, last: StepInfo | None) -> str | None:
        # The multiple that was passed last; no step passes 0, where runs begin.
        passed = 0 if last is None else last.step // self.period
        return self._why if info.step // self.period > passed or info.step == 0 else None


@dataclass(frozen=True)
class KeepTimeInterval:
    """Keeps the lowest step, and each that was committed some seconds or more after the last kept.

    A higher step with an earlier time shows that the clock was set back; it is kept, and time is measured from it.
    """

    seconds: float

    def keep(self, steps: Sequence[StepInfo]) -> dict[int, str]:
        return _climb(StepList(steps), self._after)

    def follow(self, steps: StepList) -> Follower:
        return _Climb(steps, self._after)

    @cached_property
    def _why(self) -> str:
        return f"every {format_duration(self.seconds)}"

    def _after(self, info: StepInfo, last: StepInfo | None) -> str | None:
        if not math.isfinite(info.time):
            return None
        if last is None or info.time - last.time >= self.seconds:
            return self._why
        return f"{self._why} (the clock was set back)" if info.time < last.time else None


@dataclass(frozen=True)
class KeepItem:
    """Keeps the newest step with an item that not every step has."""

    item: str

    def keep(self, steps: Sequence[StepInfo]) -> dict[int, str]:
        newest = max((info.step for info in steps if self.item in info.items), default=None)
        return {} if newest is None else {newest: f"the newest with {self.item}"}

    def follow(self, steps: StepList) -> Follower:
        return _Highest(steps, 1, lambda info: 0.0 if self.item in info.items else None)


@dataclass(frozen=True)
class KeepPinned:
    """Keeps the pinned steps."""

    def keep(self, steps: Sequence[StepInfo]) -> dict[int, str]:
        return {info.step: "pinned" for info in steps if info.pinned}

    def follow(self, steps: StepList) -> Follower:
        return _Each(self)


@dataclass(frozen=True)
class KeepWithoutMetrics:
    """Keeps the steps without any metrics."""

    def keep(self, steps: Sequence[StepInfo]) -> dict[int, str]:
        return {info.step: "no metrics" for info in steps if not info.metrics}

    def follow(self, steps: StepList) -> Follower:
        return _Each(self)


@dataclass(frozen=True)
class KeepSteps:
    """Keeps the chosen steps that exist."""

    steps: Collection[int]

    def keep(self, steps: Sequence[StepInfo]) -> dict[int, str]:
        return {info.step: "chosen step" for info in steps if info.step in self.steps}

    def follow(self, steps: StepList) -> Follower:
        return _Each(self)


# ---- all rules


def reasons(steps: Sequence[StepInfo], rules: Sequence[Rule]) -> dict[int, tuple[str, ...]]:
    """Return the steps to keep with every reason: those that any rule keeps, and the newest in any case."""
    if not steps:
        return {}
    found: dict[int, list[str]] = {max(info.step for info in steps): [NEWEST]}
    for rule in rules or (KeepAll(),):
        for step, reason in rule.keep(steps).items():
            said = found.setdefault(step, [])
            if reason not in said:
                said.append(reason)
    return {step: tuple(found[step]) for step in sorted(found)}


class Retention:
    """The rules beside the steps of a run as they come and go.

    It gives up the steps for which :func:`reasons` has no reason, and finds them without looking at every step.
    """

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = (KeepLatest(1), *(rules or (KeepAll(),)))
        self._steps = StepList()
        self._followers: list[Follower] | None = None  # None: to be made from all steps
        self._changes: dict[int, StepInfo | None] = {}  # that the followers have not seen
        self._doubtful: set[int] = set()  # steps that may have no reason to stay

    def given_up(self, changes: Mapping[int, StepInfo | None]) -> list[StepInfo]:
        """Take what has changed, None for a step that is gone; return all steps that no rule keeps.

        A step is returned at every call until it is gone.
        """
        self._changes.update(changes)
        followers, self._followers = self._followers, None  # until ``best_fn`` has gone well
        if followers is not None and len(self._changes) <= _FEW:
            for step, info in self._changes.items():
                self._change(step, info, followers)
        else:
            for step, info in self._changes.items():
                self._change(step, info, ())
            followers = [rule.follow(self._steps) for rule in self._rules]
            self._doubtful.update(info.step for info in self._steps)
        self._changes = {}
        self._followers = followers
        found = [info for step in sorted(self._doubtful) if (info := self._steps.get(step)) is not None]
        gone = [info for info in found if not any(follower.keeps(info) for follower in followers)]
        self._doubtful = {info.step for info in gone}
        return gone

    def _change(self, step: int, info: StepInfo | None, followers: Sequence[Follower]) -> None:
        old = self._steps.get(step)
        if old is not None:
            self._steps.drop(step)
            for follower in followers:
                self._doubtful.update(follower.drop(old))
        if info is not None:
            self._steps.put(info)
            for follower in followers:
                self._doubtful.update(follower.put(info))
            self._doubtful.add(step)


def newest_with(item: str, steps: Sequence[StepInfo], before: float = math.inf) -> int | None:
    """Return the newest step that has an item, of those before a step; None if none has. The steps are in order."""
    return next((info.step for info in reversed(steps) if item in info.items and info.step < before), None)


def best(steps: Sequence[StepInfo], metric: Metric, mode: Mode = "max") -> int | None:
    """Return the step with the best value of a metric; of several with the same value, the newest."""
    ranked = _ranked(steps, metric, mode, 1)
    return ranked[0][0] if ranked else None


def _ranked(steps: Sequence[StepInfo], metric: Metric, mode: Mode, n: int) -> list[tuple[int, float]]:
    ranks = [(rank, info.step) for info in steps if (rank := _rank(info, metric, mode)) is not None]
    return [(step, rank if mode == "max" else -rank) for rank, step in heapq.nlargest(n, ranks)]


def _rank(info: StepInfo, metric: Metric, mode: Mode) -> float | None:
    """Return a number that is higher for a better value; None without one."""
    value = info.value(metric)
    return value if value is None or mode == "max" else -value


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
