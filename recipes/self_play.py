"""Two torch policies learn a board game by playing against each other.

The state of training is a tree of components, which is also the tree of directories of its checkpoints::

    (trainer)            the number of updates
    learner              the optimizers
        policies/p0, policies/p1
    runner               how many games were played
        observation      from boards to the input of the networks; has the mean and deviation of every feature
        choice           from the output of the networks to moves; has the random generator

So a checkpoint serves not only to resume: a policy can be taken out of it, or replaced by another one.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..integrations.components import Checkpointable, allow
from ..integrations.loop import CheckpointCallback
from .registry import Outcome, RunContext
from .schema import SelfPlay, SelfPlaySwap

logger = logging.getLogger("holdfast.recipes")

Bools = NDArray[np.bool_]
Floats = NDArray[np.float32]
Numbers = NDArray[np.int64]
Boards = NDArray[np.int8]
"""int8[n, rows, columns], the lowest row first: 1 is a stone of the player who looks, -1 of the other, 0 is none."""
Player = Callable[[Boards, Numbers], Numbers]
"""Chooses a column, int64[k], for each of k boards, which belong to the games with these numbers, int64[k]."""


@allow  # Checkpoints may name this class as a constructor argument.
@dataclass(frozen=True)
class Rules:
    """Stones fall into columns; the first player with `connect` of them in a line, in any of four directions, wins."""

    rows: int = 4
    columns: int = 5
    connect: int = 3

    def legal(self, boards: Boards) -> Bools:
        """Return bool[n, columns]: the columns that are not full."""
        top: Bools = boards[:, -1] == 0
        return top

    def has_line(self, stones: Bools) -> Bools:
        """Return bool[n]: which of the boards, bool[n, rows, columns], have a line of stones."""
        found = np.zeros(len(stones), np.bool_)
        mirrored = stones[:, :, ::-1]
        for up, right, seen in ((0, 1, stones), (1, 0, stones), (1, 1, stones), (1, 1, mirrored)):
            height, width = self.rows - up * (self.connect - 1), self.columns - right * (self.connect - 1)
            if height > 0 and width > 0:
                shifts = range(self.connect)
                places = [seen[:, up * i : up * i + height, right * i : right * i + width] for i in shifts]
                found |= np.logical_and.reduce(places).any(axis=(1, 2))
        return found

    def play(self, count: int, players: Sequence[Player]) -> Floats:
        """Let two players play games to their end; each begins every other game.

        Returns:
            float32[count]: 1 where the first player has won, -1 where the second has, 0 where neither has.

        Raises:
            ValueError: A player has chosen a column that is full.
        """
        boards = np.zeros((count, self.rows, self.columns), np.int8)  # 1 is a stone of the first player
        outcomes, over, turn = np.zeros(count, np.float32), np.zeros(count, np.bool_), np.arange(count) % 2
        while not over.all():
            for number, (sign, player) in enumerate(zip((1, -1), players, strict=True)):
                games = np.flatnonzero(~over & (turn == number))
                mine = boards[games] * np.int8(sign)
                columns = player(mine, games)
                if not np.take_along_axis(self.legal(mine), columns[:, None], axis=1).all():
                    raise ValueError("a stone in a column that is full")
                index = np.arange(len(games))
                mine[index, (mine[index, :, columns] != 0).sum(axis=1), columns] = 1
                boards[games] = mine * sign
                won = self.has_line(mine == 1)
                outcomes[games[won]] = sign
                over[games] = won | ~self.legal(mine).any(axis=1)
            turn = 1 - turn
        return outcomes


class Policy(Checkpointable, nn.Module):
    """A multilayer perceptron with two heads: logits of the columns, and the outcome to expect, from -1 to 1."""

    def __init__(self, features: int, columns: int, hidden: Sequence[int], seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            widths = [features, *hidden]
            layers = [(nn.Linear(*pair), nn.Tanh()) for pair in itertools.pairwise(widths)]
            self.body = nn.Sequential(*(layer for pair in layers for layer in pair))
            self.logits = nn.Linear(widths[-1], columns)
            self.value = nn.Linear(widths[-1], 1)
        with torch.no_grad():  # Small logits make the first games random.
            self.logits.weight.mul_(0.01)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return float32[n, columns] and float32[n] for float32[n, features]."""
        hidden = self.body(features)
        return self.logits(hidden), torch.tanh(self.value(hidden)).squeeze(-1)


