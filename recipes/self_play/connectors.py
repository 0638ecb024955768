"""Connectors: the steps between a board and a policy's network, and between the network and a column to play."""

from __future__ import annotations

import abc
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...integrations.components import Checkpointable
from .game import Boards, Rules

Floats = NDArray[np.float32]


@dataclass
class Turn:
    """One turn in n games, on its way through the connectors; each of them adds to it, or changes what is there.

    Attributes:
        boards: int8[n, cells] as seen by the player whose turn it is.
        legal: bool[n, columns], the columns with room.
        features: float32[n, features], the input of the network.
        logits: float32[n, columns], the output of the network.
        actions: int64[n], the columns to play.
        random: bool[n], the turns that are played at random.
    """

    boards: Boards
    legal: NDArray[np.bool_]
    features: Floats = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    logits: Floats = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    actions: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    random: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))


class Connector(Checkpointable, abc.ABC):
    """One step of a pipeline."""

    @abc.abstractmethod
    def __call__(self, turn: Turn, *, training: bool) -> None:
        """Add to a turn, or changes it.

        Args:
            turn: What the connectors before this one have made of it.
            training: Whether it is played to be learnt from: to count in statistics, and to explore.
        """


class BoardPlanes(Connector):
    """Encodes a board: own stones, the other's stones, and how full the board is."""

    def __call__(self, turn: Turn, *, training: bool) -> None:
        """Make float32[n, 2 * cells + 1] features of the boards."""
        full = (turn.boards != 0).mean(axis=1, keepdims=True)
        turn.features = np.concatenate([turn.boards == 1, turn.boards == -1, full], axis=1).astype(np.float32)


class RunningNormalizer(Connector):
    """Brings every feature to mean 0 and standard deviation 1, as far as seen in training.

    Batches are taken in with the update of Chan, Golub and LeVeque, *Algorithms for computing the sample variance*
    (1983), which loses no digits when very many have been seen.

    Args:
        size: How many features there are.
        limit: Normalised features are kept between ``-limit`` and ``limit``.

    Attributes:
        count: Turns seen.
        mean: float64[size].
        squares: float64[size], the sum of squared distances from the mean.
    """

    __untracked__ = ("size", "limit")

    def __init__(self, size: int, limit: float = 5.0) -> None:
        self.size = size
        self.limit = limit
        self.count = 0
        self.mean = np.zeros(size)
        self.squares = np.zeros(size)

    def __call__(self, turn: Turn, *, training: bool) -> None:
        """Normalise the features; in training they are counted first."""
        if training:
            self._take_in(turn.features)
        deviation = np.sqrt(self.squares / max(1, self.count) + 1e-2)
        normalised = (turn.features - self.mean) / deviation
        turn.features = normalised.clip(-self.limit, self.limit).astype(np.float32)

    def _take_in(self, features: Floats) -> None:
        many = len(features)
        if not many:
            return
        batch = features.astype(np.float64)
        mean = batch.mean(axis=0)
        total = self.count + many
        step = mean - self.mean
        self.squares = self.squares + ((batch - mean) ** 2).sum(axis=0) + step**2 * (self.count * many / total)
        self.mean = self.mean + step * (many / total)
        self.count = total


class LegalColumns(Connector):
    """Rules out columns that are full."""

    def __call__(self, turn: Turn, *, training: bool) -> None:
        """Set the logits of full columns to -inf."""
        turn.logits = np.where(turn.legal, turn.logits, -np.inf).astype(np.float32)


class ColumnChoice(Connector):
    """Chooses: in training a column is drawn with its probability, otherwise the most probable one is taken.

    Args:
        seed: The seed of the random generator.
        explore: The share of the turns in which all columns with room are equally probable, in training.
    """

    __untracked__ = ("seed", "explore")

    def __init__(self, seed: int, explore: float = 0.0) -> None:
        self.seed = seed
        self.explore = explore
        self.generator = np.random.default_rng(seed)

    def __call__(self, turn: Turn, *, training: bool) -> None:
        """Choose the actions."""
        logits: NDArray[np.floating[Any]] = turn.logits
        if training:
            turn.random = self.generator.random(len(logits)) < self.explore
            logits = np.where(turn.random[:, None] & turn.legal, 0, logits)
            logits = logits + self.generator.gumbel(size=logits.shape)  # the largest is a draw from the softmax
        turn.actions = np.argmax(logits, axis=1)


class Pipeline(Connector):
    """Connectors one after the other.

    Args:
        **connectors: The connectors by name, in their order.
    """

    def __init__(self, **connectors: Connector) -> None:
        self.connectors = connectors

    def __call__(self, turn: Turn, *, training: bool) -> None:
        """Send a turn through all connectors."""
        for connector in self.connectors.values():
            connector(turn, training=training)

    def get_checkpointable_components(self) -> list[tuple[str, Any]]:
        """Return the connectors with their names."""
        return list(self.connectors.items())


class ObservationPipeline(Pipeline):
    """From boards to the input of the network.

    Args:
        rules: The rules of the game.
    """

    __untracked__ = ("rules",)

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        super().__init__(encode=BoardPlanes(), normalize=RunningNormalizer(feature_count(rules)))


class ActionPipeline(Pipeline):
    """From the output of the network to columns to play.

    Args:
        seed: The seed of the random generator, used in training.
        explore: The share of the turns that are played at random in training.
    """

    def __init__(self, seed: int = 0, explore: float = 0.0) -> None:
        super().__init__(mask=LegalColumns(), choose=ColumnChoice(seed, explore))


def feature_count(rules: Rules) -> int:
    """Return how many features a network sees of a board."""
    return 2 * rules.cells + 1
