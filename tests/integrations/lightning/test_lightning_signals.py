"""Runs that a signal, a kill or an exception ends, each at any place: what is saved, and where the next one goes on."""

from __future__ import annotations

import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import pytest
import torch
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from tests.integrations.lightning import program
from tests.integrations.lightning.program import NEVER, new_directory
from tests.sweep.cases import NEVER as NO_SAVE
from tests.sweep.lightning_runs import Interruption, Program

import holdfast as hf
from holdfast.engine.checkpoint.save import Save
from holdfast.integrations.lightning import CheckpointCallback, Preempted

pytestmark = pytest.mark.filterwarnings("ignore:Swapping scheduler")

# ---- signals between batches, and to programs that do not train yet


def reasons(directory: Any) -> dict[int, str | None]:
    """Returns why each step was saved."""
    return {entry.step: entry.reason for entry in hf.list_checkpoints(directory)}


def test_another_signal_has_the_step_saved_and_ends_the_run_with_its_status() -> None:
    directory, handler = new_directory(), signal.getsignal(signal.SIGUSR1)
    sender, checkpoint = program.Signal(signal.SIGUSR1, after=3), {**NEVER, "signals": ["SIGUSR1"]}
    with pytest.raises(Preempted) as caught:
        program.run(directory, callbacks=(sender,), checkpoint=checkpoint)
    assert caught.value.code == 128 + signal.SIGUSR1
    assert signal.getsignal(signal.SIGUSR1) is handler
    assert reasons(directory) == {4: "preempted"}


def test_a_run_whose_step_is_saved_already_leaves_an_accumulation_that_begins() -> None:
    directory = new_directory()
    with pytest.raises(Preempted):
        program.run(directory, callbacks=(program.Signal(after=2),), accumulate_grad_batches=3)
    assert reasons(directory) == {1: "every step", 2: "every step"}


@pytest.mark.usefixtures("default_sigterm")
def test_a_signal_that_comes_while_handlers_are_replaced_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def registered(connector: Any, register: Any = _SignalConnector.register_signal_handlers) -> None:
        register(connector)
        os.kill(os.getpid(), signal.SIGTERM)  # It reaches the handler of Lightning.

    monkeypatch.setattr(_SignalConnector, "register_signal_handlers", registered)
    directory = new_directory()
    with pytest.raises(Preempted):
        program.run(directory, checkpoint={**NEVER, "witness_steps_after_signal": 0}, num_sanity_val_steps=0)
    assert reasons(directory) == {1: "preempted"}


def test_a_step_is_saved_at_a_signal_although_the_save_before_it_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def write(save: Save, *rest: Any, write: Any = Save.write) -> Any:
        if save._location.name == "2":
            raise hf.errors.StorageFullError("no space left for step 2")
        return write(save, *rest)

    monkeypatch.setattr(Save, "write", write)
    with pytest.raises(Preempted):
        program.run(str(tmp_path), callbacks=(program.Signal(after=2),), checkpoint={**NEVER, "save_interval_steps": 2})
    assert "an earlier save failed; step 3 is being saved" in caplog.messages
    assert reasons(tmp_path) == {3: "preempted"}


def test_signal_between_batches_is_kept_for_users_own_handler() -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        with pytest.raises(Preempted):
            program.run(new_directory(), recorder=program.Recorder(signal_after=2))
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [signal.SIGTERM, signal.SIGTERM]


@pytest.mark.parametrize(
    ("function", "hook"),
    [
        ("fit", "on_validation_batch_start"),  # in the sanity check
        ("validate", "on_validation_batch_start"),
        ("test", "on_test_batch_start"),
        ("predict", "on_predict_batch_start"),
    ],
)
@pytest.mark.usefixtures("default_sigterm")
def test_nothing_to_save_yet(function: str, hook: str) -> None:
    sender = program.Signal(hook=hook)
    callback = CheckpointCallback(new_directory(), **NEVER)
    trainer = program.trainer(callback, sender, max_epochs=1)
    loaders = program.loaders()[function != "fit" :]
    model: Any = program.Model()
    model.predict_step = model.loss
    with pytest.raises(Preempted) as caught:
        getattr(trainer, function)(model, *loaders)
    assert (caught.value.code, sender.batches) == (143, 1)
    assert callback.manager.all_steps() == []


