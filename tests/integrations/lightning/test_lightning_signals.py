"""Real signals to real processes."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import pytest
from tests.integrations.lightning import program
from tests.integrations.lightning.program import new_directory

import holdfast as hf
from holdfast.integrations.lightning import CheckpointCallback, Preempted

NEVER: dict[str, Any] = {"save_interval_steps": 1000, "save_at_end": False}


@pytest.mark.parametrize(
    ("kind", "first", "second", "options"),
    [
        # Steps 5 and 10 are the ends of epochs; with accumulation, steps 2 and 4 are.
        pytest.param("signal_after", 3, 5, {}, id="SIGTERM"),
        pytest.param("signal_after", 2, 4, {"accumulate_grad_batches": 3}, id="SIGTERM while accumulating"),
        pytest.param("signal_in_validation_after", 5, 10, {}, id="SIGTERM in a validation"),
        pytest.param("kill_after", 5, 8, {}, id="SIGKILL"),
    ],
)
def test_killed_twice(
    run_process: Callable[..., tuple[int, Any, str]],
    tmp_path: Path,
    kind: str,
    first: int,
    second: int,
    options: dict[str, Any],
) -> None:
    whole = json.loads(json.dumps(program.run(new_directory(), checkpoint=NEVER, **options).final))
    directory = tmp_path / "run"
    # SIGTERM loses nothing although nothing else makes it save; in a validation, it loses what is not saved, and
    # SIGKILL loses what was not on disk yet.
    killed = kind == "kill_after"
    checkpoint = NEVER if kind == "signal_after" else {"save_interval_steps": 1}
    for seed, step in enumerate((first, second), start=1):
        status, result, said = run_process(directory, seed=seed, checkpoint=checkpoint, **{kind: step}, **options)
        assert (status, result) == (-signal.SIGKILL if killed else 143, None), said
        assert hf.verify(directory).ok
    status, result, said = run_process(directory, seed=9, checkpoint=checkpoint, **options)
    assert status == 0, said
    assert result["final"] == whole
    # The batch in which SIGTERM came belongs to the step that is saved.
    saved = {"signal_after": second + 1, "signal_in_validation_after": second - 1, "kill_after": second}[kind]
    assert result["first_step"] in ({saved - 1, saved} if killed else {saved})


def test_a_loader_with_workers(run_process: Callable[..., tuple[int, Any, str]], tmp_path: Path, every: bool) -> None:
    options = {"loader": "workers", "checkpoint": NEVER}
    _, whole, _ = run_process(tmp_path / "whole", **options)
    for step in (2, 4, 5, 7, 9, 10) if every else (2, 5, 9):
        directory = tmp_path / str(step)
        status, _, said = run_process(directory, signal_after=step - 1, **options)
        assert status == 143, said
        status, resumed, said = run_process(directory, seed=step, **options)
        assert (status, resumed["first_step"]) == (0, step), said
        assert resumed["final"] == whole["final"]
        # The validation after the last step of an epoch is left to the run that continues.
        assert resumed["events"] == [event for event in whole["events"] if event[1] >= step]


def test_preemption_ends_with_the_status_of_sigterm() -> None:
    handler = signal.getsignal(signal.SIGTERM)
    directory = new_directory()
    with pytest.raises(Preempted) as caught:
        program.run(directory, recorder=program.Recorder(signal_after=6), checkpoint=NEVER)
    assert caught.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is handler
    manager = hf.CheckpointManager(directory, options=hf.CheckpointManagerOptions(read_only=True))
    assert manager.all_steps() == [7]
    assert [entry.reason for entry in hf.list_checkpoints(directory)] == ["preempted"]


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


def test_signal_when_the_step_is_saved_already() -> None:
    # The first batch after step 2 begins an accumulation: the run need not continue to its end.
    directory = new_directory()
    recorder = program.Recorder(signal_after=2)
    with pytest.raises(Preempted):
        program.run(directory, recorder=recorder, accumulate_grad_batches=3)
    manager = hf.CheckpointManager(directory, options=hf.CheckpointManagerOptions(read_only=True))
    assert manager.all_steps() == [1, 2]


class SignalIn(lightning.Callback):
    """Sends SIGTERM in the first batch of a hook, and counts the batches that follow."""

    def __init__(self, hook: str) -> None:
        self.batches = 0
        setattr(self, hook, self.send)

    def send(self, *args: Any, **kwargs: Any) -> None:
        self.batches += 1
        if self.batches == 1:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    ("function", "hook"),
    [
        pytest.param("fit", "on_validation_batch_start", id="sanity check"),
        pytest.param("validate", "on_validation_batch_start", id="validate"),
        pytest.param("test", "on_test_batch_start", id="test"),
        pytest.param("predict", "on_predict_batch_start", id="predict"),
    ],
)
@pytest.mark.usefixtures("default_sigterm")
def test_nothing_to_save_yet(function: str, hook: str) -> None:
    sender = SignalIn(hook)
    callback = CheckpointCallback(new_directory(), **NEVER)
    trainer: Any = lightning.Trainer(callbacks=[callback, sender], max_epochs=1, **program.QUIET)
    loaders = [program.validation_loader()]
    if function == "fit":
        loaders.insert(0, program.training_loader("shuffled"))
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
