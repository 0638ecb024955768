"""A program whose policy is an attribute of the actor and of the learner: killed, and resumed bit for bit."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.processes.harness import Process, run_outcomes
from torch import nn

import holdfast as hf
from holdfast.components import Checkpointable, ComponentCheckpointHandler

ENVS, STEPS, MINIBATCHES, UPDATES = 4, 8, 4, 6


def log_prob(logits: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(1).gather(1, actions[:, None])[:, 0]


class Agent(Checkpointable, nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
        self.actor = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2))


class Envs(Checkpointable):
    """Carts that should stay near the middle, while the wind pushes them."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.position = self.random.normal(size=(ENVS, 2)).astype(np.float32)
        self.age = np.zeros(ENVS, np.int64)
        self.returns: deque[float] = deque(maxlen=40)

    def observe(self) -> torch.Tensor:
        return torch.from_numpy(np.column_stack([self.position, self.age / 20]).astype(np.float32))

    def step(self, actions: torch.Tensor) -> torch.Tensor:
        self.position[:, 1] += 0.1 * (2 * actions.numpy() - 1) + self.random.normal(scale=0.05, size=ENVS)
        self.position[:, 0] += 0.1 * self.position[:, 1]
        self.age += 1
        rewards = 1 - np.abs(self.position[:, 0])
        for index in np.flatnonzero(self.age >= 5):
            self.returns.append(float(rewards[index]))
            self.position[index], self.age[index] = self.random.normal(size=2), 0
        return torch.from_numpy(rewards)


class Actor(Checkpointable):
    def __init__(self, agent: Agent, seed: int) -> None:
        self.agent, self.envs = agent, Envs(seed)
        self.generator = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def rollout(self) -> list[torch.Tensor]:
        rows = []
        for _ in range(STEPS):
            observations = self.envs.observe()
            logits = self.agent.actor(observations)
            actions = torch.multinomial(logits.softmax(1), 1, generator=self.generator)[:, 0]
            rows.append((observations, actions, log_prob(logits, actions), self.envs.step(actions)))
        return [torch.cat(column) for column in zip(*rows, strict=True)]


class Learner(Checkpointable):
    def __init__(self, agent: Agent, seed: int) -> None:
        self.agent = agent
        self.optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-3, eps=1e-5)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.1, total_iters=UPDATES)
        self.shuffle = np.random.default_rng(seed)
        self.losses: list[float] = []

    def update(self, batch: list[torch.Tensor]) -> None:
        for rows in np.split(self.shuffle.permutation(ENVS * STEPS), MINIBATCHES):
            observations, actions, before, rewards = (values[torch.from_numpy(rows)] for values in batch)
            advantages = rewards - self.agent.critic(observations)[:, 0]
            ratio = (log_prob(self.agent.actor(observations), actions) - before).exp()
            loss = (
                -torch.min(advantages * ratio, advantages * ratio.clamp(0.8, 1.2)).mean() + advantages.square().mean()
            )
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.losses.append(loss.item())
        self.schedule.step()


class Trainer(Checkpointable):
    def __init__(self, seed: int = 1) -> None:
        torch.manual_seed(seed)
        self.agent = Agent()
        self.actor, self.learner = Actor(self.agent, seed), Learner(self.agent, seed)
        self.updates = 0


def main(process: Process, directory: str) -> tuple[int, list[Any]]:
    """Train, from the newest checkpoint if there is one; return where it began and all that training depends on."""
    trainer = Trainer()
    options = hf.CheckpointManagerOptions(save_interval_steps=2, max_to_keep=2)
    with hf.CheckpointManager(directory, hf.AsyncCheckpointer(ComponentCheckpointHandler()), options) as manager:
        if manager.latest_step() is not None:
            manager.restore(items=trainer)
        start = trainer.updates
        while trainer.updates < UPDATES:
            trainer.learner.update(trainer.actor.rollout())
            trainer.updates += 1
            manager.save(trainer.updates, trainer)
            process.reached(f"update {trainer.updates}")
    optimizer = trainer.learner.optimizer
    moments = [one.numpy().tobytes() for p in trainer.agent.parameters() for one in optimizer.state[p].values()]
    weights = [one.detach().numpy().tobytes() for one in trainer.agent.parameters()]
    rate = optimizer.param_groups[0]["lr"]
    return start, [weights, moments, rate, trainer.learner.losses, trainer.actor.envs.returns]


def test_ppo_is_killed_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    start, expected = main(Process(0, 1), str(tmp_path / "through"))
    assert start == 0
    assert len(expected[1]) == 8 * 3
    run_outcomes(main, 1, str(tmp_path / "killed"), backend="torch", kill=(0, "update 5"))
    start, found = main(Process(0, 1), str(tmp_path / "killed"))
    assert start in (2, 4)
    assert found == expected
    trainer = Trainer.from_checkpoint(next((tmp_path / "killed").glob(f"{UPDATES}/*/checkpoint.json")).parent)
    assert trainer.agent is trainer.actor.agent is trainer.learner.agent
