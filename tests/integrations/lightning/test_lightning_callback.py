"""What the callback promises beside exact resumption."""

from __future__ import annotations

import copy
import json
import logging
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch
import numpy as np
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.tuner.tuning import Tuner
from tests.equality import assert_same
from tests.integrations.lightning import program
from tests.integrations.lightning.program import BY_LOSS, new_directory
from tests.logs import unconfigure
from tests.sweep.lightning_programs import FEATURES

import holdfast as hf
from holdfast.integrations.lightning import CheckpointCallback, load_checkpoint

# ---- what is on disk


def test_a_checkpoint_is_what_lightning_has_and_reads_without_torch(tmp_path: Path) -> None:
    outcome = program.run(str(tmp_path), checkpoint={"save_interval_steps": 5}, max_epochs=1, facts={"width": 3})
    weights = outcome.model.state_dict()
    leaves = {leaf.path: leaf for leaf in hf.describe(tmp_path, 5)}
    assert list(leaves)[: len(weights)] == [f"state_dict/{name}" for name in weights]
    for index, (name, value) in enumerate(outcome.model.named_parameters()):
        assert leaves[f"state_dict/{name}"].shape == tuple(value.shape)
        assert leaves[f"optimizer_states/0/state/{index}/exp_avg"].shape == tuple(value.shape)
    assert hf.verify(tmp_path).ok

    checkpoint = load_checkpoint(tmp_path)
    assert checkpoint["global_step"] == 5
    assert checkpoint["hyper_parameters"] == {"schedule": "epoch", "width": 3}
    assert_same(checkpoint["state_dict"], weights)
    assert checkpoint["state_dict"]._metadata == weights._metadata

    code = (
        "import sys, holdfast as hf\n"
        f"tree = hf.load({str(tmp_path)!r})\n"
        "assert not {'torch', 'lightning', 'jax'} & set(sys.modules)\n"
        "print(tree['state_dict']['head.weight'].tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == outcome.model.head.weight.tolist()


def test_nothing_is_pickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("pickled")

    for module, names in {pickle: ("dump", "load", "loads"), torch: ("save", "load")}.items():
        for name in names:
            monkeypatch.setattr(module, name, forbidden)
    program.run(str(tmp_path), checkpoint={"save_interval_steps": 3}, max_steps=7)
    assert program.run(str(tmp_path), checkpoint={"save_interval_steps": 3}).recorder.first_step == 7
    for file in (path for path in tmp_path.rglob("*") if path.is_file()):
        assert not file.read_bytes().startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"))


@pytest.mark.filterwarnings("ignore:Attribute 'loss' is an instance of `nn.Module`")
def test_objects_are_left_out_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    class Opinionated(lightning.pytorch.Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"count": 3, "object": object()}

    directory = new_directory()
    facts = {"loss": torch.nn.MSELoss(), "layers": [torch.nn.ReLU(), 2], "size": np.int64(3), "rate": 0.5}
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        program.run(directory, facts=facts, callbacks=(Opinionated(),))
    [warning] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "hyper_parameters/loss (torch.nn.modules.loss.MSELoss)" in warning
    assert "hyper_parameters/layers (torch.nn.modules.activation.ReLU)" in warning
    assert "Opinionated/object (object)" in warning
    saved = load_checkpoint(directory)
    assert saved["hyper_parameters"] == {"schedule": "epoch", "size": 3, "rate": 0.5}
    assert list(saved["callbacks"].values()) == [{"count": 3}]


def test_what_a_resume_needs_is_never_left_out() -> None:
    class Secretive(torch.nn.Module):
        def get_extra_state(self) -> object:
            return object()

    class Adds(lightning.pytorch.Callback):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            pl_module.secret = Secretive()

    with pytest.raises(hf.errors.UnsupportedLeafError, match=r"state_dict/secret\._extra_state \(object\)"):
        program.run(new_directory(), callbacks=(Adds(),))


# ---- which checkpoint a run begins with


def test_a_path_that_is_named_wins(caplog: pytest.LogCaptureFixture) -> None:
    directory = new_directory()
    first = program.run(directory)
    again = program.run(directory, seed=2, ckpt_path=f"{directory}/7")
    assert again.recorder.first_step == 7
    assert again.final == first.final
    [told] = [text for text in caplog.messages if "later steps" in text]
    assert "this run went back to step 7, and later steps are there" in told
    # Later steps are replaced.
    rarely = {"save_interval_steps": 2}
    other = program.run(directory, ckpt_path=f"{directory}/3", schedule="step", checkpoint=rarely)
    reasons = {entry.step: entry.reason for entry in hf.list_checkpoints(directory)}
    assert (reasons[3], reasons[6], reasons[7]) == (
        "every step",
        "every 2 steps",
        "replaces the step of an earlier run",
    )
    assert_same(load_checkpoint(directory, 15)["state_dict"], other.model.state_dict())
    assert other.final["model"] != first.final["model"]
    # It may be of another run.
    assert program.run(new_directory(), seed=2, ckpt_path=f"{directory}/9").recorder.first_step == 9
    assert program.run(new_directory(), ckpt_path=directory, max_epochs=4).recorder.first_step == 15


def test_callback_of_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    def fit(directory: str, **options: Any) -> Any:
        callback = CheckpointCallback(directory, save_interval_steps=1)
        monkeypatch.setattr(program.Model, "configure_callbacks", lambda _: callback)
        torch.manual_seed(0)
        model = program.Model()
        program.trainer(enable_checkpointing=False, **options).fit(model, *program.loaders())
        return model.head.weight.tolist()

    directory = new_directory()
    fit(directory, max_steps=7)
    assert fit(directory, max_epochs=2) == fit(new_directory(), max_epochs=2)


def test_checkpoints_are_never_started_over(monkeypatch: pytest.MonkeyPatch) -> None:
    directory = new_directory()
    program.run(directory, max_epochs=1)
    monkeypatch.setattr(CheckpointCallback, "ckpt_path", None)  # as if a trainer did not ask any more
    with pytest.raises(hf.errors.StateError, match="up to step 5, but the trainer did not load one"):
        program.run(directory)


# ---- when it saves, what it keeps, what it measures


def test_metrics_belong_to_the_step_they_were_measured_at() -> None:
    outcome = program.run(new_directory(), checkpoint={**BY_LOSS, "save_interval_steps": 2})
    manager, measured = outcome.manager, outcome.measured
    assert manager.all_steps() == [2, 4, 5, 6, 8, 10, 12, 14, 15]
    for step in manager.all_steps():
        metrics = manager.metrics(step)
        assert metrics.get("val_loss") == measured.get(step)
        assert "train_loss_step" in metrics
        assert ("train_loss_epoch" in metrics) == (step in (5, 10, 15))
    assert manager.best_step() == outcome.best


@pytest.mark.parametrize("stop_after", [None, 9, 11])
def test_interval_saves_and_a_metric_of_validations(stop_after: int | None) -> None:
    """An interval that never ends at a validation: the next validation is saved, and three steps stay at any time."""
    directory, kept = new_directory(), []
    checkpoint = {**BY_LOSS, "save_interval_steps": 3, "max_to_keep": 3, "save_at_end": False}

    class Watcher(lightning.pytorch.Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            trainer.checkpoint_callback.manager.wait_until_finished()
            kept.append((trainer.global_step, len(trainer.checkpoint_callback.manager.all_steps())))

    options = {"checkpoint": checkpoint, "callbacks": (Watcher(),), "max_epochs": 4}
    if stop_after is not None:
        program.interrupt(directory, stop_after, **options)
    outcome = program.run(directory, **options)
    manager = outcome.manager
    ranked = [step for step in manager.all_steps() if "val_loss" in manager.metrics(step)]
    assert ranked == manager.all_steps()  # the best three, and the newest
    assert len(ranked) >= 3
    assert {20} < {*ranked} <= {5, 10, 15, 20}
    assert all(count >= 3 for step, count in kept if step > 6)


def test_metrics_that_come_after_the_save() -> None:
    # The third batch only begins a new accumulation, so the validation after it measures step 1.
    outcome = program.run(new_directory(), accumulate_grad_batches=2, val_check_interval=3, max_epochs=1)
    [event] = [event for event in outcome.recorder.events if event[0] == "validation"]
    assert event[1] == 1
    assert outcome.manager.all_steps() == [1, 2, 3], "steps are those of the optimizer"
    assert outcome.manager.metrics(1)["val_loss"] == event[2]
    # Training ends within an epoch: its last step is saved before the epoch's means are known.
    outcome = program.run(new_directory(), max_steps=7)
    assert outcome.manager.metrics(7)["train_loss_epoch"] == outcome.recorder.events[-1][2]


@pytest.mark.parametrize("kind", ["best", "last"])
def test_the_best_and_the_last_step_are_evaluated(kind: str) -> None:
    directory = new_directory()
    options: dict[str, Any] = {**BY_LOSS, "save_interval_steps": None, "every_n_epochs": 1, "max_to_keep": 2}
    outcome = program.run(directory, checkpoint=options, max_epochs=4)
    callback, measured, best = outcome.trainer.checkpoint_callback, outcome.measured, outcome.best
    assert callback.manager.best_step() == best
    assert callback.best_model_path == f"{directory}/{best}"
    assert float(callback.best_model_score) == pytest.approx(measured[best])
    two = {f"{directory}/{step}": measured[step] for step in sorted(measured, key=measured.__getitem__)[:2]}
    assert {path: float(score) for path, score in callback.best_k_models.items()} == pytest.approx(two)
    assert (callback.monitor, callback.mode, callback.save_top_k) == ("val_loss", "min", 2)

    expected = pytest.approx(measured[best if kind == "best" else 20])
    torch.nn.init.zeros_(outcome.model.head.weight)
    alone = program.trainer(CheckpointCallback(directory, **options))  # in a process that has not trained
    for trainer, model in ((outcome.trainer, outcome.model), (alone, program.Model())):
        for function, metric in (("validate", "val_loss"), ("test", "test_loss")):
            [result] = getattr(trainer, function)(model, program.validation_loader(), ckpt_path=kind, verbose=False)
            assert result[metric] == expected


def test_function_of_the_metrics() -> None:
    def score(metrics: Any) -> float:
        return float(metrics["val_loss"] + metrics["train_loss_epoch"])

    options = {"best_fn": score, "best_mode": "min", "max_to_keep": 2, "save_interval_steps": 5}
    outcome = program.run(new_directory(), checkpoint=options)
    manager = outcome.manager
    assert manager.best_step() == min(manager.all_steps(), key=lambda step: score(manager.metrics(step)))
    assert outcome.trainer.checkpoint_callback.monitor is None


def test_fast_dev_run_neither_resumes_nor_saves_and_evaluation_does_not_save() -> None:
    directory = new_directory()
    callback = CheckpointCallback(directory, save_interval_steps=1)
    program.trainer(callback).validate(program.Model(), program.validation_loader(), verbose=False)
    assert (callback.manager.all_steps(), callback.best_model_path) == ([], "")
    program.run(directory, max_epochs=1)
    dev = program.run(directory, fast_dev_run=True)
    assert dev.recorder.first_step == 0
    assert dev.manager.all_steps() == [1, 2, 3, 4, 5]


# ---- evaluation, tuner, loggers, packages


def test_a_program_saves_and_removes_steps_by_its_trainer(tmp_path: Path) -> None:
    directory = new_directory()
    trainer = program.run(directory, max_epochs=1, checkpoint={"save_interval_steps": 2, "save_at_end": False}).trainer
    trainer.save_checkpoint(f"{directory}/5")
    saved = {entry.step: entry.reason for entry in hf.list_checkpoints(directory)}
    assert saved == {2: "every 2 steps", 4: "every 2 steps", 5: "trainer.save_checkpoint"}
    assert load_checkpoint(directory)["global_step"] == 5
    trainer.strategy.remove_checkpoint(f"{directory}/4")
    assert trainer.checkpoint_callback.manager.all_steps() == [2, 5]
    trainer.save_checkpoint(tmp_path / "own.ckpt")
    trainer.strategy.remove_checkpoint(tmp_path / "own.ckpt")
    assert not (tmp_path / "own.ckpt").exists()


def test_tuner_keeps_its_own_files(tmp_path: Path) -> None:
    class Tunable(program.Model):
        lr = 0.05

    class Inner(TorchCheckpointIO):
        saved: ClassVar[list[str]] = []

        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            self.saved.append(os.path.basename(path))
            super().save_checkpoint(checkpoint, path, storage_options)

    # The tuner's files lie in the very directory of the checkpoints.
    callback = CheckpointCallback(tmp_path, save_interval_steps=5)
    trainer = program.trainer(callback, plugins=[Inner()], default_root_dir=tmp_path, max_epochs=1)
    model, loaders = Tunable(), program.loaders()
    Tuner(trainer).lr_find(model, *loaders, num_training=4, update_attr=False)
    assert len(Inner.saved) == 1
    assert Inner.saved[0].startswith(".lr_find")
    assert callback.manager.all_steps() == []
    trainer.fit(model, *loaders)
    assert callback.manager.all_steps() == [5]


class Quiet(Logger):
    name = version = "quiet"

    def log_metrics(self, metrics: Any, step: int | None = None) -> None: ...
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...


def test_loggers_are_told_after_the_commit(tmp_path: Path) -> None:
    told: list[str] = []

    class Listening(Quiet):
        def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
            assert Path(checkpoint_callback.last_model_path, "checkpoint.json").exists()
            assert checkpoint_callback.current_score is not None
            told.append(checkpoint_callback.last_model_path)

    program.run(str(tmp_path), checkpoint=BY_LOSS, max_epochs=2, logger=Listening(), log_every_n_steps=1)
    assert told[-1] == str(tmp_path / "10")


def test_loggers_get_the_numbers_of_events(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """On the trainer's thread; a logger that fails is named once, and stops nothing."""
    logged: list[tuple[int | None, list[str]]] = []

    class Noting(Quiet):
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            if found := [name.removeprefix("checkpoint/") for name in metrics if name.startswith("checkpoint/")]:
                assert threading.current_thread() is threading.main_thread()
                assert all(type(value) in (int, float) for value in metrics.values())
                logged.append((step, found))

    class Failing(Noting):
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            if any(name.startswith("checkpoint/") for name in metrics):
                raise ConnectionError("no answer")

    def run(epochs: int, logger: Any) -> None:
        options = {"save_interval_steps": 5}
        program.run(str(tmp_path), checkpoint=options, max_epochs=epochs, log_every_n_steps=1, logger=logger)

    saved = ["bytes", "shared_bytes", "blocked_seconds", "total_seconds"]
    for epochs, logger in enumerate((Noting(), Failing(), Noting()), start=1):
        run(epochs, logger)
    assert logged == [(5, saved), (10, ["restore_seconds", "skipped"]), (15, saved)]
    (said,) = [record.message for record in caplog.records if "the trainer's loggers failed" in record.message]
    assert said.endswith("ConnectionError: no answer")


def test_the_other_package() -> None:
    class Tiny(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(FEATURES, 1)

        def training_step(self, batch: Any, index: int) -> Any:
            return torch.nn.functional.mse_loss(self.head(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters())

    def fit(directory: str, **options: Any) -> list[Any]:
        torch.manual_seed(0)
        callback, model = CheckpointCallback(directory, save_interval_steps=2), Tiny()
        trainer = program.trainer(callback, package=pytorch_lightning, **options)
        assert trainer.checkpoint_callbacks == [callback]
        trainer.fit(model, program.training_loader("shuffled"))
        return [model.head.weight.tolist(), callback.manager.all_steps()]

    directory = new_directory()
    fit(directory, max_steps=6)
    assert fit(directory, max_epochs=2) == fit(new_directory(), max_epochs=2)


# ---- what it says


def test_one_line_says_where_a_run_is(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    unconfigure(monkeypatch)
    directory, at_once = new_directory(), {"witness_steps_after_signal": 0}
    for options in ({"max_steps": 3}, {}, {}):
        program.run(directory, **options)
    with pytest.raises(SystemExit):
        program.run(directory, max_epochs=4, recorder=program.Recorder(signal_after=17), checkpoint=at_once)
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("holdfast: ")]
    assert said == [
        f"holdfast: started fresh: no checkpoint in {directory}",
        f"holdfast: resumed from step 3 in {directory}",
        "holdfast: not witnessed: step 3 was restored as it was saved, and no step was recorded after it",
        f"holdfast: resumed from step 15 in {directory}",
        f"holdfast: nothing left to do after step 15 in {directory}",
        f"holdfast: resumed from step 15 in {directory}",
        "holdfast: not witnessed: step 15 was restored as it was saved, and no step was recorded after it",
        f"holdfast: preempted: stopping after step 18 in {directory}",
    ]


# ---- a callback beyond its fit


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_fitted_callback_can_be_copied(duplicate: Callable[[Any], Any]) -> None:
    class Duplicates(lightning.pytorch.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            made.append(duplicate(trainer.checkpoint_callback))

    made: list[Any] = []
    directory = new_directory()
    callback = program.run(directory, max_steps=3, callbacks=(Duplicates(),)).trainer.checkpoint_callback
    for one in (*made, duplicate(callback)):
        assert one.manager.all_steps() == [1, 2, 3]
        assert one.last_model_path == callback.last_model_path
        assert not one.preempted
    program.trainer(made[0], max_steps=5).fit(program.Model(), *program.loaders())
    assert made[0].manager.all_steps() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("end", [{"max_epochs": 2}, {"max_steps": 7}])
def test_a_finished_run_is_started_again(caplog: pytest.LogCaptureFixture, end: dict[str, int]) -> None:
    directory = new_directory()
    first = program.run(directory, **end)
    with caplog.at_level(logging.INFO, logger="holdfast"):
        again = program.run(directory, seed=2, **end)
    assert again.recorder.first_step is None
    assert {**again.final, "epoch": None} == {**first.final, "epoch": None}
    assert again.trainer.callback_metrics == first.trainer.callback_metrics
    step = first.trainer.global_step
    assert f"nothing left to do after step {step} in {directory}" in caplog.messages
