"""When a manager saves and what it keeps, as tables, with a clock that the test sets; restarts in the middle."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.clocks import FakeClock
from tests.manager.runs import opened

import holdfast as hf
from holdfast.engine.manager import StepInfo, reasons, retention_rules

NAN = math.nan
HOUR = 3600.0


class PowersOfTwo(hf.SavePolicy, hf.KeepPolicy):
    """Policies of a program: of both protocols, with the defaults of the other members."""

    def reason(self, moment: hf.reports.Moment) -> str | None:
        return "a power of two" if moment.step.bit_count() == 1 else None

    def kept(self, steps: Sequence[StepInfo]) -> dict[int, str]:
        return {info.step: "a power of two" for info in steps if info.step.bit_count() == 1}


def every(steps: int, keep: int | None = None) -> hf.Every:
    return hf.Every(steps=steps, keep=keep)


def options(**changes: Any) -> hf.CheckpointManagerOptions:
    return hf.CheckpointManagerOptions(**changes)


def train(
    place: Path | str,
    given: hf.CheckpointManagerOptions,
    steps: Sequence[int],
    *,
    metrics: Mapping[int, Any] | None = None,
    restored: int | None = None,
    restart_at: Sequence[int] = (),
) -> tuple[list[int], list[int]]:
    """Runs a loop over steps, from a step that an earlier run has left, and with a new manager before some of them.

    Returns which were saved and which are left.
    """
    clock = FakeClock()
    saved = []
    if restored is not None:
        with hf.CheckpointManager(place, hf.PyTreeCheckpointer()) as earlier:
            earlier.save(restored, restored)
    manager = hf.CheckpointManager(place, hf.PyTreeCheckpointer(), given, clock=clock)
    if restored is not None:
        manager.restore(restored)
    for step in steps:
        if step in restart_at:
            manager.close()
            manager = hf.CheckpointManager(place, hf.PyTreeCheckpointer(), given, clock=clock)
        clock.sleep(60)
        if manager.save(step, step, metrics=None if metrics is None else metrics.get(step)):
            saved.append(step)
    manager.close()
    left = hf.CheckpointManager(place).all_steps()
    assert manager.all_steps() == left
    return saved, left


RESTARTS = pytest.mark.parametrize(
    "restart_at", [(), (6,), (3, 4, 5), tuple(range(1, 30))], ids=["no restart", "one", "three", "always"]
)

LOSSES = {1: {"loss": 5}, 2: {"loss": 2}, 3: {"loss": NAN}, 4: None, 5: {"loss": 3}, 6: {"other": 1}, 7: {"loss": 4}}


@pytest.mark.one_in(2)
@RESTARTS
@pytest.mark.parametrize(
    ("given", "kept"),
    [
        pytest.param(options(max_to_keep=1), [9], id="the newest"),
        pytest.param(options(max_to_keep=2, keep_period=4), [4, 8, 9], id="every 4 steps"),
        pytest.param(options(keep_period=4), [1, 2, 3, 4, 5, 6, 7, 8, 9], id="a period without a limit"),
        pytest.param(options(max_to_keep=1, keep_steps=(2, 5, 77)), [2, 5, 9], id="chosen steps"),
        pytest.param(options(max_to_keep=1, keep_time_interval="3m"), [1, 4, 7, 9], id="every 3 minutes"),
        pytest.param(options(max_to_keep=2, best_fn="loss", best_mode="min"), [2, 5, 9], id="best 2"),
        pytest.param(options(max_to_keep=2, best_fn="loss", best_mode="max"), [1, 7, 9], id="largest 2"),
        pytest.param(
            options(max_to_keep=1, keep_latest=2, best_fn="loss", best_mode="min"), [2, 8, 9], id="best and newest 2"
        ),
        pytest.param(
            options(max_to_keep=1, best_fn="loss", best_mode="min", keep_checkpoints_without_metrics=True),
            [2, 4, 8, 9],
            id="without metrics",
        ),
        pytest.param(
            options(max_to_keep=1, best_fn=lambda metrics: -metrics["loss"], keep_period=3), [2, 3, 6, 9], id="function"
        ),
        pytest.param(options(keep=every(3)), [3, 6, 9], id="policy: all of a period"),
        pytest.param(options(keep=[every(1, 2), every(3)]), [3, 6, 8, 9], id="policies: some of one, all of one"),
        pytest.param(options(keep=hf.Every(secs="2m", keep=2)), [7, 9], id="policy: a few of a period in time"),
        pytest.param(options(keep=[PowersOfTwo(), every(3, 1)]), [1, 2, 4, 8, 9], id="policy of the program"),
        pytest.param(
            options(keep=every(4, 1), best_fn="loss", best_mode="min", keep_steps=[3]),
            [2, 3, 8, 9],
            id="policy and best",
        ),
    ],
)
def test_what_is_kept(place: str, given: hf.CheckpointManagerOptions, kept: list[int], restart_at: list[int]) -> None:
    saved, left = train(place, given, range(1, 10), metrics=LOSSES, restart_at=restart_at)
    assert saved == list(range(1, 10))
    assert left == kept


@pytest.mark.parametrize(
    ("given", "saved"),
    [
        pytest.param(options(save_interval_secs="5m"), [5, 10], id="every 5 minutes"),
        pytest.param(options(save_interval_steps=4, save_interval_secs=180), [3, 4, 7, 8, 11, 12], id="either"),
        pytest.param(options(), [*range(1, 14)], id="every step without a trigger"),
        pytest.param(options(save=every(5)), [5, 10], id="policy"),
        pytest.param(options(save=[every(5), hf.Every(secs="4m")]), [4, 5, 9, 10], id="policies"),
        pytest.param(options(save=[PowersOfTwo(), every(6)]), [1, 2, 4, 6, 8, 12], id="of the program"),
        pytest.param(
            options(save=every(6), save_on_best=True, best_fn="loss", best_mode="min"),
            [1, 2, 6, 12],
            id="policy and best",
        ),
    ],
)
def test_when_it_saves(place: str, given: hf.CheckpointManagerOptions, saved: list[int]) -> None:
    assert train(place, given, range(1, 14), metrics=LOSSES)[0] == saved


@RESTARTS
@pytest.mark.parametrize(
    ("save", "kept"),
    [
        ([every(2, 3), every(10)], [10, 20, 24, 26, 28]),
        ([every(2), every(10)], list(range(2, 29, 2))),
        ([every(2, 3), PowersOfTwo()], [24, 26, 28]),
    ],
)
def test_periods_say_what_is_kept_too(place: str, save: list[hf.Every], kept: list[int], restart_at: list[int]) -> None:
    given = options(save=save)
    assert train(place, given, range(1, 29), restart_at=restart_at)[1] == kept
    listed = {one.step: one.kept for one in hf.list_checkpoints(place)}
    with hf.CheckpointManager(place, options=given) as manager:
        assert listed == {step: manager.why_kept(step) for step in kept}


@pytest.mark.parametrize(
    ("n", "restored", "steps", "saved"),
    [
        pytest.param(2, None, range(11), [0, 2, 4, 6, 8, 10], id="from zero"),
        pytest.param(2, None, range(1, 11), [2, 4, 6, 8, 10], id="from one"),
        pytest.param(5, 0, range(1, 12), [5, 10], id="restored at zero"),
        pytest.param(100, 150, range(151, 351), [200, 300], id="restored between"),
        pytest.param(10, None, range(7, 60, 7), [14, 21, 35, 42, 56], id="jumps by seven"),
        pytest.param(10, None, [3, 4, 99, 100, 101], [99, 100], id="one long jump"),
        pytest.param(10, None, [31, 32], [], id="the first step is not due"),
        pytest.param(10, 25, [25, 26, 29, 30, 30], [30], id="the same step again"),
        pytest.param(100, 250, [151, 152, 200], [151, 200], id="the counter went back"),
    ],
)
def test_saving_every_n_steps(place: str, n: int, restored: int | None, steps: Sequence[int], saved: list[int]) -> None:
    assert train(place, options(save_interval_steps=n), steps, restored=restored)[0] == saved


@pytest.mark.parametrize("restart_at", [(), range(1, 9)], ids=["no restart", "always"])
@pytest.mark.parametrize(
    ("mode", "values", "saved"),
    [
        pytest.param("max", [0.1, 0.3, 0.2, 0.3, 0.4], [1, 2, 5], id="max"),
        pytest.param("min", [0.4, 0.3, 0.5, 0.3, 0.1], [1, 2, 5], id="min"),
        pytest.param("max", [NAN, 0.1, NAN, 0.2, None, 0.15], [2, 4], id="max, NaN and missing"),
        pytest.param("min", [NAN, 5, 5, 6, 3, None, 2], [2, 5, 7], id="min, NaN and missing"),
        pytest.param("min", [math.inf, 3.0, math.inf], [1, 2], id="from infinity"),
        pytest.param("max", ["0.9", 0.1], [2], id="text is no number"),
    ],
)
def test_saving_the_best(place: str, mode: Any, values: list[Any], saved: list[int], restart_at: Sequence[int]) -> None:
    given = options(save_on_best=True, best_fn="acc", best_mode=mode, max_to_keep=1)
    metrics = {step: {"acc": value} for step, value in enumerate(values, start=1) if value is not None}
    found = train(place, given, range(1, len(values) + 1), metrics=metrics, restart_at=restart_at)
    assert found == (saved, saved[-1:])


@pytest.mark.parametrize(
    ("step", "seconds", "metrics", "save", "reason"),
    [
        (51, 0, None, False, "nothing is due"),
        (50, 900, {"acc": 0.5}, False, "step 50 is saved already"),
        (100, 0, None, True, "every 100 steps"),
        (51, 900, None, True, "every 15m"),
        (51, 0, {"acc": 0.5}, True, "best acc (0.5)"),
        (100, 900, {"acc": 0.5}, True, "every 100 steps, every 15m, best acc (0.5)"),
    ],
)
def test_why_a_step_is_saved(place: str, step: int, seconds: float, metrics: Any, save: bool, reason: str) -> None:
    train(place, options(), [50])
    given = options(
        save=[every(100), every(100), hf.Every(secs=900)], save_on_best=True, best_fn="acc", best_mode="max"
    )
    clock = FakeClock()
    with hf.CheckpointManager(place, options=given, clock=clock) as manager:
        manager.restore(50)
        clock.sleep(seconds)
        decision = manager.decide(step, metrics=metrics)
        assert decision == hf.reports.Decision(save, reason)
        assert bool(decision) is save


@pytest.mark.parametrize(
    ("period", "moment", "due"),
    [
        pytest.param(hf.Every(secs=60), {"now": 159.0, "last": 100.0}, False, id="before"),
        pytest.param(hf.Every(secs=60), {"now": 160.0, "last": 100.0}, True, id="exactly"),
        pytest.param(hf.Every(secs=60), {"now": 99.0, "last": 100.0}, True, id="backwards"),
        pytest.param(hf.Every(secs=60), {"now": 5.0, "last": 1e9}, True, id="another clock"),
        pytest.param(hf.Every(secs=60), {"now": 1e9}, False, id="no start"),
        pytest.param(every(10), {"step": 20}, True, id="a multiple without a step before"),
        pytest.param(every(10), {"step": 7}, False, id="no multiple"),
    ],
)
def test_whether_a_period_has_passed(period: hf.Every, moment: dict[str, Any], due: bool) -> None:
    assert (period.reason(hf.reports.Moment(**{"step": 1, **moment})) is not None) is due


def test_a_clock_that_is_set_back(place: str) -> None:
    given = options(max_to_keep=1, keep_time_interval="1h", save_interval_secs="30m")
    clock = FakeClock()
    with hf.CheckpointManager(place, hf.PyTreeCheckpointer(), given, clock=clock) as manager:
        saved = []
        for step in range(1, 25):  # 10 minutes each
            clock.sleep(600)
            if step == 12:
                clock.wall -= 24 * HOUR
            if manager.save(step, step):
                saved.append(step)
        assert saved == [3, 6, 9, 12, 15, 18, 21, 24], "the interval is measured by a clock that cannot be set"
        assert manager.all_steps() == [3, 9, 12, 18, 24]
        assert manager.why_kept(12) == ("every 1h (the clock was set back)",)
        assert manager.latest_step() == 24


def test_the_best_step_is_one_with_a_number(place: str) -> None:
    reports: dict[str, tuple[int | None, list[dict[str, Any]]]] = {
        "some": (1, [{"a": 1}, {"a": NAN}, {}]),
        "none": (None, [{"b": 1}, {"a": NAN}, {}]),
    }
    for name, (best, metrics) in reports.items():
        run = f"{place}/{name}"
        with opened(run, hf.PyTreeCheckpointer(), best_fn="a", best_mode="max") as manager:
            for step, found in enumerate(metrics, start=1):
                manager.save(step, step, metrics=found)
            assert manager.best_step() == best
        assert opened(run, best_fn="a", best_mode="max").best_step() == best
        assert hf.CheckpointManager(run).best_step() == 3


def test_pins_and_a_run_that_keeps_less(place: str) -> None:
    train(place, options(), range(1, 8))
    with opened(place, hf.PyTreeCheckpointer(), max_to_keep=2) as manager:
        assert manager.all_steps() == [1, 2, 3, 4, 5, 6, 7], "looking deletes nothing"
        manager.pin(1)
        assert (manager.why_kept(1), manager.why_kept(3)) == (("pinned",), ())
        manager.save(8, 8)
        assert manager.all_steps() == [1, 7, 8]
        with pytest.raises(hf.CheckpointNotFoundError):
            manager.pin(2)
    with opened(place, hf.PyTreeCheckpointer(), max_to_keep=1) as manager:
        manager.save(9, 9)
        assert manager.all_steps() == [1, 9]
        manager.unpin(1)
        assert manager.why_kept(1) == ()
        manager.save(10, 10)
        assert manager.all_steps() == [10]


def test_every_reason_is_told(place: str) -> None:
    given = options(
        max_to_keep=2,
        keep_latest=2,
        keep_period=3,
        keep_steps=[5],
        best_fn="acc",
        best_mode="max",
        keep_time_interval="1h",
        keep_checkpoints_without_metrics=True,
    )
    clock = FakeClock()
    with hf.CheckpointManager(place, hf.PyTreeCheckpointer(), given, clock=clock) as manager:
        for step, accuracy in enumerate([0.1, 0.5, 0.4, None, NAN, 0.3], start=1):
            clock.sleep(0.6 * HOUR)
            manager.save(step, step, metrics=None if accuracy is None else {"acc": accuracy})
            if step in (2, 5):
                manager.pin(step)
        kept = {step: manager.why_kept(step) for step in manager.all_steps()}
        with pytest.raises(hf.CheckpointNotFoundError, match="no checkpoint of step 9"):
            manager.why_kept(9)
    assert kept == {
        1: ("every 1h",),
        2: ("best acc (0.5)", "pinned"),
        3: ("2nd best acc (0.4)", "every 3 steps", "every 1h"),
        4: ("no metrics",),
        5: ("one of the newest 2", "every 1h", "chosen step", "pinned"),
        6: ("newest", "every 3 steps"),
    }
    assert {summary.step: summary.kept for summary in hf.list_checkpoints(place)} == kept


def test_a_damaged_step_does_not_count(tmp_path: Path) -> None:
    train(tmp_path, options(), [1, 2, 3])
    (tmp_path / "3" / "checkpoint.json").write_text("{")
    with hf.CheckpointManager(tmp_path, hf.PyTreeCheckpointer(), options(max_to_keep=2)) as manager:
        manager.save(4, 4)
        assert manager.all_steps() == [2, 4]
        assert (tmp_path / "3" / "state").exists(), "what is damaged may be looked at"


@pytest.mark.parametrize(
    ("best_fn", "metrics", "said"),
    [
        ("val_los", {"val_loss": 1.0}, ["metric val_los, by which best_fn finds the best (the newest has val_loss)"]),
        (lambda metrics: metrics["val_los"], {"val_loss": 1.0}, ["has the metric that best_fn returns, by which"]),
        ("loss", None, ["(the newest has no metrics)"]),
        ("loss", {"loss": 1.0}, []),
    ],
    ids=["name", "function", "no metrics", "found"],
)
def test_a_metric_that_no_checkpoint_has_is_told_before_steps_are_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, best_fn: Any, metrics: Any, said: list[str]
) -> None:
    with hf.CheckpointManager(tmp_path, options=options(best_fn=best_fn, best_mode="max", max_to_keep=1)) as manager:
        for step in range(4):
            manager.save(step, {"x": step}, metrics=metrics)

    warnings = [text for record in caplog.records if "best_fn finds the best" in (text := record.getMessage())]
    assert len(warnings) == len(said)
    assert all(part in warning for part, warning in zip(said, warnings, strict=True))


@pytest.mark.parametrize(
    ("given", "reports", "said"),
    [
        ({"best_fn": "val_los"}, [{"x": 1}, {"x": 1, "val_loss": 2}], "2 was reported without the metric val_los,"),
        ({"best_fn": "acc"}, [{"accuracy": 1.0, "x": {"y": 2}}] * 2, "1 was reported without the metric acc,"),
        ({"best_fn": "acc"}, [{"accuracy": 1.0, "x": {"y": 2}}], "reported: accuracy, x/y. "),
        ({"best_fn": "val/los"}, [{"val": {"loss": 1}}], "did you mean val/loss?"),
        ({"best_fn": lambda metrics: metrics.get("los")}, [{"loss": 1.0}], "reported: loss."),
        ({"best_fn": "matrix"}, [{"matrix": np.eye(2)}], "1 was reported with a metric matrix that is a"),
        ({"best_fn": lambda metrics: "low"}, [{"loss": 1.0}], "with metrics of which best_fn makes 'low', and"),
        ({"best_fn": lambda metrics: np.ones(8)}, [{"loss": 1.0}], "makes a ndarray of the shape [8], and"),
        ({"best_fn": "loss"}, [None] * 1001, "1000 was reported without the metric loss,"),
        ({"best_fn": "val_loss"}, [{"loss": 1.0}] * 999 + [{"loss": 1.0, "val_loss": 1.0}], None),
        ({"best_fn": "loss"}, [{}, {"loss": math.nan}, {"other": 1.0}], None),
        ({"best_fn": lambda metrics: metrics["loss"]}, [{"loss": np.ones(1)}, {"other": 1.0}], None),
    ],
)
def test_reports_without_the_metric_are_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, given: Any, reports: list[Any], said: str | None
) -> None:
    with opened(tmp_path, **given, best_mode="max", save_on_best=True) as manager:
        for step, metrics in enumerate(reports, start=1):
            manager.should_save(step, metrics=metrics)
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == (said is not None)
    assert said is None or said in told[0]


def test_a_resumed_run_knows_the_metric_of_its_checkpoints(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step, metrics in enumerate([{"score": 1.0}, {"loss": 1.0}]):
        with hf.CheckpointManager(tmp_path, options=options(best_fn="score", best_mode="max")) as manager:
            manager.save(step, {"x": step}, metrics=metrics)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


CHANGES = st.lists(
    st.tuples(
        st.sampled_from(
            ["save", "save", "save", "pin", "unpin", "metrics", "late metrics", "delete", "deleted by others"]
        ),
        st.integers(0, 20),  # chooses the step
        st.sampled_from([None, math.nan, 0.1, 0.2, 0.2, 0.3]),
    ),
    min_size=6,
    max_size=14,
)


STORY = [
    *[("save", 0, 0.1), ("save", 0, 0.2), ("save", 0, 0.3), ("pin", 2, None), ("save", 0, 0.3)],
    *[("unpin", 2, None), ("save", 0, 0.3), ("late metrics", 3, 0.1), ("save", 0, None), ("delete", 0, None)],
    *[("save", 0, 0.3), ("metrics", 0, 0.2), ("deleted by others", 1, None), ("save", 0, 0.2), ("save", 0, None)],
]


@example(changes=STORY)
@settings(max_examples=8, deadline=None)
@given(changes=CHANGES)
def test_a_run_keeps_what_all_rules_keep_of_all_steps(changes: list[tuple[str, int, float | None]]) -> None:
    options = hf.CheckpointManagerOptions(
        best_fn="loss", best_mode="min", max_to_keep=2, keep_latest=1, keep_period=4, keep_time_interval=3
    )
    clock = FakeClock()
    steps: dict[int, StepInfo] = {}
    late: set[int] = set()  # steps whose metrics are those of another program, also if the run has others later
    newest = 0
    with tempfile.TemporaryDirectory() as place, hf.CheckpointManager(place, options=options, clock=clock) as run:
        for what, number, loss in changes:
            metrics = None if loss is None else {"loss": loss}
            decided = what == "save"
            step = sorted(steps)[number % len(steps)] if steps else -1
            if what == "save":
                newest += 1
                clock.sleep(1)
                run.save(newest, {"w": 1}, metrics=metrics)
                steps[newest] = StepInfo(step=newest, time=clock.now(), metrics=metrics)
            elif step == -1:
                continue
            elif what in ("pin", "unpin"):
                getattr(run, what)(step)
                steps[step] = replace(steps[step], pinned=what == "pin")
            elif what.startswith("delete"):
                if what == "delete":
                    run.delete(step)
                else:
                    shutil.rmtree(f"{place}/{step}")
                    run.reload()
                del steps[step]
            elif metrics is not None and (what == "late metrics" or step not in late):
                if what == "metrics":
                    run.record_metrics(step, metrics)
                    decided = True
                else:
                    hf.record_metrics(place, step, metrics)
                    late.add(step)
                steps[step] = replace(steps[step], metrics=metrics)
            run.wait_until_finished()
            if decided:
                kept = {*reasons(list(steps.values()), retention_rules(options)), newest}
                steps = {step: info for step, info in steps.items() if step in kept}
            assert run.all_steps() == sorted(steps)
