"""The learned interval: what the events of a run say about saves and failures, and which interval follows."""

from __future__ import annotations

import json
import logging
import math
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.clocks import FakeClock
from tests.manager.runs import HeldHandler, commit, opened
from tests.processes.threads import together

import holdfast as hf
from holdfast.engine.distributed import Coordinator
from holdfast.engine.manager import DAY, Experience, LearnedInterval
from holdfast.engine.manager.decisions import Moment, OnBest, SavePolicy, StepPace, SyncSchedule
from holdfast.engine.manager.events import RunEvents, read_run_events
from holdfast.engine.manager.intervals import Every
from holdfast.engine.manager.options import save_triggers
from holdfast.engine.observer import process_observer
from holdfast.engine.storage import as_location

HOUR = 3600.0


def event(name: str, time: float, run: str = "a", **facts: Any) -> dict[str, Any]:
    return {"event": name, "time": time, "run": run, **facts}


def saved(time: float, run: str = "a", *, blocked: float = 0.1, total: float = 0.1, **facts: Any) -> dict[str, Any]:
    return event("saved", time, run, step=int(time), blocked_seconds=blocked, total_seconds=total, **facts)


# ---- the option


@pytest.mark.parametrize(
    ("value", "least", "greatest"),
    [
        (" auto ", 60, HOUR),
        ("auto 30s to 2h", 30, 2 * HOUR),
        ("auto  90 to 1h30m", 90, 1.5 * HOUR),
        ("auto 5m to 5m", 300, 300),
    ],
)
def test_the_option(value: str, least: float, greatest: float) -> None:
    options = hf.CheckpointManagerOptions(save_interval_secs=value)
    assert save_triggers(options) == (LearnedInterval(least, greatest),)


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ("auto 1h", "must be 'auto', or have the least and the greatest interval, as in 'auto 1m to 1h'"),
        ("automatic", "must be 'auto', or have"),
        ("auto 1m - 1h", "must be 'auto', or have"),
        ("auto 1h to 1m", "the least interval comes first, and 1h is longer than 1m"),
        ("auto soon to 1h", "the least='soon' is not a duration"),
        ("auto 1m to never", "the greatest='never' is not a duration"),
        ("auto 0 to 1h", "the least='0' is not a duration: give seconds above zero"),
        ("soon", "or text such as '90s', '15m', '1h30m'; or 'auto', or 'auto 1m to 1h' with bounds of your own"),
    ],
)
def test_texts_that_are_no_interval(value: str, what: str) -> None:
    with pytest.raises(hf.errors.OptionError, match=f"^save_interval_secs='{value}.*{re.escape(what)}"):
        hf.CheckpointManagerOptions(save_interval_secs=value)


# ---- what the events say


def killed(times: int, every: float, **numbers: float) -> list[dict[str, Any]]:
    """A run that is killed some times, each ``every`` seconds after a start, and comes back ten seconds later."""
    found = []
    for number in range(times + 1):
        began, run = number * (every + 10), str(number)
        found += [event("started", began, run), event("restored", began + 4, run, step=number)]
        found += [saved(began + share * every, run, **numbers) for share in (0.5, 1)]
    return found


@pytest.mark.parametrize(
    ("events", "interval"),
    [
        pytest.param([], 60, id="cold start: the least, as only a save tells what one costs"),
        pytest.param([event("started", 0)], 60, id="nothing is saved"),
        pytest.param([event("started", 0), saved(1, blocked=0.1)], math.sqrt(2 * 0.1 * DAY), id="one save"),
        pytest.param([event("started", 0), saved(60, blocked=0.001)], 60, id="a cheap save: the least"),
        pytest.param([event("started", 0), saved(60, blocked=900, total=900)], HOUR, id="a dear save: the greatest"),
        pytest.param([event("started", 0), saved(60, blocked=0.01, total=200)], 200, id="no save waits for the last"),
        pytest.param(
            [event("started", 0), saved(1, blocked=0.1, slowed_seconds=0.3, total=9)],
            math.sqrt(2 * 0.4 * DAY),
            id="steps that are slowed down count",
        ),
        pytest.param(
            [event("started", 0), *(saved(day * DAY) for day in range(1, 11))],
            math.sqrt(2 * 0.1 * 18 * DAY),
            id="no failure in ten days",
        ),
        pytest.param(killed(20, HOUR, blocked=1.0), math.sqrt(2 * 1.0 * 1.08 * HOUR), id="a failure every hour"),
        pytest.param(killed(5, 600, blocked=10.0), math.sqrt(2 * 10 * 871), id="a failure every ten minutes"),
    ],
)
def test_which_interval_is_learned(events: Sequence[dict[str, Any]], interval: float) -> None:
    learned = LearnedInterval(60, HOUR)
    learned.learn(events)
    assert learned.interval_secs == pytest.approx(interval, rel=0.02)


