"""Saves by epochs, and what is kept beside the steps: links, and a file with the best weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import safetensors.torch
import torch
from tests.integrations.lightning import program
from tests.integrations.lightning.program import new_directory

import holdfast as hf
from holdfast.integrations.lightning import CheckpointCallback, load_checkpoint

BY_LOSS: dict[str, Any] = {"best_fn": "val_loss", "best_mode": "min", "save_interval_steps": 5}


def best_of(outcome: Any) -> int:
    measured = outcome.measured
    best: int = min(measured, key=measured.__getitem__)
    return best


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        pytest.param({"every_n_epochs": 2, "save_at_end": False}, [10, 20], marks=pytest.mark.sweep),
        ({"every_n_epochs": 2}, [10, 20, 25]),
        pytest.param({"every_n_epochs": 1, "save_at_end": False, "max_to_keep": 2}, [20, 25], marks=pytest.mark.sweep),
        ({"every_n_epochs": 3, "save_interval_steps": 7, "save_at_end": False}, [7, 14, 15, 21]),
    ],
)
def test_every_few_epochs(options: dict[str, Any], steps: list[int]) -> None:
    directory = new_directory()
    options = {"save_interval_steps": None, **options}
    program.interrupt(directory, 17, checkpoint=options, max_epochs=5)
    outcome = program.run(directory, checkpoint=options, max_epochs=5)
    assert outcome.manager.all_steps() == steps


@pytest.mark.parametrize("name", ["{elsewhere}/weights/best.safetensors", "best.ckpt"])
def test_the_best_weights_are_exported(tmp_path: Path, name: str) -> None:
    class Looks(lightning.pytorch.Callback):
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            if file.exists():
                seen.append(hf.load(file) if name.endswith(".ckpt") else safetensors.torch.load_file(file))

    seen: list[Any] = []
    name = name.format(elsewhere=tmp_path / "elsewhere")
    file = tmp_path / "run" / name
    options = {**BY_LOSS, "export_best": name, "max_to_keep": 1}
    outcome = program.run(str(tmp_path / "run"), checkpoint=options, max_epochs=4, callbacks=(Looks(),))
    best = load_checkpoint(tmp_path / "run", best_of(outcome))["state_dict"]
    if name.endswith(".ckpt"):
        found = program.Model.load_from_checkpoint(file, weights_only=True).state_dict()
    else:
        found = safetensors.torch.load_file(file)
    assert found.keys() == best.keys()
    assert all(torch.equal(found[key], best[key]) for key in best)
    assert seen  # it was there, and whole, while training continued
    # a process that was killed in between has not written it
    file.unlink()
    program.run(str(tmp_path / "run"), checkpoint=options, max_epochs=4)
    assert file.exists()


def test_links_follow_the_steps(tmp_path: Path) -> None:
    outcome = program.run(str(tmp_path), checkpoint=BY_LOSS, max_epochs=4)
    assert os.readlink(tmp_path / "last") == "20"
    assert os.readlink(tmp_path / "best") == str(best_of(outcome))
    for name, step in (("last", 20), ("best", best_of(outcome))):
        assert load_checkpoint(tmp_path / name)["global_step"] == step
    assert hf.verify(tmp_path).ok
    assert [one.step for one in hf.list_checkpoints(tmp_path)] == [5, 10, 15, 20]
    (tmp_path / "last").unlink()
    (tmp_path / "last").symlink_to("15")  # as a process leaves it that is killed after the commit
    again = program.run(str(tmp_path), checkpoint=BY_LOSS, ckpt_path=str(tmp_path / "best"), max_epochs=5)
    assert again.recorder.first_step == best_of(outcome) or best_of(outcome) == 20
    assert os.readlink(tmp_path / "last") == "25"


def test_what_is_no_link_stays(tmp_path: Path) -> None:
    (tmp_path / "best").write_text("of the user")
    program.run(str(tmp_path), checkpoint={**BY_LOSS, "links": True}, max_epochs=1)
    assert (tmp_path / "best").read_text() == "of the user"
    program.run(str(tmp_path / "without"), checkpoint={**BY_LOSS, "links": False}, max_epochs=1)
    assert not (tmp_path / "without" / "last").is_symlink()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"export_best": "best.ckpt"}, "export_best= needs best_fn"),
        ({"export_best": "best.pt", "best_fn": "loss", "best_mode": "min"}, "must end in .safetensors or .ckpt"),
        ({"every_n_epochs": 0}, "must be a whole number of at least 1"),
    ],
)
def test_invalid_options(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(hf.errors.OptionError, match=message):
        CheckpointCallback(tmp_path, **options)
