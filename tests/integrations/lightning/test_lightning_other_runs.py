"""A directory in which Lightning's ModelCheckpoint has saved: refused by a fresh run, imported, and gone on from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from tests.integrations.lightning import program

import holdfast as hf
from holdfast.integrations.lightning import CheckpointCallback

pytestmark = [
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed from"),
]


def fit(callbacks: list[Any], epochs: int, **options: Any) -> Any:
    torch.manual_seed(epochs)
    model = program.Model("epoch")
    trainer = lightning.Trainer(callbacks=callbacks, **{**program.QUIET, "max_epochs": epochs})
    trainer.fit(model, program.training_loader("shuffled"), program.validation_loader(), **options)
    return trainer, model.state_dict()


def test_a_run_of_lightning_goes_on(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    fit([ModelCheckpoint(theirs, save_top_k=-1, save_last=True)], 2)
    before = sorted(theirs.rglob("*"))
    said = rf"{theirs} holds 2 checkpoints of Lightning, the newest epoch=1-step=10\.ckpt of step 10.*holdfast import"
    with pytest.raises(hf.CheckpointExistsError, match=said):
        fit([CheckpointCallback(theirs)], 3)
    assert sorted(theirs.rglob("*")) == before

    hf.import_checkpoint(theirs, ours)
    trainer, weights = fit([CheckpointCallback(ours)], 3)
    _, expected = fit([ModelCheckpoint(tmp_path / "expected")], 3, ckpt_path=theirs / "last.ckpt")
    assert trainer.global_step == 15
    assert all(torch.equal(weights[name], value) for name, value in expected.items())
    assert [one.step for one in hf.list_checkpoints(ours)] == [5, 10, 15]


def test_both_callbacks_in_one_directory(tmp_path: Path) -> None:
    def callbacks() -> list[Any]:
        return [CheckpointCallback(tmp_path, save_interval_steps=5), ModelCheckpoint(tmp_path, save_top_k=-1)]

    fit(callbacks(), 1)
    trainer, _ = fit(callbacks(), 2)
    assert trainer.global_step == 10
    assert [one.step for one in hf.list_checkpoints(tmp_path)] == [5, 10]


def test_two_callbacks_of_one_directory_are_refused(tmp_path: Path) -> None:
    """Each would take what the other saves for a call of ``trainer.save_checkpoint``, and save every step."""
    same = [CheckpointCallback(tmp_path / "run"), CheckpointCallback(f"{tmp_path}/other/../run")]
    with pytest.raises(
        hf.errors.OptionError, match=rf"the trainer has 2 callbacks that save to {tmp_path}/run: leave one"
    ):
        fit(same, 1)
    assert not (tmp_path / "run").exists()
    fit([CheckpointCallback(tmp_path / "run"), CheckpointCallback(tmp_path / "other")], 1)
    assert hf.list_checkpoints(tmp_path / "run")[-1].step == hf.list_checkpoints(tmp_path / "other")[-1].step