def test_what_a_save_costs() -> None:
    # A model that has grown makes saves dearer; one slow save changes nothing.
    small = [saved(100.0 * number) for number in range(30)]
    assert Experience([*small, saved(3000, blocked=50, total=50)]).cost == pytest.approx(0.1)
    assert Experience([*small, *(saved(3000 + 100.0 * n, blocked=5, total=5) for n in range(20))]).cost == 5
    # Saves at every step wait for each other, which is no cost of a save: a longer interval would not.
    events = [saved(10.0 * number, blocked=9.5 if number > 1 else 0.5, total=19.0) for number in range(1, 12)]
    found = Experience(events)
    assert (found.cost, found.durable, found.interval) == (0.5, 10, 10)
    assert found.loss(10).saving == pytest.approx(0.05 * DAY)
    assert found.loss(5).saving == pytest.approx(0.55 * DAY), "each save waits five seconds for the one before"
    assert found.loss(5).failing == found.loss(10).failing


ENDS: dict[str, tuple[list[dict[str, Any]], int]] = {
    "it has finished": ([event("finished", 90, step=9)], 0),
    "it was preempted, and has saved": ([event("preempted", 90, step=9), event("ended", 91, how="preempted")], 0),
    "it was preempted, and has hung then": ([event("preempted", 90, step=9), event("ended", 91, how="hung")], 0),
    "the program closed its manager": ([event("closed", 90, step=9)], 0),
    "closed, and killed": ([event("closed", 90, step=9), event("ended", 91, how="crashed")], 1),
    "an exception": ([event("failed", 90, step=9), event("ended", 91, how="crashed")], 1),
    "killed, as a supervisor says": ([event("ended", 91, how="crashed", status=137)], 1),
    "hung": ([event("ended", 91, how="hung")], 1),
    "asked to end, and has not saved": ([event("ended", 91, how="preempted")], 1),
    "no word": ([], 1),
}


@pytest.mark.parametrize("case", ENDS)
def test_what_is_a_failure(case: str) -> None:
    end, failures = ENDS[case]
    found = Experience([event("started", 0), saved(60), *end, event("started", 100, "b")])
    assert found.failures == failures


def test_which_starts_say_that_the_one_before_has_failed() -> None:
    begun = [event("started", 0, pid=1, program="a"), saved(60)]
    # Another manager in the same process does not, as in the cells of a notebook; a process with the same number does.
    assert Experience([*begun, event("started", 100, "b", pid=1, program="a")]).failures == 0
    assert Experience([*begun, event("started", 100, "b", pid=1, program="c")]).failures == 1
    # So does a command that changes the run.
    found = Experience([*begun, event("started", 70, "pin"), event("closed", 71, "pin")])
    assert (found.failures, found.ran) == (1, 61)
    # A mistake in the program, before the first step of each start, is no reason to save more often.
    again = [event("started", 100, "b"), event("restored", 101, "b", step=60), event("failed", 102, "b", step=60)]
    fresh = [event("started", 200, "c"), event("failed", 201, "c", step=None)]
    assert Experience([*begun, event("finished", 90), *again, *fresh]).failures == 0


