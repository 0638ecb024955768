"""Programs in the form that public repositories give them, in small: all hand over what their next steps depend on.

Each is named after the repository, or the kind of program, whose loop it has.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import copy
import itertools
import math
import random
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.func import functional_call
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, RandomSampler

import holdfast as hf

from .hidden_case import Run, program
from .hidden_programs import EPOCH, EXAMPLES, FEATURES, SIZE, descend, examples, fit, loss_of, new_state, train


def loader_of(**options: Any) -> DataLoader[torch.Tensor]:
    data: Any = examples()
    return DataLoader(data, batch_size=SIZE, **options)


@program("nanoGPT: a batch ahead, a rate by iteration, accumulation", is_exact=True)
def _nano_gpt(run: Run) -> None:
    text = (torch.arange(200) * 7) % 13

    def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(text) - 5, (3,)).tolist()
        return torch.stack([text[i : i + 4] for i in starts]), torch.stack([text[i + 1 : i + 5] for i in starts])

    model = nn.Sequential(nn.Embedding(13, 8), nn.Dropout(0.1), nn.Linear(8, 13))
    groups = [
        {"params": [p for p in model.parameters() if (p.dim() > 1) == many], "weight_decay": 0.1 * many}
        for many in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    x, y = get_batch()
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    with run.callback() as checkpoint:
        state, start = checkpoint.restore_or_initialize(state, batch=(x, y), best=1e9)
        (x, y), best = checkpoint.extras["batch"], checkpoint.extras["best"]
        for step in range(start, run.total):
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * 0.5 * (1 + math.cos(math.pi * step / run.total))
            for _ in range(2):
                loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()) / 2
                x, y = get_batch()
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            best = min(best, loss.item())
            if run.report(checkpoint, step + 1, state, loss, batch=(x, y), best=best):
                break


class EarlyStopping:
    def __init__(self, patience: int = 30) -> None:
        self.patience, self.counter = patience, 0
        self.best_score: float | None = None
        self.best_weights: Any = None
        self.early_stop = False

    def __call__(self, score: float, model: nn.Module) -> None:
        if self.best_score is None or score < self.best_score:
            self.best_score, self.counter = score, 0
            self.best_weights = copy.deepcopy(model.state_dict())
        else:
            self.counter += 1
            self.early_stop = self.counter >= self.patience


@program("early stopping with the best weights, and a plateau", is_exact=True)
def _early_stopping(run: Run) -> None:
    state: dict[str, Any] = {**new_state(), "stopper": EarlyStopping(), "history": {"loss": []}}
    state["plateau"] = torch.optim.lr_scheduler.ReduceLROnPlateau(state["optimizer"], patience=0, factor=0.5)
    loader: Any = hf.resumable(loader_of(shuffle=True))
    with run.callback() as checkpoint:
        state, step = checkpoint.restore_or_initialize(state, data=loader)
        while step < run.total:
            for batch in loader:
                loss = fit(state, batch)
                step += 1
                state["history"]["loss"].append(loss.item())
                if step % EPOCH == 0:
                    state["plateau"].step(loss)
                    state["stopper"](loss.item(), state["model"])
                if run.report(checkpoint, step, state, loss, data=loader, batch=batch):
                    return


class ReplayBuffer:
    def __init__(self, size: int) -> None:
        self.observations, self.actions = np.zeros((size, 2), np.float32), np.zeros(size, np.int64)
        self.following, self.rewards = np.zeros((size, 2), np.float32), np.zeros(size, np.float32)
        self.position, self.full = 0, False

    def add(self, observation: Any, action: int, reward: float, following: Any) -> None:
        at = self.position
        self.observations[at], self.actions[at], self.rewards[at], self.following[at] = (
            observation,
            action,
            reward,
            following,
        )
        self.position = (at + 1) % len(self.actions)
        self.full = self.full or self.position == 0

    def sample(self, count: int) -> list[torch.Tensor]:
        chosen = np.random.randint(0, len(self.actions) if self.full else self.position, count)
        parts = (self.observations, self.actions, self.rewards, self.following)
        return [torch.from_numpy(part[chosen]) for part in parts]


class Pole:
    def __init__(self) -> None:
        self.observation = np.zeros(2, np.float32)

    def step(self, action: int) -> tuple[Any, float]:
        push = 0.1 * (2 * action - 1) + 0.01 * np.random.randn()
        self.observation = (self.observation * 0.9 + np.array([push, random.random() * 0.1])).astype(np.float32)
        return self.observation, float(-np.abs(self.observation).sum())


@program("CleanRL: DQN with a replay buffer and a target network", is_exact=True)
def _dqn(run: Run) -> None:
    network = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2))
    state: dict[str, Any] = {
        "q": network,
        "target": copy.deepcopy(network),
        "optimizer": torch.optim.Adam(network.parameters()),
        "buffer": ReplayBuffer(12),
        "env": Pole(),
    }
    with run.callback() as checkpoint:
        state, start = checkpoint.restore_or_initialize(state)
        for step in range(start, run.total):
            observation = state["env"].observation
            epsilon = max(0.1, 1 - step / 10)
            greedy = network(torch.from_numpy(observation)).argmax().item()
            action = random.randrange(2) if random.random() < epsilon else int(greedy)
            following, reward = state["env"].step(action)
            state["buffer"].add(observation, action, reward, following)
            before, actions, rewards, after = state["buffer"].sample(4)
            with torch.no_grad():
                target = rewards + 0.9 * state["target"](after).max(1).values
            loss = nn.functional.mse_loss(network(before).gather(1, actions[:, None])[:, 0], target)
            descend(state, loss)
            if step % 4 == 0:
                state["target"].load_state_dict(network.state_dict())
            if run.report(checkpoint, step + 1, state, loss.detach()):
                break


@program("CleanRL: PPO with shuffled minibatches and a normalised reward", is_exact=True)
def _ppo(run: Run) -> None:
    actor = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
    state: dict[str, Any] = {
        "actor": actor,
        "optimizer": torch.optim.Adam(actor.parameters(), lr=0.01, eps=1e-5),
        "env": Pole(),
        "returns": {"mean": 0, "count": 0},
    }
    with run.callback() as checkpoint:
        state, start = checkpoint.restore_or_initialize(state, following=torch.zeros(2))
        following = checkpoint.extras["following"]
        for update in range(start, run.total):
            state["optimizer"].param_groups[0]["lr"] = 0.01 * (1 - update / run.total)
            seen, chosen, logs, rewards = [], [], [], []
            for _ in range(6):
                policy = torch.distributions.Categorical(logits=actor(following))
                action = policy.sample()
                seen.append(following)
                chosen.append(action)
                logs.append(policy.log_prob(action).detach())
                after, reward = state["env"].step(int(action))
                following = torch.from_numpy(after.copy())
                rewards.append(reward)
            returns = state["returns"]
            returns["count"] += 1
            returns["mean"] += (np.mean(rewards) - returns["mean"]) / returns["count"]
            advantages = torch.tensor(rewards) - float(returns["mean"])
            order = np.arange(6)
            for _ in range(2):
                np.random.shuffle(order)
                for picked in (order[:3], order[3:]):
                    policy = torch.distributions.Categorical(logits=actor(torch.stack(seen)[picked]))
                    ratio = (policy.log_prob(torch.stack(chosen)[picked]) - torch.stack(logs)[picked]).exp()
                    loss = -(ratio.clamp(0.8, 1.2) * advantages[picked]).mean() - 0.01 * policy.entropy().mean()
                    descend(state, loss)
            if run.report(checkpoint, update + 1, state, loss.detach(), following=following):
                break


class ImagePool:
    """Gives earlier images half of the time, as CycleGAN shows them to its discriminators."""

    def __init__(self, size: int) -> None:
        self.size, self.images = size, list[torch.Tensor]()

    def query(self, images: torch.Tensor) -> torch.Tensor:
        given = []
        for image in images.detach():
            if len(self.images) < self.size:
                self.images.append(image)
                given.append(image)
            elif random.uniform(0, 1) > 0.5:
                at = random.randint(0, self.size - 1)
                given.append(self.images[at].clone())
                self.images[at] = image
            else:
                given.append(image)
        return torch.stack(given)


@program("CycleGAN: a pool of images, two optimizers with schedules", is_exact=True)
def _cycle_gan(run: Run) -> None:
    there, back, critic = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 1)
    generators = torch.optim.Adam(itertools.chain(there.parameters(), back.parameters()), betas=(0.5, 0.999))
    critics = torch.optim.Adam(critic.parameters(), betas=(0.5, 0.999))
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(one, lambda n: 1 - max(0, n - 2) / 5) for one in (generators, critics)
    ]
    state: dict[str, Any] = {
        "there": there,
        "back": back,
        "critic": critic,
        "g": generators,
        "d": critics,
        "schedules": schedules,
        "pool": ImagePool(3),
    }
    loader: Any = hf.resumable(loader_of(shuffle=True))
    with run.callback() as checkpoint:
        state, step = checkpoint.restore_or_initialize(state, data=loader)
        while step < run.total:
            for batch in loader:
                fake = there(batch)
                loss = (back(fake) - batch).abs().mean() + (critic(fake) - 1).square().mean()
                generators.zero_grad()
                loss.backward()
                generators.step()
                shown = state["pool"].query(fake)
                critics.zero_grad()
                ((critic(batch) - 1).square().mean() + critic(shown).square().mean()).backward()
                critics.step()
                step += 1
                if step % EPOCH == 0:
                    for schedule in schedules:
                        schedule.step()
                if run.report(checkpoint, step, state, loss.detach(), data=loader, batch=batch):
                    return


@program("denoising diffusion: an average of the model, noise, accumulation", is_exact=True)
def _diffusion(run: Run) -> None:
    model = nn.Sequential(nn.Linear(FEATURES + 1, 8), nn.SiLU(), nn.Linear(8, FEATURES))
    state: dict[str, Any] = {
        "model": model,
        "ema": copy.deepcopy(model),
        "optimizer": torch.optim.Adam(model.parameters(), 0.01),
    }
    batches = hf.skip_to(loader_of(shuffle=True))

    def update() -> torch.Tensor:
        total = torch.zeros(())
        state["optimizer"].zero_grad()
        for _ in range(2):
            batch = next(batches)
            times, noise = torch.randint(0, 100, (len(batch), 1)) / 100, torch.randn_like(batch)
            found = model(torch.cat([batch * (1 - times) + noise * times, times], 1))
            loss = nn.functional.mse_loss(found, noise) / 2
            loss.backward()
            total += loss.detach()
        state["optimizer"].step()
        for average, weight in zip(state["ema"].parameters(), model.parameters(), strict=True):
            average.data.lerp_(weight.data, 0.1)
        return total

    train(run, state, update, data=batches)


@program("stochastic weight averaging, and its normalisation", is_exact=True)
def _weight_averaging(run: Run) -> None:
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    state: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "average": AveragedModel(model),
        "swa": SWALR(optimizer, 0.01, 3),
    }
    loader: Any = hf.resumable(loader_of(shuffle=True))
    with run.callback() as checkpoint:
        state, step = checkpoint.restore_or_initialize(state, data=loader)
        while step < run.total:
            for batch in loader:
                loss = fit(state, batch)
                step += 1
                if step % EPOCH == 0 and step > EPOCH:
                    state["average"].update_parameters(model)
                    state["swa"].step()
                    update_bn(examples().split(SIZE), state["average"])
                if run.report(checkpoint, step, state, loss, data=loader, batch=batch):
                    return


class Contrast(nn.Module):
    queue: torch.Tensor
    pointer: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(FEATURES, 3), nn.Linear(FEATURES, 3)
        self.key.load_state_dict(self.query.state_dict())
        self.register_buffer("queue", nn.functional.normalize(torch.randn(3, 6), dim=0))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        query = nn.functional.normalize(self.query(one))
        with torch.no_grad():
            for slow, fast in zip(self.key.parameters(), self.query.parameters(), strict=True):
                slow.data.mul_(0.9).add_(fast.data, alpha=0.1)
            keys = nn.functional.normalize(self.key(other))
        logits = torch.cat([(query * keys).sum(1, keepdim=True), query @ self.queue.clone()], 1)
        at = int(self.pointer)
        self.queue[:, at : at + len(keys)] = keys.T
        self.pointer[0] = (at + len(keys)) % self.queue.shape[1]
        return nn.functional.cross_entropy(logits / 0.2, torch.zeros(len(keys), dtype=torch.long))


@program("MoCo: a queue of keys, a momentum encoder, two views", is_exact=True)
def _moco(run: Run) -> None:
    model = Contrast()
    state: dict[str, Any] = {"model": model, "optimizer": torch.optim.SGD(model.query.parameters(), 0.05, momentum=0.9)}
    state["schedule"] = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(state["optimizer"], 3)
    batches = hf.skip_to(loader_of(shuffle=True))

    def update() -> tuple[torch.Tensor, torch.Tensor]:
        batch = next(batches)
        views = [batch + 0.1 * torch.randn_like(batch) for _ in range(2)]
        loss = descend(state, model(*views))
        state["schedule"].step()
        return loss, batch

    train(run, state, update, data=batches)


@program("mixup, warm-up and label noise of numpy", is_exact=True)
def _mixup(run: Run) -> None:
    state = new_state()
    state["warmup"] = torch.optim.lr_scheduler.LambdaLR(state["optimizer"], lambda step: min(1, (step + 1) / 8))
    sampler = RandomSampler(range(EXAMPLES), replacement=True, num_samples=EXAMPLES)
    batches = hf.skip_to(loader_of(sampler=sampler))

    def update() -> tuple[torch.Tensor, torch.Tensor]:
        batch = next(batches)
        share = float(np.random.beta(0.4, 0.4))
        loss = fit(state, share * batch + (1 - share) * batch[torch.randperm(len(batch))])
        state["warmup"].step()
        return loss, batch

    train(run, state, update, data=batches)


@program("MAML: tasks of a RandomState, steps of the inner loop", is_exact=True)
def _maml(run: Run) -> None:
    state, tasks = new_state(), np.random.RandomState(4)

    def update() -> torch.Tensor:
        total: Any = 0
        for _ in range(2):
            amplitude, phase = tasks.uniform(0.1, 5), tasks.uniform(0, math.pi)
            x = torch.from_numpy(tasks.uniform(-1, 1, (4, FEATURES))).float()
            y = amplitude * torch.sin(x.sum(1, keepdim=True) + phase)
            fast = dict(state["model"].named_parameters())
            loss = nn.functional.mse_loss(functional_call(state["model"], fast, x), y)
            slopes = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
            fast = {name: one - 0.01 * slope for (name, one), slope in zip(fast.items(), slopes, strict=True)}
            total = total + nn.functional.mse_loss(functional_call(state["model"], fast, x), y)
        return descend(state, total / 100)

    train(run, state, update, tasks=tasks)


@program("self-play: a window of games, sampled without replacement", is_exact=True)
def _self_play(run: Run) -> None:
    state: dict[str, Any] = {**new_state(), "games": deque(maxlen=8), "elo": {"now": 0, "best": None}}

    def update() -> torch.Tensor:
        with torch.no_grad():
            game = torch.randn(FEATURES)
            state["games"].append(game + 0.01 * state["model"](game))
        chosen = random.sample(list(state["games"]), min(SIZE, len(state["games"])))
        loss = fit(state, torch.stack(chosen))
        elo = state["elo"]
        elo["now"] = 0.9 * elo["now"] - loss.item()
        elo["best"] = elo["now"] if elo["best"] is None else max(elo["best"], elo["now"])
        return loss

    train(run, state, update)


@program("examples of pytorch: REINFORCE with a running reward", is_exact=True)
def _reinforce(run: Run) -> None:
    policy = nn.Sequential(nn.Linear(2, 6), nn.Dropout(0.3), nn.ReLU(), nn.Linear(6, 2))
    state: dict[str, Any] = {"policy": policy, "optimizer": torch.optim.Adam(policy.parameters(), 0.01), "env": Pole()}
    with run.callback() as checkpoint:
        state, start = checkpoint.restore_or_initialize(state, running_reward=10)
        running = checkpoint.extras["running_reward"]
        for step in range(start, run.total):
            logs, rewards = [], deque[float]()
            for _ in range(4):
                chances = torch.distributions.Categorical(logits=policy(torch.from_numpy(state["env"].observation)))
                action = chances.sample()
                logs.append(chances.log_prob(action))
                rewards.append(state["env"].step(int(action))[1])
            running = 0.05 * sum(rewards) + 0.95 * running
            loss = -torch.stack(logs).sum() * (sum(rewards) - running)
            descend(state, loss)
            if run.report(checkpoint, step + 1, state, loss.detach(), running_reward=running):
                break


@program("hard examples: weights by loss, lookahead of the weights", is_exact=True)
def _hard_examples(run: Run) -> None:
    state: dict[str, Any] = {**new_state(), "weights": torch.ones(EXAMPLES), "slow": None}
    values = examples()

    def update() -> torch.Tensor:
        chosen = torch.multinomial(state["weights"], SIZE)
        loss = descend(state, loss_of(state, values[chosen]))
        state["weights"][chosen] = loss + 0.1
        if state["slow"] is None:
            state["slow"] = [one.detach().clone() for one in state["model"].parameters()]
        for slow, fast in zip(state["slow"], state["model"].parameters(), strict=True):
            slow.lerp_(fast.detach(), 0.5)
            fast.data.copy_(slow)
        return loss

    train(run, state, update)
