"""Self-play without checkpoints: the game, what is seen of it, and what is learnt."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.recipes.self_play import Choice, Observation, Rules, Trainer, best_columns


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
    ("moves", "outcome"),
    [
        ([0, 1, 0, 1, 0], 1),
        ([0, 4, 1, 4, 2], 1),
        ([0, 1, 1, 2, 2, 4, 2], 1),
        ([4, 3, 3, 2, 2, 0, 2], 1),
        ([0, 1, 0, 1, 4, 1], -1),
    ],
    ids=["upright", "lying", "rising", "falling", "the other"],
)
def test_lines_win(moves: list[int], outcome: int) -> None:
    left = list(moves)

    def next_move(boards: Any, games: Any) -> Any:
        return np.array([left.pop(0) for _ in games], np.int64)

    assert Rules().play(1, [next_move, next_move]).tolist() == [outcome]
    assert left == []


def test_a_full_board_is_a_draw_and_a_full_column_is_closed() -> None:
    rules = Rules(rows=2, columns=2, connect=2)
    boards = np.array([[[1, 0], [-1, 0]]], np.int8)
    assert rules.legal(boards).tolist() == [[False, True]]

    def leftmost(boards: Any, games: Any) -> Any:
        return np.zeros(len(games), np.int64)

    with pytest.raises(ValueError, match="a column that is full"):
        Rules(rows=1, columns=3).play(1, [leftmost, leftmost])
    flat = Rules(rows=1, columns=2, connect=2)
    assert flat.play(2, [lambda boards, games: flat.legal(boards).argmax(axis=1)] * 2).tolist() == [0, 0]


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.integers(0, 2**32 - 1))
def test_the_observation_knows_mean_and_deviation(sizes: list[int], seed: int) -> None:
    generator = np.random.default_rng(seed)
    batches = [generator.integers(-1, 2, (size, 4, 5)).astype(np.int8) for size in sizes]
    observation = Observation(Rules())
    for batch in batches:
        observation(batch, training=True)

    boards = np.concatenate(batches).reshape(sum(sizes), 20)
    features = np.concatenate([boards == 1, boards == -1], axis=1).astype(np.float64)
    assert observation.count == len(features)
    if len(features):
        np.testing.assert_allclose(observation.mean, features.mean(0), atol=1e-9)
        np.testing.assert_allclose(observation.squares / len(features), features.var(0), atol=1e-9)


def test_full_columns_are_never_played() -> None:
    legal = np.tile([[True, False, True]], (200, 1))
    logits = np.tile(np.array([0, 9, 1], np.float32), (200, 1))
    columns, random = Choice(seed=3, explore=0.5)(logits, legal)
    assert set(columns) == {0, 2}
    assert set(random) == {True, False}
    assert set(best_columns(logits, legal)) == {2}


def test_an_update_without_turns_changes_nothing() -> None:
    trainer = Trainer(Rules(), [4], games=2, explore=0.999)
    before = [parameter.clone() for parameter in trainer.learner.policies["p0"].parameters()]

    metrics = trainer.train_step()

    assert metrics == {"loss": 0.0}
    assert all(map(torch.equal, before, trainer.learner.policies["p0"].parameters()))
    assert math.isfinite(trainer.evaluate(games=2)["win_rate"])
