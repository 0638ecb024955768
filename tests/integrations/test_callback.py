"""The callback around states that are plain pytrees: when it saves, what it says, what it refuses."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]  # it ships no types
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import holdfast as hf
from holdfast.integrations.flax import CheckpointCallback, StepOutcome

pytestmark = pytest.mark.usefixtures("default_sigterm")


class Positions:
    """A data iterator that knows how far it is."""

    def __init__(self) -> None:
        self.position = 0

    def __next__(self) -> int:
        self.position += 1
        return self.position

    def get_state(self) -> dict[str, int]:
        return {"position": self.position}

    def set_state(self, state: Mapping[str, int]) -> None:
        self.position = state["position"]


class Loader:
    """A data loader that begins anew whenever it is asked."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class OnDevice:
    """A scalar on a device: reading its value waits for the device."""

    def __init__(self, value: float) -> None:
        self._value = value
        self.fetched = 0

    def item(self) -> float:
        self.fetched += 1
        return self._value

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the device was waited for")

    def __float__(self) -> float:
        raise AssertionError("the device was waited for")


def state_at(step: int) -> dict[str, Any]:
    return {"params": {"w": np.full(3, step, np.float32)}, "count": step}


def run(checkpoint: CheckpointCallback, first: int, last: int) -> None:
    """Reports steps first..last."""
    for step in range(first, last + 1):
        checkpoint.on_step(step, state_at(step))


def test_outcomes_say_what_was_done(tmp_path: Path) -> None:
    """No step is saved where none was done, and none a second time at the end."""
    with CheckpointCallback(tmp_path) as checkpoint:
        assert checkpoint.restore_or_initialize(state_at(0))[1] == 0
    assert hf.list_checkpoints(tmp_path) == []
    with CheckpointCallback(tmp_path, save_interval_steps=2) as checkpoint:
        state = state_at(0)
        assert checkpoint.restore_or_initialize(state) == (state, 0)
        assert checkpoint.on_step(1, state_at(1)) == StepOutcome(False, "nothing is due", False)
        assert checkpoint.on_step(2, state_at(2)) == StepOutcome(True, "every 2 steps", False)
        assert not checkpoint.should_stop
        checkpoint.manager.wait_until_finished()
        written = (tmp_path / "2" / "checkpoint.json").stat().st_mtime_ns
    assert (tmp_path / "2" / "checkpoint.json").stat().st_mtime_ns == written


# Resuming


def test_a_loop_that_forgets_to_restore_is_stopped_before_it_mixes_two_runs(tmp_path: Path) -> None:
    with CheckpointCallback(tmp_path) as checkpoint:  # into an empty directory there is nothing to restore
        run(checkpoint, 1, 2)
    for _ in range(2):
        with (
            CheckpointCallback(tmp_path) as checkpoint,
            pytest.raises(hf.errors.StateError, match="restore_or_initialize"),
        ):
            checkpoint.on_step(1, state_at(1))
    assert hf.CheckpointManager(tmp_path).all_steps() == [2]


# Extras


def test_extras_come_back_each_in_its_own_way(tmp_path: Path) -> None:
    def fresh(seed: int) -> dict[str, Any]:
        noise = np.random.default_rng(seed)
        return {"data": Positions(), "noise": noise, "ema": np.zeros(2), "key": jax.random.key(seed), "config": {}}

    extras = fresh(3)
    with CheckpointCallback(tmp_path) as checkpoint:
        checkpoint.restore_or_initialize(state_at(0), **extras)
        assert checkpoint.extras["data"] is extras["data"]
        assert checkpoint.extras["config"] is extras["config"]
        next(extras["data"]), extras["noise"].random()
        key, _ = jax.random.split(extras["key"])
        changed = {"ema": np.ones(2), "key": key, "config": {"history": [0.5, 0.25], "note": "y"}, "late": b"more"}
        checkpoint.on_step(1, state_at(1), **{**extras, **changed})
    expected = extras["noise"].random()

    again = fresh(9)
    with CheckpointCallback(tmp_path) as checkpoint:
        _, start = checkpoint.restore_or_initialize(state_at(0), **again, late=None)
    assert (start, again["data"].position, again["noise"].random()) == (1, 1, expected)
    assert checkpoint.extras["data"] is again["data"]
    assert checkpoint.extras["noise"] is again["noise"]
    assert checkpoint.extras["ema"].tolist() == [1, 1]
    assert np.array_equal(jax.random.key_data(checkpoint.extras["key"]), jax.random.key_data(key))
    assert checkpoint.extras["config"] == {"history": [0.5, 0.25], "note": "y"}
    assert checkpoint.extras["late"] == b"more"


