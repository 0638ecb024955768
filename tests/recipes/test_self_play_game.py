"""Self-play without checkpoints: the game, what is seen of it, and what is learnt."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.recipes.self_play import ActionPipeline, Rules, Trainer
from holdfast.recipes.self_play.connectors import RunningNormalizer, Turn
from holdfast.recipes.self_play.game import Games


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_both_policies_learn() -> None:
    learning = Trainer(Rules(), [64, 64], games=64, learning_rate=5e-3)
    before = learning.evaluate()
    for _ in range(50):
        learning.train_step()
    after = learning.evaluate()

    assert before == Trainer(Rules(), [64, 64]).evaluate()
    assert 0.4 < before["win_rate"] < 0.6
    assert after["win_rate_p0"] > 0.62
    assert after["win_rate_p1"] > 0.62


@pytest.mark.parametrize(
    ("moves", "winner"),
    [
        ([0, 1, 0, 1, 0], 1),
        ([0, 4, 1, 4, 2], 1),
        ([0, 1, 1, 2, 2, 4, 2], 1),
        ([4, 3, 3, 2, 2, 0, 2], 1),
        ([0, 1, 0, 1, 4, 1], -1),
    ],
    ids=["upright", "lying", "rising", "falling", "the other"],
)
def test_lines_win(moves: list[int], winner: int) -> None:
    games = Games(Rules(), 2)
    for move in moves:
        assert not games.over[0]
        games.play(np.array([0]), np.array([move]))
        games.next_ply()

    assert games.winner.tolist() == [winner, 0]
    assert games.over.tolist() == [True, False]


def test_a_full_board_is_a_draw_and_a_full_column_is_closed() -> None:
    games = Games(Rules(rows=2, columns=2, connect=2), 1)
    one = np.array([0])
    games.play(one, np.array([0]))
    games.boards[0, 2] = -1
    assert games.legal(one).tolist() == [[False, True]]
    with pytest.raises(ValueError, match="a column that is full"):
        games.play(one, np.array([0]))

    drawn = Games(Rules(rows=1, columns=2, connect=2), 1)
    for column in (0, 1):
        drawn.play(one, np.array([column]))
        drawn.next_ply()
    assert (drawn.over[0], drawn.winner[0]) == (True, 0)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.integers(0, 2**32 - 1))
def test_the_normalizer_knows_mean_and_deviation(sizes: list[int], seed: int) -> None:
    generator = np.random.default_rng(seed)
    batches = [generator.normal(3, 5, (size, 4)).astype(np.float32) for size in sizes]
    normalizer = RunningNormalizer(4)
    for batch in batches:
        turn = Turn(np.zeros((len(batch), 1), np.int8), np.ones((len(batch), 1), np.bool_), features=batch)
        normalizer(turn, training=True)

    everything = np.concatenate(batches).astype(np.float64)
    assert normalizer.count == len(everything)
    if len(everything):
        np.testing.assert_allclose(normalizer.mean, everything.mean(0), atol=1e-9)
        np.testing.assert_allclose(normalizer.squares / len(everything), everything.var(0), atol=1e-9)


def test_full_columns_are_never_played() -> None:
    action = ActionPipeline(seed=3, explore=0.5)
    legal = np.tile([[True, False, True]], (200, 1))
    for training in (True, False):
        turn = Turn(np.zeros((200, 3), np.int8), legal, logits=np.tile(np.array([0, 9, 1], np.float32), (200, 1)))
        action(turn, training=training)
        assert set(turn.actions) == ({0, 2} if training else {2})


def test_an_update_without_turns_changes_nothing() -> None:
    trainer = Trainer(Rules(), [4], games=2, explore=0.999)
    before = [parameter.clone() for parameter in trainer.learner.policies["p0"].parameters()]

    metrics = trainer.train_step()

    assert metrics == {"loss": 0.0}
    assert all(map(torch.equal, before, trainer.learner.policies["p0"].parameters()))
    assert math.isfinite(trainer.evaluate(games=2)["win_rate"])
