"""Callbacks of Lightning's own beside ours: they do not decide where a run begins, and searches are not repeated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.tuner.tuning import Tuner
from tests.integrations.lightning import program
from tests.integrations.lightning.program import new_directory
from tests.sweep.lightning_programs import samples
from torch.utils.data import DataLoader

from holdfast.integrations.lightning import CheckpointCallback

pytestmark = [
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:The `lr_find`|The number of training batches"),
]


# ---- ModelCheckpoint


def beside(place: Path) -> ModelCheckpoint:
    return ModelCheckpoint(place, save_last=True, every_n_train_steps=1, save_top_k=1)


@pytest.mark.parametrize("resume", [pytest.param("auto", marks=pytest.mark.sweep), "never"])
def test_a_fresh_run_beside_an_old_last_ckpt(tmp_path: Path, resume: str) -> None:
    program.run(new_directory(), callbacks=(beside(tmp_path),), max_steps=3)
    assert (tmp_path / "last.ckpt").exists()
    whole = program.run(new_directory())
    fresh = program.run(new_directory(), checkpoint={"resume": resume}, callbacks=(beside(tmp_path),))
    assert fresh.recorder.first_step == 0
    assert fresh.final == whole.final


def test_after_a_kill_only_our_directory_decides(tmp_path: Path) -> None:
    whole = program.run(new_directory())
    directory = new_directory()
    program.interrupt(directory, 8, checkpoint={"save_interval_steps": 3}, callbacks=(beside(tmp_path),))
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 8
    resumed = program.run(directory, seed=2, callbacks=(beside(tmp_path),))
    assert resumed.recorder.first_step == 6
    assert resumed.final == whole.final


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize("named", ["last", "last.ckpt"])
def test_a_path_that_is_named_is_taken(tmp_path: Path, named: str) -> None:
    program.run(new_directory(), callbacks=(beside(tmp_path),), max_steps=3)
    path = str(tmp_path / named) if named.endswith(".ckpt") else named
    resumed = program.run(new_directory(), callbacks=(beside(tmp_path),), ckpt_path=path, max_steps=5)
    assert resumed.recorder.first_step == 3


# ---- searches for a learning rate and a batch size


def searching() -> Any:
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

    return Searched


def fit(directory: str, root: Path, callbacks: list[Any], *, tuner: str = "", **options: Any) -> Any:
    torch.manual_seed(options.pop("seed", 1))
    stop = options.pop("stop_after", None)
    recorder, model = program.Recorder(stop_after=stop), searching()(**options.pop("given", {}))
    checkpoint = CheckpointCallback(directory, save_interval_steps=1)
    trainer = lightning.pytorch.Trainer(
        callbacks=[checkpoint, *callbacks, recorder], default_root_dir=root, max_epochs=3, **program.QUIET, **options
    )
    if tuner == "lr":
        Tuner(trainer).lr_find(model, max_lr=0.1, num_training=14, early_stop_threshold=None)
    if tuner == "batch_size":
        Tuner(trainer).scale_batch_size(model, init_val=3, max_trials=2, steps_per_trial=1)
    trainer.fit(model)
    return program.Outcome(trainer, model, recorder)


def finders(kind: str) -> list[Any]:
    rate = LearningRateFinder(max_lr=0.1, num_training_steps=14, early_stop_threshold=None)
    size = BatchSizeFinder(init_val=3, max_trials=2, steps_per_trial=1)
    kinds: dict[str, list[Any]] = {"lr": [rate], "batch_size": [size], "both": [size, rate], "tuner": []}
    return kinds[kind]


@pytest.mark.parametrize(
    ("kind", "tuner"),
    [
        # before, a run of Lightning with both has no metrics in its first epoch
        pytest.param("both", "", marks=pytest.mark.needs("lightning", "2.6")),
        ("tuner", "lr"),
        pytest.param("lr", "", marks=pytest.mark.sweep),
        pytest.param("batch_size", "", marks=pytest.mark.sweep),
        pytest.param("tuner", "batch_size", marks=pytest.mark.sweep),
    ],
)
def test_a_resumed_run_does_not_search(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    tuner: str,
    every: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Lightning collects garbage in each trial, which takes seconds in a process that holds as much as this one.
    monkeypatch.setattr("lightning.pytorch.tuner.batch_size_scaling.garbage_collection_cuda", lambda: None)
    whole = fit(new_directory(), tmp_path, finders(kind), tuner=tuner)
    assert dict(whole.model.hparams) != dict(searching()().hparams)  # something was found
    epoch = whole.trainer.num_training_batches
    for step in range(1, 3 * epoch) if every else (2, epoch):
        directory = new_directory()
        with pytest.raises(program.InterruptionError):
            fit(directory, tmp_path, finders(kind), tuner=tuner, stop_after=step)
        caplog.clear()
        given = {} if tuner else {"batch_size": whole.model.hparams.batch_size}
        resumed = fit(directory, tmp_path, finders(kind), tuner=tuner, seed=1 if tuner else 7, given=given)
        said = [one for one in caplog.records if "does not search again" in one.getMessage()]
        assert len(said) == len(finders(kind))
        assert resumed.recorder.first_step == step
        assert resumed.final == whole.final