def test_training_in_another_thread(caplog: pytest.LogCaptureFixture) -> None:
    outcomes: list[Any] = []
    thread = threading.Thread(target=lambda: outcomes.append(program.run(new_directory(), max_epochs=1)))
    thread.start()
    thread.join()
    assert outcomes[0].trainer.global_step == 5
    assert "SIGTERM or SIGHUP is not handled" in caplog.text


# ---- a validation: it is left at once, and a save comes before it


IN_SECOND = Interruption("signal in validation", 5, 1)
CASES = {
    "EMA": IN_SECOND,
    "EMA, validation within epochs": Interruption("signal before validation", 3),
    "EMA, accumulation": Interruption("signal in validation", 3),
    "swap by hand": Interruption("signal in validation", 3),
    "swap by the module": Interruption("signal in validation", 3, 1),
    "moved and returned": IN_SECOND,
    "counts validation batches": Interruption("signal in validation", 3),
    "validation within epochs": Interruption("signal in validation", 3),
}


def check(setup: str, *interruptions: Interruption) -> list[Program]:
    """Interrupts a program, and compares it with the whole run; gives the programs that did it together.

    A signal before a validation saves; one within it loses what is not saved, so that such a program saves every step.
    """
    whole = Program(new_directory(), setup, "shuffled")
    whole.fit()
    directory = new_directory()
    parts = []
    for seed, interruption in enumerate([*interruptions, None], start=1):
        every = 1 if any(one.kind == "signal in validation" for one in interruptions) else NO_SAVE
        parts.append(Program(directory, setup, "shuffled", seed=seed, every=every))
        assert parts[-1].fit(interruption) == (None if interruption is None else 143)
    assert parts[-1].final() == whole.final()
    events = whole.recorder.events
    assert {key: value for part in parts for key, value in part.recorder.events.items()} == events
    manager = parts[-1].trainer.checkpoint_callback.manager
    for step in {step for what, step in events if what == "validation"} & {*manager.all_steps()}:
        assert manager.metrics(step)["val_loss"] == events["validation", step][0]
    return parts


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "setup",
    [pytest.param(name, marks=pytest.mark.needs("lightning", "2.6") if "EMA" in name else []) for name in CASES],
)
def test_left_in_a_validation(setup: str) -> None:
    check(setup, CASES[setup])


@pytest.mark.needs("lightning", "2.6")
def test_left_twice_in_the_same_validation() -> None:
    check("EMA", IN_SECOND, IN_SECOND)


def test_a_validation_is_left_with_its_first_batch(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "holdfast"):
        first, _ = check("counts validation batches", CASES["counts validation batches"])
    assert "preempted during validation after step 3, which is not saved: the run resumes from step 2" in caplog.text
    assert first.recorder.validations == []


class CountsStates(lightning.Callback):
    count = 0

    def state_dict(self) -> dict[str, Any]:
        self.count += 1
        return {}


def test_nothing_is_captured_before_a_validation() -> None:
    program = Program(new_directory(), "swap by hand", "shuffled")
    counts = CountsStates()
    program.trainer.callbacks.insert(0, counts)
    program.fit()
    assert len(program.recorder.validations) == 3
    assert counts.count == 1  # at the end


# ---- exceptions, and save_on_exception


RARELY: dict[str, Any] = {"save_interval_steps": 4, "save_on_exception": True}


