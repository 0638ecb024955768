"""The runner: lets policies play, and collects experience from their games."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ...integrations.components import Checkpointable
from .connectors import ActionPipeline, Floats, ObservationPipeline, Turn
from .game import Boards, Games, Rules
from .policy import Policy

Player = Callable[[Games, NDArray[np.intp]], NDArray[np.int64]]
"""Chooses columns to play, int64[k], in the games with these numbers, intp[k]."""


@dataclass(frozen=True)
class Experience:
    """The turns of one policy.

    Attributes:
        features: float32[n, features], its input.
        legal: bool[n, columns], the columns with room.
        actions: int64[n], its moves.
        outcomes: float32[n], how the game ended for it: 1 won, -1 lost, 0 neither.
    """

    features: Floats
    legal: NDArray[np.bool_]
    actions: NDArray[np.int64]
    outcomes: Floats


class Runner(Checkpointable):
    """Plays games between two policies and owns the connectors, with the statistics of their input.

    Args:
        rules: The rules of the game.
        games: Games that are played at once; each policy begins half of them.
        explore: The share of the turns that are played at random.
        seed: The seed of the random generators.

    Attributes:
        played: Games finished, in all.
    """

    __untracked__ = ("rules", "games", "explore", "seed")

    def __init__(self, rules: Rules, games: int, explore: float, seed: int) -> None:
        self.rules = rules
        self.games = games
        self.seed = seed
        self.played = 0
        self.observation = ObservationPipeline(rules)
        self.action = ActionPipeline(seed, explore)

    def sample(self, policies: Mapping[str, Policy]) -> dict[str, Experience]:
        """Play one batch of games to their end.

        Args:
            policies: Two policies by name.

        Returns:
            What each of them can learn from, by its name.
        """
        turns: dict[str, list[tuple[NDArray[np.intp], int, Turn]]] = {name: [] for name in policies}

        def player(name: str) -> Player:
            def play(games: Games, active: NDArray[np.intp]) -> NDArray[np.int64]:
                boards, legal = games.seen(active), games.legal(active)
                turn = take_turn(policies[name], self.observation, self.action, boards, legal, training=True, draw=True)
                turns[name].append((active, games.sign, turn))
                return turn.actions

            return play

        first, second = policies
        games = play_games(self.rules, self.games, player(first), player(second))
        self.played += self.games
        return {name: _experience(mine, games.winner) for name, mine in turns.items()}


def take_turn(
    policy: Policy,
    observation: ObservationPipeline,
    action: ActionPipeline,
    boards: Boards,
    legal: NDArray[np.bool_],
    *,
    training: bool = False,
    draw: bool = False,
) -> Turn:
    """Let a policy choose columns.

    Args:
        policy: The policy.
        observation: Turns boards into features.
        action: Turns logits into columns.
        boards: int8[n, cells] as the policy sees them: 1 is its own stone.
        legal: bool[n, columns], the columns with room.
        training: Whether to update the statistics of the input.
        draw: Whether to draw columns with their probabilities, rather than to take the most probable ones.

    Returns:
        The turn, with the columns to play.
    """
    turn = Turn(boards, legal)
    observation(turn, training=training)
    with torch.no_grad():
        logits, _ = policy(torch.from_numpy(turn.features))
    turn.logits = logits.numpy()
    action(turn, training=draw)
    return turn


def play_games(rules: Rules, count: int, first: Player, second: Player) -> Games:
    """Play games to their end.

    Args:
        rules: The rules.
        count: How many games; `first` begins the first half of them, `second` the others.
        first: One player.
        second: The other.

    Returns:
        The finished games.
    """
    games = Games(rules, count)
    halves = np.array_split(np.arange(count), 2)
    while not games.over.all():
        for player, half in ((first, halves[games.ply % 2]), (second, halves[1 - games.ply % 2])):
            active = games.active(half)
            if len(active):
                games.play(active, player(games, active))
        games.next_ply()
    return games


def _experience(turns: list[tuple[NDArray[np.intp], int, Turn]], winner: NDArray[np.int8]) -> Experience:
    """Put turns together, without those that were played at random: they say little about the policy."""
    chosen = ~np.concatenate([turn.random for _, _, turn in turns])
    return Experience(
        np.concatenate([turn.features for _, _, turn in turns])[chosen],
        np.concatenate([turn.legal for _, _, turn in turns])[chosen],
        np.concatenate([turn.actions for _, _, turn in turns])[chosen],
        np.concatenate([winner[games] * sign for games, sign, _ in turns])[chosen].astype(np.float32),
    )
