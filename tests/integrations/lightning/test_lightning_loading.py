"""Checkpoints of a run in programs that are not the run: modules made from them, and trainers without the callback."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import torch
from tests.integrations.lightning import program
from tests.integrations.lightning.program import new_directory

import holdfast as hf
from holdfast.integrations.lightning import CheckpointCallback, HoldfastCheckpointIO, load_from_checkpoint

BY_LOSS: dict[str, Any] = {"best_fn": "val_loss", "best_mode": "min", "save_interval_steps": 5}


@dataclasses.dataclass
class Data:
    root: Path
    dtype: torch.dtype = torch.float32


def test_a_module_is_made_from_a_step() -> None:
    class Configured(program.Model):
        def __init__(self, data: Data, options: Namespace, scale: float = 1.0) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.data, self.options, self.scale = data, options, scale

    torch.manual_seed(0)
    directory = new_directory()
    data, options = Data(Path("x")), Namespace(act=torch.nn.ReLU, depth=3)
    callback = CheckpointCallback(directory, **BY_LOSS)
    trainer = lightning.pytorch.Trainer(callbacks=[callback], max_epochs=4, **program.QUIET)
    model = Configured(data, options)
    trainer.fit(model, program.training_loader("shuffled"), program.validation_loader())

    newest = load_from_checkpoint(Configured, directory)
    assert (newest.data, newest.options, newest.scale) == (data, options, 1.0)
    for name, value in model.state_dict().items():
        assert torch.equal(newest.state_dict()[name], value)
    best = load_from_checkpoint(Configured, directory, step="best", scale=2.0)
    assert (best.scale, best.hparams["scale"]) == (2.0, 2.0)
    assert torch.equal(
        best.head.weight,
        torch.from_numpy(hf.load(callback.best_model_path)["state_dict"]["head.weight"]),
    )
    assert torch.equal(
        load_from_checkpoint(Configured, directory, 5).average,
        load_from_checkpoint(Configured, f"{directory}/5").average,
    )


def test_what_cannot_be_loaded() -> None:
    directory = new_directory()
    program.run(directory, max_epochs=1, checkpoint={"save_interval_steps": 5})
    with pytest.raises(hf.errors.OptionError, match="does not rank its checkpoints by the name of a metric"):
        load_from_checkpoint(program.Model, directory, step="best")
    with pytest.raises(hf.CheckpointNotFoundError, match="/7"):
        load_from_checkpoint(program.Model, directory, 7)
    with pytest.raises(TypeError, match="is neither a LightningModule nor a LightningDataModule"):
        load_from_checkpoint(torch.nn.Linear, directory)

    class Other(lightning.pytorch.LightningModule):
        def __init__(self, schedule: str) -> None:
            super().__init__()

    with pytest.raises(RuntimeError, match="Unexpected key"):
        load_from_checkpoint(Other, directory)


def test_a_trainer_without_the_callback(tmp_path: Path) -> None:
    directory = new_directory()
    outcome = program.run(directory, max_epochs=4, checkpoint=BY_LOSS)
    measured = outcome.measured
    best = outcome.trainer.checkpoint_callback.best_model_path
    trainer = lightning.pytorch.Trainer(plugins=[HoldfastCheckpointIO()], default_root_dir=tmp_path, **program.QUIET)
    loader = program.validation_loader()
    for path, step in ((best, min(measured, key=measured.__getitem__)), (f"{directory}/10", 10), (directory, 20)):
        [result] = trainer.validate(program.Model(), loader, ckpt_path=path, verbose=False)
        assert result["val_loss"] == pytest.approx(measured[step])
    # its own files are as they would be without the plugin
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    assert (
        torch.load(tmp_path / "one.ckpt", weights_only=True)["state_dict"].keys() == program.Model().state_dict().keys()
    )
    [result] = trainer.validate(program.Model(), loader, ckpt_path=tmp_path / "one.ckpt", verbose=False)
    assert result["val_loss"] == pytest.approx(measured[20])