def test_extras_that_do_not_fit_are_errors_that_change_nothing(tmp_path: Path) -> None:
    data, ema = Positions(), {"w": np.ones(2)}
    next(data)
    with CheckpointCallback(tmp_path / "run") as checkpoint:
        checkpoint.restore_or_initialize(state_at(0), data=data, ema=ema)
        with pytest.raises(hf.errors.StateError, match="data="):
            checkpoint.on_step(1, state_at(1), ema=ema)
        checkpoint.on_step(1, state_at(1), data=data, ema=ema)
    with CheckpointCallback(tmp_path / "bare") as checkpoint:
        run(checkpoint, 1, 1)
    fresh, timer = Positions(), Positions()
    wrong: list[tuple[str, dict[str, Any], str]] = [
        ("run", {"data": fresh, "ema": ema, "timer": timer}, "timer="),
        ("run", {"data": fresh, "ema": {"w": np.ones(3)}}, "ema/w"),
        ("bare", {"data": fresh}, "data="),
    ]
    for name, extras, named in wrong:
        with CheckpointCallback(tmp_path / name) as checkpoint, pytest.raises(hf.TreeMismatchError, match=named):
            checkpoint.restore_or_initialize(state_at(0), **extras)
    assert fresh.position == 0
    with CheckpointCallback(tmp_path / "run") as checkpoint:  # what the message recommends
        checkpoint.restore_or_initialize(state_at(0), data=fresh, ema=ema)
        checkpoint.on_step(2, state_at(2), data=fresh, ema=ema, timer=timer)
    with CheckpointCallback(tmp_path / "run") as checkpoint:
        assert checkpoint.restore_or_initialize(state_at(0), data=fresh, ema=ema, timer=timer)[1] == 2


@pytest.mark.parametrize(
    "data",
    [iter(range(3)), (number for number in range(3)), zip([1], [2], strict=True), Loader()],
    ids=["iterator", "generator", "zip", "loader"],
)
def test_data_without_a_state_is_refused_before_the_first_step(tmp_path: Path, data: Any) -> None:
    with CheckpointCallback(tmp_path / "run", save_interval_steps=1) as checkpoint:
        with pytest.raises(hf.errors.OptionError, match=rf"^data= is a {type(data).__name__}, .*state_dict and"):
            checkpoint.restore_or_initialize(state_at(0), data=data)
        _, start = checkpoint.restore_or_initialize(state_at(0), text="abc", pair=(np.ones(2), {1: 2}), empty=[])

    assert start == 0
    assert not (tmp_path / "run").exists() or hf.list_checkpoints(tmp_path / "run") == []