class Fails(lightning.Callback):
    """Ends the run at a step, in one of the hooks, after it has spoiled the weights there."""

    def __init__(self, where: str, step: int, error: type[BaseException]) -> None:
        self.step, self.error = step, error
        setattr(self, where, self.fail)

    def fail(self, trainer: Any, module: Any, *args: Any) -> None:
        if trainer.global_step == self.step and not trainer.sanity_checking:
            with torch.no_grad():
                module.head.weight.data.add_(1.0)
            torch.rand(3)
            raise self.error("spoiled")


@pytest.mark.parametrize(
    ("where", "step", "saved", "options", "error"),
    [
        ("on_train_batch_start", 6, 6, {}, KeyboardInterrupt),
        ("on_after_backward", 7, 7, {}, RuntimeError),
        ("on_train_batch_end", 8, 7, {}, RuntimeError),  # the update is done, but not all that belongs to it
        ("on_before_zero_grad", 2, 2, {"accumulate_grad_batches": 2}, RuntimeError),
        ("on_validation_batch_end", 3, 3, {"val_check_interval": 3}, RuntimeError),
        pytest.param("on_validation_batch_start", 10, 10, {}, RuntimeError, marks=pytest.mark.sweep),
        pytest.param("on_validation_end", 10, 10, {}, KeyboardInterrupt, marks=pytest.mark.sweep),
        pytest.param("on_train_epoch_start", 5, 5, {}, RuntimeError, marks=pytest.mark.sweep),
        pytest.param("on_train_batch_start", 8, 8, {}, RuntimeError, marks=pytest.mark.sweep),  # saved anyway
        pytest.param("on_train_epoch_end", 10, 10, {}, KeyboardInterrupt, marks=pytest.mark.sweep),
    ],
)
def test_the_last_point_is_saved(
    where: str, step: int, saved: int, options: dict[str, Any], error: type[BaseException]
) -> None:
    whole = program.run(new_directory(), **options)
    directory = new_directory()
    failing = Fails(where, step, error)
    with pytest.raises((error, SystemExit)):
        program.run(directory, checkpoint=RARELY, callbacks=(failing,), **options)
    newest = hf.list_checkpoints(directory)[-1]
    assert newest.step == saved
    assert newest.reason == ("every 4 steps" if saved % 4 == 0 else f"after {error.__name__}")
    resumed = program.run(directory, seed=3, **options)
    assert resumed.recorder.first_step == saved
    assert resumed.final == whole.final


@pytest.mark.parametrize(
    ("checkpoint", "step", "saved"),
    [
        pytest.param({"save_interval_steps": 4}, 6, [4], id="nothing without the option"),
        pytest.param(RARELY, 0, [], id="nothing of a fresh run that fails at once"),
    ],
)
def test_nothing_more_is_saved(
    checkpoint: dict[str, Any], step: int, saved: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    directory = new_directory()
    with pytest.raises(RuntimeError, match="spoiled"):
        program.run(directory, checkpoint=checkpoint, callbacks=(Fails("on_after_backward", step, RuntimeError),))
    assert [one.step for one in hf.list_checkpoints(directory)] == saved
    lost = f"the loop ended with RuntimeError after step 6: step 4 is saved in {directory}, steps lost: 2"
    assert (lost in caplog.text) == bool(saved)


# ---- local steps


@pytest.mark.parametrize(("stop", "first", "saved"), [(5, 4, 1000), (5, 4, 3), (7, 6, 1000), (7, 7, 7)])
def test_a_run_resumes_from_its_local_steps(tmp_path: Path, stop: int, first: int, saved: int) -> None:
    whole, directory = program.run(new_directory(), checkpoint=NEVER), new_directory()
    local = hf.Local(tmp_path / "memory", every=2, copies=0)
    checkpoint = {**NEVER, "save_interval_steps": saved, "local": local}
    program.interrupt(directory, stop, checkpoint=checkpoint)
    resumed = program.run(directory, seed=2, checkpoint=checkpoint)
    assert resumed.recorder.first_step == first
    assert resumed.final == whole.final
