"""Resumes that prove themselves: what a run records, what the next start compares, and what it says."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import holdfast as hf
from holdfast.engine.observer import Observer
from holdfast.integrations.loop.preemption import PreemptionSignal
from holdfast.integrations.loop.stopping import StepsAfterSignal
from holdfast.integrations.loop.witnessing import Proof
from holdfast.integrations.options import CallbackOptions


class StopHereError(Exception):
    """Ends a run as a crash does, when its saves are complete."""


class Run:
    """A loop with everything that a witness sees, and a part of each layer that can be kept from a resume."""

    def __init__(self, directory: Path | str, hidden: str = "", **options: Any) -> None:
        self.directory = directory
        self.options = {"save_interval_steps": 4, "save_at_end": False, **options}
        self.hidden = hidden
        self.checkpoint: Any = None
        self.done = 0

    def __call__(self, last: int = 20, crash: int = 0, at: Callable[[int], object] = lambda step: None) -> Run:
        rng, order = np.random.default_rng(1), np.random.default_rng(2)
        extras: dict[str, Any] = {} if self.hidden == "generators" else {"rng": rng}
        extras |= {} if self.hidden == "batch" else {"order": order}
        with hf.CheckpointCallback(self.directory, **self.options) as checkpoint:
            self.checkpoint = checkpoint
            state, start = checkpoint.restore_or_initialize({"w": np.zeros(100)}, **extras)
            w, self.done = state["w"], start
            epoch = 0 if self.hidden == "counters" else start // 5
            lr = 1.0 if self.hidden == "state" else 0.9**start
            if self.hidden == "a draw" and start:
                rng.normal()
            for step in range(start + 1, last + 1):
                batch = {"x": order.normal(size=3)}
                lr *= 0.9
                w = w + lr * batch["x"][0] + (0 if self.hidden == "generators" else rng.normal())
                epoch += step % 5 == 0
                self.done = step
                at(step)
                noise = rng.normal() if self.hidden == "generators" else 0.0
                metrics = {"loss": float(w[0]) + noise, "step_time": time.perf_counter()}
                if checkpoint.on_step(step, {"w": w}, metrics=metrics, batch=batch, epoch=epoch, **extras).should_stop:
                    break
                if step == crash:
                    checkpoint.manager.wait_until_finished()
                if step == crash + 3 and crash:
                    raise StopHereError
        return self


def crashed(directory: Path | str, hidden: str = "", crash: int = 8, **options: Any) -> None:
    with pytest.raises(StopHereError):
        Run(directory, hidden, **options)(crash=crash)


@pytest.fixture(params=["disk", "memory"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "run") if request.param == "disk" else f"memory://witness/{tmp_path.name}"


def test_a_resume_that_is_exact_says_what_was_compared(directory: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    crashed(directory)
    caplog.clear()  # of what that run has lost
    run = Run(directory)(last=14)
    assert run.checkpoint.proof == Proof(exact=True, steps=(9, 10))
    (line,) = [text for text in caplog.messages if text.startswith("exact: ")]
    generators = 5 if "torch" in sys.modules else 4
    what = f"batch, {generators} generators, epoch, step, loss, its leaf"
    assert line == f"exact: steps 9 and 10 are those of before the stop ({what})"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    events = run.checkpoint.manager.events.earlier()
    proofs = [event for event in events if event["event"] == "witness"]
    if directory.startswith("/"):
        assert [(one["saved_step"], one["step"], one["exact"]) for one in proofs] == [(8, 10, True)]


@pytest.mark.parametrize(
    ("hidden", "cause"),
    [
        ("batch", "The data does not continue where it stopped: pass the iterator or loader"),
        ("a draw", "A random generator was drawn from or seeded in another way: pass it as an extra"),
        ("generators", "Either the loop changes the state after on_step"),
        ("state", "Either the loop changes the state after on_step"),
        ("counters", "The run counts its steps or epochs in another way: pass the counter as an extra"),
    ],
)
def test_each_layer_that_differs_is_named_at_the_first_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, hidden: str, cause: str
) -> None:
    crashed(tmp_path, hidden)
    run = Run(tmp_path, hidden)(last=14)
    proof = run.checkpoint.proof
    assert (proof.exact, proof.steps) == (False, ())
    # A generator that is not handed over is not compared.
    assert {"generators": "metrics", "a draw": "generators"}.get(hidden, hidden) in proof.differs
    (warning,) = [text for text in caplog.messages if text.startswith("not exact from step 9 on: ")]
    assert cause in warning
    assert "Or the program or its data have changed" in warning
    assert "holdfast drill" in warning


def count(
    directory: Path, last: int, rise: Callable[[int], float], *, loss: float | None = None, **options: Any
) -> Proof:
    """Add to a state in each step, report a loss, by default of the state, and wait for each save."""
    with hf.CheckpointCallback(directory, save_at_end=False, **options) as checkpoint:
        state, start = checkpoint.restore_or_initialize({"w": np.zeros(50)})
        for step in range(start + 1, last + 1):
            state = {"w": state["w"] + rise(step)}
            checkpoint.on_step(step, state, metrics={"loss": float(state["w"][0]) if loss is None else loss})
            checkpoint.manager.wait_until_finished()
    return checkpoint.proof


def test_a_later_difference_is_named_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Steps after those of the line are compared until the next save."""
    caplog.set_level(logging.INFO, "holdfast")

    count(tmp_path, 30, lambda step: 1, loss=1.0, save_interval_steps=20)
    proof = count(tmp_path, 30, lambda step: 2 if step == 27 else 1, loss=1.0, save_interval_steps=20)
    assert (proof.exact, proof.steps, proof.differs) == (False, (21, 22, 24), ("state",))
    said = [text.partition(" (")[0] for text in caplog.messages if "exact" in text]
    assert said == ["exact: steps 21, 22 and 24 are those of before the stop", "not exact from step 28 on: state"]