class Ticks:
    """A clock for what takes its time, here a fixed one for everything that is measured; the first takes longer."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.time = 0.0

    def thread_time(self) -> float:
        self.time += self.seconds if self.time else 2 * self.seconds
        return self.time


@pytest.mark.parametrize(("milliseconds", "warnings"), [(0.01, 0), (0.5, 0), (20, 1)])
def test_a_batch_drawn_after_the_last_step(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    milliseconds: float,
    warnings: int,
) -> None:
    """The position belongs to the step, although it has to be taken at every step."""
    monkeypatch.setattr("holdfast.integrations.loop.steps.time", Ticks(milliseconds / 1000))
    data = Positions()
    with CheckpointCallback(tmp_path, save_interval_steps=100) as checkpoint:
        checkpoint.restore_or_initialize(state_at(0), data=data)
        for step in range(1, 8):
            next(data)
            checkpoint.on_step(step, state_at(step), data=data)
        next(data)
    with CheckpointCallback(tmp_path) as checkpoint:
        checkpoint.restore_or_initialize(state_at(0), data=data)
    assert data.position == 7
    found = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert [text.split(":")[0] for text in found] == [
        "taking the state of data= costs 20.0 ms at every step"
    ] * warnings


def test_a_random_number_drawn_after_the_last_step(tmp_path: Path) -> None:
    def drawn(rngs: Any) -> list[int]:
        return [int(word) for word in jax.random.key_data(rngs.noise())]

    rngs = nnx.Rngs(noise=3)
    with CheckpointCallback(tmp_path, save_interval_steps=100) as checkpoint:
        checkpoint.restore_or_initialize(state_at(0), rngs=rngs)
        for step in range(1, 4):
            drawn(rngs)
            checkpoint.on_step(step, state_at(step), rngs=rngs)
        expected = drawn(rngs)
    rngs = nnx.Rngs(noise=4)
    with CheckpointCallback(tmp_path) as checkpoint:
        checkpoint.restore_or_initialize(state_at(0), rngs=rngs)
    assert drawn(rngs) == expected


# Preemption


def test_a_signal_saves_durably_and_asks_to_stop(tmp_path: Path) -> None:
    """Also where it comes after the last step, in a run that saves none at its end."""
    with CheckpointCallback(tmp_path, save_interval_steps=100, witness_steps_after_signal=0) as checkpoint:
        checkpoint.restore_or_initialize(state_at(0))
        run(checkpoint, 1, 3)
        os.kill(os.getpid(), signal.SIGTERM)
        assert checkpoint.preempted
        assert not checkpoint.should_stop
        assert checkpoint.on_step(4, state_at(4)) == StepOutcome(True, "preempted", True)
        assert checkpoint.should_stop
        assert (tmp_path / "4" / "checkpoint.json").exists()
        stopped = StepOutcome(False, "the run was stopped; nothing is saved any more", True)
        assert checkpoint.on_step(5, state_at(5)) == stopped
    assert checkpoint.exit_status == 75
    options: dict[str, Any] = {"save_interval_steps": 100, "save_at_end": False, "grace_secs": "1h"}
    with CheckpointCallback(tmp_path, **options, signals=["SIGUSR1"]) as checkpoint:
        assert checkpoint.restore_or_initialize(state_at(0))[1] == 4
        run(checkpoint, 5, 6)
        os.kill(os.getpid(), signal.SIGUSR1)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    assert [(one.step, one.reason) for one in hf.list_checkpoints(tmp_path)] == [(4, "preempted"), (6, "at the end")]
    with CheckpointCallback(tmp_path) as checkpoint:
        checkpoint.restore_or_initialize(state_at(0))
        run(checkpoint, 7, 7)
    assert (checkpoint.exit_status, hf.list_checkpoints(tmp_path)[-1].reason) == (0, "at the end")


# Exceptions and the end


def break_next_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", refuse)


def test_a_failed_save_does_not_hide_the_exception_of_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with (  # noqa: PT012 - the loop is what raises
        pytest.raises(RuntimeError, match="in the loop"),
        CheckpointCallback(tmp_path, save_interval_steps=2) as checkpoint,
    ):
        checkpoint.restore_or_initialize(state_at(0))
        break_next_commit(monkeypatch)
        run(checkpoint, 1, 2)
        raise RuntimeError("in the loop")
    monkeypatch.undo()
    assert "a save failed while the training loop was ending with RuntimeError" in caplog.text


def test_closing_by_hand_is_the_same_as_leaving_the_block(tmp_path: Path) -> None:
    checkpoint = CheckpointCallback(tmp_path, save_interval_steps=2)
    checkpoint.restore_or_initialize(state_at(0))
    run(checkpoint, 1, 3)
    checkpoint.close()
    checkpoint.close()
    assert hf.CheckpointManager(tmp_path).all_steps() == [2, 3]
    with pytest.raises(hf.errors.StateError, match="closed"):
        checkpoint.on_step(4, state_at(4))
    with pytest.raises(hf.errors.StateError, match="closed"):
        checkpoint.restore_or_initialize(state_at(0))


@dataclasses.dataclass
class Counted:
    step: Any


@pytest.mark.parametrize("counters", [[3, 3], [4, 4], [3, 4], [], 2], ids=str)
def test_counters_of_a_state_are_its_own_business(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, counters: Any
) -> None:
    """As after replicate, where all are the same, or for a vmapped population; or that of another tree."""
    create: Any = TrainState.create
    state = create(apply_fn=None, params={"w": jnp.zeros(2)}, tx=optax.sgd(0.1))
    several = isinstance(counters, list)
    with CheckpointCallback(tmp_path, save_interval_steps=1) as checkpoint:
        reported = state.replace(step=jnp.array(counters, jnp.int32)) if several else Counted(counters)
        assert checkpoint.on_step(3, reported).saved
    assert hf.CheckpointManager(tmp_path).all_steps() == [3]
    assert [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING] == []


# Metrics


def test_metrics_are_stored_as_numbers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One that is gone does not cost the step."""
    donated = jnp.float32(0.5) + 1
    donated.delete()
    metrics = {
        "loss": jnp.float32(0.5),
        "val": {"accuracy": np.float64(0.25), "confusion": np.eye(2)},
        "count": np.int64(3),
        "lr": 0.125,
        "done": True,
        "half": jnp.bfloat16(1.5),
        "halves": jnp.ones(2, jnp.bfloat16),
        "image": np.zeros((80, 80)),
        "names": ["a", "b"],
        "gone": donated,
    }
    with CheckpointCallback(tmp_path) as checkpoint:
        checkpoint.on_step(1, state_at(1), metrics=metrics)
    assert hf.CheckpointManager(tmp_path).metrics(1) == {
        "loss": 0.5,
        "val": {"accuracy": 0.25, "confusion": [[1, 0], [0, 1]]},
        "count": 3,
        "lr": 0.125,
        "done": True,
        "half": 1.5,
        "halves": [1.0, 1.0],
    }
    assert "the metric gone cannot be read, and is not stored: Array has been deleted" in caplog.text


