"""Trainers whose resume proves itself: what is compared after each batch, and the batches after a signal."""

from __future__ import annotations

import logging
import shutil
from typing import Any

import lightning.pytorch
import pytest
from tests.integrations.lightning import program

import holdfast as hf
from holdfast.integrations.lightning import CheckpointCallback
from holdfast.integrations.loop import Proof


class Crash(lightning.pytorch.Callback):
    """Ends a run after a batch, when its saves are complete."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        trainer.checkpoint_callback.manager.wait_until_finished()
        if trainer.global_step == self.after:
            raise program.InterruptionError


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


def crashed(directory: str, after: int, *callbacks: Any, every: int = 3, **options: Any) -> None:
    with pytest.raises(program.InterruptionError):
        program.run(
            directory, callbacks=(Crash(after), *callbacks), checkpoint={"save_interval_steps": every}, **options
        )


def resumed(directory: str, *callbacks: Any, every: int = 3, **checkpoint: Any) -> CheckpointCallback:
    run = program.run(directory, seed=2, callbacks=callbacks, checkpoint={"save_interval_steps": every, **checkpoint})
    found: CheckpointCallback = run.trainer.checkpoint_callback
    return found


def test_a_resume_that_is_exact(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    crashed(str(tmp_path), 5)
    assert resumed(str(tmp_path)).proof == Proof(exact=True, steps=(4, 5))
    (line,) = [text for text in caplog.messages if text.startswith("exact: ")]
    assert line.startswith("exact: steps 4 and 5 are those of before the stop (batch, ")
    assert "batch, epoch, step" in line
    assert not [text for text in caplog.messages if text.startswith("not exact") or "as saved, except" in text]


def test_the_end_of_an_epoch_is_no_part_of_its_last_batch(tmp_path: Any) -> None:
    """Step 10 is saved when its epoch has ended; a resume from the step before comes to it in that epoch."""
    crashed(str(tmp_path), 11, every=5)
    shutil.rmtree(tmp_path / "10")
    assert resumed(str(tmp_path), every=5).proof == Proof(exact=True, steps=(6, 7, 9))


def test_what_a_callback_hides_is_named(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    crashed(str(tmp_path), 5, Counting())
    data = Data()
    proof = resumed(str(tmp_path), Counting()).proof
    assert (proof.exact, proof.steps) == (False, ())
    assert "state" in proof.differs
    assert "batch" not in proof.differs
    (warning,) = [text for text in caplog.messages if text.startswith("not exact from step 4 on: ")]
    assert "give a callback state_dict and load_state_dict, or save the rest in on_save_checkpoint" in warning
    assert "restore_or_initialize" not in warning
    assert "prepare_data_per_node" not in warning, f"{data} has it from its base class"


def test_nothing_is_saved_after_a_difference_with_raise(tmp_path: Any) -> None:
    crashed(str(tmp_path), 5, Counting())
    with pytest.raises(hf.errors.StateError, match="not exact from step 4 on"):
        resumed(str(tmp_path), Counting(), on_inexact="raise", save_on_exception=True)
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
    assert resumed(str(tmp_path), every=100).proof == Proof(exact=True, steps=compared)
