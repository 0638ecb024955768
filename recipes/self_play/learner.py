"""The learner: owns the policies and their optimizers, and improves each policy from its games."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...integrations.components import Checkpointable
from .policy import Policy
from .runner import Experience


class PolicyGroup(Checkpointable, Mapping[str, Policy]):
    """Policies by name.

    Args:
        names: Their names.
        features: How many features they see.
        actions: How many actions there are.
        hidden: Units of every hidden layer.
        seed: Decides the first weights, which differ from policy to policy.
    """

    def __init__(self, names: Sequence[str], features: int, actions: int, hidden: Sequence[int], seed: int) -> None:
        self._policies = {name: Policy(features, actions, hidden, seed + number) for number, name in enumerate(names)}

    def __getitem__(self, name: str) -> Policy:
        return self._policies[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._policies)

    def __len__(self) -> int:
        return len(self._policies)

    def get_checkpointable_components(self) -> list[tuple[str, Any]]:
        """Return the policies with their names."""
        return list(self._policies.items())


class Learner(Checkpointable):
    """Does one update for each policy: an advantage actor-critic on whole games (Mnih et al., 2016, section 4).

    Args:
        names: The names of the policies.
        features: How many features they see.
        actions: How many actions there are.
        hidden: Units of every hidden layer.
        learning_rate: Adam's learning rate.
        entropy: Weight of the entropy of the moves, which keeps policies exploring.
        seed: Decides the first weights.

    Attributes:
        policies: The policies by name.
        optimizers: Adam for each of them, by name.
        updates: Updates done.
    """

    __untracked__ = ("learning_rate", "entropy")  # the constructor's count, not those of a checkpoint

    def __init__(
        self,
        names: Sequence[str],
        features: int,
        actions: int,
        hidden: Sequence[int],
        learning_rate: float,
        entropy: float,
        seed: int,
    ) -> None:
        self.learning_rate = learning_rate
        self.entropy = entropy
        self.policies = PolicyGroup(names, features, actions, hidden, seed)
        self.optimizers = {
            name: torch.optim.Adam(policy.parameters(), learning_rate) for name, policy in self.policies.items()
        }
        self.updates = 0

    def update(self, experience: Mapping[str, Experience]) -> float:
        """Do one update of every policy.

        Args:
            experience: What each of them has played, by name.

        Returns:
            The mean of their losses, 0 if there was nothing to learn from.
        """
        losses = []
        for name, played in experience.items():
            if not len(played.actions):
                continue  # all of its few turns were random
            loss = self._loss(self.policies[name], played)
            optimizer = self.optimizers[name]
            for group in optimizer.param_groups:
                group["lr"] = self.learning_rate
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it without types
            optimizer.step()
            losses.append(float(loss.detach()))
        self.updates += 1
        return sum(losses) / max(1, len(losses))

    def _loss(self, policy: Policy, played: Experience) -> Tensor:
        logits, values = policy(torch.from_numpy(played.features))
        legal = torch.from_numpy(played.legal)
        logs = torch.log_softmax(logits.masked_fill(~legal, -torch.inf), dim=-1)
        chosen = logs.gather(1, torch.from_numpy(played.actions)[:, None]).squeeze(1)
        outcomes = torch.from_numpy(played.outcomes)
        advantages = (outcomes - values).detach()
        entropy = -(logs.exp() * logs.masked_fill(~legal, 0.0)).sum(dim=1).mean()
        policy_loss = -(advantages * chosen).mean() - self.entropy * entropy
        loss: Tensor = policy_loss + 0.5 * (outcomes - values).square().mean()
        return loss
