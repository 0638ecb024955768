"""What the YAML of the recipe ``self_play`` may say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from .problems import KeyPath
from .schema import Config, Count, Fraction, Name, NotNegative, Positive, Section


class SelfPlayModel(Section):
    """The network of each policy: a multilayer perceptron with two heads."""

    hidden: Annotated[list[Count], Field(min_length=1)] = Field(default_factory=lambda: [64, 64])
    """Units of every hidden layer."""


class SelfPlayGame(Section):
    """Stones fall into columns, and who first has enough of them in a line wins."""

    rows: Annotated[int, Field(gt=0, le=12)] = 4
    """Stones that fit into a column."""
    columns: Annotated[int, Field(gt=0, le=12)] = 5
    """Columns of the board."""
    connect: Annotated[int, Field(gt=1, le=12)] = 3
    """Stones in a line that win."""
    batch_size: Annotated[int, Field(gt=1, le=10_000)] = 128
    """Games that are played for an update; each policy begins half of them."""
    explore: Fraction = 0.15
    """The share of the moves that are random; they are not learnt from."""


class SelfPlayOptimizer(Section):
    """Adam, one for each policy."""

    learning_rate: Positive = 3e-3
    """The learning rate."""
    entropy: NotNegative = 0.02
    """Weight of the entropy of what is played, which keeps policies exploring."""


class SelfPlaySwap(Section):
    """Takes a policy from another checkpoint while training goes on."""

    policy: Literal["p0", "p1"] = "p1"
    """The policy that gets other weights; its optimizer and all else stay as they are."""
    path: Annotated[str, Field(min_length=1)] | None = None
    """The directory of the policy in another checkpoint, such as .../300/trainer/learner/policies/p0; null for none."""
    at_step: Annotated[int, Field(ge=0)] = 0
    """Swap when so many updates are done; a run that is resumed later on does not do it again."""


class SelfPlay(Config):
    """The keys of the recipe ``self_play``."""

    IDENTITY: ClassVar[tuple[str, ...]] = ("recipe", "seed", "model", "game", "optimizer")
    METRICS: ClassVar[tuple[str, ...]] = ("loss", "win_rate", "win_rate_p0", "win_rate_p1")

    name: Name = "self_play"
    """The name of the run."""
    model: SelfPlayModel = Field(default_factory=SelfPlayModel)
    """The network of each policy."""
    game: SelfPlayGame = Field(default_factory=SelfPlayGame)
    """The game, and how many of them are played."""
    optimizer: SelfPlayOptimizer = Field(default_factory=SelfPlayOptimizer)
    """Adam, one for each policy."""
    swap: SelfPlaySwap = Field(default_factory=SelfPlaySwap)
    """Whether a policy is taken from another checkpoint while training goes on."""

    def conflicts(self) -> Iterator[tuple[KeyPath, str]]:
        """Yields what is wrong although every key by itself is right: the key, and what to do about it."""
        yield from super().conflicts()
        if self.game.connect > max(self.game.rows, self.game.columns):
            text = f"expected a line that fits on {self.game.rows} x {self.game.columns}, found {self.game.connect}"
            yield ("game", "connect"), text
        if self.swap.path is None and self.swap.at_step:
            yield ("swap", "at_step"), "expected a path as well: where the other policy comes from"