@pytest.mark.parametrize(
    ("trained", "last", "proof"),
    [
        pytest.param("head", 7, Proof(exact=True, steps=(5, 6)), id="head"),
        pytest.param("all", 7, Proof(exact=False, differs=("gradients", "state")), id="all"),
        pytest.param("in turn", 7, Proof(exact=True, steps=(6,)), id="in turn"),
        pytest.param("in turn", 5, Proof(exact=False, differs=("gradients",)), id="in turn, only one step is compared"),
    ],
)
def test_gradients_that_no_optimizer_uses_decide_nothing(tmp_path: Path, trained: str, last: int, proof: Proof) -> None:
    """``zero_grad`` of an optimizer of the head leaves those of a body, and they add up until its own ``zero_grad``."""
    torch: Any = pytest.importorskip("torch")

    def train(last: int) -> Proof:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        parts = {"head": [model[1]], "all": [model], "in turn": model}[trained]
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]
        with hf.CheckpointCallback(tmp_path, save_interval_steps=4, save_at_end=False) as checkpoint:
            state, start = checkpoint.restore_or_initialize({"model": model, "optimizers": optimizers})
            for step in range(start + 1, last + 1):
                optimizer = optimizers[step % len(optimizers)]
                if trained != "all":
                    optimizer.zero_grad()
                torch.autograd.backward(model(torch.randn(3, 2)).square().mean())
                optimizer.step()
                checkpoint.on_step(step, state)
                checkpoint.manager.wait_until_finished()
        return checkpoint.proof

    train(last)
    assert train(8) == proof


class Model:
    """An object whose state lacks numbers that steps change, or make."""

    made: Any = 0

    def __init__(self) -> None:
        self.w, self.calls = np.zeros(3), 0

    def get_state(self) -> dict[str, Any]:
        return {"w": self.w}

    def set_state(self, state: dict[str, Any]) -> None:
        self.w = state["w"]


@pytest.mark.parametrize(("last", "level"), [(2, logging.INFO), (5, logging.WARNING)])
def test_attributes_that_were_not_restored_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, last: int, level: int
) -> None:
    """At WARNING once two saves have shown that steps change them."""
    caplog.set_level(logging.INFO, "holdfast")
    for _ in range(2):
        model = Model()
        with hf.CheckpointCallback(tmp_path, save_interval_steps=2, save_at_end=False) as checkpoint:
            state, start = checkpoint.restore_or_initialize({"w": np.zeros(3)}, model=model)
            for step in range(start + 1, last + 1):
                model.calls += 1
                model.made = step if last > 2 else "once"
                checkpoint.on_step(step, state, model=model)
                checkpoint.manager.wait_until_finished()
    saved = last // 2 * 2
    (found,) = [record for record in caplog.records if "as saved, except" in record.getMessage()]
    assert found.levelno == level
    made = f", model.made ({saved}, now not there)" if last > 2 else ""
    expected = f"resumed from step {saved}: as saved, except model.calls ({saved}, now 0){made}, which steps before"
    assert found.getMessage().startswith(expected)
    assert checkpoint.proof.exact is not False


