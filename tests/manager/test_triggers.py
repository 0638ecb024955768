from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from holdfast.engine.manager import Decision, StepInfo, decide
from holdfast.engine.manager.decisions import Moment, OnBest, SavePolicy, SyncSchedule
from holdfast.engine.manager.intervals import Every, passes
from holdfast.engine.manager.metrics import Mode

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

NAN = math.nan


class Loop:
    """A training loop that asks at every step, with a fake clock, and remembers what a manager would."""

    def __init__(self, triggers: Sequence[SavePolicy], *, restored: int | None = None, clock: float = 0.0) -> None:
        self.triggers = triggers
        self.previous = restored
        self.clock = clock
        self.last = clock
        self.infos: dict[int, StepInfo] = {}
        self.log: list[tuple[int, str]] = []

    def step(self, step: int, *, seconds: float = 1.0, metrics: Mapping[str, Any] | None = None) -> Decision:
        self.clock += seconds
        decision = decide(
            self.triggers,
            Moment(
                step=step,
                previous=self.previous,
                now=self.clock,
                last=self.last,
                metrics=metrics,
                earlier=tuple(self.infos.values()),
                saved=step in self.infos,
            ),
        )
        if decision:
            self.log.append((step, decision.reason))
            self.infos[step] = StepInfo(step=step, time=self.clock, metrics=metrics)
            self.last = self.clock
        if decision or self.previous is None:
            self.previous = step
        return decision

    def restart(self, *, restored: int | None, clock: float) -> Loop:
        """A new process, whose monotonic clock starts anywhere, and who finds the checkpoints of the old one."""
        loop = Loop(self.triggers, restored=restored, clock=clock)
        loop.infos = {
            step: StepInfo(step=step, time=info.time, metrics=info.metrics) for step, info in self.infos.items()
        }
        return loop

    @property
    def saved(self) -> list[int]:
        return [step for step, _ in self.log]


def run(triggers: Sequence[SavePolicy], steps: Iterable[int], **options: Any) -> list[int]:
    loop = Loop(triggers, **options)
    for step in steps:
        loop.step(step)
    return loop.saved


@pytest.mark.parametrize(
    ("n", "restored", "steps", "expected"),
    [
        pytest.param(2, None, range(11), [0, 2, 4, 6, 8, 10], id="from-zero"),
        pytest.param(2, None, range(1, 11), [2, 4, 6, 8, 10], id="from-one"),
        pytest.param(1, None, range(3), [0, 1, 2], id="every-step"),
        pytest.param(5, 0, range(1, 12), [5, 10], id="restored-at-zero"),
        pytest.param(100, 150, range(151, 351), [200, 300], id="restored-between"),
        pytest.param(100, 200, range(201, 302), [300], id="restored-on-a-multiple"),
        pytest.param(10, None, range(7, 60, 7), [14, 21, 35, 42, 56], id="jumps-by-seven"),
        pytest.param(10, None, [3, 4, 99, 100, 101], [99, 100], id="one-long-jump"),
        pytest.param(10, None, [30, 31], [30], id="first-step-is-due"),
        pytest.param(10, None, [31, 32], [], id="first-step-is-not-due"),
        pytest.param(10, 25, [25, 26, 29, 30, 30], [30], id="same-step-again"),
        pytest.param(100, 250, [151, 152, 200], [151, 200], id="counter-went-back"),
    ],
)
def test_every_steps(n: int, restored: int | None, steps: Iterable[int], expected: list[int]) -> None:
    assert run([Every(steps=n)], steps, restored=restored) == expected


@pytest.mark.parametrize(
    ("step", "previous", "expected"),
    [
        (0, None, True),
        (7, None, False),
        (20, None, True),
        (10, 9, True),
        (10, 10, False),
        (19, 10, False),
        (25, 9, True),
    ],
)
def test_every_steps_due(step: int, previous: int | None, expected: bool) -> None:
    assert passes(10, step, previous) is expected