@pytest.mark.parametrize(
    ("end", "seconds"),
    [
        pytest.param([event("ended", 80, how="crashed")], 40, id="the end is known"),
        pytest.param([event("failed", 85, step=70), event("ended", 86, how="crashed")], 35, id="an exception"),
        pytest.param([], 20, id="no word: from the next start"),
    ],
)
def test_the_time_to_come_back(end: list[dict[str, Any]], seconds: float) -> None:
    again = [event("started", 100, "b"), event("restored", 120, "b", step=60, seconds=3.0)]
    found = Experience([event("started", 0), saved(60, total=2), *end, *again])
    assert found.comeback == seconds
    assert found.loss(100).failing == pytest.approx((50 + 2 + seconds) / found.between_failures * DAY)


@pytest.mark.parametrize("value", [None, True, -1, 10**400, "x", [], {}, math.nan, math.inf])
@pytest.mark.parametrize("name", ["started", "saved", "restored", "failed", "ended", "interval", "of the program"])
def test_any_value_of_any_event(name: str, value: Any) -> None:
    learned = LearnedInterval(60, HOUR)
    facts = dict.fromkeys(["step", "blocked_seconds", "total_seconds", "slowed_seconds", "how"], value)
    learned.learn([{"event": name, "time": value}, {"event": name, "time": 5, "run": value, **facts}, {"event": value}])
    assert 60 <= learned.interval_secs <= HOUR
    learned.report(RunEvents(as_location("nowhere"), FakeClock(), 1, process_observer()), "nowhere")


@pytest.mark.parametrize(
    ("failures", "ran", "expected"),
    [
        pytest.param(0, 0, DAY, id="nothing is known: one a day"),
        pytest.param(0, DAY, 3.9 * DAY, id="a day without one"),
        pytest.param(0, 10 * DAY, 18 * DAY, id="ten days without one"),
        pytest.param(1, DAY, DAY, id="one a day, as assumed"),
        pytest.param(1, HOUR, 1.9 * HOUR, id="one in the first hour"),
        pytest.param(20, 20 * HOUR, 1.03 * HOUR, id="one an hour: its own history outweighs the guess"),
        pytest.param(3, 60, 39, id="three in a minute"),
        pytest.param(2, 1, 5.6, id="killed twice before it has saved"),
    ],
)
def test_the_expected_time_between_failures(failures: int, ran: float, expected: float) -> None:
    """The derivative of the logarithm of the probability of a rate, by the logarithm of the rate, is zero there."""
    known = Experience([event("started", 0), event("of the program", ran)])
    known.failures = failures
    seconds = known.between_failures
    assert seconds == pytest.approx(expected, rel=0.03)
    assert failures == pytest.approx(ran / seconds + math.log(DAY / seconds) / math.log(10) ** 2)


def test_a_run_that_is_killed_before_it_saves_gets_on() -> None:
    """The first starts save after three minutes, and are killed after two; two of them are enough to learn that."""
    learned = LearnedInterval(10, HOUR)
    learned.learn([event("started", 0), saved(10, blocked=0.2, total=0.2)])
    intervals = [learned.interval_secs]
    for number in range(1, 4):
        learned.learn([event("started", 120 * number, str(number)), event("restored", 120 * number, str(number))])
        intervals.append(learned.interval_secs)
    assert [round(seconds) for seconds in intervals] == [186, 14, 10, 10]


# ---- properties


TIMES = st.floats(0.001, 1e5)


@given(st.floats(1, 1e4), st.floats(1, 1e4), TIMES, TIMES, st.integers(0, 20), st.floats(1, 1e6))
def test_the_interval_stays_in_its_bounds(
    one: float, other: float, blocked: float, total: float, failures: int, every: float
) -> None:
    learned = LearnedInterval(min(one, other), max(one, other))
    for known in killed(failures, every, blocked=blocked, total=total):
        learned.learn([known])
        assert learned.least <= learned.interval_secs <= learned.greatest


