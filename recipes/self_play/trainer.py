"""The trainer: owns everything that self-play consists of."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ...integrations.components import Checkpointable
from .connectors import ActionPipeline, ObservationPipeline, feature_count
from .game import Games, Rules
from .learner import Learner
from .policy import Policy
from .runner import Runner, play_games, take_turn

NAMES = ("p0", "p1")


class Trainer(Checkpointable):
    """Two policies that play against each other, and learn from it.

    Its components, which are also the directories of its checkpoints::

        learner                        the optimizers
            policies
                p0, p1                 the networks
        runner                         how many games were played
            observation                from boards to the input of the networks
                encode, normalize      normalize has the running mean and deviation
            action                     from the output of the networks to moves
                mask, choose           choose has the random generator

    Args:
        rules: The rules of the game.
        hidden: Units of every hidden layer of the networks.
        learning_rate: Adam's learning rate.
        entropy: Weight of the entropy of the moves.
        games: Games that are played for an update.
        explore: The share of the turns that are played at random.
        seed: Decides the first weights and everything that is drawn.

    Attributes:
        step: Updates done.
    """

    __untracked__ = ("seed",)

    def __init__(
        self,
        rules: Rules,
        hidden: Sequence[int] = (64, 64),
        *,
        learning_rate: float = 3e-3,
        entropy: float = 0.02,
        games: int = 128,
        explore: float = 0.15,
        seed: int = 0,
    ) -> None:
        self.learner = Learner(
            NAMES,
            feature_count(rules),
            rules.columns,
            hidden,
            learning_rate=learning_rate,
            entropy=entropy,
            seed=seed,
        )
        self.runner = Runner(rules, games=games, explore=explore, seed=seed)
        self.step = 0
        self.seed = seed

    def train_step(self) -> dict[str, float]:
        """Play one batch of games, and do one update of each policy.

        Returns:
            The loss.
        """
        loss = self.learner.update(self.runner.sample(self.learner.policies))
        self.step += 1
        return {"loss": loss}

    def evaluate(self, games: int = 200) -> dict[str, float]:
        """Let the policies play against a player who chooses at random.

        The games depend on the policies, the seed and the step alone, so that a resumed run finds the same.

        Args:
            games: How many games each policy plays; it begins half of them.

        Returns:
            Their shares of won games, where a game without winner counts as half won, and the mean of these.
        """
        found = {}
        for number, name in enumerate(NAMES):
            policy, seed = self.learner.policies[name], [self.seed, self.step, number]
            found[f"win_rate_{name}"] = win_rate(policy, self.runner.observation, self.runner.rules, games, seed)
        return {"win_rate": sum(found.values()) / len(found), **found}


def win_rate(
    policy: Policy, observation: ObservationPipeline, rules: Rules, games: int, seed: Sequence[int] | int
) -> float:
    """Return the share of games that a policy wins against a random player; no winner counts as half won.

    Args:
        policy: The policy; its moves are drawn with their probabilities.
        observation: Turns boards into the input of the policy; it is not changed.
        rules: The rules of the game.
        games: How many games; the policy begins half of them.
        seed: The seed of the random generator.
    """
    generator = np.random.default_rng(seed)
    action = ActionPipeline(int(generator.integers(2**32)))

    def policy_plays(playing: Games, active: NDArray[np.intp]) -> NDArray[np.int64]:
        boards, legal = playing.seen(active), playing.legal(active)
        return take_turn(policy, observation, action, boards, legal, draw=True).actions

    def random_plays(playing: Games, active: NDArray[np.intp]) -> NDArray[np.int64]:
        legal = playing.legal(active)
        columns: NDArray[np.int64] = np.argmax(np.where(legal, generator.random(legal.shape), -1), axis=1)
        return columns

    first, second = np.array_split(play_games(rules, games, policy_plays, random_plays).winner, 2)
    return float((np.concatenate([first, -second]) + 1).mean()) / 2