def test_metrics_that_are_no_mapping_are_refused(tmp_path: Path) -> None:
    wrong: Any = [0.5]
    with CheckpointCallback(tmp_path, save_interval_steps=1) as checkpoint:
        with pytest.raises(hf.errors.OptionError, match="loss"):
            checkpoint.on_eval(1, wrong)
        with pytest.raises(hf.errors.OptionError, match="loss"):
            checkpoint.on_step(1, state_at(1), metrics=wrong)


def test_an_evaluation_does_not_hide_that_the_save_of_its_step_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = CheckpointCallback(tmp_path, save_interval_steps=2)
    checkpoint.restore_or_initialize(state_at(0))
    run(checkpoint, 1, 1)
    break_next_commit(monkeypatch)
    run(checkpoint, 2, 2)

    def evaluate_and_close() -> None:
        try:
            checkpoint.on_eval(2, {"loss": 0.5})
        finally:
            checkpoint.close()

    with pytest.raises(hf.SaveFailedError, match="step 2"):
        evaluate_and_close()


def test_metrics_of_an_evaluation_reach_the_checkpoint_of_their_step(tmp_path: Path) -> None:
    with CheckpointCallback(tmp_path, save_interval_steps=2, best_fn="loss", best_mode="min") as checkpoint:
        checkpoint.restore_or_initialize(state_at(0))
        for step, loss in [(1, 0.1), (2, 0.5), (3, 0.4), (4, 0.7), (5, 0.6)]:
            checkpoint.on_step(step, state_at(step), metrics={"train": 1.0})
            checkpoint.on_eval(step, {"loss": np.float32(loss)})
        assert checkpoint.on_eval(2, {"late": 1}).reason == "metrics recorded with step 2"
        assert "not saved" in checkpoint.on_eval(3, {"late": 1}).reason
        assert checkpoint.manager.best_step() == 2
    manager = hf.CheckpointManager(tmp_path)
    assert manager.all_steps() == [2, 4, 5]
    assert manager.metrics(2) == {"train": 1.0, "loss": 0.5, "late": 1}
    assert manager.metrics(5) == {"train": 1.0, "loss": pytest.approx(0.6)}


