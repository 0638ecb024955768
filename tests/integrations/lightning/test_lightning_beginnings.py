"""Where a run begins: beside callbacks of Lightning and their files, and in one program with other runs."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.tuner.tuning import Tuner
from tests.integrations.lightning import program
from tests.integrations.lightning.program import new_directory
from tests.sweep.lightning_programs import BATCH_SIZE, BATCHES, samples
from torch.utils.data import DataLoader

import holdfast as hf
from holdfast.integrations.lightning import CheckpointCallback

pytestmark = [
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:The `lr_find`|The number of training batches"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed from"),
]

# ---- ModelCheckpoint


def beside(place: Path) -> ModelCheckpoint:
    return ModelCheckpoint(place, save_last=True, every_n_train_steps=1, save_top_k=1)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_a_file_of_lightning_counts_only_where_it_is_named(tmp_path: Path) -> None:
    program.run(new_directory(), callbacks=(beside(tmp_path),), max_steps=3)
    assert "holdfast" not in torch.load(tmp_path / "last.ckpt", weights_only=True)
    for named, first in (("last", 3), (str(tmp_path / "last.ckpt"), 5)):
        resumed = program.run(new_directory(), callbacks=(beside(tmp_path),), ckpt_path=named, max_steps=first + 2)
        assert resumed.recorder.first_step == first
    # A fresh run does not take it, and neither does one that resumes.
    directory, checkpoint = new_directory(), {"save_interval_steps": 3, "resume": "never"}
    fresh = program.interrupt(directory, 8, checkpoint=checkpoint, callbacks=(beside(tmp_path),))
    assert fresh.first_step == 0
    assert 8 in [torch.load(path, weights_only=True)["global_step"] for path in tmp_path.glob("last*.ckpt")]
    resumed = program.run(directory, seed=2, callbacks=(beside(tmp_path),))
    assert resumed.recorder.first_step == 6
    assert resumed.final == program.run(new_directory()).final


# ---- searches for a learning rate and a batch size


class Searched(program.Model):
    hparams: Any

    def __init__(self, lr: float = 0.02, batch_size: int = 4, **facts: Any) -> None:
        super().__init__(**facts)
        self.save_hyperparameters()

    def train_dataloader(self) -> Any:
        return DataLoader(samples(24, seed=1), self.hparams.batch_size, shuffle=True)

    def val_dataloader(self) -> Any:
        return program.validation_loader()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), self.hparams.lr, momentum=0.5)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit(
    directory: str, root: Path, kind: str, *, seed: int = 1, batch_size: int = 4, stop_after: int | None = None
) -> program.Outcome:
    """Searches by callbacks, or by a function of the tuner, and trains."""
    torch.manual_seed(seed)
    rate = LearningRateFinder(max_lr=0.1, num_training_steps=14, early_stop_threshold=None)
    size = BatchSizeFinder(init_val=3, max_trials=2, steps_per_trial=1)
    finders: Any = {"both": [size, rate], "LearningRateFinder": [rate], "BatchSizeFinder": [size]}.get(kind, [])
    recorder, model = program.Recorder(stop_after=stop_after), Searched(batch_size=batch_size)
    checkpoint = CheckpointCallback(directory, save_interval_steps=1)
    trainer = program.trainer(checkpoint, *finders, recorder, default_root_dir=root, max_epochs=3)
    if kind == "lr_find":
        Tuner(trainer).lr_find(model, max_lr=0.1, num_training=14, early_stop_threshold=None)
    if kind == "scale_batch_size":
        Tuner(trainer).scale_batch_size(model, init_val=3, max_trials=2, steps_per_trial=1)
    trainer.fit(model)
    return program.Outcome(trainer, model, recorder)


@pytest.mark.parametrize(
    ("kind", "finders"),
    [
        # before, a run of Lightning with both has no metrics in its first epoch
        pytest.param("both", 2, marks=pytest.mark.needs("lightning", "2.6")),
        ("lr_find", 0),
        pytest.param("LearningRateFinder", 1, marks=pytest.mark.sweep),
        pytest.param("BatchSizeFinder", 1, marks=pytest.mark.sweep),
        pytest.param("scale_batch_size", 0, marks=pytest.mark.sweep),
    ],
)
def test_a_resumed_run_does_not_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, finders: int, caplog: pytest.LogCaptureFixture
) -> None:
    # Lightning collects garbage in each trial, which takes seconds in a process that holds as much as this one.
    monkeypatch.setattr("lightning.pytorch.tuner.batch_size_scaling.garbage_collection_cuda", lambda: None)
    whole = fit(new_directory(), tmp_path, kind)
    assert dict(whole.model.hparams) != dict(Searched().hparams)  # something was found
    for step in (2, whole.trainer.num_training_batches):
        directory = new_directory()
        with pytest.raises(program.InterruptionError):
            fit(directory, tmp_path, kind, stop_after=step)
        caplog.clear()
        if finders:
            resumed = fit(directory, tmp_path, kind, seed=7, batch_size=whole.model.hparams.batch_size)
        else:  # the function searches again, with the same seed
            resumed = fit(directory, tmp_path, kind)
        assert len([text for text in caplog.messages if "does not search again" in text]) == finders
        assert resumed.recorder.first_step == step
        assert resumed.final == whole.final


# ---- a directory in which ModelCheckpoint has saved


def trained(callbacks: list[Any], epochs: int, **options: Any) -> Any:
    torch.manual_seed(epochs)
    model = program.Model("epoch")
    trainer = program.trainer(*callbacks, max_epochs=epochs)
    trainer.fit(model, *program.loaders(), **options)
    return trainer, model.state_dict()


def test_a_run_of_lightning_goes_on(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    trained([ModelCheckpoint(theirs, save_top_k=-1, save_last=True)], 2)
    before = sorted(theirs.rglob("*"))
    said = rf"{theirs} holds 2 checkpoints of Lightning, the newest epoch=1-step=10\.ckpt of step 10.*holdfast import"
    with pytest.raises(hf.CheckpointExistsError, match=said):
        trained([CheckpointCallback(theirs)], 3)
    assert sorted(theirs.rglob("*")) == before

    hf.import_checkpoint(theirs, ours)
    trainer, weights = trained([CheckpointCallback(ours)], 3)
    _, expected = trained([ModelCheckpoint(tmp_path / "expected")], 3, ckpt_path=theirs / "last.ckpt")
    assert trainer.global_step == 15
    assert all(torch.equal(weights[name], value) for name, value in expected.items())
    assert [one.step for one in hf.list_checkpoints(ours)] == [5, 10, 15]


def test_both_callbacks_in_one_directory(tmp_path: Path) -> None:
    def callbacks() -> list[Any]:
        return [CheckpointCallback(tmp_path, save_interval_steps=5), ModelCheckpoint(tmp_path, save_top_k=-1)]

    trained(callbacks(), 1)
    trainer, _ = trained(callbacks(), 2)
    assert trainer.global_step == 10
    assert [one.step for one in hf.list_checkpoints(tmp_path)] == [5, 10]


def test_two_callbacks_of_one_directory_are_refused(tmp_path: Path) -> None:
    """Each would take what the other saves for a call of ``trainer.save_checkpoint``, and save every step."""
    same = [CheckpointCallback(tmp_path / "run"), CheckpointCallback(f"{tmp_path}/other/../run")]
    with pytest.raises(
        hf.errors.OptionError, match=rf"the trainer has 2 callbacks that save to {tmp_path}/run: keep one"
    ):
        trained(same, 1)
    assert not (tmp_path / "run").exists()
    trained([CheckpointCallback(tmp_path / "run"), CheckpointCallback(tmp_path / "other")], 1)
    assert hf.list_checkpoints(tmp_path / "run")[-1].step == hf.list_checkpoints(tmp_path / "other")[-1].step


# ---- programs that call fit more than once: folds, phases, and the same run for longer


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
        trainer = program.trainer(callback, recorder, **options)
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
    with pytest.raises(hf.errors.StateError, match=r"finished with another module.*its own directory"):
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
            trainer = program.trainer(callback, recorder, max_epochs=epochs)
            trainer.fit(model, *program.loaders())
            found.append(program.Outcome(trainer, model, recorder).final)
        return found

    whole, directory = train(new_directory()), new_directory()
    with pytest.raises(program.InterruptionError):
        train(directory, step)
    start_again()
    with caplog.at_level("INFO"):
        assert train(directory)[1] == whole[1]
    assert ("nothing left to do" in caplog.text) == (step > 5)