@given(st.floats(1, 1e4), TIMES, TIMES, st.integers(0, 20), st.integers(1, 5))
def test_more_failures_shorten_it_and_dearer_saves_lengthen_it(
    every: float, blocked: float, more: float, failures: int, further: int
) -> None:
    def interval(failures: int, blocked: float) -> float:
        known = Experience([event("started", 0), saved(1e6, blocked=blocked, total=blocked)])
        known.failures = failures
        return known.best()

    assert interval(failures + further, blocked) <= interval(failures, blocked)
    assert interval(failures, blocked + more) > interval(failures, blocked)
    known = Experience(killed(failures, every, blocked=blocked, total=blocked))
    best = known.loss(known.best()).together
    assert all(best <= known.loss(known.best() * factor).together * (1 + 1e-9) for factor in (0.5, 0.9, 1.1, 2))


# ---- steps that a save slows down


@pytest.mark.parametrize(
    ("without", "during", "share"),
    [
        pytest.param([1.0] * 20, [2.0] * 10, 0.5, id="twice as long"),
        pytest.param([1.0] * 20, [1.0] * 10, 0.0, id="the same"),
        pytest.param([1.0, 1.2] * 10, [1.2, 1.0] * 5, 0.0, id="steps that vary"),
        pytest.param([1.0] * 20, [*[1.0] * 9, 60.0], 0.0, id="one validation"),
        pytest.param([1.0] * 20, [2.0] * 5, None, id="too few steps"),
        pytest.param([1.0] * 3, [2.0] * 10, None, id="nothing to compare with"),
    ],
)
def test_how_much_a_save_slows_steps(without: Sequence[float], during: Sequence[float], share: float | None) -> None:
    pace, now, step = StepPace(), 0.0, 0
    for save, lengths in ((None, without), (1, during)):
        if save:
            pace.save_begins()
            now += 100  # the loop waits for the copy
        pace.step(step, now, save)
        for seconds in lengths:
            now, step = now + seconds, step + 1
            pace.step(step, now, save)
        step += 1
    pace.step(step, now + 50, None)  # the save has ended within this step
    assert pace.slowed(30.0) == (None if share is None else pytest.approx(30 * share))


@pytest.mark.parametrize("steps", [10, 3])
def test_saves_note_how_much_they_have_slowed_steps_down(steps: int, tmp_path: Path) -> None:
    """Each step takes a second, and two while the save is written; a few steps tell nothing."""
    clock, handler = FakeClock(), HeldHandler()
    with opened(tmp_path, hf.AsyncCheckpointer(handler), clock=clock, save_interval_steps=100) as manager:
        for step in range(1, 101 + steps):
            clock.sleep(1 if step <= 100 else 2)
            manager.save(step, {"w": np.zeros(3)})
        handler.written.set()
    (found,) = [one for one in manager.events.earlier() if one["event"] == "saved"]
    if steps == 3:
        assert "slowed_seconds" not in found
    else:
        background = found["total_seconds"] - found["blocked_seconds"]
        assert found["slowed_seconds"] == pytest.approx(background / 2, abs=1e-5)


# ---- managers


def train(directory: Path, clock: FakeClock, steps: int, interval: str) -> list[tuple[int, str]]:
    """Take a step every ten seconds from the newest one on; return the saved steps, and why."""
    found: list[tuple[int, str]] = []
    with hf.CheckpointCallback(directory, save_interval_secs=interval, clock=clock, save_at_end=False) as checkpoint:
        state, start = checkpoint.restore_or_initialize({"w": np.zeros(3)})
        for step in range(start + 1, start + 1 + steps):
            clock.sleep(10)
            outcome = checkpoint.on_step(step, state)
            if outcome.saved:
                found.append((step, outcome.reason))
                checkpoint.manager.wait_until_finished()
    return found


def write(directory: Path, events: Sequence[dict[str, Any]]) -> None:
    directory.mkdir(exist_ok=True)
    with open(directory / "events.jsonl", "a") as file:
        file.writelines(f"{json.dumps(one)}\n" for one in events)