def test_an_error_of_the_witness_ends_the_witness_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise MemoryError("no memory for samples")

    for last in (2, 5):
        with hf.CheckpointCallback(tmp_path, save_interval_steps=1) as checkpoint:
            state, start = checkpoint.restore_or_initialize({"w": np.zeros(3)})
            monkeypatch.setattr("holdfast.engine.pytree.sampling.Sampler.take", fail)
            for step in range(start + 1, last + 1):
                checkpoint.on_step(step, state)
        assert [text for text in caplog.messages if "no longer recorded" in text and "no memory" in text]
        caplog.clear()
    assert [entry.step for entry in hf.list_checkpoints(tmp_path)] == [1, 2, 3, 4, 5]


def test_nothing_is_saved_after_a_difference_with_raise(tmp_path: Path) -> None:
    crashed(tmp_path, "state")
    run = Run(tmp_path, "state", on_inexact="raise", save_at_end=True)
    with pytest.raises(hf.errors.StateError, match=r"not exact from step 9 on: .*on_inexact='raise'"):
        run()
    assert (run.done, run.checkpoint.proof.exact) == (9, False)
    with hf.CheckpointCallback(tmp_path, save_interval_steps=1, on_inexact="raise") as checkpoint:
        checkpoint.restore_or_initialize({"w": np.zeros(100)})
        for step in (9, 10):  # A loop that goes on hears it at each step.
            with pytest.raises(hf.errors.StateError, match="not exact from step 9 on"):
                checkpoint.on_step(step, {"w": np.ones(100)})
    assert [entry.step for entry in hf.list_checkpoints(tmp_path)] == [4, 8]


def rewrite_header(path: Path, name: str) -> None:
    """Gives a part of the key in the header of a file of records another value."""
    lines = []
    for line in path.read_text().splitlines():
        record = json.loads(line)["record"]
        if "key" in record:
            record["key"][name] = "another"
        text = json.dumps(record, sort_keys=True, separators=(",", ":"))
        lines.append(f'{{"crc":{zlib.crc32(text.encode())},"record":{text}}}\n')
    path.write_text("".join(lines))


@pytest.mark.parametrize(
    ("changed", "options", "exact", "why"),
    [
        ("", {"on_inexact": "ignore"}, False, ""),
        ("", {"resume": 4}, None, "resume=4 chose the step"),
        ("", {"hyperparameters": "program"}, None, "hyperparameters='program' takes those of the program"),
        ("processes", {}, None, "processes changed ("),
        ("versions", {}, None, "the versions of libraries changed ("),
        ("devices", {}, None, "devices changed ("),
    ],
)
def test_what_is_ignored_or_not_comparable(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    changed: str,
    options: dict[str, Any],
    exact: bool | None,
    why: str,
) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    crashed(tmp_path, "state")
    if changed:
        rewrite_header(tmp_path / "8" / "witness.jsonl", changed)
    proof = Run(tmp_path, "state", **options)(last=11).checkpoint.proof
    assert proof.exact is exact
    assert why in proof.why
    assert not [text for text in caplog.messages if "exact" in text]
    said = [text for text in caplog.messages if text.startswith("not witnessed: ")]
    assert len(said) == (exact is None)
    assert all(why in text for text in said)


def test_without_the_witness_there_is_no_file(tmp_path: Path) -> None:
    crashed(tmp_path, witness=False)
    run = Run(tmp_path, "state", witness=False, on_inexact="raise")(last=12)
    assert run.checkpoint.proof == Proof()
    assert not [*tmp_path.rglob("witness*")]


