"""The recipe self_play: what is learnt, and the three uses of its checkpoints."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
import torch
from tests.cli.commands import said_by
from tests.documents.examples import Examples
from tests.recipes.programs import preempt_at, values_of

import holdfast as hf
from holdfast.cli.main import main
from holdfast.recipes.configuration import load_configuration
from holdfast.recipes.problems import ConfigError
from holdfast.recipes.registry import Outcome
from holdfast.recipes.runner import run
from holdfast.recipes.self_play import Policy, Trainer

SMALL = {
    "model.hidden": "[6]",
    "game.batch_size": "6",
    "train.steps": "4",
    "train.eval_interval_steps": "2",
    "checkpoint.save_interval_steps": "100",
    "checkpoint.max_to_keep": "null",
    "logging.interval_steps": "1",
}
SHORT = ["model.hidden=[64,64]", "train.steps=2"]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def arguments(*given: str) -> list[str]:
    values = {**SMALL, **dict(argument.split("=") for argument in given)}
    return [f"{key}={value}" for key, value in values.items()]


def train(*given: str) -> Outcome:
    return run(load_configuration("self_play", arguments(*given)))


def saved(run_dir: str, step: int) -> str:
    return f"{run_dir}/checkpoints/{step}/state"


def trainer(seed: int = 0) -> Trainer:
    return Trainer(5, [6], games=6, seed=seed)


# ---- what is learnt, and continued


def test_both_policies_learn() -> None:
    learning = Trainer(5, [64, 64], games=64, learning_rate=5e-3)
    before = learning.evaluate()
    for _ in range(50):
        learning.train_step()
    after = learning.evaluate()

    assert before == Trainer(5, [64, 64]).evaluate()
    assert 0.4 < before["win_rate"] < 0.6
    assert after["win_rate_p0"] > 0.7
    assert after["win_rate_p1"] > 0.7


def test_the_command_ends_with_75_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    preempt_at(monkeypatch, 2)

    def lines(status: int) -> list[str]:
        """Runs the command, and returns what it prints, without the time of each line."""
        said, _ = said_by(capsys, "run", "self_play", *arguments(), status=status)
        return [line.split(" ", 1)[1] for line in said.splitlines()]

    first, second, *others, last = lines(75)
    assert first == "self_play: 4 steps of self_play in runs/self_play"
    assert second.startswith("started fresh: ")
    (save,) = (line for line in others if line.startswith("saved step 2 "))
    assert re.fullmatch(r"saved step 2 \(preempted\): [\d.]+ kB, blocked [\d.]+ s, [\d.]+ s in all, [\d.]+ .B/s", save)
    assert last.endswith("resumes from step 2 of 4 in runs/self_play/checkpoints")
    again = lines(0)
    assert f"resumed from step 2 in {tmp_path}/runs/self_play/checkpoints" in again
    assert again[-1].endswith("step 4 of 4 is saved in runs/self_play/checkpoints")
    assert main(["run", "self_play", *arguments("checkpoint.resume=never")]) == 2
    assert main(["run", "self_play", *arguments("name=other", "checkpoint.resume=must")]) == 2
    errors = capsys.readouterr().err
    assert (
        "checkpoint.resume=never, but runs/self_play/checkpoints holds 2 checkpoint(s), the newest of step 4" in errors
    )
    assert "checkpoint.resume=must, but there is no checkpoint in runs/other/checkpoints" in errors


def test_the_given_learning_rate_counts_and_not_the_one_that_was_saved() -> None:
    train("train.steps=1")
    with pytest.raises(hf.errors.OptionError, match=r"learning_rate: 0.003 \(checkpoints\), 0.5 \(now\)"):
        train("optimizer.learning_rate=0.5")

    allowed = "checkpoint.allow_changes=[optimizer]"
    assert train("train.steps=2", "optimizer.learning_rate=1e-30", allowed) == Outcome(start=1, step=2, preempted=False)
    first, second = (hf.load(saved("runs/self_play", step))["learner/policies/p0"] for step in (1, 2))
    assert values_of(first) == values_of(second), "nothing is learnt at this rate"


# ---- swap one policy


def test_the_recipe_swaps_and_resumes_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    train("run_dir=other", "seed=3", "train.steps=1")
    swap = ["swap.at_step=2", f"swap.path={saved('other', 1)}/learner/policies/p0"]
    assert train("run_dir=plain").step == 4
    assert train("run_dir=whole", *swap).step == 4
    preempt_at(monkeypatch, 1, 2, 3)
    for start in range(3):
        assert train("run_dir=cut", *swap) == Outcome(start=start, step=start + 1, preempted=True)

    assert train("run_dir=cut", *swap) == Outcome(start=3, step=4, preempted=False)
    plain, whole, cut = (values_of(hf.load(saved(name, 4))) for name in ("plain", "whole", "cut"))
    assert whole == cut
    assert whole != plain
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_swap_that_will_fail_fails_at_once() -> None:
    with pytest.raises(ConfigError, match=r"swap\.at_step: expected a path as well"):
        load_configuration("self_play", ["swap.at_step=3"])
    with pytest.raises(hf.CheckpointNotFoundError, match="nowhere"):
        train("swap.at_step=3", "swap.path=nowhere")
    trainer().save_to_path("other")
    with pytest.raises(hf.TreeMismatchError, match=r"body/0/weight: expected float32\[7, 5\]"):
        train("swap.at_step=3", "swap.path=other/learner/policies/p0", "model.hidden=[7]")
    assert not list(Path("runs/self_play/checkpoints").glob("[0-9]*"))


def test_a_run_begins_with_the_policies_of_another(caplog: pytest.LogCaptureFixture) -> None:
    train("run_dir=other", "seed=3", "train.steps=1")

    train("run_dir=new", "train.steps=1", "optimizer.learning_rate=1e-30", "checkpoint.init_from=other")

    for policy in ("p0", "p1"):
        new, other = (hf.load(f"{saved(name, 1)}/learner/policies/{policy}") for name in ("new", "other"))
        assert values_of(new) == values_of(other)
    assert any(message.startswith("took the weights from ") for message in caplog.messages)


def test_both_policies_may_begin_with_the_weights_of_one(caplog: pytest.LogCaptureFixture) -> None:
    weights = Policy(5, [6], seed=9).state_dict()
    torch.save({"state_dict": weights}, "policy.pt")

    train("train.steps=1", "optimizer.learning_rate=1e-30", "checkpoint.init_from=policy.pt")

    for name in ("p0", "p1"):
        policy = Policy.from_checkpoint(f"{saved('runs/self_play', 1)}/learner/policies/{name}")
        for key, value in policy.state_dict().items():
            torch.testing.assert_close(value, weights[key])
    assert any("policy.pt (torch; 6 arrays" in message for message in caplog.messages)


# ---- the page


@pytest.mark.examples("docs/self_play.md")
def test_the_page_is_true(examples: Examples, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs all of it in its order, with less training: 2 updates for 200."""
    order = ["console 1", "console 2", "python 1", "python 2", "console 3", "python 3", "console 4"]
    for name in order:
        block = examples[name].replace("/200/", "/2/").replace("at_step=100", "at_step=1")
        if name.startswith("python"):
            exec(compile(block, examples.page, "exec"), {})
            continue
        for line in block.splitlines():
            command = line.removeprefix("$ holdfast ").split()
            assert main(command + (arguments(*SHORT) if command[0] == "run" else [])) == 0

    printed = capsys.readouterr().out
    assert "policies/p0/body/0/weight/exp_avg" in printed
    assert re.search(r"plays the card [1-9]0\.0$", printed, re.MULTILINE)
    assert Path("more/201/checkpoint.json").exists()
    assert Path("runs/third/checkpoints/2").is_dir()
