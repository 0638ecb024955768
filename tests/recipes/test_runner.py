from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.recipes.programs import preempt_at, values_of

import holdfast as hf
from holdfast.recipes.configuration import load_configuration
from holdfast.recipes.registry import RECIPES, MissingExtraError, Outcome, Recipe
from holdfast.recipes.runner import run

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
def test_a_finished_run_has_nothing_to_do(caplog: pytest.LogCaptureFixture) -> None:
    caplog.clear()

    assert train("flax_digits", "train.steps=2") == Outcome(start=2, step=2, preempted=False)
    assert caplog.messages == [
        "flax_digits: 2 steps of flax_digits in runs/flax_digits",
        "nothing to do: step 2 is saved in runs/flax_digits/checkpoints; raise train.steps to train on",
    ]


@pytest.mark.usefixtures("trained")
def test_raising_the_steps_trains_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.clear()

    assert train("flax_digits", "train.steps=3") == Outcome(start=2, step=3, preempted=False)
    assert "changed since the last time: train.steps: 2 (checkpoints), 3 (now)" in caplog.messages
    assert any(message.startswith("resumed from step 2 in ") for message in caplog.messages)
    assert any(message.startswith("saved step 3 (at the end): ") for message in caplog.messages)


@pytest.mark.usefixtures("trained")
def test_another_model_does_not_resume() -> None:
    with pytest.raises(hf.errors.OptionError) as caught:
        train("flax_digits", "seed=7", "model.hidden=[9]", "train.steps=3")

    assert str(caught.value).splitlines() == [
        "runs/flax_digits/checkpoints belongs to a run with another configuration than configs/flax_digits.yaml:",
        "  seed: 0 (checkpoints), 7 (now)",
        "  model.hidden: [8] (checkpoints), [9] (now)",
        "begin another run with name=... or run_dir=..., or continue with the new values: "
        "checkpoint.allow_changes=[seed,model.hidden]",
    ]
    assert "steps: 2\n" in Path("runs/flax_digits/config.yaml").read_text(encoding="utf-8")


@pytest.mark.usefixtures("trained")
def test_changes_that_are_allowed_are_named_and_remembered(caplog: pytest.LogCaptureFixture) -> None:
    change = "optimizer.learning_rate=0.5"

    assert train("flax_digits", change, "train.steps=3", "checkpoint.allow_changes=[optimizer]").step == 3
    assert "changed since the last time: optimizer.learning_rate: 0.003 (checkpoints), 0.5 (now)" in caplog.messages
    assert train("flax_digits", change, "train.steps=4") == Outcome(start=3, step=4, preempted=False)
    with pytest.raises(hf.errors.OptionError, match=r"learning_rate: 0.5 \(checkpoints\), 0.003 \(now\)"):
        train("flax_digits", "train.steps=5")


@pytest.mark.usefixtures("trained")
def test_never_resume_refuses_to_mix_runs() -> None:
    with pytest.raises(hf.CheckpointExistsError, match="newest of step 2"):
        train("flax_digits", "checkpoint.resume=never")


def test_must_resume_refuses_to_start_over() -> None:
    with pytest.raises(hf.CheckpointNotFoundError, match="there is no checkpoint in"):
        train("flax_digits", "checkpoint.resume=must")


@pytest.mark.usefixtures("trained")
def test_the_configuration_lies_with_the_checkpoints() -> None:
    written = load_configuration("runs/flax_digits/config.yaml")
    with hf.CheckpointManager("runs/flax_digits/checkpoints") as manager:
        metadata = manager.metadata()
        metrics = manager.metrics(2)

    assert metadata == {"recipe": "flax_digits", "config": written.resolved()}
    assert metrics is not None
    assert sorted(metrics) == ["loss", "val_accuracy", "val_loss"]
    assert steps_in("runs/flax_digits") == [2]


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


def test_a_package_that_is_too_old_names_the_command_that_updates_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("flax.nnx.List", raising=False)
    monkeypatch.delitem(sys.modules, "holdfast.recipes.flax_text", raising=False)

    with pytest.raises(MissingExtraError, match=r"flax_text needs flax 0\.12 or newer: pip install 'flax>=0\.12'"):
        RECIPES["flax_text"].program()


def test_a_missing_package_names_the_command_that_installs_it() -> None:
    recipe = Recipe("x", "", RECIPES["flax_text"].schema, "flax", ("numpy", "no_such_package"))

    with pytest.raises(MissingExtraError, match=r"needs no_such_package: pip install .*\[recipes,flax\]'"):
        recipe.program()
