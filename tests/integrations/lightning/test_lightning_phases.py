"""Programs that call ``fit`` more than once: folds, phases, and the same run for longer."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from tests.integrations.lightning import program
from tests.integrations.lightning.program import new_directory
from tests.sweep.lightning_programs import BATCH_SIZE, BATCHES, samples
from torch.utils.data import DataLoader

import holdfast as hf
from holdfast.integrations.lightning import CheckpointCallback


def folds(root: str, stop: tuple[int, int] | None = None, **options: Any) -> list[Any]:
    """Trains three models one after the other, as a cross-validation does, and returns what each came to."""
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(3)
    own = torch.Generator().manual_seed(5)
    found = []
    for fold in range(3):
        model = program.Model()
        drawn = random.random(), np.random.rand(), torch.rand(3).tolist()
        recorder = program.Recorder(stop_after=stop[1] if stop is not None and stop[0] == fold else None)
        callback = CheckpointCallback(f"{root}/fold_{fold}", save_interval_steps=2)
        trainer = Trainer(callbacks=[callback, recorder], **program.QUIET, **options)
        data = samples(BATCHES * BATCH_SIZE, seed=fold)
        loader = DataLoader(data, BATCH_SIZE, shuffle=True, generator=own)
        trainer.fit(model, loader, program.validation_loader())
        outcome = program.Outcome(trainer, model, recorder)
        progress = trainer.fit_loop.epoch_progress.state_dict()
        found.append((drawn, outcome.final, progress, own.get_state().tolist(), trainer.fit_loop.restarting))
    return [*found, random.random(), np.random.rand(), torch.rand(3).tolist()]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("options", [{"max_epochs": 2}, {"max_epochs": -1, "max_steps": 7}], ids=str)
def test_what_follows_a_finished_run_is_what_followed_it(
    start_again: Callable[[], None], options: dict[str, Any]
) -> None:
    whole = folds(new_directory(), **options)
    for stop in ((1, 1), (1, 5), (2, 6)):
        root = new_directory()
        with pytest.raises(program.InterruptionError):
            folds(root, stop, **options)
        start_again()
        assert folds(root, **options) == whole, f"interrupted in fold {stop[0]} after step {stop[1]}"
        start_again()
        assert folds(root, **options) == whole  # all are finished


@pytest.mark.parametrize("restarts", [False, True])
def test_one_directory_for_all_folds_is_refused(start_again: Callable[[], None], restarts: bool) -> None:
    directory = new_directory()
    program.run(directory, max_epochs=1)
    if restarts:
        start_again()
        program.run(directory, max_epochs=1)
    with pytest.raises(hf.errors.StateError, match=r"finished with another module.*directory of its own"):
        program.run(directory, max_epochs=1)
    with pytest.raises(hf.errors.StateError, match="finished with another module"):
        program.run(directory, max_epochs=2)
    for way in ({"checkpoint": {"resume": "must"}}, {"ckpt_path": "last"}):
        assert program.run(directory, max_epochs=2, **way).trainer.global_step == 10
    assert program.run(new_directory(), max_epochs=1).recorder.first_step == 0


@pytest.mark.usefixtures("start_again")
def test_a_retry_after_an_error_is_no_other_run() -> None:
    directory = new_directory()
    program.interrupt(directory, 4)
    assert program.run(directory).recorder.first_step == 4


@pytest.mark.one_in(2)
@pytest.mark.parametrize("step", [3, 7, 10, 11, 14])
def test_one_run_in_two_phases(start_again: Callable[[], None], step: int, caplog: pytest.LogCaptureFixture) -> None:
    """``fit`` up to one epoch, then up to three, in one directory: one that the run is past has nothing left to do."""

    def train(directory: str, stop_after: int | None = None) -> list[Any]:
        torch.manual_seed(3)
        model, found = program.Model(), []
        for epochs in (1, 3):
            recorder = program.Recorder(stop_after=stop_after)
            callback = CheckpointCallback(directory, save_interval_steps=1)
            trainer = Trainer(callbacks=[callback, recorder], max_epochs=epochs, **program.QUIET)
            trainer.fit(model, program.training_loader("shuffled"), program.validation_loader())
            found.append(program.Outcome(trainer, model, recorder).final)
        return found

    whole, directory = train(new_directory()), new_directory()
    with pytest.raises(program.InterruptionError):
        train(directory, step)
    start_again()
    with caplog.at_level("INFO"):
        assert train(directory)[1] == whole[1]
    assert ("nothing left to do" in caplog.text) == (step > 5)