class Observation(Checkpointable):
    """Boards as the input of a policy: own stones and the other's, brought to mean 0 and standard deviation 1.

    Batches are taken in with the update of Chan, Golub and LeVeque, *Algorithms for computing the sample variance*
    (1983), which loses no digits when very many have been seen.
    """

    __untracked__ = ("rules",)

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.count = 0
        self.mean = np.zeros(2 * rules.rows * rules.columns)
        self.squares = np.zeros_like(self.mean)  # sums of squared distances from the mean

    def __call__(self, boards: Boards, *, training: bool = False) -> Floats:
        """Return float32[n, features]; in training, the boards count in the mean and the deviation."""
        flat = boards.reshape(len(boards), self.rules.rows * self.rules.columns)
        features = np.concatenate([flat == 1, flat == -1], axis=1).astype(np.float64)
        if training and len(features):
            mean, total = features.mean(axis=0), self.count + len(features)
            step, weight = mean - self.mean, len(features) / total
            self.squares = self.squares + ((features - mean) ** 2).sum(axis=0) + step**2 * self.count * weight
            self.mean, self.count = self.mean + step * weight, total
        deviation = np.sqrt(self.squares / max(1, self.count) + 1e-2)
        normalized: Floats = ((features - self.mean) / deviation).clip(-5, 5).astype(np.float32)
        return normalized


class Choice(Checkpointable):
    """Draws columns with their probabilities; a share of them, `explore`, at random from all with room."""

    __untracked__ = ("seed", "explore")

    def __init__(self, seed: int, explore: float = 0.0) -> None:
        self.seed = seed
        self.explore = explore
        self.generator = np.random.default_rng(seed)

    def __call__(self, logits: Floats, legal: Bools) -> tuple[Numbers, Bools]:
        """Return the columns, int64[n], and which of them are drawn at random, bool[n]."""
        random = self.generator.random(len(logits)) < self.explore
        noise = self.generator.gumbel(size=logits.shape)  # The largest sum is a draw from the softmax (Gumbel trick).
        return best_columns(np.where(random[:, None], 0, logits) + noise, legal), random


class Turns(NamedTuple):
    """Turns of one policy: its input, the columns with room, and the columns that it has chosen."""

    features: Floats
    legal: Bools
    columns: Numbers
    random: Bools


class Experience(NamedTuple):
    """Turns of one policy, and how their games ended for it, float32[n]: 1 won, -1 lost, 0 neither."""

    features: Floats
    legal: Bools
    columns: Numbers
    outcomes: Floats


def best_columns(logits: NDArray[np.floating], legal: Bools) -> Numbers:
    """Return int64[n]: of the columns with room, those with the largest logits."""
    columns: Numbers = np.where(legal, logits, -np.inf).argmax(axis=1)
    return columns


def take_turns(
    policy: Policy, observation: Observation, boards: Boards, choice: Choice | None = None, *, training: bool = False
) -> Turns:
    """Let a policy choose columns, which `choice` draws; without one, it takes the most probable ones."""
    features, legal = observation(boards, training=training), observation.rules.legal(boards)
    with torch.no_grad():
        logits = policy(torch.from_numpy(features))[0].numpy()
    columns, random = choice(logits, legal) if choice else (best_columns(logits, legal), np.zeros(len(legal), np.bool_))
    return Turns(features, legal, columns, random)


class Runner(Checkpointable):
    """Plays games between two policies, `games` at once."""

    __untracked__ = ("games",)

    def __init__(self, rules: Rules, games: int, explore: float, seed: int) -> None:
        self.games = games
        self.played = 0
        self.observation = Observation(rules)
        self.choice = Choice(seed, explore)

    def sample(self, policies: Mapping[str, Policy]) -> dict[str, Experience]:
        """Play one batch of games, and return what each policy can learn from; moves at random say little about it."""
        played: dict[str, list[tuple[Turns, Numbers]]] = {name: [] for name in policies}

        def player(name: str) -> Player:
            def choose(boards: Boards, games: Numbers) -> Numbers:
                turns = take_turns(policies[name], self.observation, boards, self.choice, training=True)
                played[name].append((turns, games))
                return turns.columns

            return choose

        outcomes = self.observation.rules.play(self.games, [player(name) for name in policies])
        self.played += self.games
        return {
            name: Experience(
                np.concatenate([turns.features[~turns.random] for turns, _ in parts]),
                np.concatenate([turns.legal[~turns.random] for turns, _ in parts]),
                np.concatenate([turns.columns[~turns.random] for turns, _ in parts]),
                sign * outcomes[np.concatenate([games[~turns.random] for turns, games in parts])],
            )
            for sign, (name, parts) in zip((1, -1), played.items(), strict=True)
        }


