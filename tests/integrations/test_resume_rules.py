"""The rules of resume= for recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.recipes.configuration import load_configuration
from holdfast.recipes.runner import run


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