def test_a_difference_that_another_processor_rounds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The records are those of another model of processor; the noise is a part of the update."""
    caplog.set_level(logging.INFO, "holdfast")

    count(tmp_path, 3, lambda step: 1, save_interval_steps=2)
    rewrite_header(tmp_path / "2" / "witness.jsonl", "processor")
    proof = count(tmp_path, 3, lambda step: 1 + 1e-6, save_interval_steps=2, on_inexact="raise")
    assert (proof.exact, proof.differs) == (None, ())
    assert proof.rounding is not None
    assert 0 < proof.rounding < 1e-4
    assert [text for text in caplog.messages if "as another processor rounds" in text]


@pytest.mark.parametrize(("devices", "exact"), [("", False), ("cpu", False), ("cpu x 4", False), ("cpu, cuda", None)])
def test_only_accelerators_round_on_the_same_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: str, exact: bool | None
) -> None:
    """A state of numpy has no devices, and one on a GPU may have counters on the CPU."""
    monkeypatch.setattr("holdfast.engine.pytree.Samples.devices", lambda samples, count: devices)
    count(tmp_path, 3, lambda step: 1, save_interval_steps=2)
    proof = count(tmp_path, 3, lambda step: 1 + 1e-6, save_interval_steps=2, on_inexact="ignore")
    assert (proof.exact, proof.rounding is None) == (exact, exact is False)


@pytest.mark.parametrize(
    ("fresh", "divides", "rise", "cause"),
    [
        # The count is on one device until the first step.
        ("x", "x", 0.5, ""),
        # A step that divides the weights as before the stop makes up for a program that no longer does.
        ("y", "x", 0.5, ""),
        ("y", "x", 0.25, "The first step divides arrays among the devices in another way .* [(]w[)], .*out_shardings="),
        ("y", "y", 0.5, "Either the loop changes the state after on_step"),
    ],
)
def test_arrays_on_several_devices(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fresh: str, divides: str, rise: float, cause: str
) -> None:
    jax = pytest.importorskip("jax")
    mesh = jax.make_mesh((1, 4), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def train(last: int, fresh: str, divides: str, rise: float) -> Proof:
        over = {axis: jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(axis)) for axis in "xy"}
        begin = {"w": jax.device_put(jax.numpy.arange(8.0), over[fresh]), "count": jax.numpy.int32(0)}
        shardings = {"w": over[divides], "count": jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())}
        step_of = jax.jit(lambda state: {"w": state["w"] + rise, "count": state["count"] + 1}, out_shardings=shardings)
        with hf.CheckpointCallback(tmp_path, save_interval_steps=2, save_at_end=False) as checkpoint:
            state, start = checkpoint.restore_or_initialize(begin)
            for step in range(start + 1, last + 1):
                state = step_of(state)
                checkpoint.on_step(step, state)
        return checkpoint.proof

    train(3, "x", "x", 0.5)
    caplog.clear()
    proof = train(4, fresh, divides, rise)
    assert (proof.exact, proof.why) == (not cause, "")
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == bool(cause)
    assert all(re.match(f"not exact from step 3 on: .*{cause}", text) for text in warnings)


@pytest.mark.parametrize(
    ("hidden", "proof"),
    [("", Proof(exact=True, steps=(7,))), ("state", Proof(exact=False, differs=("metrics", "state")))],
    ids=["nothing", "state"],
)
def test_a_resume_from_the_memory_of_the_host_is_compared(tmp_path: Path, hidden: str, proof: Proof) -> None:
    """A local step has the records of its next steps beside its files, and they are removed with it."""
    local = hf.Local(tmp_path / "memory", every=2, copies=0)
    run = Run(tmp_path / "run", hidden, save_interval_steps=1000, local=local)
    lines: dict[Path, int] = {}

    def crash(step: int) -> None:
        if step == 8:
            run.checkpoint.manager.wait_until_finished()
            files = sorted(tmp_path.glob("memory/*/own/*/witness.jsonl"))
            lines.update((file, len(file.read_bytes().splitlines())) for file in files)  # before anything is closed
            raise StopHereError

    with pytest.raises(StopHereError):
        run(at=crash)
    assert [*lines.values()] == [4, 3]  # a header, k = 0, 1, and the next save
    assert run(last=12).checkpoint.proof == proof
    assert not [file for file in lines if file.exists()]


def records_of(step: Path) -> list[Any]:
    """Returns the records of a file, without its header."""
    return [json.loads(line)["record"] for line in (step / "witness.jsonl").read_text().splitlines()[1:]]


def test_records_go_on_where_a_resume_was_exact(tmp_path: Path) -> None:
    """The file keeps its lines, and has those of later steps for the next start."""
    crashed(tmp_path, save_interval_steps=8)
    path = tmp_path / "8" / "witness.jsonl"
    before = path.read_bytes()
    crashed(tmp_path, crash=12, save_interval_steps=8)
    assert path.read_bytes().startswith(before)
    # The last one is the first step of an epoch.
    assert [record["k"] for record in records_of(tmp_path / "8")] == [0, 1, 2, 4, 7]
    assert Run(tmp_path, save_interval_steps=8)(last=13).checkpoint.proof.steps == (9, 10, 12)


def test_other_steps_are_not_added_to_the_records_of_a_save(tmp_path: Path) -> None:
    """A resume that is not exact leaves the file of its step alone, and records the steps after its own saves."""
    crashed(tmp_path, "state", save_interval_steps=8)
    before = (tmp_path / "8" / "witness.jsonl").read_bytes()
    crashed(tmp_path, "state", crash=16, save_interval_steps=8)
    assert (tmp_path / "8" / "witness.jsonl").read_bytes() == before
    assert [record["k"] for record in records_of(tmp_path / "16")] == [0, 1, 2]


@pytest.mark.parametrize("by", ["the callback", "the manager"])
def test_a_loop_goes_back_twice_without_a_save_between(tmp_path: Path, by: str) -> None:
    """Its steps from then on are no records of the save, so that the steps before it prove a later resume."""

    def train(going_back: int, last: int) -> Proof:
        w = np.zeros(3)
        with hf.CheckpointCallback(tmp_path, save_interval_steps=8, save_at_end=False) as checkpoint:
            state, step = checkpoint.restore_or_initialize({"w": w})
            while step < last:
                state, step = {"w": state["w"] + step}, step + 1
                if step == 12 and going_back:
                    going_back -= 1
                    checkpoint.manager.wait_until_finished()
                    if by == "the callback":
                        state, step = checkpoint.restore_or_initialize({"w": w})
                    else:
                        state, step = checkpoint.manager.restore(8, {"state": {"w": w}})["state"], 8
                    continue
                checkpoint.on_step(step, state, metrics={"loss": float(state["w"][0])})
            return checkpoint.proof

    assert train(2, 15).why == ("the loop went back after step 11" if by == "the callback" else "")
    assert [record["step"] for record in records_of(tmp_path / "8")] == [8, 9, 10]
    assert train(0, 15) == Proof(exact=True, steps=(9, 10))


@pytest.mark.parametrize("name", ["batch", "epoch"])
def test_extras_of_these_names_are_saved_where_they_are_restored(tmp_path: Path, name: str) -> None:
    """Those that only on_step gets are compared, and are not saved."""
    for start, last in ((0, 3), (3, 5)):
        with hf.CheckpointCallback(tmp_path, save_interval_steps=1) as checkpoint:
            _, found = checkpoint.restore_or_initialize({"w": 1.0}, **{name: 0})
            assert (found, checkpoint.extras[name]) == (start, 10 * start)
            for step in range(start + 1, last + 1):
                shown: dict[str, Any] = {"batch": np.ones(3), "epoch": 2, name: 10 * step}
                checkpoint.on_step(step, {"w": 1.0}, **shown)
    saved = hf.load(tmp_path, item="extras")
    assert saved[name] == 50
    assert len({"batch", "epoch"} & {*saved}) == 1


# ---- the steps after a signal


def told(at: int) -> Callable[[int], object]:
    return lambda step: os.kill(os.getpid(), signal.SIGTERM) if step == at else None


@pytest.mark.usefixtures("default_sigterm")
def test_a_preempted_run_goes_on_to_be_compared(tmp_path: Path) -> None:
    run = Run(tmp_path, grace_secs="1h")(at=told(6))
    assert run.done == 10
    assert run.checkpoint.exit_status == 75
    assert [entry.step for entry in hf.list_checkpoints(tmp_path)] == [4, 6]
    assert hf.list_checkpoints(tmp_path)[-1].reason == "preempted"
    again = Run(tmp_path, save_interval_steps=100)(last=12)
    assert again.checkpoint.proof == Proof(exact=True, steps=(7, 8, 10))


@pytest.mark.usefixtures("default_sigterm")
@pytest.mark.parametrize("ended", [False, True], ids=["none", "ended"])
def test_steps_after_a_signal_are_for_the_witness(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    """None follows without it, and one that has ended is not shown them."""
    if ended:
        monkeypatch.setattr("holdfast.engine.pytree.sampling.Sampler.take", None)
    run = Run(tmp_path, grace_secs="1h", witness=ended)(at=told(6))
    assert (run.done, [entry.step for entry in hf.list_checkpoints(tmp_path)]) == (10 if ended else 6, [4, 6])
    assert len([text for text in caplog.messages if "no longer recorded" in text]) == ended


@pytest.mark.usefixtures("default_sigterm")
def test_a_loop_that_ends_by_itself_meanwhile_ends_the_program(tmp_path: Path) -> None:
    run = Run(tmp_path, grace_secs="1h", save_at_end=True)
    with pytest.raises(SystemExit) as ended:
        run(last=8, at=told(6))
    assert (run.done, ended.value.code) == (8, 75)
    assert [entry.step for entry in hf.list_checkpoints(tmp_path)] == [4, 6]
    again = Run(tmp_path, save_at_end=True)(last=8)
    assert (again.done, again.checkpoint.exit_status, again.checkpoint.proof.steps) == (8, 0, (7, 8))


def test_no_step_follows_the_end_of_an_epoch(tmp_path: Path) -> None:
    with hf.CheckpointCallback(tmp_path, save_interval_steps=100, grace_secs="1h") as checkpoint:
        data = hf.skip_to([np.ones(1)] * 6)
        checkpoint.restore_or_initialize({"w": 1.0}, data=data)
        for step in range(1, 20):
            next(data)
            if step == 4:
                os.kill(os.getpid(), signal.SIGTERM)
            if checkpoint.on_step(step, {"w": 1.0}, data=data).should_stop:
                break
            if step > 4:
                outcome = checkpoint.on_eval(step, {"loss": 1.0})
                assert (outcome.saved, outcome.reason) == (False, "preempted; the step is recorded and not saved")
    assert step == 6


AFTER: dict[str, tuple[dict[str, Any], int]] = {
    "plenty of time": ({}, 4),
    "fewer are wanted": ({"most": 2}, 2),
    "none is wanted": ({"most": 0}, 0),
    "a quarter of the grace": ({"grace": 84, "pauses": [5.0, 1.0]}, 2),  # 21 seconds, and twice 5 for each
    "steps that are too long": ({"grace": 80, "pauses": [11.0]}, 0),
    "no grace is known": ({"pauses": [0.3]}, 3),  # 2 seconds in all
    "no step was timed yet": ({"pauses": []}, 0),
    "steps without a time": ({"pauses": [0.0]}, 4),
    "a long step that is long ago": ({"pauses": [9.0, *[0.01] * 20]}, 4),
    "the end of an epoch": ({"left": 1}, 1),
    "Ctrl-C": ({"number": signal.SIGINT}, 0),
    "a closed terminal": ({"number": signal.SIGHUP}, 0),
    "another signal": ({"number": signal.SIGUSR1}, 4),
    "the signal came again": ({"again": True}, 0),
    "a notice": ({"number": 1000}, 0),
}


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time on the monotonic clock, which the test sets."""
    now = [1000.0]
    monkeypatch.setattr("holdfast.integrations.loop.stopping.time.monotonic", lambda: now[0])
    return now


