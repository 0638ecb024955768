"""Which steps each rule keeps, in which order steps rank, and how the reasons read."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.engine.clock import format_duration
from holdfast.engine.manager import BestMode, KeepAll, KeepPolicy, StepInfo, best, reasons
from holdfast.engine.manager.intervals import Every
from holdfast.engine.manager.retention import KeepBest, KeepLatest, KeepSteps, KeepWithoutMetrics

if TYPE_CHECKING:
    from collections.abc import Mapping

NAN = math.nan
HOUR = 3600.0


def infos(*steps: int) -> list[StepInfo]:
    return [StepInfo(step=step, time=float(step)) for step in steps]


def scored(values: Mapping[int, Any], name: str = "acc") -> list[StepInfo]:
    """Steps with one metric; None stands for a step without metrics."""
    return [
        StepInfo(step=step, time=float(step), metrics=None if value is None else {name: value})
        for step, value in values.items()
    ]


def timed(times: Mapping[int, float]) -> list[StepInfo]:
    return [StepInfo(step=step, time=time) for step, time in times.items()]


@pytest.mark.parametrize(
    ("rule", "steps", "expected"),
    [
        pytest.param(KeepLatest(2), infos(3, 1, 2), [2, 3], id="latest-unordered"),
        pytest.param(KeepLatest(5), infos(1, 2), [1, 2], id="latest-of-fewer"),
        pytest.param(KeepLatest(1), timed({5: 100.0, 9: 1.0}), [9], id="latest-by-step-not-by-time"),
        pytest.param(Every(steps=10), infos(0, 5, 10, 15, 20, 23), [0, 10, 20], id="period"),
        pytest.param(Every(steps=100), infos(99, 201), [201], id="period-two-jumped-over"),
        pytest.param(Every(steps=100), infos(330, 30, 201, 99, 299, 301), [201, 301], id="period-first-past-each"),
        pytest.param(Every(steps=10), infos(7, 14, 21, 28, 35, 42, 49, 56), [14, 21, 35, 42, 56], id="period-of-7"),
        pytest.param(Every(steps=5), infos(12, 24, 36), [12, 24, 36], id="period-shorter-than-the-interval"),
        pytest.param(KeepSteps([7, 8, 2]), infos(1, 2, 7), [2, 7], id="chosen"),
        pytest.param(KeepSteps(range(0, 100, 3)), infos(1, 2, 99), [99], id="chosen-range"),
        pytest.param(KeepWithoutMetrics(), scored({1: None, 2: 0.5, 3: NAN}), [1], id="without-metrics"),
        pytest.param(KeepWithoutMetrics(), [StepInfo(step=1, time=0.0, metrics={})], [1], id="empty-metrics"),
    ],
)
def test_each_rule_keeps(rule: KeepPolicy, steps: list[StepInfo], expected: list[int]) -> None:
    assert sorted(rule.kept(steps)) == expected


@pytest.mark.parametrize(
    ("mode", "values", "order"),
    [
        pytest.param("max", {1: 0.5, 2: 0.5, 3: 0.1}, [2, 1, 3], id="max-tie-newer-wins"),
        pytest.param("min", {1: 0.5, 2: 0.5, 3: 0.9}, [2, 1, 3], id="min-tie-newer-wins"),
        pytest.param("min", {3: 0.5, 2: 0.5, 1: 0.5}, [3, 2, 1], id="tie-unordered"),
        pytest.param("max", {1: -0.0, 2: 0.0}, [2, 1], id="zeros-tie"),
        pytest.param("max", {1: 0.1, 2: NAN, 3: None}, [1], id="max-nan-and-missing"),
        pytest.param("min", {1: NAN, 2: None, 3: 0.1, 4: NAN}, [3], id="min-nan-and-missing"),
        pytest.param("max", {1: "0.9", 2: 0.1, 3: [1.0]}, [2], id="not-numbers"),
        pytest.param("max", {1: math.inf, 2: 1.0, 3: -math.inf}, [1, 2, 3], id="max-infinities"),
        pytest.param("min", {1: math.inf, 2: 1.0, 3: -math.inf}, [3, 2, 1], id="min-infinities"),
        pytest.param("max", {1: NAN, 2: None}, [], id="no-value-at-all"),
    ],
)
def test_best_orders_by_value_then_newness(mode: BestMode, values: dict[int, Any], order: list[int]) -> None:
    steps = scored(values)
    assert best(steps, "acc", mode) == (order[0] if order else None)
    assert best(steps[::-1], lambda metrics: metrics["acc"], mode) == (order[0] if order else None)
    others = sorted(values.keys() - {*order}, reverse=True)
    for n in range(1, 5):
        assert list(KeepBest(n, "acc", mode).kept(steps)) == [*order, *others][:n]


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        pytest.param({}, [], id="none"),
        pytest.param({1: 0.0, 2: 0.5 * HOUR, 3: 1.0 * HOUR, 4: 1.9 * HOUR, 5: 2.0 * HOUR}, [1, 3, 5], id="hourly"),
        pytest.param(
            {1: 0.0, 2: 0.9 * HOUR, 3: 1.5 * HOUR, 4: 2.4 * HOUR, 5: 2.6 * HOUR}, [1, 3, 5], id="from-last-kept"
        ),
        pytest.param({3: 1.5 * HOUR, 1: 0.0, 2: 0.9 * HOUR}, [1, 3], id="unordered"),
        pytest.param({1: 0.0, 2: 9.0 * HOUR, 3: 9.5 * HOUR, 4: 10.0 * HOUR}, [1, 2, 4], id="gap-of-a-preemption"),
        pytest.param({1: 5 * HOUR, 2: 5.5 * HOUR, 3: 1 * HOUR, 4: 1.5 * HOUR, 5: 2 * HOUR}, [1, 3, 5], id="set-back"),
        pytest.param(
            {1: 5 * HOUR, 2: 5.5 * HOUR, 3: 5.4 * HOUR, 4: 6 * HOUR}, [1, 4], id="set-back-but-after-last-kept"
        ),
        pytest.param({1: 3.0 * HOUR, 2: 2.0 * HOUR, 3: 1.0 * HOUR}, [1, 2, 3], id="backwards-all-the-way"),
        pytest.param({1: 4e9, 2: 1.0 * HOUR, 3: 1.2 * HOUR}, [1, 2], id="first-from-the-future"),
        pytest.param({1: NAN, 2: 0.0, 3: math.inf, 4: 1.0 * HOUR}, [2, 4], id="times-that-are-no-times"),
        pytest.param({1: 0.0, 2: 0.0, 3: 0.0}, [1], id="clock-stands-still"),
    ],
)
def test_time_interval(times: dict[int, float], expected: list[int]) -> None:
    assert sorted(Every(secs=HOUR).kept(timed(times))) == expected


@given(
    times=st.lists(st.floats(-100, 100, allow_nan=False), max_size=12),
    extra=st.sets(st.integers(0, 11)),
    seconds=st.floats(0.5, 60),
)
def test_time_interval_keeps_what_it_kept(times: list[float], extra: set[int], seconds: float) -> None:
    """The survivors stay the same beside any steps that other rules leave."""
    rule = Every(secs=seconds)
    steps = timed(dict(enumerate(times)))
    kept = set(rule.kept(steps))
    assert set(rule.kept([info for info in steps if info.step in kept | extra])) == kept


@given(
    data=st.lists(
        st.tuples(st.floats(0, 50), st.none() | st.floats(allow_nan=True), st.booleans()), min_size=1, max_size=12
    ),
    n=st.integers(1, 4),
    mode=st.sampled_from(["max", "min"]),
)
def test_collecting_twice_changes_nothing(data: list[tuple[float, float | None, bool]], n: int, mode: BestMode) -> None:
    steps = [
        StepInfo(step=step, time=time, metrics=None if value is None else {"acc": value}, pinned=pinned)
        for step, (time, value, pinned) in enumerate(data)
    ]
    rules: list[KeepPolicy] = [KeepBest(n, "acc", mode), KeepLatest(n), Every(steps=4), Every(secs=10)]
    kept = reasons(steps, rules)
    survivors = [info for info in steps if info.step in kept]
    assert max(kept) == steps[-1].step
    assert best(survivors, "acc", mode) == best(steps, "acc", mode)
    assert reasons(survivors, rules) == kept


def test_places_are_spelled_as_people_say_them() -> None:
    kept = KeepBest(111, "acc").kept(scored({place: -place for place in range(1, 112)}))
    spelled = {1: "best", 2: "2nd best", 3: "3rd best", 4: "4th best", 11: "11th best", 12: "12th best"}
    spelled |= {13: "13th best", 21: "21st best", 111: "111th best"}
    assert {place: kept[place].partition(" acc")[0] for place in spelled} == spelled
    assert KeepBest(3, "acc").kept(scored({1: None, 2: 0.5})) == {
        2: "best acc (0.5)",
        1: "one of 3, as too few have acc",
    }


DURATIONS = {
    0: "0s", 0.00025: "0.00025s", 0.25: "0.25s", 1: "1s", 59.9996: "1m", 60.0: "1m", 90.5: "1m30.5s", 900: "15m",
    3600: "1h", 5400: "1h30m", 3601: "1h1s", 86400 * 400: "400d", 90061.1: "1d1h1m1.1s",
}  # fmt: skip


def test_durations_are_spelled_as_options_are() -> None:
    assert {seconds: format_duration(seconds) for seconds in DURATIONS} == DURATIONS


def test_the_newest_is_kept_by_any_rules_and_everything_without_rules() -> None:
    steps = scored({100: 0.1, 200: 0.2, 300: 0.3, 400: 0.4, 500: 0.5})
    assert list(reasons(steps, [KeepBest(3, "acc", "min")])) == [100, 200, 300, 500]
    assert reasons(steps, [KeepSteps(())]) == {500: ("newest",)}
    assert reasons(steps[:1], [KeepAll()]) == {100: ("newest", "nothing limits what is kept")}
    assert list(reasons(steps[::-1], [KeepAll()])) == [100, 200, 300, 400, 500]
    assert reasons([], [KeepLatest(1)]) == {}
    twice = [KeepLatest(1), KeepLatest(3), Every(steps=1), Every(steps=1)]
    assert reasons(infos(1), twice) == {1: ("newest", "every step")}, "each reason is given once"


def test_a_function_ranks_each_step_once() -> None:
    called: list[Any] = []
    rule = KeepBest(2, lambda metrics: (called.append(metrics), metrics["acc"])[1])  # type: ignore[func-returns-value]
    steps = scored({1: 0.5, 2: 0.9, 3: 0.1})
    assert [*rule.kept(steps)] == [*rule.kept(steps)] == [2, 1]
    assert best([*steps, StepInfo(step=4, time=0.0, metrics={"acc": 0.7})], rule.metric) == 2
    assert len(called) == 4
