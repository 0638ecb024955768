"""A policy: a network that chooses moves and values positions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ...integrations.components import Checkpointable


class Policy(Checkpointable, nn.Module):
    """A multilayer perceptron with two heads.

    Args:
        features: How many features it sees of a position.
        actions: How many actions there are.
        hidden: Units of every hidden layer.
        seed: Decides the first weights.
    """

    def __init__(self, features: int, actions: int, hidden: Sequence[int], seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            layers: list[nn.Module] = []
            width = features
            for units in hidden:
                layers += [nn.Linear(width, units), nn.Tanh()]
                width = units
            self.body = nn.Sequential(*layers)
            self.logits = nn.Linear(width, actions)
            self.value = nn.Linear(width, 1)
        with torch.no_grad():  # the first games are played at random
            self.logits.weight.mul_(0.01)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of the actions and the value of each position.

        Args:
            features: float32[n, features].

        Returns:
            float32[n, actions], the logits of the actions; float32[n], the outcome to expect, from -1 to 1.
        """
        hidden = self.body(features)
        return self.logits(hidden), torch.tanh(self.value(hidden)).squeeze(-1)
