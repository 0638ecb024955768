"""The rules of resume= for recipes, and what only the callback of a trainer does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.recipes.configuration import load_configuration
from holdfast.recipes.runner import run
from holdfast.recipes.self_play import Trainer


def test_a_recipe_begins_from_a_step(tmp_path: Path) -> None:
    def train(**checkpoint: Any) -> Any:
        keys = {"save_interval_steps": 1, "best_fn": "loss", "best_mode": "max", "max_to_keep": "null", **checkpoint}
        small = ["model.hidden=[4]", "game.batch_size=4", "train.steps=4", f"run_dir={tmp_path}"]
        return run(load_configuration("self_play", [*small, *(f"checkpoint.{key}={keys[key]}" for key in keys)]))

    assert train().step == 4
    manager = hf.CheckpointManager(
        tmp_path / "checkpoints", options=hf.CheckpointManagerOptions(read_only=True, best_fn="loss", best_mode="max")
    )
    best = manager.best_step()
    assert best is not None
    assert [train(resume=resume).start for resume in (2, "best", "auto")] == [2, best, 4]
    with pytest.raises(hf.CheckpointNotFoundError, match=r"checkpoint\.resume=9, but .* has no such step.*1, 2, 3, 4"):
        train(resume=9)
    with pytest.raises(hf.errors.OptionError, match=r"checkpoint\.resume: resume='best' needs best_fn="):
        train(resume="best", best_fn="null")


def test_a_trainer_that_has_gone_on_is_not_saved_under_an_older_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer(5, [6], games=6)
    with hf.CheckpointCallback(tmp_path, save_interval_steps=1) as checkpoint:
        for _ in range(2):
            trainer.train_step()
            checkpoint.on_step(trainer.step, trainer)
    with hf.CheckpointCallback(tmp_path, save_interval_steps=100) as checkpoint:
        assert checkpoint.restore_or_initialize(trainer) == (trainer, 2)
        trainer.train_step()
        checkpoint.on_step(3, trainer)
        trainer.train_step()
    assert hf.CheckpointManager(tmp_path).all_steps() == [1, 2]
    assert "step 3 is not saved at the end: its tensors were changed since; call on_step" in caplog.text
