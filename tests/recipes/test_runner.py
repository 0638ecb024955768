"""What runs a recipe: which runs go on, what is the same run, what is reported, and where weights come from."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from tests.recipes.programs import preempt_at, values_of

import holdfast as hf
from holdfast.engine.arrays import ArrayDatabase, TreeReader
from holdfast.recipes.configuration import load_configuration
from holdfast.recipes.registry import RECIPES, MissingExtraError, Outcome, Progress, Recipe
from holdfast.recipes.runner import blocks_resume, differences, run

SMALL = {
    "flax_digits": {"model.hidden": "[8]", "data.batch_size": "300"},
    "lightning_digits": {"model.hidden": "[8]", "data.batch_size": "300"},
    "flax_text": {"model": "{width: 8, layers: 1, heads: 2}", "data": "{batch_size: 2, context: 8}"},
}
SHORT = {
    "train.steps": "6",
    "train.eval_interval_steps": "2",
    "optimizer.warmup_steps": "1",
    "optimizer.decay_steps": "6",
    "checkpoint.save_interval_steps": "4",
    "checkpoint.best_fn": "val_loss",
    "checkpoint.best_mode": "min",
    "logging.interval_steps": "1",
}


def train(recipe: str, *arguments: str) -> Outcome:
    values = {**SMALL[recipe], **SHORT, **dict(argument.split("=") for argument in arguments)}
    return run(load_configuration(recipe, [f"{key}={value}" for key, value in values.items()]))


def steps_in(run_dir: str) -> list[int]:
    with hf.CheckpointManager(f"{run_dir}/checkpoints", options=hf.CheckpointManagerOptions(read_only=True)) as manager:
        return manager.all_steps()


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("recipe", "stops"),
    [
        ("flax_digits", [3, 4]),
        pytest.param("flax_text", [3], marks=pytest.mark.needs("flax", "0.12")),
        ("lightning_digits", [3, 4, 5]),
    ],
)
def test_preemptions_change_no_bit(recipe: str, stops: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    assert train(recipe, "run_dir=whole") == Outcome(start=0, step=6, preempted=False)
    preempt_at(monkeypatch, *stops)
    start = 0
    for stop in stops:
        arguments = ["run_dir=cut", "checkpoint.witness_steps_after_signal=0"]
        assert train(recipe, *arguments) == Outcome(start=start, step=stop, preempted=True)
        assert steps_in("cut")[-1] == stop
        start = stop

    assert train(recipe, "run_dir=cut") == Outcome(start=start, step=6, preempted=False)
    cut, whole = (values_of(hf.load(f"{name}/checkpoints/6")) for name in ("cut", "whole"))
    for found in (cut, whole):  # Lightning's loops note when they got their loaders; that is no part of the training
        found.pop("/holdfast/reloaded_at_epoch", None)
    assert cut == whole
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trains a run of two steps, once for all tests."""
    elsewhere = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(elsewhere)
        train("flax_digits", "train.steps=2")
    return elsewhere / "runs" / "flax_digits"


@pytest.fixture
def trained(two_steps: Path, tmp_path: Path) -> None:
    """Lays that run where the recipe looks for it."""
    shutil.copytree(two_steps, tmp_path / "runs" / "flax_digits")


@pytest.mark.usefixtures("trained")
def test_what_lies_with_a_finished_run_and_that_it_has_nothing_to_do(caplog: pytest.LogCaptureFixture) -> None:
    caplog.clear()
    assert train("flax_digits", "train.steps=2") == Outcome(start=2, step=2, preempted=False)
    assert caplog.messages == [
        "flax_digits: 2 steps of flax_digits in runs/flax_digits",
        "nothing to do: step 2 is saved in runs/flax_digits/checkpoints; raise train.steps to continue",
    ]
    written = load_configuration("runs/flax_digits/config.yaml")
    with hf.CheckpointManager("runs/flax_digits/checkpoints") as manager:
        metadata, metrics = manager.metadata(), manager.metrics(2)
    assert metadata == {"recipe": "flax_digits", "config": written.resolved()}
    assert metrics is not None
    assert sorted(metrics) == ["loss", "val_accuracy", "val_loss"]
    assert steps_in("runs/flax_digits") == [2]


