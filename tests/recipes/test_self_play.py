"""The recipe self_play: what is learnt, and the three uses of its checkpoints."""

from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.documents.examples import Examples
from tests.recipes.programs import preempt_at, values_of

import holdfast as hf
from holdfast.cli.main import main
from holdfast.integrations.components.saving import PreparedComponents
from holdfast.recipes.configuration import load_configuration
from holdfast.recipes.problems import ConfigError
from holdfast.recipes.registry import Outcome
from holdfast.recipes.runner import run
from holdfast.recipes.self_play import Choice, Observation, Policy, Trainer, choose, deal, outcomes_of

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


def state_of(component: Any) -> dict[str, Any]:
    return values_of(component.get_state())


def trainer(seed: int = 0, **changes: Any) -> Trainer:
    return Trainer(5, [6], **{"games": 6, "seed": seed, **changes})


# ---- the game, what is seen of it, and what is learnt


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


def test_the_higher_card_wins() -> None:
    hands = np.array([[[3.0, 9.0], [3.0, 9.0]], [[5.0, 1.0], [5.0, 1.0]]])
    moves = np.array([1, 0]), np.array([0, 0])
    assert outcomes_of(hands, moves).tolist() == [1, -1]


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(0, 2**32 - 1))
def test_the_observation_knows_mean_and_deviation(sizes: list[int], seed: int) -> None:
    generator = np.random.default_rng(seed)
    batches = [deal(generator, size, 4)[0] for size in sizes]
    observation = Observation(4)
    for batch in batches:
        observation(batch, training=True)

    hands = np.concatenate(batches)
    assert observation.count == len(hands)
    np.testing.assert_allclose(observation.mean, hands.mean(0), atol=1e-9)
    np.testing.assert_allclose(observation.squares / len(hands), hands.var(0), atol=1e-6)


def test_likely_moves_are_drawn_most_often() -> None:
    moves = Choice(seed=3)(np.tile(np.log([[0.7, 0.3, 1e-9]]).astype(np.float32), (400, 1)))
    assert 240 < (moves == 0).sum() < 320
    assert set(moves) == {0, 1}


# ---- continue training


def test_preemptions_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert train("run_dir=whole") == Outcome(start=0, step=4, preempted=False)
    preempt_at(monkeypatch, 1, 3)
    assert train("run_dir=cut") == Outcome(start=0, step=1, preempted=True)
    assert train("run_dir=cut") == Outcome(start=1, step=3, preempted=True)

    assert train("run_dir=cut") == Outcome(start=3, step=4, preempted=False)
    whole, cut = hf.load(saved("whole", 4)), hf.load(saved("cut", 4))
    assert "learner/policies/p0" in whole
    assert values_of(cut) == values_of(whole)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_the_command_ends_with_75_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    preempt_at(monkeypatch, 2)

    assert main(["run", "self_play", *arguments()]) == 75
    assert main(["run", "self_play", *arguments()]) == 0
    assert "\n" in capsys.readouterr().out.partition("resumed from step 2 in ")[2]
    assert main(["run", "self_play", *arguments("checkpoint.resume=never")]) == 2
    assert main(["run", "self_play", *arguments("name=other", "checkpoint.resume=must")]) == 2
    errors = capsys.readouterr().err
    assert (
        "checkpoint.resume=never, but runs/self_play/checkpoints holds 2 checkpoint(s), the newest of step 4" in errors
    )
    assert "checkpoint.resume=must, but there is no checkpoint in runs/other/checkpoints" in errors


def test_the_state_of_a_trainer_is_all_there_is() -> None:
    first = trainer()
    first.train_step()
    first.save_to_path("one")
    again = Trainer.from_checkpoint("one")
    other = trainer(seed=7)
    parameters = list(other.learner.policies["p0"].parameters())

    report = other.restore_from_path("one", strict=True)

    assert report.complete
    assert all(a is b for a, b in zip(parameters, other.learner.policies["p0"].parameters(), strict=True))
    assert state_of(again) == state_of(other) == state_of(first)
    assert first.train_step() == other.train_step() == again.train_step()
    assert state_of(again) == state_of(other) == state_of(first)
    assert (again.step, again.runner.played) == (2, 12)
    still = Trainer.from_checkpoint("one", learning_rate=1e-30)
    before = [state_of(policy) for policy in still.learner.policies.values()]
    still.train_step()
    after = [state_of(policy) for policy in still.learner.policies.values()]
    assert after == before  # the given rate counts, not the one that was saved


def test_a_checkpoint_holds_what_was_when_it_was_saved() -> None:
    first = trainer()
    first.train_step()
    before = state_of(first)

    with hf.CheckpointCallback("run", save_interval_steps=1, save_at_end=False) as checkpoints:
        checkpoints.on_step(1, first)
        for _ in range(20):  # while it is being written
            first.train_step()
    assert state_of(first) != before
    with hf.CheckpointCallback("run", save_at_end=False) as checkpoints:
        assert checkpoints.restore_or_initialize(first) == (first, 1)
    assert state_of(first) == before
    assert hf.verify("run").ok


