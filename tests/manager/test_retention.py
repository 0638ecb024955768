"""Which steps each rule keeps, in which order steps rank, and how the reasons read."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast as hf
from holdfast.engine.clock import format_duration
from holdfast.engine.manager import BestMode, KeepAll, KeepPolicy, StepInfo, best, reasons, retention_rules
from holdfast.engine.manager.intervals import Every
from holdfast.engine.manager.retention import (
    KeepBest,
    KeepLatest,
    KeepSteps,
    KeepWithoutMetrics,
)

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
        pytest.param(KeepAll(), infos(1, 2, 3), [1, 2, 3], id="all"),
        pytest.param(KeepLatest(2), infos(1, 2, 3), [2, 3], id="latest"),
        pytest.param(KeepLatest(2), infos(3, 1, 2), [2, 3], id="latest-unordered"),
        pytest.param(KeepLatest(5), infos(1, 2), [1, 2], id="latest-of-fewer"),
        pytest.param(KeepLatest(5), [], [], id="latest-of-none"),
        pytest.param(KeepLatest(1), timed({5: 100.0, 9: 1.0}), [9], id="latest-by-step-not-by-time"),
        pytest.param(Every(steps=10), infos(0, 5, 10, 15, 20, 23), [0, 10, 20], id="period"),
        pytest.param(Every(steps=1), infos(0, 5), [0, 5], id="period-one"),
        pytest.param(Every(steps=1000), infos(998, 1003), [1003], id="period-jumped-over"),
        pytest.param(Every(steps=100), infos(99, 201), [201], id="period-two-jumped-over"),
        pytest.param(Every(steps=100), infos(330, 30, 201, 99, 299, 301), [201, 301], id="period-first-past-each"),
        pytest.param(Every(steps=10), infos(7, 14, 21, 28, 35, 42, 49, 56), [14, 21, 35, 42, 56], id="period-of-7"),
        pytest.param(Every(steps=5), infos(12, 24, 36), [12, 24, 36], id="period-shorter-than-the-interval"),
        pytest.param(KeepSteps([7, 8, 2]), infos(1, 2, 7), [2, 7], id="chosen"),
        pytest.param(KeepSteps(range(0, 100, 3)), infos(1, 2, 99), [99], id="chosen-range"),
        pytest.param(KeepSteps(()), infos(1), [], id="chosen-none"),
        pytest.param(KeepWithoutMetrics(), scored({1: None, 2: 0.5, 3: NAN}), [1], id="without-metrics"),
        pytest.param(KeepWithoutMetrics(), [StepInfo(step=1, time=0.0, metrics={})], [1], id="empty-metrics"),
    ],
)
def test_each_rule_keeps(rule: KeepPolicy, steps: list[StepInfo], expected: list[int]) -> None:
    assert sorted(rule.kept(steps)) == expected


@pytest.mark.parametrize(
    ("mode", "values", "order"),
    [
        pytest.param("max", {1: 0.1, 2: 0.9, 3: 0.5}, [2, 3, 1], id="max"),
        pytest.param("min", {1: 0.1, 2: 0.9, 3: 0.5}, [1, 3, 2], id="min"),
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
        pytest.param("max", {}, [], id="no-steps"),
    ],
)
def test_best_orders_by_value_then_newness(mode: BestMode, values: dict[int, Any], order: list[int]) -> None:
    steps = scored(values)
    assert best(steps, "acc", mode) == (order[0] if order else None)
    assert best(steps[::-1], lambda metrics: metrics["acc"], mode) == (order[0] if order else None)
    others = sorted(values.keys() - {*order}, reverse=True)
    for n in range(1, 5):
        assert list(KeepBest(n, "acc", mode).kept(steps)) == [*order, *others][:n]


def test_best_of_a_nested_metric_and_a_misspelled_one() -> None:
    steps = [StepInfo(step=step, time=0.0, metrics={"val": {"loss": 1.0 / step}}) for step in (1, 2, 3)]
    assert best(steps, "val/loss", "min") == 3
    assert best(steps, "val/lost", "min") is None


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        pytest.param({}, [], id="none"),
        pytest.param({1: 5.0}, [1], id="oldest"),
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


def test_reasons_are_a_union_that_people_can_read() -> None:
    values = {0: 0.10, 100: 0.93, 200: 0.92, 250: 0.2, 300: NAN, 400: None, 500: 0.3, 600: 0.5}
    steps = [
        StepInfo(
            step=step,
            time=step * 10.0,
            metrics=None if value is None else {"accuracy": value},
            pinned=step in (200, 250),
        )
        for step, value in values.items()
    ]
    rules = (
        KeepBest(2, "accuracy", "max"),
        KeepLatest(2),
        Every(steps=300),
        Every(secs=5000),
        KeepWithoutMetrics(),
        KeepSteps([500]),
    )
    assert reasons(steps, rules) == {
        0: ("every 300 steps", "every 1h23m20s"),
        100: ("best accuracy (0.93)",),
        200: ("2nd best accuracy (0.92)", "pinned"),
        250: ("pinned",),
        300: ("every 300 steps",),
        400: ("no metrics",),
        500: ("one of the newest 2", "every 1h23m20s", "chosen step"),
        600: ("newest", "every 300 steps"),
    }
    assert list(reasons(steps[::-1], rules)) == sorted(values)


def test_places_are_spelled_as_people_say_them() -> None:
    kept = KeepBest(111, "acc").kept(scored({place: -place for place in range(1, 112)}))
    spelled = {1: "best", 2: "2nd best", 3: "3rd best", 4: "4th best", 11: "11th best", 12: "12th best"}
    spelled |= {13: "13th best", 21: "21st best", 111: "111th best"}
    assert {place: kept[place].partition(" acc")[0] for place in spelled} == spelled
    assert KeepBest(3, "acc").kept(scored({1: None, 2: 0.5})) == {
        2: "best acc (0.5)",
        1: "one of 3, as too few have acc",
    }


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, "0s"),
        (0.00025, "0.00025s"),
        (0.25, "0.25s"),
        (1, "1s"),
        (59.9996, "1m"),
        (60.0, "1m"),
        (90.5, "1m30.5s"),
        (900, "15m"),
        (3600, "1h"),
        (5400, "1h30m"),
        (3601, "1h1s"),
        (86400 * 400, "400d"),
        (90061.1, "1d1h1m1.1s"),
    ],
)
def test_durations_are_spelled_as_options_are(seconds: float, expected: str) -> None:
    assert format_duration(seconds) == expected


def test_the_newest_is_kept_by_any_rules_and_everything_without_rules() -> None:
    steps = scored({100: 0.1, 200: 0.2, 300: 0.3, 400: 0.4, 500: 0.5})
    assert list(reasons(steps, [KeepBest(3, "acc", "min")])) == [100, 200, 300, 500]
    assert reasons(steps, [KeepSteps(())]) == {500: ("newest",)}
    assert list(reasons(steps, [KeepAll()])) == [100, 200, 300, 400, 500]
    assert reasons(steps, [KeepAll()])[100] == ("nothing limits what is kept",)
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


def test_rules_and_steps_are_values() -> None:
    assert retention_rules(hf.CheckpointManagerOptions(keep_steps=[2, 1, 1])) == (
        KeepSteps({1, 2}),
        KeepAll(),
    )
    assert len({KeepLatest(3), KeepLatest(3), KeepSteps(frozenset([1])), KeepSteps(frozenset({1}))}) == 2
    with pytest.raises(AttributeError):
        StepInfo(step=1, time=0.0).pinned = True  # type: ignore[misc]  # frozen, which is the point
