"""Programs of torch in the form that public repositories give them, in small: all hand over what their next steps need.

Each is named after the repository, or the kind of program, whose loop it has.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import copy
import math
import random
from collections import defaultdict, deque
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, Subset, WeightedRandomSampler, random_split

import holdfast as hf

from .hidden_case import Run, program
from .hidden_programs import (
    EXAMPLES,
    FEATURES,
    SIZE,
    descend,
    epochs,
    examples,
    fit,
    loader_of,
    new_state,
    shuffled,
    train,
)


@program("nanoGPT: a batch ahead, a rate by iteration, accumulation")
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
            if run.report(checkpoint, step + 1, state, loss.detach(), batch=(x, y), best=best):
                break


class EarlyStopping:
    def __init__(self) -> None:
        self.best_score: float | None = None
        self.best_weights: Any = None
        self.counter = 0

    def __call__(self, score: float, model: nn.Module) -> None:
        if self.best_score is None or score < self.best_score:
            self.best_score, self.best_weights, self.counter = score, copy.deepcopy(model.state_dict()), 0
        else:
            self.counter += 1


@program("early stopping with the best weights, and a plateau")
def _early_stopping(run: Run) -> None:
    state: dict[str, Any] = {**new_state(), "stopper": EarlyStopping(), "losses": []}
    state["plateau"] = torch.optim.lr_scheduler.ReduceLROnPlateau(state["optimizer"], patience=0, factor=0.5)

    def update(batch: torch.Tensor) -> torch.Tensor:
        loss = fit(state, batch)
        state["losses"].append(loss.item())
        return loss

    def at_end() -> None:
        state["plateau"].step(state["losses"][-1])
        state["stopper"](state["losses"][-1], state["model"])

    epochs(run, state, shuffled(), update, at_end)


class Pole:
    def __init__(self) -> None:
        self.observation = np.zeros(2, np.float32)

    def step(self, action: int) -> tuple[Any, float]:
        push = 0.1 * (2 * action - 1) + 0.01 * np.random.randn()
        self.observation = (self.observation * 0.9 + np.array([push, random.random() * 0.1])).astype(np.float32)
        return self.observation, float(-np.abs(self.observation).sum())


@program("CleanRL: PPO with shuffled minibatches and a normalised reward")
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


@program("MoCo: a queue of keys, a momentum encoder, two views")
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


@program("self-play: a window of games, sampled without replacement")
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


@program("AlphaZero: a tree of visits in dictionaries, moves by temperature")
def _tree_search(run: Run) -> None:
    state: dict[str, Any] = {**new_state(), "visits": {}, "values": {}, "games": []}

    def update() -> torch.Tensor:
        place = "root"
        for _ in range(3):
            options = [f"{place}/{number}" for number in range(2)]
            counts = np.array([state["visits"].get(option, 0) + 1.0 for option in options])
            place = str(np.random.choice(options, p=counts / counts.sum()))
            state["visits"][place] = state["visits"].get(place, 0) + 1
            state["values"][place] = 0.5 * state["values"].get(place, 0.0) + random.random()
        state["games"] = [*state["games"][-5:], [state["values"][place], len(state["visits"]), 1.0, 0.5]]
        return fit(state, torch.tensor(random.choices(state["games"], k=SIZE)))

    train(run, state, update)


@program("word language model: a hidden state that is carried over batches")
def _carried(run: Run) -> None:
    text = (torch.arange(120) * 5) % 11
    columns = text.view(4, -1).t().contiguous()
    embed, rnn, decode = nn.Embedding(11, 6), nn.LSTM(6, 6), nn.Linear(6, 11)
    model = nn.ModuleList([embed, rnn, decode])
    state: dict[str, Any] = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.5)}
    hidden = (torch.zeros(1, 4, 6), torch.zeros(1, 4, 6))
    with run.callback() as checkpoint:
        state, first = checkpoint.restore_or_initialize(state, hidden=hidden)
        hidden = checkpoint.extras["hidden"]
        for step in range(first, run.total):
            start = step * 3 % 27
            found, hidden = rnn(embed(columns[start : start + 2]), tuple(one.detach() for one in hidden))
            loss = nn.functional.cross_entropy(decode(found).flatten(0, 1), columns[start + 1 : start + 3].flatten())
            state["optimizer"].zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            state["optimizer"].step()
            kept = tuple(one.detach() for one in hidden)
            if run.report(checkpoint, step + 1, state, loss.detach(), hidden=kept):
                break


@program("knowledge distillation: a frozen teacher, a temperature that cools at each epoch")
def _distillation(run: Run) -> None:
    teacher = nn.Linear(FEATURES, 3).requires_grad_(False)
    student = nn.Sequential(nn.Linear(FEATURES, 4), nn.Dropout(0.2), nn.Linear(4, 3))
    state: dict[str, Any] = {"student": student, "teacher": teacher, "temperature": 4.0}
    state["optimizer"] = torch.optim.NAdam(student.parameters(), 0.02)
    state["schedule"] = torch.optim.lr_scheduler.MultiStepLR(state["optimizer"], [1, 3], gamma=0.5)

    def update(batch: torch.Tensor) -> torch.Tensor:
        soft = nn.functional.log_softmax(student(batch) / state["temperature"], 1)
        aim = nn.functional.softmax(teacher(batch) / state["temperature"], 1)
        return descend(state, nn.functional.kl_div(soft, aim, reduction="batchmean") * state["temperature"] ** 2)

    def at_end() -> None:
        state["schedule"].step()
        state["temperature"] = max(1.0, 0.8 * state["temperature"])

    epochs(run, state, shuffled(), update, at_end)


@program("cross-validation by random_split, a weighted sampler with a generator")
def _weighted(run: Run) -> None:
    parts = random_split(range(EXAMPLES), [6, 4], torch.Generator().manual_seed(1))  # type: ignore[arg-type, var-annotated]
    both: Any = ConcatDataset([Subset(examples(), list(part.indices)) for part in parts])  # type: ignore[arg-type]
    sampler = WeightedRandomSampler(
        [1.0 + index % 3 for index in range(EXAMPLES)], EXAMPLES, generator=torch.Generator()
    )
    loader: Any = hf.resumable(DataLoader(both, batch_sampler=BatchSampler(sampler, SIZE, drop_last=True)))
    state = new_state()
    epochs(run, state, loader, lambda batch: fit(state, batch))


@program("federated averaging: clients with optimizers of their own, some of them each round")
def _federated(run: Run) -> None:
    values = examples()
    server = nn.Linear(FEATURES, 1)
    clients = [copy.deepcopy(server) for _ in range(3)]
    optimizers = [torch.optim.SGD(client.parameters(), 0.05, momentum=0.5) for client in clients]
    state: dict[str, Any] = {"server": server, "clients": clients, "optimizers": optimizers, "rounds": defaultdict(int)}

    def update() -> torch.Tensor:
        total = torch.zeros(())
        chosen = sorted(random.sample(range(3), 2))
        for number in chosen:
            clients[number].load_state_dict(server.state_dict())
            for _ in range(2):
                x = values[torch.randint(EXAMPLES, (SIZE,))]
                loss = nn.functional.mse_loss(clients[number](x), x.sum(1, keepdim=True))
                total += descend({"optimizer": optimizers[number]}, loss)
            state["rounds"][number] += 1
        with torch.no_grad():
            for name, parameter in server.named_parameters():
                parameter.copy_(torch.stack([dict(clients[n].named_parameters())[name] for n in chosen]).mean(0))
        return total

    train(run, state, update)


@program("loss weights by uncertainty, GradNorm's first losses, several schedules")
def _multi_task(run: Run) -> None:
    trunk, heads = nn.Linear(FEATURES, 4), nn.ModuleList([nn.Linear(4, 1) for _ in range(2)])
    weights = nn.Parameter(torch.zeros(2))
    groups: list[dict[str, Any]] = [{"params": [*trunk.parameters(), *heads.parameters()]}, {"params": [weights]}]
    optimizer = torch.optim.Adam(groups)
    first = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
    later = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    state: dict[str, Any] = {"trunk": trunk, "heads": heads, "weights": weights, "optimizer": optimizer}
    state["schedule"] = torch.optim.lr_scheduler.SequentialLR(optimizer, [first, later], [4])
    state["first losses"] = torch.zeros(2)

    def update(batch: torch.Tensor) -> torch.Tensor:
        seen = torch.tanh(trunk(batch))
        losses = torch.stack([(heads[0](seen)[:, 0] - batch.sum(1)).square().mean(), heads[1](seen).square().mean()])
        if not state["first losses"].any():
            state["first losses"].copy_(losses.detach())
        ratios = losses.detach() / state["first losses"].clamp(min=1e-3)
        loss = descend(state, (losses * torch.exp(-weights) * ratios).sum() + weights.sum())
        state["schedule"].step()
        return loss

    epochs(run, state, shuffled(), update)


@program("gaussian-splatting: points that are split and pruned, moments that follow them")
def _splatting(run: Run) -> None:
    views = examples()
    rates = {"places": 0.02, "opacities": 0.05}

    def build(count: int) -> dict[str, Any]:
        points = {"places": nn.Parameter(torch.randn(count, 2)), "opacities": nn.Parameter(torch.zeros(count))}
        groups = [{"params": [points[name]], "lr": rate, "name": name} for name, rate in rates.items()]
        optimizer = torch.optim.Adam(groups, 0.0, eps=1e-15)
        return {**points, "optimizer": optimizer, "slopes": torch.zeros(count), "stack": list(range(EXAMPLES))}

    def replace(state: dict[str, Any], chosen: torch.Tensor) -> None:
        for group in state["optimizer"].param_groups:
            before, name = group["params"][0], group["name"]
            moments = state["optimizer"].state.pop(before)
            after = state[name] = group["params"][0] = nn.Parameter(before.detach()[chosen])
            kept = {key: moments[key][chosen] for key in ("exp_avg", "exp_avg_sq")}
            state["optimizer"].state[after] = {**moments, **kept}

    def densify(state: dict[str, Any]) -> None:
        count = len(state["slopes"])
        steep = (state["slopes"] >= state["slopes"].median()).nonzero()[:2, 0]
        opaque = state["opacities"].detach().argsort(descending=True)[: count - 1].sort().values
        replace(state, torch.cat([opaque, steep]))
        with torch.no_grad():
            state["places"][-len(steep) :].add_(0.1 * torch.randn(len(steep), 2))
        state["slopes"] = torch.zeros(count - 1 + len(steep))

    with run.callback() as checkpoint:
        found = checkpoint.peek()
        state, start = checkpoint.restore_or_initialize(build(found.extras["count"] if found else 4), count=4)
        for step in range(start + 1, run.total + 1):
            if not state["stack"]:
                state["stack"] = list(range(EXAMPLES))
            view = views[state["stack"].pop(random.randint(0, len(state["stack"]) - 1))]
            state["optimizer"].param_groups[0]["lr"] = 0.02 * 0.1 ** (step / run.total)
            near = torch.exp(-(state["places"] - view[:2]).square().sum(1)) * torch.sigmoid(state["opacities"])
            loss = (near.sum() - view[2:].sum()).square()
            state["optimizer"].zero_grad(set_to_none=True)
            loss.backward()
            state["slopes"] += state["places"].grad.norm(dim=1)
            state["optimizer"].step()
            if step % 4 == 0:
                densify(state)
            if run.report(checkpoint, step, state, loss.detach(), count=len(state["slopes"])):
                break