@pytest.mark.usefixtures("trained")
def test_changes_of_a_run_that_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """Its steps may be raised; what else is allowed to change is named and remembered."""
    with pytest.raises(hf.errors.OptionError) as caught:
        train("flax_digits", "seed=7", "model.hidden=[9]", "train.steps=3")
    assert str(caught.value).splitlines() == [
        "runs/flax_digits/checkpoints belongs to a run whose configuration differs from configs/flax_digits.yaml:",
        "  seed: 0 (checkpoints), 7 (now)",
        "  model.hidden: [8] (checkpoints), [9] (now)",
        "start a new run with name=... or run_dir=..., or continue with the new values: "
        "checkpoint.allow_changes=[seed,model.hidden]",
    ]
    assert "steps: 2\n" in Path("runs/flax_digits/config.yaml").read_text(encoding="utf-8")

    assert train("flax_digits", "train.steps=3") == Outcome(start=2, step=3, preempted=False)
    assert "changed since the last time: train.steps: 2 (checkpoints), 3 (now)" in caplog.messages
    assert any(message.startswith("resumed from step 2 in ") for message in caplog.messages)
    assert any(message.startswith("saved step 3 (at the end): ") for message in caplog.messages)

    change = "optimizer.learning_rate=0.5"
    assert train("flax_digits", change, "train.steps=4", "checkpoint.allow_changes=[optimizer]").step == 4
    assert "changed since the last time: optimizer.learning_rate: 0.003 (checkpoints), 0.5 (now)" in caplog.messages
    assert train("flax_digits", change, "train.steps=5") == Outcome(start=4, step=5, preempted=False)
    with pytest.raises(hf.errors.OptionError, match=r"learning_rate: 0.5 \(checkpoints\), 0.003 \(now\)"):
        train("flax_digits", "train.steps=6")


@pytest.mark.usefixtures("trained")
def test_a_run_whose_stored_configuration_is_damaged_resumes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stored = tmp_path / "runs" / "flax_digits" / "checkpoints" / "metadata" / "data.json"
    stored.write_bytes(stored.read_bytes().replace(b'"seed":0', b'"seed":9'))

    assert train("flax_digits", "train.steps=3").start == 2
    assert f"the facts about the run are not used: {stored} is damaged" in caplog.text


def test_checkpoints_may_live_elsewhere() -> None:
    outcome = train("flax_digits", "checkpoint.directory=memory://elsewhere/recipe")

    assert outcome.step == 6
    assert hf.load("memory://elsewhere/recipe/6", item="state")["step"] == 6
    assert [path.name for path in Path("runs/flax_digits").iterdir()] == ["config.yaml"]