class Learner(Checkpointable):
    """Improves policies from their games: an advantage actor-critic on whole games (Mnih et al., 2016, section 4)."""

    __untracked__ = ("learning_rate", "entropy")  # The values of the constructor apply, not those of a checkpoint.

    def __init__(self, policies: dict[str, Policy], learning_rate: float, entropy: float) -> None:
        self.learning_rate = learning_rate
        self.entropy = entropy
        self.policies = policies
        self.optimizers = {name: torch.optim.Adam(one.parameters(), learning_rate) for name, one in policies.items()}

    def update(self, name: str, played: Experience) -> float:
        """Do one update of a policy, and return the loss; 0 if there is nothing to learn from."""
        if not len(played.columns):
            return 0.0
        legal, outcomes = torch.from_numpy(played.legal), torch.from_numpy(played.outcomes)
        logits, values = self.policies[name](torch.from_numpy(played.features))
        logs = torch.log_softmax(logits.masked_fill(~legal, -torch.inf), dim=-1)
        chosen = logs.gather(1, torch.from_numpy(played.columns)[:, None]).squeeze(1)
        entropy = -(logs.exp() * logs.masked_fill(~legal, 0.0)).sum(dim=1).mean()
        policy_loss = -((outcomes - values).detach() * chosen).mean() - self.entropy * entropy
        loss: Tensor = policy_loss + 0.5 * (outcomes - values).square().mean()
        optimizer = self.optimizers[name]
        for group in optimizer.param_groups:
            group["lr"] = self.learning_rate
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
        optimizer.step()
        return float(loss.detach())


class Trainer(Checkpointable):
    """Two policies, ``p0`` and ``p1``, that play against each other and learn from it.

    Args:
        rules: The rules of the game.
        hidden: Units of every hidden layer of the networks.
        learning_rate: Adam's learning rate.
        entropy: Weight of the entropy of the moves, which keeps policies exploring.
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
        self.runner = Runner(rules, games, explore, seed)
        features = len(self.runner.observation.mean)
        policies = {f"p{number}": Policy(features, rules.columns, hidden, seed + number) for number in (0, 1)}
        self.learner = Learner(policies, learning_rate, entropy)
        self.step = 0
        self.seed = seed

    def train_step(self) -> dict[str, float]:
        """Play one batch of games, do one update of each policy, and return the mean loss."""
        experience = self.runner.sample(self.learner.policies)
        losses = [self.learner.update(name, played) for name, played in experience.items()]
        self.step += 1
        return {"loss": sum(losses) / len(losses)}

    def evaluate(self, games: int = 200) -> dict[str, float]:
        """Return the share of games that each policy wins against a random player, and the mean of both.

        The games depend on the policies, the seed and the step alone, so that a resumed run finds the same.
        """
        found = {
            f"win_rate_{name}": win_rate(policy, self.runner.observation, games, [self.seed, self.step, number])
            for number, (name, policy) in enumerate(self.learner.policies.items())
        }
        return {"win_rate": sum(found.values()) / len(found), **found}


def win_rate(policy: Policy, observation: Observation, games: int, seed: Sequence[int] | int) -> float:
    """Return the share of games that a policy wins against a random player; no winner counts as half won."""
    generator = np.random.default_rng(seed)
    choice, rules = Choice(int(generator.integers(2**32))), observation.rules

    def policy_plays(boards: Boards, _: Numbers) -> Numbers:
        return take_turns(policy, observation, boards, choice).columns

    def random_plays(boards: Boards, _: Numbers) -> Numbers:
        legal = rules.legal(boards)
        return best_columns(generator.random(legal.shape), legal)

    outcomes = rules.play(games, [policy_plays, random_plays])
    return float((outcomes + 1).mean()) / 2


def run(config: SelfPlay, context: RunContext) -> Outcome:
    """Train from the newest checkpoint, or from the beginning."""
    torch.set_num_threads(1)  # Such small networks gain nothing from more threads.
    total, interval = config.train.steps, config.train.eval_interval_steps
    trainer, stopped = new_trainer(config), False
    with CheckpointCallback(context.checkpoints, **context.callback_arguments) as checkpoints:
        _, start = checkpoints.restore_or_initialize(trainer)
        if start <= config.swap.at_step:
            swap(new_trainer(config), config.swap)  # A mistake in the section fails now instead of in an hour.
        progress = context.progress(start, total)
        while trainer.step < total and not stopped:
            if trainer.step == config.swap.at_step and swap(trainer, config.swap):
                logger.info("step %d: %s took the weights of %s", trainer.step, config.swap.policy, config.swap.path)
            metrics = trainer.train_step()
            if trainer.step % interval == 0 or trainer.step == total:
                metrics |= trainer.evaluate()
            progress.update(trainer.step, metrics)
            stopped = checkpoints.on_step(trainer.step, trainer, metrics=metrics).should_stop
    return Outcome(start=start, step=trainer.step, preempted=stopped and trainer.step < total)


def new_trainer(config: SelfPlay) -> Trainer:
    """Return the trainer of a configuration, before the first update."""
    game = config.game
    return Trainer(
        Rules(game.rows, game.columns, game.connect),
        config.model.hidden,
        learning_rate=config.optimizer.learning_rate,
        entropy=config.optimizer.entropy,
        games=game.batch_size,
        explore=game.explore,
        seed=config.seed,
    )


def swap(trainer: Trainer, section: SelfPlaySwap) -> bool:
    """Give a policy the weights of one from another checkpoint, if there is one; everything else stays as it is."""
    if section.path is None:
        return False
    trainer.restore_from_path(section.path, component=f"learner/policies/{section.policy}", strict=True)
    return True