def test_asking_again_without_saving_stays_due() -> None:
    """A save that did not come about at the multiple itself is made up for at the next step."""
    assert [step for step in range(198, 203) if passes(100, step, 150)] == [200, 201, 202]


@pytest.mark.parametrize(
    ("now", "last", "expected"),
    [
        pytest.param(159.0, 100.0, False, id="before"),
        pytest.param(160.0, 100.0, True, id="exactly"),
        pytest.param(500.0, 100.0, True, id="long-after"),
        pytest.param(100.0, 100.0, False, id="at-once"),
        pytest.param(99.0, 100.0, True, id="backwards"),
        pytest.param(5.0, 1e9, True, id="another-clock"),
    ],
)
def test_every_seconds_due(now: float, last: float, expected: bool) -> None:
    assert (Every(secs=60).reason(Moment(step=1, now=now, last=last)) is not None) is expected


def test_every_seconds_counts_from_the_last_save_for_any_reason() -> None:
    loop = Loop([Every(steps=7), Every(secs=50)])
    for step in range(1, 22):
        loop.step(step, seconds=10.0)
    assert loop.log == [
        (5, "every 50s"),
        (7, "every 7 steps"),
        (12, "every 50s"),
        (14, "every 7 steps"),
        (19, "every 50s"),
        (21, "every 7 steps"),
    ]


def test_a_clock_that_runs_backwards_saves_once_and_goes_on() -> None:
    loop = Loop([Every(secs=50)], clock=1000.0)
    for step in range(1, 16):
        loop.step(step, seconds=-500.0 if step == 8 else 10.0)
    assert loop.saved == [5, 8, 13]


def test_without_a_start_time_does_not_count() -> None:
    assert not decide([Every(secs=1)], Moment(step=1, now=1e9))


@pytest.mark.parametrize(
    ("mode", "values", "expected"),
    [
        pytest.param("max", [0.1, 0.3, 0.2, 0.3, 0.4], [1, 2, 5], id="max"),
        pytest.param("min", [0.4, 0.3, 0.5, 0.3, 0.1], [1, 2, 5], id="min"),
        pytest.param("max", [NAN, 0.1, NAN, 0.2, None, 0.15], [2, 4], id="max-nan-and-missing"),
        pytest.param("min", [NAN, 0.3, NAN, 0.2, None, 0.25], [2, 4], id="min-nan-and-missing"),
        pytest.param("max", [None, None], [], id="never-a-metric"),
        pytest.param("max", [0.5, 0.5, 0.5], [1], id="ties-are-not-better"),
        pytest.param("min", [math.inf, 3.0, math.inf], [1, 2], id="from-infinity"),
        pytest.param("max", ["0.9", 0.1], [2], id="text-is-no-number"),
    ],
)
def test_on_best(mode: Mode, values: list[Any], expected: list[int]) -> None:
    loop = Loop([OnBest("acc", mode)])
    for step, value in enumerate(values, start=1):
        loop.step(step, metrics=None if value is None else {"acc": value})
    assert loop.saved == expected


def test_best_is_remembered_by_the_checkpoints_and_not_by_the_process() -> None:
    loop = Loop([OnBest("loss", "min")])
    for step, loss in enumerate([0.9, 0.5, 0.7], start=1):
        loop.step(step, metrics={"loss": loss})
    assert loop.saved == [1, 2]
    loop = loop.restart(restored=2, clock=-1e6)
    for step, loss in enumerate([0.7, 0.5, 0.6, 0.4], start=3):
        loop.step(step, metrics={"loss": loss})
    assert loop.log == [(6, "best loss (0.4)")]


