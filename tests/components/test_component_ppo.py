"""A PPO program in one file, whose policy is an attribute of the actor and of the learner: killed, and resumed."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tests.processes.harness import Process, run_outcomes, run_processes
from torch import nn
from torch.distributions import Categorical

import holdfast as hf
from holdfast.components import Checkpointable, ComponentCheckpointHandler

ENVS, STEPS, EPOCHS, MINIBATCHES, UPDATES = 4, 16, 2, 4, 6
GAMMA, LAMBDA, CLIP = 0.99, 0.95, 0.2


class Agent(Checkpointable, nn.Module):
    def __init__(self, observations: int = 3, actions: int = 2) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(observations, 16), nn.Tanh(), nn.Linear(16, 1))
        self.actor = nn.Sequential(nn.Linear(observations, 16), nn.Tanh(), nn.Linear(16, actions))

    def distribution(self, observations: torch.Tensor) -> Any:
        return Categorical(logits=self.actor(observations))


class Envs(Checkpointable):
    """Carts that should stay near the middle, while the wind pushes them."""

    def __init__(self, count: int, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.position = self.random.normal(size=(count, 2)).astype(np.float32)
        self.age = np.zeros(count, np.int64)
        self.episode_return = np.zeros(count)
        self.returns: deque[float] = deque(maxlen=40)

    def observe(self) -> torch.Tensor:
        return torch.from_numpy(np.column_stack([self.position, self.age / 20]).astype(np.float32))

    def step(self, actions: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        self.position[:, 1] += 0.1 * (2 * actions - 1) + self.random.normal(scale=0.05, size=len(actions))
        self.position[:, 0] += 0.1 * self.position[:, 1]
        reward = 1 - np.abs(self.position[:, 0])
        self.age += 1
        self.episode_return += reward
        done = (self.age >= 20) | (np.abs(self.position[:, 0]) > 2)
        for index in np.flatnonzero(done):
            self.returns.append(float(self.episode_return[index]))
            self.position[index], self.age[index], self.episode_return[index] = self.random.normal(size=2), 0, 0
        return reward.astype(np.float32), done


class Actor(Checkpointable):
    def __init__(self, agent: Agent, seed: int) -> None:
        self.agent = agent
        self.envs = Envs(ENVS, seed)
        self.generator = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def rollout(self) -> dict[str, torch.Tensor]:
        found: dict[str, list[Any]] = {
            name: [] for name in ("obs", "actions", "logprobs", "values", "rewards", "dones")
        }
        for _ in range(STEPS):
            observations = self.envs.observe()
            distribution = self.agent.distribution(observations)
            actions = torch.multinomial(distribution.probs, 1, generator=self.generator)[:, 0]
            rewards, dones = self.envs.step(actions.numpy())
            row = (observations, actions, distribution.log_prob(actions), self.agent.critic(observations)[:, 0])
            for name, value in zip(found, (*row, torch.from_numpy(rewards), torch.from_numpy(dones)), strict=True):
                found[name].append(value)
        batch = {name: torch.stack(values) for name, values in found.items()}
        batch["advantages"] = torch.zeros_like(batch["rewards"])
        following, last = self.agent.critic(self.envs.observe())[:, 0], torch.zeros(ENVS)
        for step in reversed(range(STEPS)):
            going = 1 - batch["dones"][step].float()
            delta = batch["rewards"][step] + GAMMA * following * going - batch["values"][step]
            batch["advantages"][step] = last = delta + GAMMA * LAMBDA * going * last
            following = batch["values"][step]
        return {name: values.flatten(0, 1) for name, values in batch.items()}


class Learner(Checkpointable):
    def __init__(self, agent: Agent, seed: int, lr: float = 2.5e-3) -> None:
        self.agent = agent
        self.optimizer = torch.optim.Adam(agent.parameters(), lr=lr, eps=1e-5)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.1, total_iters=UPDATES)
        self.shuffle = np.random.default_rng(seed)
        self.losses: list[float] = []

    def update(self, batch: dict[str, torch.Tensor]) -> None:
        for _ in range(EPOCHS):
            for rows in np.split(self.shuffle.permutation(ENVS * STEPS), MINIBATCHES):
                part = {name: values[torch.from_numpy(rows)] for name, values in batch.items()}
                distribution = self.agent.distribution(part["obs"])
                ratio = (distribution.log_prob(part["actions"]) - part["logprobs"]).exp()
                advantages = (part["advantages"] - part["advantages"].mean()) / (part["advantages"].std() + 1e-8)
                policy_loss = -torch.min(advantages * ratio, advantages * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
                value_error = self.agent.critic(part["obs"])[:, 0] - part["advantages"] - part["values"]
                loss = policy_loss + 0.5 * value_error.square().mean() - 0.01 * distribution.entropy().mean()
                self.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.agent.parameters(), 0.5)
                self.optimizer.step()
                self.losses.append(loss.item())
        self.schedule.step()


class Trainer(Checkpointable):
    def __init__(self, seed: int = 1) -> None:
        torch.manual_seed(seed)
        self.agent = Agent()
        self.actor = Actor(self.agent, seed)
        self.learner = Learner(self.agent, seed)
        self.updates = 0

    def update(self) -> None:
        self.learner.update(self.actor.rollout())
        self.updates += 1


def main(process: Process, directory: str) -> tuple[int, list[Any]]:
    """Train, from the newest checkpoint where there is one; return where it began and all that training depends on."""
    trainer = Trainer()
    options = hf.CheckpointManagerOptions(save_interval_steps=2, max_to_keep=2)
    with hf.CheckpointManager(directory, hf.AsyncCheckpointer(ComponentCheckpointHandler()), options) as manager:
        if manager.latest_step() is not None:
            manager.restore(items=trainer)
        start = trainer.updates
        while trainer.updates < UPDATES:
            trainer.update()
            manager.save(trainer.updates, trainer)
            process.reached(f"update {trainer.updates}")
    optimizer = trainer.learner.optimizer
    moments = [one.numpy().tobytes() for p in trainer.agent.parameters() for one in optimizer.state[p].values()]
    weights = [one.detach().numpy().tobytes() for one in trainer.agent.parameters()]
    rate = optimizer.param_groups[0]["lr"]
    return start, [weights, moments, rate, trainer.learner.losses, trainer.actor.envs.returns]


def test_ppo_is_killed_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    [(start, expected)] = run_processes(main, 1, str(tmp_path / "through"), backend="torch")
    assert start == 0
    assert len(expected[1]) == 8 * 3
    run_outcomes(main, 1, str(tmp_path / "killed"), backend="torch", kill=(0, "update 5"))
    [(start, found)] = run_processes(main, 1, str(tmp_path / "killed"), backend="torch")
    assert start in (2, 4)
    assert found == expected
    trainer = Trainer.from_checkpoint(next((tmp_path / "killed").glob(f"{UPDATES}/*/checkpoint.json")).parent)
    assert trainer.agent is trainer.actor.agent is trainer.learner.agent
