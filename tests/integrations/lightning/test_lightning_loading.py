"""Checkpoints of a run elsewhere: modules made from them, weights for fresh runs, trainers without the callback."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch
import pytest
import torch
from tests.integrations.lightning import program
from tests.integrations.lightning.program import BY_LOSS, new_directory

import holdfast as hf
from holdfast.integrations.lightning import (
    CheckpointCallback,
    HoldfastCheckpointIO,
    load_checkpoint,
    load_from_checkpoint,
)
from holdfast.integrations.lightning.callback import take_weights
from holdfast.integrations.lightning.trees import POSITION, VERSION, from_tree

# ---- modules, and trainers without the callback


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

    directory = new_directory()
    data, options = Data(Path("x")), Namespace(act=torch.nn.ReLU, depth=3)
    outcome = program.run(directory, model=lambda: Configured(data, options), checkpoint=BY_LOSS, max_epochs=4)

    newest = load_from_checkpoint(Configured, directory)
    assert (newest.data, newest.options, newest.scale) == (data, options, 1.0)
    for name, value in outcome.model.state_dict().items():
        assert torch.equal(newest.state_dict()[name], value)
    best = load_from_checkpoint(Configured, directory, step="best", scale=2.0)
    assert (best.scale, best.hparams["scale"]) == (2.0, 2.0)
    saved = load_checkpoint(directory, outcome.best)["state_dict"]
    assert torch.equal(best.head.weight, saved["head.weight"])
    early = [load_from_checkpoint(Configured, *place).average for place in ((directory, 5), (f"{directory}/5",))]
    assert torch.equal(*early)


def test_what_cannot_be_loaded() -> None:
    directory = new_directory()
    program.run(directory, max_epochs=1, checkpoint={"save_interval_steps": 5})
    with pytest.raises(hf.errors.OptionError, match="does not rank its checkpoints by the name of a metric"):
        load_from_checkpoint(program.Model, directory, step="best")
    with pytest.raises(hf.CheckpointNotFoundError, match="/7"):
        load_from_checkpoint(program.Model, directory, 7)
    with pytest.raises(TypeError, match="is neither a LightningModule nor a LightningDataModule"):
        load_from_checkpoint(torch.nn.Linear, directory)

    class Other(lightning.LightningModule):
        def __init__(self, schedule: str) -> None:
            super().__init__()

    with pytest.raises(RuntimeError, match="Unexpected key"):
        load_from_checkpoint(Other, directory)
    hf.save(f"{directory}/weights", {"weights": torch.zeros(3)})
    with pytest.raises(hf.errors.StateError, match="was not saved from a Lightning trainer"):
        load_checkpoint(f"{directory}/weights")


def test_a_trainer_without_the_callback(tmp_path: Path) -> None:
    directory = new_directory()
    outcome = program.run(directory, max_epochs=4, checkpoint=BY_LOSS)
    measured = outcome.measured
    best = outcome.trainer.checkpoint_callback.best_model_path
    trainer = program.trainer(plugins=[HoldfastCheckpointIO()], default_root_dir=tmp_path)
    loader = program.validation_loader()
    for path, step in ((best, outcome.best), (f"{directory}/10", 10), (directory, 20)):
        [result] = trainer.validate(program.Model(), loader, ckpt_path=path, verbose=False)
        assert result["val_loss"] == pytest.approx(measured[step])
    # its own files are as they would be without the plugin
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    written = torch.load(tmp_path / "one.ckpt", weights_only=True)["state_dict"]
    assert written.keys() == program.Model().state_dict().keys()
    [result] = trainer.validate(program.Model(), loader, ckpt_path=tmp_path / "one.ckpt", verbose=False)
    assert result["val_loss"] == pytest.approx(measured[20])


# ---- init_from=


def test_one_fit_after_another_takes_the_weights_once(tmp_path: Path) -> None:
    torch.save(program.Model().state_dict(), tmp_path / "weights.pt")
    begun: list[torch.Tensor] = []

    class Beginning(lightning.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            begun.append(pl_module.head.weight.detach().clone())

    checkpoint = CheckpointCallback(new_directory(), save_at_end=False, init_from=tmp_path / "weights.pt")
    model = program.Model()
    for _ in range(2):
        program.trainer(Beginning(), checkpoint, max_steps=2).fit(model, *program.loaders())
    taken = torch.load(tmp_path / "weights.pt")["head.weight"]
    assert [torch.equal(one, taken) for one in begun] == [True, False]


def test_strategies_that_shard_first_are_refused() -> None:
    trainer = SimpleNamespace(strategy=SimpleNamespace(restore_checkpoint_after_setup=True))
    with pytest.raises(hf.errors.OptionError, match="does not work with SimpleNamespace"):
        take_weights(trainer, program.Model(), "weights.pt")


# ---- the version of what is written


WRITTEN = Path(__file__).with_name("written.txt")
DEPTH = 3  # keys of a path that are ours; below are names of the program and fields of Lightning


def outline(value: Any, keys: tuple[str, ...] = ()) -> list[str]:
    """Returns a line for each entry: its path and its type."""
    if isinstance(value, dict) and value and len(keys) < DEPTH:
        return [line for key, item in value.items() for line in outline(item, (*keys, str(key)))]
    return [f"{'/'.join(keys)}: {type(value).__name__}"]


def test_what_is_written_has_not_changed() -> None:
    directory = new_directory()
    program.run(directory, max_steps=3)
    tree = hf.load(directory)
    ours = {name: tree[name] for name in (POSITION, "state_dict_versions", "value_types", "tree_version")}

    written = "\n".join([f"version {tree['tree_version']}", *sorted(outline(ours)), ""])

    assert written == WRITTEN.read_text(), (
        f"the callback writes something else than version {VERSION}. Where the version of holdfast before could not "
        "read it, raise VERSION in integrations/lightning/trees.py; then write this test's file anew, with\n" + written
    )


@pytest.mark.parametrize("version", [VERSION + 1, "2", None])
def test_a_newer_version_is_refused(version: Any) -> None:
    with pytest.raises(
        hf.errors.FormatVersionError, match=rf"runs/x: .* has version {version!r}, .* up to {VERSION}; install"
    ):
        from_tree({"state_dict": {}, "tree_version": version}, "runs/x")


def test_a_run_of_a_newer_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    directory = new_directory()
    with monkeypatch.context() as newer:
        newer.setattr("holdfast.integrations.lightning.trees.VERSION", VERSION + 1)
        program.run(directory, max_steps=3)
    for read in (lambda: program.run(directory, max_steps=3), lambda: load_checkpoint(directory)):
        with pytest.raises(hf.errors.FormatVersionError, match=f"has version {VERSION + 1}"):
            read()
