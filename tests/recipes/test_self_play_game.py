"""Self-play without checkpoints: the game, what is seen of it, and what is learnt."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.recipes.self_play import Choice, Observation, Trainer, deal, outcomes_of


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


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
