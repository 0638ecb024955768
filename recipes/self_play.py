"""Two torch policies learn a card game by playing against each other.

Each player has a hand of cards and plays one of them; the higher card wins. The training state is a tree of components,
which is also the directory tree of its checkpoints::

    (trainer)            counts the updates
    learner              holds the optimizers
        policies/p0, policies/p1
    runner               counts the games played; holds the random generator that deals cards
        observation      converts hands to network inputs; holds the mean and deviation of every card
        choice           converts network outputs to moves; holds the random generator that samples them

A checkpoint is therefore useful beyond resuming: a single policy can be loaded from it, or swapped into another run.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..integrations.components import Checkpointable
from ..integrations.loop import CheckpointCallback
from .registry import Outcome, RunContext
from .schema import SelfPlay, SelfPlaySwap

logger = logging.getLogger("holdfast.recipes")

Floats = NDArray[np.float32]
Moves = NDArray[np.int64]
"""Indices of the played cards within their hands, int64[n]."""
Hands = NDArray[np.float64]
"""Cards from 0 to 100: float64[n, cards], or float64[2, n, cards] for both players."""


def deal(generator: np.random.Generator, games: int, cards: int) -> Hands:
    """Deal random hands to both players and return them as float64[2, games, cards]."""
    return generator.uniform(0, 100, (2, games, cards))


def outcomes_of(hands: Hands, moves: Sequence[Moves]) -> Floats:
    """Return float32[games]: 1 if the first player played the higher card, -1 if the second did."""
    first, second = (np.take_along_axis(hand, move[:, None], axis=1) for hand, move in zip(hands, moves, strict=True))
    outcomes: Floats = np.sign(first - second).astype(np.float32).squeeze(1)
    return outcomes


class Policy(Checkpointable, nn.Module):
    """A multilayer perceptron with two heads: the logits of the cards, and the expected outcome, from -1 to 1."""

    def __init__(self, cards: int, hidden: Sequence[int], seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            widths = [cards, *hidden]
            layers = [(nn.Linear(*pair), nn.Tanh()) for pair in itertools.pairwise(widths)]
            self.body = nn.Sequential(*(layer for pair in layers for layer in pair))
            self.logits = nn.Linear(widths[-1], cards)
            self.value = nn.Linear(widths[-1], 1)
        with torch.no_grad():  # small logits make the first games nearly random
            self.logits.weight.mul_(0.01)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits, float32[n, cards], and values, float32[n], for features, float32[n, cards]."""
        hidden = self.body(features)
        return self.logits(hidden), torch.tanh(self.value(hidden)).squeeze(-1)


class Observation(Checkpointable):
    """Converts hands to policy inputs, normalized to mean 0 and standard deviation 1 for each card.

    The statistics are updated batch by batch with the algorithm of Chan, Golub and LeVeque, *Algorithms for computing
    the sample variance* (1983), which stays numerically accurate even after many batches.
    """

    def __init__(self, cards: int) -> None:
        self.count = 0
        self.mean = np.zeros(cards)
        self.squares = np.zeros(cards)  # sums of squared deviations from the mean

    def __call__(self, hands: Hands, *, training: bool = False) -> Floats:
        """Return the normalized hands as float32[n, cards]. If ``training``, first update the statistics."""
        if training:
            mean, total = hands.mean(axis=0), self.count + len(hands)
            step, weight = mean - self.mean, len(hands) / total
            self.squares = self.squares + ((hands - mean) ** 2).sum(axis=0) + step**2 * self.count * weight
            self.mean, self.count = self.mean + step * weight, total
        deviation = np.sqrt(self.squares / max(1, self.count) + 1e-2)
        return ((hands - self.mean) / deviation).clip(-5, 5).astype(np.float32)


class Choice(Checkpointable):
    """Samples moves from a policy's probabilities."""

    def __init__(self, seed: int) -> None:
        self.generator = np.random.default_rng(seed)

    def __call__(self, logits: Floats) -> Moves:
        """Sample moves from the softmax of the logits with the Gumbel-max trick: add noise, and take the argmax."""
        moves: Moves = (logits + self.generator.gumbel(size=logits.shape)).argmax(axis=1)
        return moves


def choose(policy: Policy, features: Floats, choice: Choice | None = None) -> Moves:
    """Return a policy's moves: sampled by `choice` if it is given, otherwise the most probable moves."""
    with torch.no_grad():
        logits = policy(torch.from_numpy(features))[0].numpy()
    moves: Moves = choice(logits) if choice else logits.argmax(axis=1)
    return moves


class Turns(NamedTuple):
    """A batch of turns by one policy: inputs, moves, and outcomes (1 for a win, -1 for a loss)."""

    features: Floats
    moves: Moves
    outcomes: Floats


