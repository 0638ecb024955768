"""Options of the callback, and what it keeps beside the steps."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import pytest
import safetensors.torch
import torch
from tests.integrations.lightning import program
from tests.integrations.lightning.program import BY_LOSS, new_directory

import holdfast as hf
from holdfast.integrations.lightning import CheckpointCallback, load_checkpoint
from holdfast.integrations.lightning.loader_states import replicated_states

# ---- options that managers and the callback of any loop have as well


class Model(program.Model):
    """Logs nothing, and may halve its learning rate at each step."""

    def __init__(self, lr: float, is_halved: bool) -> None:
        super().__init__()
        self.lr, self.is_halved = lr, is_halved

    def training_step(self, batch: Any, index: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), self.lr, momentum=0.5)
        if not self.is_halved:
            return optimizer
        halved = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        return [optimizer], [{"scheduler": halved, "interval": "step"}]


def fit(directory: Any, lr: float, is_halved: bool, steps: int, **options: Any) -> float:
    """Trains up to a step; returns the learning rate of its end."""
    callback = CheckpointCallback(directory, save_interval_steps=1, **options)
    trainer = program.trainer(callback, max_steps=steps)
    trainer.fit(Model(lr, is_halved), *program.loaders())
    return float(trainer.optimizers[0].param_groups[0]["lr"])


@pytest.mark.parametrize(
    ("options", "schedule", "rate"),
    [
        ({}, False, 0.1),
        ({"hyperparameters": "saved"}, True, 0.1 / 16),
        ({"hyperparameters": "program"}, False, 0.4),
        ({"hyperparameters": "program"}, True, 0.4 / 16),  # what the schedule has done counts in any case
    ],
)
def test_another_learning_rate(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict[str, Any], schedule: bool, rate: float
) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    for steps in (2, 3):
        assert fit(tmp_path, 0.1, schedule, steps) == pytest.approx(0.1 / (2**steps if schedule else 1))
    assert "hyperparameters differ" not in caplog.text
    assert fit(tmp_path, 0.4, schedule, 4, **options) == pytest.approx(rate)
    [said] = [one.getMessage() for one in caplog.records if "hyperparameters differ" in one.getMessage()]
    chosen = options.get("hyperparameters", "saved")
    assert f"those {'of the program' if chosen == 'program' else 'that were saved'} count" in said
    assert f"hyperparameters={chosen!r}" in said
    assert re.search(r"optimizer_0\.param_groups\[0\]\S* \(program 0\.4, saved 0\.1\)", said)


def test_what_managers_take(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "step_prefix": "line",
        "metadata": {"team": "tides"},
        "barrier_timeout_secs": "7m",
        "save_timeout_secs": 90,
        "keep_checkpoints_without_metrics": True,
        "best_fn": "loss",
        "best_mode": "min",
        "max_to_keep": 1,
        "export_best": "best.safetensors",
    }
    fit(tmp_path, 0.1, False, 2, **options)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_symlink()) == ["last"]
    assert (tmp_path / "last").resolve() == tmp_path / "line_2"
    callback = CheckpointCallback(tmp_path, **options)
    assert callback.manager.all_steps() == [1, 2]
    assert callback.manager.options.barrier_timeout_secs == "7m"
    assert callback.manager.options.save_timeout_secs == 90
    assert dict(callback.manager.metadata() or {}) == {"team": "tides"}
    assert callback.last_model_path == str(tmp_path / "line_2")
    assert load_checkpoint(tmp_path)["global_step"] == load_checkpoint(tmp_path, 2)["global_step"] == 2
    assert load_checkpoint(tmp_path, 1)["global_step"] == 1
    fit(tmp_path, 0.1, False, 3, **options)
    assert callback.manager.all_steps() == [1, 2, 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"item_intervals": {"state": 2}}, "item_intervals=.*has the item state and"),
        ({"step_prefix": "a/b"}, "step_prefix='a/b' cannot be part"),
        ({"replicated": ["data"]}, "replicated names 'data', but a Lightning trainer has 'loaders'"),
        ({"export_best": "best.ckpt"}, "export_best= needs best_fn"),
        ({"export_best": "best.pt", "best_fn": "loss", "best_mode": "min"}, "must end in .safetensors or .ckpt"),
        ({"every_n_epochs": 0}, "must be a whole number of at least 1"),
    ],
)
def test_options_that_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(hf.errors.OptionError, match=message):
        CheckpointCallback(tmp_path, **options)


def test_state_of_all_processes_is_declared_in_yaml(tmp_path: Path) -> None:
    """As in the configuration of a LightningCLI, which parses it with the same library."""
    jsonargparse = pytest.importorskip("jsonargparse")
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(CheckpointCallback, "callback")
    given = f"callback: {{dirpath: {tmp_path}, replicated: [loaders/0, global_generators]}}"
    callback = parser.instantiate_classes(parser.parse_string(given)).callback
    assert list(callback._options.replicated) == ["loaders/0", "global_generators"]


@pytest.mark.parametrize(("name", "known"), [("loaders/1", 1), ("loaders", 0)])
def test_a_declaration_of_a_loader_without_a_state_is_refused(tmp_path: Path, name: str, known: int) -> None:
    loaders = [hf.skip_to([1.0], 0, global_batch_size=1)] * known + [program.training_loader("plain")]
    with pytest.raises(hf.errors.OptionError, match=f"replicated names '{name}', but the trainer has {known} training"):
        replicated_states(loaders, [name])


# ---- saves by epochs, links, and a file with the best weights


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
    class Looks(lightning.Callback):
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            if file.exists():
                seen.append(hf.load(file) if name.endswith(".ckpt") else safetensors.torch.load_file(file))

    seen: list[Any] = []
    name = name.format(elsewhere=tmp_path / "elsewhere")
    file = tmp_path / "run" / name
    options = {**BY_LOSS, "export_best": name, "max_to_keep": 1}
    outcome = program.run(str(tmp_path / "run"), checkpoint=options, max_epochs=4, callbacks=(Looks(),))
    best = load_checkpoint(tmp_path / "run", outcome.best)["state_dict"]
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


def test_best_weights_that_cannot_be_written_stop_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "taken").write_text("a file")
    options = {**BY_LOSS, "export_best": tmp_path / "taken" / "best.ckpt"}
    assert program.run(new_directory(), checkpoint=options, max_epochs=1).trainer.global_step == 5
    assert f"step 5 is the best, but {tmp_path}/taken/best.ckpt could not be written: " in caplog.text


def test_links_follow_the_steps(tmp_path: Path) -> None:
    outcome = program.run(str(tmp_path), checkpoint=BY_LOSS, max_epochs=4)
    assert os.readlink(tmp_path / "last") == "20"
    assert os.readlink(tmp_path / "best") == str(outcome.best)
    for name, step in (("last", 20), ("best", outcome.best)):
        assert load_checkpoint(tmp_path / name)["global_step"] == step
    assert hf.verify(tmp_path).ok
    assert [one.step for one in hf.list_checkpoints(tmp_path)] == [5, 10, 15, 20]
    (tmp_path / "last").unlink()
    (tmp_path / "last").symlink_to("15")  # as a process leaves it that is killed after the commit
    again = program.run(str(tmp_path), checkpoint=BY_LOSS, ckpt_path=str(tmp_path / "best"), max_epochs=5)
    assert again.recorder.first_step == outcome.best or outcome.best == 20
    assert os.readlink(tmp_path / "last") == "25"


def test_what_is_no_link_stays(tmp_path: Path) -> None:
    (tmp_path / "best").write_text("of the user")
    program.run(str(tmp_path), checkpoint={**BY_LOSS, "links": True}, max_epochs=1)
    assert (tmp_path / "best").read_text() == "of the user"
    program.run(str(tmp_path / "without"), checkpoint={**BY_LOSS, "links": False}, max_epochs=1)
    assert not (tmp_path / "without" / "last").is_symlink()