def steps_after(now: list[float], given: dict[str, Any], *, alone: bool = True) -> StepsAfterSignal:
    """Return what counts the steps after a signal, which comes after steps of some seconds."""
    preemption = PreemptionSignal()
    options = CallbackOptions(witness_steps_after_signal=given.get("most", 4), grace_secs=given.get("grace"))
    processes = SimpleNamespace(alone=alone, decide=lambda what, decide: decide())
    manager: Any = SimpleNamespace(observer=Observer(), processes=processes)
    after = StepsAfterSignal(options, manager, preemption)
    for pause in (0.0, *given.get("pauses", [0.01])):
        now[0] += pause
        after.note_step()
    preemption.request(given.get("number", signal.SIGTERM))
    preemption.again = given.get("again", False)
    return after


@pytest.mark.parametrize("name", AFTER)
def test_how_many_steps_follow(now: list[float], name: str) -> None:
    given, expected = AFTER[name]
    after = steps_after(now, given)
    assert after.begin(given.get("left")) == bool(expected)
    assert (after.left or 0) == expected


@pytest.mark.parametrize(
    ("alone", "passed", "again", "left"),
    [(True, 0.0, False, 2), (True, 9e9, False, 0), (True, 0.0, True, 0), (False, 9e9, True, 2)],
)
def test_whether_another_step_follows(now: list[float], alone: bool, passed: float, again: bool, left: int) -> None:
    """Processes that go on together do as many as they have agreed on."""
    after = steps_after(now, {"most": 3, "grace": "1h"}, alone=alone)
    assert after.begin(None)
    now[0] += passed
    after._preemption.again = again
    assert after.count() == left