def test_a_preemption_before_the_first_step(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    program = Recipe.program

    def preempted(self: Recipe) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return program(self)

    monkeypatch.setattr(Recipe, "program", preempted)

    assert train("flax_digits") == Outcome(start=0, step=0, preempted=True)
    assert caplog.messages[-1] == "preempted before the first step: nothing to save; run the same command again"


def test_packages_that_are_missing_or_too_old_name_the_command_that_installs_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr("flax.nnx.List", raising=False)
    monkeypatch.delitem(sys.modules, "holdfast.recipes.flax_text", raising=False)
    recipe = Recipe("x", RECIPES["flax_text"].schema, "flax", ("numpy", "no_such_package"))
    for wanted, said in (
        (RECIPES["flax_text"], r"flax_text needs flax 0\.12 or newer: pip install 'flax>=0\.12'"),
        (recipe, r"needs no_such_package: pip install .*\[recipes,flax\]'"),
    ):
        with pytest.raises(MissingExtraError, match=said):
            wanted.program()


# ---- what makes a run what it is


@pytest.mark.parametrize(
    ("arguments", "expected", "blocks"),
    [
        ("seed=1", {"seed": "0 (checkpoints), 1 (now)"}, True),
        ("model.hidden=[64]", {"model.hidden": "[128, 128] (checkpoints), [64] (now)"}, True),
        ("model.dropout=0", {"model.dropout": "0.1 (checkpoints), 0.0 (now)"}, True),
        ("data.batch_size=32", {"data.batch_size": "64 (checkpoints), 32 (now)"}, True),
        ("optimizer.learning_rate=1e-2", {"optimizer.learning_rate": "0.003 (checkpoints), 0.01 (now)"}, True),
        ("train.steps=9", {"train.steps": "2000 (checkpoints), 9 (now)"}, False),
        ("checkpoint.best_fn=", {"checkpoint.best_fn": "val_accuracy (checkpoints), null (now)"}, False),
        ("checkpoint.save_at_end=false", {"checkpoint.save_at_end": "true (checkpoints), false (now)"}, False),
        ("logging.level=debug", {"logging.level": "info (checkpoints), debug (now)"}, False),
        ("name=other", {"name": "flax_digits (checkpoints), other (now)"}, False),
        ("optimizer.learning_rate=0.003", {}, False),
        ("model.hidden=[128,128]", {}, False),
    ],
)
def test_what_makes_a_run_what_it_is(arguments: str, expected: dict[str, str], blocks: bool) -> None:
    stored = load_configuration("flax_digits").resolved()
    now = load_configuration("flax_digits", [arguments])
    found = differences(stored, now.resolved())
    assert found == expected
    assert any(blocks_resume(key, now.config.IDENTITY, []) for key in found) == blocks


def test_which_changes_are_allowed() -> None:
    """By key, or by section."""
    assert differences({"model": {"old": 1}}, {"model": {"new": None}}) == {
        "model.new": "nothing (checkpoints), null (now)",
        "model.old": "1 (checkpoints), nothing (now)",
    }
    for allowed, blocks in (
        ([], True),
        (["optimizer.learning_rate"], False),
        (["optimizer"], False),
        (["optimizer.weight_decay", "model"], True),
        (["optimizer.learning"], True),
    ):
        assert blocks_resume("optimizer.learning_rate", ["optimizer"], allowed) is blocks
        assert not blocks_resume("train.steps", ["optimizer"], allowed)


# ---- what is reported


@pytest.mark.parametrize(
    ("start", "steps", "expected"),
    [
        (0, range(1, 11), [4, 8, 10]),
        (5, range(6, 11), [8, 10]),
        (0, [3, 6, 7, 9], [6, 9]),
        (0, range(1, 4), []),
    ],
    ids=["from the start", "resumed", "jumps", "stopped early"],
)
def test_lines_at_the_interval_and_at_the_end(
    caplog: pytest.LogCaptureFixture, start: int, steps: range, expected: list[int]
) -> None:
    progress = Progress(start, 10, 4)
    for step in steps:
        progress.update(step, {"loss": 1.0})

    assert [text.partition(":")[0] for text in caplog.messages] == [f"step {step} of 10" for step in expected]


def test_metrics_are_fetched_only_when_they_are_shown(caplog: pytest.LogCaptureFixture) -> None:
    loss = MagicMock()  # a number on a device
    loss.__float__.return_value = 0.25
    progress = Progress(0, 10, 5)
    for step in range(1, 11):
        progress.update(step, {"loss": loss})

    assert loss.__float__.call_count == 2
    assert "step 5 of 10: loss 0.2500 (" in caplog.text
    assert caplog.text.count("steps/s)") == 2


# ---- checkpoint.init_from


def leaf_of(step: str, path: str) -> Any:
    found = hf.load(step, item="state", select=path)
    for key in path.split("/"):
        found = found[key]
    return found


@pytest.mark.parametrize(
    ("recipe", "weight"),
    [("flax_digits", "params/Dense_0/kernel"), ("lightning_digits", "state_dict/layers.0.weight")],
)
def test_a_run_begins_with_the_weights_of_another(recipe: str, weight: str, caplog: pytest.LogCaptureFixture) -> None:
    train(recipe, "run_dir=first", "train.steps=2")
    caplog.clear()

    begun = ["train.steps=2", "seed=3", "checkpoint.init_from=first", "optimizer.learning_rate=1e-30"]
    train(recipe, "run_dir=second", *begun)

    (said,) = [line for line in caplog.messages if line.startswith("took the weights from ")]
    assert "first/checkpoints/2" in said
    first, second = (leaf_of(f"{name}/checkpoints/2", weight) for name in ("first", "second"))
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
    train(recipe, "run_dir=first", "train.steps=2")
    caplog.clear()
    changed = ["model.hidden=[8,6]", "checkpoint.partial=initialize", "optimizer.learning_rate=1e-30", "train.steps=3"]
    place = ["run_dir=second", "checkpoint.init_from=first"]
    if way == "resume":
        place = ["run_dir=first", "checkpoint.allow_changes=[model,optimizer]"]

    train(recipe, *changed, *place)

    (warning,) = [line for line in caplog.messages if "partial='initialize'" in line]
    assert new.rpartition("/")[2] in warning
    run_dir = place[0].partition("=")[2]
    first, second = leaf_of("first/checkpoints/2", kept), leaf_of(f"{run_dir}/checkpoints/3", kept)
    np.testing.assert_allclose(first, second, atol=0.01)  # of one update; as they are made, they are up to 0.1
    assert hf.load(f"{run_dir}/checkpoints/3", item="state", select=new)


def test_a_path_without_checkpoint_is_seen_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(hf.CheckpointNotFoundError, match=r"^checkpoint\.init_from: .*nowhere: there is nothing"):
        train("flax_digits", "run_dir=run", "checkpoint.init_from=nowhere")

    assert list(tmp_path.iterdir()) == []


# ---- checkpoint.compression


@pytest.mark.parametrize(
    ("recipe", "level"),
    [
        ("flax_digits", None),
        ("flax_digits", 3),
        ("lightning_digits", 3),
        pytest.param("lightning_digits", None, marks=pytest.mark.sweep),
    ],
)
def test_arrays_are_compressed_when_asked(recipe: str, level: int | None) -> None:
    asked = [] if level is None else [f"checkpoint.compression={level}"]
    train(recipe, "run_dir=run", "train.steps=2", *asked)
    state = hf.storage.as_location("run/checkpoints/2/state")
    arrays = ArrayDatabase(state).metadata([leaf.name for leaf in TreeReader(state).leaves])
    assert {found.compression for found in arrays if found is not None} == {level}
    assert hf.verify("run/checkpoints").ok
    train(recipe, "run_dir=run", "train.steps=3")  # continues from there
    assert hf.load("run/checkpoints", item="state")