def test_on_best_passes_over_steps_without_a_value() -> None:
    earlier = [
        StepInfo(step=1, time=0.0),
        StepInfo(step=2, time=0.0, metrics={"acc": NAN}),
        StepInfo(step=3, time=0.0, metrics={"other": 5.0}),
    ]

    def due(metrics: Mapping[str, Any] | None, earlier: Sequence[StepInfo]) -> bool:
        trigger = OnBest(lambda metrics: metrics["acc"])
        return trigger.reason(Moment(step=5, metrics=metrics, earlier=earlier)) is not None

    assert due({"acc": 0.1}, earlier)
    assert not due({"acc": 0.1}, [*earlier, StepInfo(step=4, time=0.0, metrics={"acc": 0.1})])
    assert not due({"other": 9.0}, earlier)
    assert not due(None, [])


def test_a_step_is_not_saved_twice() -> None:
    loop = Loop([Every(steps=4)])
    for step in range(1, 9):
        loop.step(step)
    assert loop.step(8) == Decision(False, "step 8 is saved already")
    assert loop.saved == [4, 8]


def test_a_run_interrupted_at_every_point_saves_the_same_steps() -> None:
    """Restored from its newest checkpoint each time, whichever clock the new machine has."""
    expected = run([Every(steps=3)], range(1, 20))
    for stop in range(1, 20):
        first = Loop([Every(steps=3)])
        for step in range(1, stop + 1):
            first.step(step)
        newest = max(first.infos, default=0)
        second = first.restart(restored=newest, clock=1e5 * (-1) ** stop)
        for step in range(newest + 1, 20):
            second.step(step)
        assert first.saved + second.saved == expected, stop


@pytest.mark.parametrize(
    ("moment", "expected"),
    [
        pytest.param({}, Decision(False, "nothing is due"), id="nothing"),
        pytest.param({"step": 100}, Decision(True, "every 100 steps"), id="steps"),
        pytest.param({"now": 900.0, "last": 0.0}, Decision(True, "every 15m"), id="time"),
        pytest.param({"metrics": {"acc": 0.5}}, Decision(True, "best acc (0.5)"), id="best"),
        pytest.param({"step": 100, "saved": True}, Decision(False, "step 100 is saved already"), id="saved-already"),
        pytest.param(
            {"step": 100, "now": 900.0, "last": 0.0, "metrics": {"acc": 0.5}},
            Decision(True, "every 100 steps, every 15m, best acc (0.5)"),
            id="all-reasons-in-one-line",
        ),
    ],
)
def test_decisions(moment: dict[str, Any], expected: Decision) -> None:
    triggers: list[SavePolicy] = [Every(steps=100), Every(secs=900), OnBest("acc")]
    decision = decide(triggers, Moment(**{"step": 51, "previous": 50, **moment}))
    assert decision == expected
    assert bool(decision) is expected.save


def test_no_triggers_save_nothing() -> None:
    assert not decide([], Moment(step=0))


def test_a_reason_given_twice_is_said_once() -> None:
    assert decide([Every(steps=1), Every(steps=1)], Moment(step=0)).reason == "every step"


# ---- what processes agree about


@dataclass(frozen=True)
class OnSpike:
    """A trigger of one's own, which reads metrics."""

    interval_secs: ClassVar[None] = None
    reads_metrics: ClassVar[bool] = True

    def reason(self, moment: Moment) -> str | None:
        return "a spike" if (moment.metrics or {}).get("loss", 0) > 10 else None


@pytest.mark.parametrize(
    ("trigger", "metrics", "asks"),
    [
        (Every(steps=3), {"loss": 1.0}, False),
        (Every(secs=60.0), None, True),
        (OnBest("loss"), None, False),
        (OnBest("loss"), {"loss": 1.0}, True),
        (OnSpike(), {"loss": 1.0}, True),
    ],
    ids=["steps", "time", "no metrics", "metrics", "metrics of one's own"],
)
def test_processes_agree_on_what_may_differ_between_them(
    trigger: SavePolicy, metrics: dict[str, float] | None, asks: bool
) -> None:
    schedule = SyncSchedule([trigger])
    assert schedule.asks(7, metrics, None) is asks
    assert schedule.certain == (() if asks or trigger.reads_metrics else (trigger,))