def test_a_resume_begins_with_what_the_run_has_learned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing of it is in a checkpoint: the events have it."""
    caplog.set_level(logging.INFO)
    clock = FakeClock()
    write(tmp_path, [{**one, "time": clock.wall + one["time"]} for one in killed(20, HOUR, blocked=0.2, total=0.2)])
    clock.sleep(30 * HOUR)

    (first, *_) = train(tmp_path, clock, 20, "auto 10s to 1h")

    assert first == (4, "every 38s, learned")
    told = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    (start, *_) = [one for one in told if one["event"] == "interval"]
    assert start["seconds"] == pytest.approx(38.5, abs=0.1)
    assert (start["failures"], start["least"], start["greatest"]) == (21, 10, HOUR)  # the last start is over, too
    text = "a save costs 0.2s and is durable after 0.2s; 21 failures in 21h, so the next one is expected in 1h1m45s"
    assert start["why"] == text
    assert f"{tmp_path}: saves every {start['seconds']:.1f}s from now on: {text}" in caplog.text
    (tmp_path / "events.jsonl").unlink()
    assert train(tmp_path, clock, 2, "auto 20s to 1h")[0][1] == "every 20s, learned", "without events it begins anew"


@pytest.mark.parametrize("place", ["memory://tests/learned/run", "run"])
def test_a_run_learns_from_its_own_saves(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in an object store, which has no file of events."""
    monkeypatch.chdir(tmp_path)
    heard: list[dict[str, Any]] = []
    with opened(place, clock=FakeClock(), save_interval_secs="auto 20s to 30s") as manager:
        manager.events.add_listener(heard.append)
        manager.save(1, {"w": 1.0}, force=True)
    assert [one["event"] for one in heard] == ["started", "saved", "interval", "closed"]
    assert 20 <= heard[2]["seconds"] <= 30
    with opened(place, save_interval_secs="auto", read_only=True) as manager:
        manager.events.add_listener(heard.append)
        manager.restore()
    assert len(heard) == 4, "a manager that only reads learns nothing"


# ---- several processes


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
def test_processes_agree_on_what_may_differ(trigger: SavePolicy, metrics: dict[str, float] | None, asks: bool) -> None:
    schedule = SyncSchedule([trigger])
    assert schedule.asks(7, metrics, None) is asks
    assert schedule.certain == (() if asks or trigger.reads_metrics else (trigger,))


def test_several_processes_save_at_the_steps_of_process_0(tmp_path: Path) -> None:
    """Only it knows the history of the run, and the clocks of the others differ."""
    hours = [saved(HOUR * number, blocked=0.2, total=0.2) for number in range(1, 41)]
    write(tmp_path, [event("started", 0), *hours, event("finished", 40 * HOUR)])

    def run(coordinator: Coordinator) -> list[tuple[int, str]]:
        clock = FakeClock(1e9 + 1e6 * coordinator.process_index)
        options = {"save_interval_secs": "auto 10s to 1h", "barrier_timeout_secs": 10}
        found = []
        with opened(tmp_path, coordinator=coordinator, clock=clock, **options) as manager:
            manager.acquire()
            for step in range(1, 131):
                clock.sleep(10 if coordinator.process_index == 0 else 1000)
                decision = manager.decide(step)
                if decision:
                    commit(manager, step, {"w": np.zeros(3)})
                    found.append((step, decision.reason))
        return found

    one, *others = together(3, run)
    assert others == [one, one]
    assert [step for step, _ in one] == [43, 86, 129]
    assert one[0][1] == "every 7m8s, learned"


def test_children_of_one_process_are_several_programs(tmp_path: Path) -> None:
    """As of a server that imports once, and forks a child for each start."""
    program = """
import os, sys
import holdfast as hf

def start(step):
    with hf.CheckpointManager(sys.argv[1]) as manager:
        manager.save(step, {"step": step})

start(1)
child = os.fork()
if child == 0:
    start(2)
    os._exit(0)
os.waitpid(child, 0)
start(3)
"""
    subprocess.run([sys.executable, "-c", program, tmp_path], check=True)
    started = [one for one in read_run_events(as_location(tmp_path)) if one["event"] == "started"]
    first, forked, again = (one["program"] for one in started)
    assert forked != first == again