def test_the_best_evaluation_saves_the_step_then(tmp_path: Path) -> None:
    outcomes = []
    with CheckpointCallback(
        tmp_path, save_on_best=True, best_fn=lambda metrics: metrics["loss"], best_mode="min", save_at_end=False
    ) as checkpoint:
        checkpoint.restore_or_initialize(state_at(0))
        for step, loss in enumerate([0.5, 0.7, 0.4, 0.4, float("nan"), 0.3], start=1):
            assert not checkpoint.on_step(step, state_at(step), metrics={"lr": 0.1}).saved
            outcomes.append(checkpoint.on_eval(step, {"loss": loss}).saved)
    assert outcomes == [True, False, True, False, False, True]
    manager = hf.CheckpointManager(tmp_path)
    assert manager.all_steps() == [1, 3, 6]
    assert manager.metrics(6) == {"lr": 0.1, "loss": 0.3}


# What a call costs


def test_metrics_on_the_device_are_left_there_until_a_save_needs_them(tmp_path: Path) -> None:
    """Where every step may be the best, only the metric of the policy is fetched."""
    best: dict[str, Any] = {"best_fn": "loss", "best_mode": "max"}
    with CheckpointCallback(tmp_path / "interval", save_interval_steps=3, **best) as checkpoint:
        checkpoint.restore_or_initialize(state_at(0))
        losses = [OnDevice(step / 10) for step in range(1, 8)]
        for step, loss in enumerate(losses, start=1):
            checkpoint.on_step(step, state_at(step), metrics={"loss": loss})
    assert [loss.fetched > 0 for loss in losses] == [False, False, True, False, False, True, True]
    other = OnDevice(1.0)
    with CheckpointCallback(tmp_path / "best", save_on_best=True, save_at_end=False, **best) as checkpoint:
        checkpoint.restore_or_initialize(state_at(0))
        reported: list[dict[str, Any]] = [{"loss": 0.5}, {"loss": OnDevice(0.1), "other": other}, {"other": other}]
        for step, metrics in enumerate(reported, start=1):
            checkpoint.on_step(step, state_at(step), metrics=metrics)
    assert other.fetched == 0


def calls_made(checkpoint: CheckpointCallback, step: int, state: Any, **extras: Any) -> int:
    count = 0

    def on_event(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(on_event)
    try:
        checkpoint.on_step(step, state, metrics={"loss": OnDevice(0.5)}, **extras)
    finally:
        sys.setprofile(before)
    return count


def test_a_step_at_which_nothing_is_due_costs_a_few_calls_for_states_of_all_sizes(tmp_path: Path) -> None:
    """The device is not asked (its arrays would raise), and neither the leaves nor the disk are visited.

    The first step finds what cannot be saved; the next few also look for what changes in place, and measure what a
    position costs.
    """
    counts = []
    for leaves in (1, 10_000):
        state = {str(index): OnDevice(index) for index in range(leaves)}
        with CheckpointCallback(
            tmp_path / str(leaves),
            save_interval_steps=10_000,
            save_interval_secs="1h",
            best_fn="loss",
            best_mode="max",
            save_at_end=False,
        ) as checkpoint:
            checkpoint.restore_or_initialize({}, data=Positions())
            checkpoint.on_step(1, state_at(1), data=Positions())
            counts += [calls_made(checkpoint, step, state, data=Positions()) for step in range(2, 8)][3:]
    assert len(set(counts)) == 1
    assert max(counts) < 140


# Without a framework


PROGRAM = """
import sys
import numpy as np
from holdfast.integrations.loop import CheckpointCallback

for first, last in ((0, 3), (3, 5)):
    with CheckpointCallback(sys.argv[1], save_interval_steps=2) as checkpoint:
        state, start = checkpoint.restore_or_initialize({"w": np.zeros(2)}, note="x")
        assert start == first, start
        for step in range(start + 1, last + 1):
            state = {"w": state["w"] + step}
            checkpoint.on_step(step, state, note="x")
print(state["w"].tolist(), sorted({"jax", "flax", "torch", "lightning"} & set(sys.modules)))
"""


def test_it_saves_and_resumes_without_any_framework(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "[15.0, 15.0] []\n"), done.stderr