def test_the_first_error_is_the_one_that_is_raised(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> Any:
        raise OSError("no space left")

    def stop(self: Trainer, games: int = 0) -> dict[str, float]:
        raise KeyError("in the loop")

    monkeypatch.setattr(PreparedComponents, "write", fail)
    with pytest.raises(hf.SaveFailedError, match="no space left"):
        train("train.eval_interval_steps=100")
    monkeypatch.setattr(Trainer, "evaluate", stop)
    with pytest.raises(KeyError, match="in the loop"):
        train("run_dir=other", "checkpoint.save_interval_steps=1")
    assert "a save failed while the training loop was ending with KeyError" in caplog.messages


def test_the_learning_rate_is_that_of_the_configuration() -> None:
    train("train.steps=1")
    with pytest.raises(hf.errors.OptionError, match=r"learning_rate: 0.003 \(checkpoints\), 0.5 \(now\)"):
        train("optimizer.learning_rate=0.5")

    allowed = "checkpoint.allow_changes=[optimizer]"
    assert train("train.steps=2", "optimizer.learning_rate=1e-30", allowed) == Outcome(start=1, step=2, preempted=False)
    first, second = (hf.load(saved("runs/self_play", step))["learner/policies/p0"] for step in (1, 2))
    assert values_of(first) == values_of(second)  # as nothing has been learnt at this rate


def test_a_damaged_checkpoint_is_seen_and_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    train("checkpoint.save_interval_steps=3")
    (data,) = Path(saved("runs/self_play", 4), "learner/policies/p1/state/d").glob("*.0.0")
    content = bytearray(data.read_bytes())
    content[100] ^= 1
    data.write_bytes(content)

    assert not hf.verify("runs/self_play/checkpoints", 4).ok
    assert train("train.steps=5") == Outcome(start=3, step=5, preempted=False)
    assert any(message.startswith("fell back past damaged steps (4)") for message in caplog.messages)


# ---- deploy one policy


def test_a_policy_plays_alone(tmp_path: Path) -> None:
    first = trainer()
    for _ in range(3):
        first.train_step()
    first.save_to_path("all")
    shutil.move("all/learner/policies/p1", "policy")
    shutil.move("all/runner/observation", "observation")
    shutil.rmtree("all")

    assert hf.verify("policy").ok
    policy, observation = Policy.from_checkpoint("policy"), Observation.from_checkpoint("observation")

    hands = np.random.default_rng(0).uniform(0, 100, (20, 5))
    features, same = observation(hands), first.runner.observation(hands)
    np.testing.assert_array_equal(features, same)
    moves = choose(policy, features)
    assert moves.shape == (20,)
    np.testing.assert_array_equal(moves, choose(first.learner.policies["p1"], same))
    assert not list(tmp_path.glob("**/learner"))


def test_a_policy_is_no_trainer() -> None:
    trainer().save_to_path("all")

    with pytest.raises(hf.errors.OptionError, match="self_play:Policy, which is no"):
        Trainer.from_checkpoint("all/learner/policies/p0")


# ---- swap one policy


def test_a_policy_is_swapped_in_a_running_trainer() -> None:
    running, other = trainer(), trainer(seed=5)
    for _ in range(2):
        running.train_step()
        other.train_step()
    other.save_to_path("other")
    before, wanted = state_of(running), state_of(other.learner.policies["p0"])
    objects = [*running.learner.policies["p1"].parameters()]

    report = running.restore_from_path("other/learner/policies/p0", component="learner/policies/p1", strict=True)

    after = state_of(running)
    changed = {path for path in before if before[path] != after[path]}
    assert report.restored == ("learner/policies/p1",)
    assert state_of(running.learner.policies["p1"]) == wanted
    assert changed
    assert all(path.startswith("/learner/policies/p1/") for path in changed)
    assert all(a is b for a, b in zip(objects, running.learner.policies["p1"].parameters(), strict=True))
    running.train_step()
    assert state_of(running.learner.policies["p1"]) != wanted  # its optimizer still has hold of it


def test_the_recipe_swaps_and_resumes_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    train("run_dir=other", "seed=3", "train.steps=1")
    swap = ["swap.at_step=2", f"swap.path={saved('other', 1)}/learner/policies/p0"]
    assert train("run_dir=plain").step == 4
    assert train("run_dir=whole", *swap).step == 4
    preempt_at(monkeypatch, 2)
    assert train("run_dir=cut", *swap).preempted

    assert train("run_dir=cut", *swap) == Outcome(start=2, step=4, preempted=False)
    plain, whole, cut = (values_of(hf.load(saved(name, 4))) for name in ("plain", "whole", "cut"))
    assert whole == cut
    assert whole != plain


def test_a_swap_that_will_fail_fails_at_once() -> None:
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


def test_a_swap_needs_a_path() -> None:
    with pytest.raises(ConfigError, match=r"swap\.at_step: expected a path as well"):
        load_configuration("self_play", ["swap.at_step=3"])


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