class Runner(Checkpointable):
    """Plays games between two policies, in batches of `games`."""

    __untracked__ = ("cards", "games")

    def __init__(self, cards: int, games: int, seed: int) -> None:
        self.cards = cards
        self.games = games
        self.played = 0
        self.generator = np.random.default_rng([seed, 1])
        self.observation = Observation(cards)
        self.choice = Choice(seed)

    def sample(self, policies: Mapping[str, Policy]) -> dict[str, Turns]:
        """Play one batch of games, and return the turns, keyed by policy name."""
        hands = deal(self.generator, self.games, self.cards)
        features = [self.observation(hand, training=True) for hand in hands]
        moves = [choose(*pair, self.choice) for pair in zip(policies.values(), features, strict=True)]
        outcomes = outcomes_of(hands, moves)
        self.played += self.games
        turns = zip(features, moves, (outcomes, -outcomes), strict=True)
        return {name: Turns(*turn) for name, turn in zip(policies, turns, strict=True)}


class Learner(Checkpointable):
    """Trains the policies on their games with advantage actor-critic (Mnih et al., 2016, section 4)."""

    __untracked__ = ("learning_rate", "entropy")  # restoring keeps the values given to the constructor

    def __init__(self, policies: dict[str, Policy], learning_rate: float, entropy: float) -> None:
        self.learning_rate = learning_rate
        self.entropy = entropy
        self.policies = policies
        adam = torch.optim.Adam
        self.optimizers = {name: adam(policy.parameters(), learning_rate) for name, policy in policies.items()}

    def update(self, name: str, turns: Turns) -> float:
        features, moves, outcomes = map(torch.from_numpy, turns)
        logits, values = self.policies[name](features)
        logs = torch.log_softmax(logits, dim=-1)
        chosen = logs.gather(1, moves[:, None]).squeeze(1)
        entropy = -(logs.exp() * logs).sum(dim=1).mean()
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
    """Trains two policies, ``p0`` and ``p1``, in games against each other; ``step`` counts the updates."""

    __untracked__ = ("seed",)

    def __init__(
        self,
        cards: int = 5,
        hidden: Sequence[int] = (64, 64),
        *,
        learning_rate: float = 3e-3,
        entropy: float = 0.02,
        games: int = 128,
        seed: int = 0,
    ) -> None:
        self.runner = Runner(cards, games, seed)
        policies = {f"p{number}": Policy(cards, hidden, seed + number) for number in (0, 1)}
        self.learner = Learner(policies, learning_rate, entropy)
        self.step = 0
        self.seed = seed

    def train_step(self) -> dict[str, float]:
        """Play one batch of games, update each policy once, and return the mean loss."""
        sampled = self.runner.sample(self.learner.policies)
        losses = [self.learner.update(name, turns) for name, turns in sampled.items()]
        self.step += 1
        return {"loss": sum(losses) / len(losses)}

    def evaluate(self, games: int = 200) -> dict[str, float]:
        """Return the win rate of each policy against a random player. A resumed run reproduces these rates."""
        rates = {
            f"win_rate_{name}": win_rate(policy, self.runner.observation, games, [self.seed, self.step, number])
            for number, (name, policy) in enumerate(self.learner.policies.items())
        }
        return {"win_rate": sum(rates.values()) / len(rates), **rates}


def win_rate(policy: Policy, observation: Observation, games: int, seed: Sequence[int] | int) -> float:
    """Return the win rate of a policy against a random player."""
    generator, cards = np.random.default_rng(seed), len(observation.mean)
    hands = deal(generator, games, cards)
    moves = choose(policy, observation(hands[0]), Choice(int(generator.integers(2**32))))
    return float((outcomes_of(hands, (moves, generator.integers(cards, size=games))) > 0).mean())


def run(config: SelfPlay, context: RunContext) -> Outcome:
    """Train from the newest checkpoint, or from scratch if there is none."""
    torch.set_num_threads(1)  # networks this small do not benefit from more threads
    total, interval = config.train.steps, config.train.eval_interval_steps
    trainer, stopped = new_trainer(config), False
    with CheckpointCallback(context.checkpoints, **context.callback_arguments) as checkpoints:
        _, start = checkpoints.restore_or_initialize(trainer)
        if start <= config.swap.at_step:
            swap(new_trainer(config), config.swap)  # try the swap now, to detect configuration errors early
        progress = context.progress(start, total)
        while trainer.step < total and not stopped:
            if trainer.step == config.swap.at_step and swap(trainer, config.swap):
                logger.info("step %d: %s took the weights of %s", trainer.step, config.swap.policy, config.swap.path)
            metrics = trainer.train_step()
            if trainer.step % interval == 0 or trainer.step == total:
                metrics |= trainer.evaluate()
            progress.update(trainer.step, metrics)
            stopped = checkpoints.on_step(trainer.step, trainer, metrics=metrics).should_stop
    return Outcome(start=start, step=trainer.step, preempted=stopped)


def new_trainer(config: SelfPlay) -> Trainer:
    return Trainer(
        config.game.cards,
        config.model.hidden,
        learning_rate=config.optimizer.learning_rate,
        entropy=config.optimizer.entropy,
        games=config.game.batch_size,
        seed=config.seed,
    )


def swap(trainer: Trainer, section: SelfPlaySwap) -> bool:
    """Load a policy's weights from another checkpoint if the section gives a path; return whether they were loaded."""
    if section.path is None:
        return False
    trainer.restore_from_path(section.path, component=f"learner/policies/{section.policy}", strict=True)
    return True
