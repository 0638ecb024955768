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
    given = {text.partition("=")[0] for text in arguments}
    run(load_configuration(recipe, [*(text for text in SHORT if text.partition("=")[0] not in given), *arguments]))


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


@pytest.mark.usefixtures("fits_are_processes")
@pytest.mark.parametrize("way", ["resume", "init_from"])
@pytest.mark.parametrize(
    ("recipe", "kept", "new"),
    [
        pytest.param("flax_digits", "params/Dense_0/kernel", "params/Dense_2/kernel", marks=pytest.mark.sweep),
        ("lightning_digits", "state_dict/layers.0.weight", "state_dict/layers.8.weight"),
    ],
)
def test_a_model_with_another_layer_takes_what_fits(
    recipe: str, kept: str, new: str, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    train(recipe, "run_dir=first")
    caplog.clear()
    changed = ["model.hidden=[8,6]", "checkpoint.partial=initialize", "optimizer.learning_rate=1e-30", "train.steps=3"]
    place = ["run_dir=second", "checkpoint.init_from=first"]
    if way == "resume":
        place = ["run_dir=first", "checkpoint.allow_changes=[model,optimizer]"]

    train(recipe, *changed, *place)

    (warning,) = [line for line in caplog.messages if "partial='initialize'" in line]
    assert new.rpartition("/")[2] in warning
    run_dir = place[0].partition("=")[2]
    steps = ("first/checkpoints/2", f"{run_dir}/checkpoints/3")
    first, second = (hf.load(step, item="state", select=kept) for step in steps)
    for key in kept.split("/"):
        first, second = first[key], second[key]
    np.testing.assert_allclose(first, second, atol=0.01)  # of one update; as they are made, they are up to 0.1
    assert hf.load(f"{run_dir}/checkpoints/3", item="state", select=new)


def test_a_path_without_checkpoint_is_seen_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(hf.CheckpointNotFoundError, match=r"^checkpoint\.init_from: .*nowhere: there is nothing"):
        train("flax_digits", "run_dir=run", "checkpoint.init_from=nowhere")

    assert list(tmp_path.iterdir()) == []
