"""Trainers whose resume proves itself: what is compared after each batch, and the batches after a signal."""

from __future__ import annotations

import logging
import shutil
from typing import Any

import lightning.pytorch
import pytest
from tests.integrations.lightning import program

import holdfast as hf
from holdfast.integrations.loop import Proof


class Counting(lightning.pytorch.Callback):
    """Scales gradients by the number of batches of this process, which no checkpoint has."""

    def __init__(self) -> None:
        self.count = 0

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.count += 1
        for parameter in module.parameters():
            parameter.grad *= self.count


class Data(lightning.pytorch.LightningDataModule):
    """In reach of the program."""


def crashed(directory: Any, after: int, *callbacks: Any, every: int = 3) -> None:
    program.interrupt(str(directory), after, callbacks=callbacks, checkpoint={"save_interval_steps": every})


def resumed(directory: Any, *callbacks: Any, every: int = 3, **checkpoint: Any) -> Any:
    """Resumes a run; returns what its callback has proved."""
    options = {"save_interval_steps": every, **checkpoint}
    run = program.run(str(directory), seed=2, callbacks=callbacks, checkpoint=options)
    return run.trainer.checkpoint_callback.proof


def test_a_resume_that_is_exact(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    crashed(tmp_path, 5)
    assert resumed(tmp_path) == Proof(exact=True, steps=(4, 5))
    (line,) = [text for text in caplog.messages if text.startswith("exact: ")]
    assert line.startswith("exact: steps 4 and 5 are those of before the stop (batch, ")
    assert "batch index, epoch, step" in line
    assert not [text for text in caplog.messages if text.startswith("not exact") or "as saved, except" in text]


def test_the_end_of_an_epoch_is_no_part_of_its_last_batch(tmp_path: Any) -> None:
    """Step 10 is saved when its epoch has ended; a resume from the step before comes to it in that epoch."""
    crashed(tmp_path, 11, every=5)
    shutil.rmtree(tmp_path / "10")
    assert resumed(tmp_path, every=5) == Proof(exact=True, steps=(6, 7, 9))


def test_what_a_callback_hides_is_named(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    crashed(tmp_path, 5, Counting())
    data = Data()
    proof = resumed(tmp_path, Counting())
    assert (proof.exact, proof.steps) == (False, ())
    assert "state" in proof.differs
    assert "batch" not in proof.differs
    (warning,) = [text for text in caplog.messages if text.startswith("not exact from step 4 on: ")]
    assert "give a callback state_dict and load_state_dict, or save the rest in on_save_checkpoint" in warning
    assert "restore_or_initialize" not in warning
    assert "prepare_data_per_node" not in warning, f"{data} has it from its base class"


def test_nothing_is_saved_after_a_difference_with_raise(tmp_path: Any) -> None:
    crashed(tmp_path, 5, Counting())
    with pytest.raises(hf.errors.StateError, match="not exact from step 4 on"):
        resumed(tmp_path, Counting(), on_inexact="raise", save_on_exception=True)
    assert [entry.step for entry in hf.list_checkpoints(tmp_path)] == [3]


@pytest.mark.usefixtures("default_sigterm")
@pytest.mark.parametrize(("signal_after", "saved", "compared"), [(1, 2, (3, 4)), (2, 3, (4,))])
def test_a_preempted_trainer_goes_on_to_be_compared(
    tmp_path: Any, signal_after: int, saved: int, compared: tuple[int, ...]
) -> None:
    """Up to four batches, but not the last one of an epoch, here of five, which a validation follows."""
    with pytest.raises(SystemExit) as ended:
        program.run(
            str(tmp_path),
            recorder=program.Recorder(signal_after=signal_after),
            checkpoint={"save_interval_steps": 100, "grace_secs": "1h"},
        )
    assert ended.value.code == 143
    assert [entry.step for entry in hf.list_checkpoints(tmp_path)] == [saved]
    assert resumed(tmp_path, every=100) == Proof(exact=True, steps=compared)
