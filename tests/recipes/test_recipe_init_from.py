"""checkpoint.init_from of recipes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import holdfast as hf
from holdfast.recipes.configuration import load_configuration
from holdfast.recipes.runner import run

SHORT = [
    *("model.hidden=[8]", "data.batch_size=300", "train.steps=2", "train.eval_interval_steps=2"),
    *("optimizer.warmup_steps=1", "optimizer.decay_steps=6", "checkpoint.best_fn=null"),
]


def train(recipe: str, *arguments: str) -> None:
    run(load_configuration(recipe, [*SHORT, *arguments]))


@pytest.mark.parametrize(
    ("recipe", "weight"),
    [("flax_digits", "params/Dense_0/kernel"), ("lightning_digits", "state_dict/layers.0.weight")],
)
def test_a_run_begins_with_the_weights_of_another(recipe: str, weight: str, caplog: pytest.LogCaptureFixture) -> None:
    train(recipe, "run_dir=first")
    caplog.clear()

    train(recipe, "run_dir=second", "seed=3", "checkpoint.init_from=first", "optimizer.learning_rate=1e-30")

    (said,) = [line for line in caplog.messages if line.startswith("took the weights from ")]
    assert "first/checkpoints/2" in said
    first, second = (hf.load(f"{name}/checkpoints/2", item="state", select=weight) for name in ("first", "second"))
    for key in weight.split("/"):
        first, second = first[key], second[key]
    np.testing.assert_allclose(first, second, rtol=1e-4)


def test_a_path_without_checkpoint_is_seen_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(hf.CheckpointNotFoundError, match=r"^checkpoint\.init_from: .*nowhere: there is nothing"):
        train("flax_digits", "run_dir=run", "checkpoint.init_from=nowhere")

    assert list(tmp_path.iterdir()) == []
