"""More programs of torch in the form of public repositories, in small: agents, language, images and odd optimizers.

Each is named after the repository, or the kind of program, whose loop it has, and hands over what its next steps need.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import copy
import heapq
import math
import random
from collections import Counter, defaultdict, deque
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, Subset, WeightedRandomSampler, random_split

import holdfast as hf

from .hidden_case import Run, program
from .hidden_programs import EPOCH, EXAMPLES, FEATURES, SIZE, descend, examples, fit, loss_of, new_state, train


def epochs(run: Run, state: dict[str, Any], loader: Any, update: Any, at_end: Any = lambda: None, **more: Any) -> None:
    """Train in nested loops over epochs; ``update`` returns the loss of a batch, ``at_end`` follows each epoch."""
    with run.callback() as checkpoint:
        state, step = checkpoint.restore_or_initialize(state, data=loader, **more)
        while step < run.total:
            for batch in loader:
                loss = update(batch)
                step += 1
                if step % EPOCH == 0:
                    at_end()
                if run.report(checkpoint, step, state, loss, data=loader, batch=batch, **more):
                    return


class SumTree:
    """Priorities of transitions, and their sums."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.at, self.count = capacity, 0, 0
        self.tree = np.zeros(2 * capacity - 1)
        self.data = np.zeros((capacity, FEATURES), np.float32)

    def update(self, index: int, priority: float) -> None:
        change = priority - self.tree[index]
        while True:
            self.tree[index] += change
            if index == 0:
                return
            index = (index - 1) // 2

    def add(self, value: Any, priority: float) -> None:
        self.data[self.at] = value
        self.update(self.at + self.capacity - 1, priority)
        self.at, self.count = (self.at + 1) % self.capacity, min(self.count + 1, self.capacity)

    def get(self, sought: float) -> int:
        index = 0
        while index < self.capacity - 1:
            left = 2 * index + 1
            index, sought = (left, sought) if sought <= self.tree[left] else (left + 1, sought - self.tree[left])
        return index


@program("prioritised replay: a tree of sums, a weight that is annealed", is_exact=True)
def _prioritised(run: Run) -> None:
    state: dict[str, Any] = {**new_state(), "tree": SumTree(8), "beta": 0.4}

    def update() -> torch.Tensor:
        tree = state["tree"]
        tree.add(np.random.randn(FEATURES), 1.0)
        total = tree.tree[0]
        chosen = [tree.get(random.uniform(total * i / SIZE, total * (i + 1) / SIZE)) for i in range(SIZE)]
        x = torch.from_numpy(tree.data[[index - tree.capacity + 1 for index in chosen]])
        state["beta"] = min(1.0, state["beta"] + 0.03)
        weights = torch.tensor([(tree.count * tree.tree[i] / total) ** -state["beta"] for i in chosen]).float()
        errors = (state["model"](x) - x.sum(1, keepdim=True)).square()[:, 0]
        for index, error in zip(chosen, errors.tolist(), strict=True):
            tree.update(index, (abs(error) + 0.01) ** 0.6)
        return descend(state, (weights / weights.max() * errors).mean())

    train(run, state, update)


@program("stable-baselines: a vector of environments, a normaliser of returns", is_exact=True)
def _vector_of_environments(run: Run) -> None:
    environments = [{"place": 0.0, "generator": np.random.default_rng(seed), "steps": 0} for seed in range(3)]
    state: dict[str, Any] = {**new_state(), "environments": environments, "mean": np.zeros(FEATURES), "count": 1e-4}

    def update() -> torch.Tensor:
        rows = []
        for one in state["environments"]:
            one["place"] = 0.9 * one["place"] + one["generator"].normal()
            one["steps"] = (one["steps"] + 1) % 7
            rows.append([one["place"], one["steps"], one["generator"].random(), 1.0])
        seen = np.array(rows)
        state["count"] += len(seen)
        state["mean"] += (seen - state["mean"]).sum(0) / state["count"]
        return fit(state, torch.from_numpy(seen - state["mean"]).float())

    train(run, state, update)


@program("TD3: noise of its own process, an actor that is updated every other step", is_exact=True)
def _delayed(run: Run) -> None:
    actor, critic = nn.Linear(FEATURES, 1), nn.Linear(FEATURES + 1, 1)
    state: dict[str, Any] = {"actor": actor, "critic": critic, "target": copy.deepcopy(critic), "noise": np.zeros(1)}
    state["actor_optimizer"] = torch.optim.Adam(actor.parameters(), 0.01)
    state["critic_optimizer"] = torch.optim.Adam(critic.parameters(), 0.01)
    state["updates"] = 0

    def update() -> torch.Tensor:
        state["noise"] += 0.15 * (0 - state["noise"]) + 0.2 * np.random.randn(1)
        x = torch.randn(SIZE, FEATURES)
        with torch.no_grad():
            action = torch.tanh(actor(x)) + torch.from_numpy(state["noise"]).float()
            aim = x.sum(1, keepdim=True) + 0.5 * state["target"](torch.cat([x, action], 1))
        loss = nn.functional.mse_loss(critic(torch.cat([x, action], 1)), aim)
        descend({"optimizer": state["critic_optimizer"]}, loss)
        state["updates"] += 1
        if state["updates"] % 2 == 0:
            descend({"optimizer": state["actor_optimizer"]}, -critic(torch.cat([x, torch.tanh(actor(x))], 1)).mean())
            for slow, fast in zip(state["target"].parameters(), critic.parameters(), strict=True):
                slow.data.mul_(0.9).add_(fast.data, alpha=0.1)
        return loss.detach()

    train(run, state, update)


@program("AlphaZero: a tree of visits in dictionaries, moves by temperature", is_exact=True)
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


@program("fairseq's form: length buckets, an order by epoch, a scaler that backs off", is_exact=True)
def _buckets(run: Run) -> None:
    lengths = [1 + 3 * index % 4 for index in range(EXAMPLES)]
    state: dict[str, Any] = {**new_state(), "scale": 128.0, "good": 0}
    values = examples()

    def update(epoch: int, at: int) -> torch.Tensor:
        order = np.random.RandomState(1 + epoch).permutation(EXAMPLES)
        order = order[np.argsort([lengths[index] for index in order], kind="mergesort")]
        batches = [order[start : start + SIZE] for start in range(0, EXAMPLES, SIZE)]
        np.random.RandomState(100 + epoch).shuffle(batches)
        loss = loss_of(state, values[batches[at]])
        state["optimizer"].zero_grad()
        (loss * state["scale"]).backward()
        if (epoch * EPOCH + at) % 7 == 3:  # an overflow
            state["scale"], state["good"] = state["scale"] / 2, 0
        else:
            for parameter in state["model"].parameters():
                parameter.grad /= state["scale"]
            state["optimizer"].step()
            state["good"] += 1
            state["scale"] *= 2 if state["good"] % 5 == 0 else 1
        return loss.detach()

    with run.callback() as checkpoint:
        state, step = checkpoint.restore_or_initialize(state)
        while step < run.total:
            loss = update(*divmod(step, EPOCH))
            step += 1
            if run.report(checkpoint, step, state, loss, epoch=(step - 1) // EPOCH):
                break


@program("word language model: a hidden state that is carried over batches", is_exact=True)
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


@program("word2vec: sparse gradients, negatives by frequency", is_exact=True)
def _word2vec(run: Run) -> None:
    words = nn.Embedding(20, 4, sparse=True)
    state: dict[str, Any] = {"model": words, "optimizer": torch.optim.SparseAdam(words.parameters(), 0.05)}
    counts = Counter({word: 1 + word % 5 for word in range(20)})
    state["counts"] = dict(counts)

    def update() -> torch.Tensor:
        chances = np.array([state["counts"][word] for word in range(20)]) ** 0.75
        centre, context = torch.randint(20, (2, 3))
        negatives = torch.from_numpy(np.random.choice(20, (3, 2), p=chances / chances.sum()))
        close = (words(centre) * words(context)).sum(1)
        far = (words(centre)[:, None] * words(negatives)).sum(2)
        for word in centre.tolist():
            state["counts"][word] += 1
        return descend(state, -nn.functional.logsigmoid(close).mean() - nn.functional.logsigmoid(-far).mean())

    train(run, state, update)


@program("VQ-VAE: a codebook of averages, dead codes that are drawn again", is_exact=True)
def _codebook(run: Run) -> None:
    class Codebook(nn.Module):
        codes: torch.Tensor
        sizes: torch.Tensor
        sums: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = nn.Linear(FEATURES, 3), nn.Linear(3, FEATURES)
            self.register_buffer("codes", torch.randn(5, 3))
            self.register_buffer("sizes", torch.ones(5))
            self.register_buffer("sums", torch.randn(5, 3))

        def forward(self, x: Any) -> Any:
            z = self.encode(x)
            nearest = torch.cdist(z, self.codes).argmin(1)
            hot = nn.functional.one_hot(nearest, 5).float()
            with torch.no_grad():
                self.sizes.mul_(0.8).add_(hot.sum(0), alpha=0.2)
                self.sums.mul_(0.8).add_(hot.t() @ z, alpha=0.2)
                self.codes.copy_(self.sums / self.sizes[:, None].clamp(min=1e-3))
                dead = self.sizes < 0.1
                self.codes[dead] = torch.randn(int(dead.sum()), 3)
            straight = z + (self.codes[nearest] - z).detach()
            return nn.functional.mse_loss(self.decode(straight), x)

    model = Codebook()
    state: dict[str, Any] = {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), 0.01)}
    loader: Any = hf.resumable(DataLoader(examples(), batch_size=SIZE, shuffle=True))  # type: ignore[arg-type]
    epochs(run, state, loader, lambda batch: descend(state, model(batch)))


@program("StyleGAN's augmentation: a chance that follows the critic's signs", is_exact=True)
def _augmented(run: Run) -> None:
    generator, critic = nn.Linear(2, FEATURES), nn.Linear(FEATURES, 1)
    state: dict[str, Any] = {"g": generator, "d": critic, "p": torch.zeros(()), "signs": deque(maxlen=4)}
    state["g_optimizer"] = torch.optim.Adam(generator.parameters(), 0.01, betas=(0.0, 0.99))
    state["d_optimizer"] = torch.optim.Adam(critic.parameters(), 0.01, betas=(0.0, 0.99))
    state["average"] = torch.zeros(2)  # of latents

    def augmented(x: torch.Tensor) -> torch.Tensor:
        flips = torch.rand(len(x), 1) < state["p"]
        return torch.where(flips, -x, x)

    def update(batch: torch.Tensor) -> torch.Tensor:
        latent = torch.randn(SIZE, 2)
        state["average"].lerp_(latent.mean(0), 0.1)
        fake = generator(latent)
        critical = critic(augmented(batch))
        loss = (
            nn.functional.softplus(critic(augmented(fake.detach()))).mean() + nn.functional.softplus(-critical).mean()
        )
        descend({"optimizer": state["d_optimizer"]}, loss)
        state["signs"].append(float(critical.detach().sign().mean()))
        change = 0.05 * math.copysign(1, sum(state["signs"]) / len(state["signs"]) - 0.6)
        state["p"].add_(change).clamp_(0, 1)
        descend({"optimizer": state["g_optimizer"]}, nn.functional.softplus(-critic(augmented(fake))).mean())
        return loss.detach()

    loader: Any = hf.resumable(DataLoader(examples(), batch_size=SIZE, shuffle=True))  # type: ignore[arg-type]
    epochs(run, state, loader, update)


@program("knowledge distillation: a frozen teacher, a temperature that cools at each epoch", is_exact=True)
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

    loader: Any = hf.resumable(DataLoader(examples(), batch_size=SIZE, shuffle=True))  # type: ignore[arg-type]
    epochs(run, state, loader, update, at_end)


@program("cross-validation by random_split, a weighted sampler with a generator", is_exact=True)
def _weighted(run: Run) -> None:
    parts = random_split(range(EXAMPLES), [6, 4], torch.Generator().manual_seed(1))  # type: ignore[arg-type, var-annotated]
    both: Any = ConcatDataset([Subset(examples(), list(part.indices)) for part in parts])  # type: ignore[arg-type]
    sampler = WeightedRandomSampler(
        [1.0 + index % 3 for index in range(EXAMPLES)], EXAMPLES, generator=torch.Generator()
    )
    loader: Any = hf.resumable(DataLoader(both, batch_sampler=BatchSampler(sampler, SIZE, drop_last=True)))
    state = new_state()
    epochs(run, state, loader, lambda batch: fit(state, batch))


@program("active learning: a pool of indices, the uncertain ones are labelled", is_exact=True)
def _active(run: Run) -> None:
    values = examples()
    state: dict[str, Any] = {**new_state(), "labelled": [0, 1], "pool": list(range(2, EXAMPLES))}

    def update() -> torch.Tensor:
        chosen = np.random.choice(state["labelled"], SIZE)
        loss = fit(state, values[chosen])
        if state["pool"] and len(state["labelled"]) < 8:
            with torch.no_grad():
                scores = (state["model"](values[state["pool"]])[:, 0] + 0.1 * torch.randn(len(state["pool"]))).abs()
            state["labelled"].append(state["pool"].pop(int(scores.argmin())))
        return loss

    train(run, state, update)


@program("OHEM: a heap of hard examples, drawn with fresh ones", is_exact=True)
def _heap(run: Run) -> None:
    values = examples()
    state: dict[str, Any] = {**new_state(), "heap": []}

    def update() -> torch.Tensor:
        fresh = random.sample(range(EXAMPLES), 2)
        hard = [heapq.heappop(state["heap"])[1] for _ in range(min(1, len(state["heap"])))]
        chosen = [*fresh, *hard]
        errors = (state["model"](values[chosen])[:, 0] - values[chosen].sum(1)).square()
        for index, error in zip(chosen, errors.tolist(), strict=True):
            heapq.heappush(state["heap"], [-error, index])
        state["heap"] = heapq.nsmallest(6, state["heap"])
        return descend(state, errors.mean())

    train(run, state, update)


@program("federated averaging: clients with optimizers of their own, some of them each round", is_exact=True)
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


@program("gradual pruning: masks of weights, tighter every few steps", is_exact=True)
def _pruned(run: Run) -> None:
    class Masked(nn.Module):
        mask: torch.Tensor

        def __init__(self, shape: torch.Size) -> None:
            super().__init__()
            self.register_buffer("mask", torch.ones(shape))

        def forward(self, weight: Any) -> Any:
            return weight * self.mask

    layer = nn.Linear(FEATURES, 6)
    parametrize.register_parametrization(layer, "weight", Masked(layer.weight.shape))
    model = nn.Sequential(layer, nn.Tanh(), nn.Linear(6, 1))
    state: dict[str, Any] = {"model": model, "optimizer": torch.optim.RMSprop(model.parameters(), 0.01)}
    state["sparsity"] = 0.0

    def update() -> torch.Tensor:
        x = torch.randn(SIZE, FEATURES)
        loss = fit(state, x)
        state["sparsity"] = min(0.6, state["sparsity"] + 0.05)
        mask: Any = layer.parametrizations["weight"][0]  # type: ignore[index]
        with torch.no_grad():
            weight = layer.weight.abs()
            mask.mask.copy_((weight > weight.flatten().quantile(state["sparsity"])).float())
        return loss

    train(run, state, update)


@program("loss weights by uncertainty, GradNorm's first losses, several schedules", is_exact=True)
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

    loader: Any = hf.resumable(DataLoader(examples(), batch_size=SIZE, shuffle=True))  # type: ignore[arg-type]
    epochs(run, state, loader, update)


@program("neural style: an image is the parameter, L-BFGS with its closures", is_exact=True)
def _lbfgs(run: Run) -> None:
    features = nn.Linear(FEATURES, 6).requires_grad_(False)
    image = nn.Parameter(torch.randn(3, FEATURES))
    optimizer = torch.optim.LBFGS([image], lr=0.3, max_iter=2, history_size=4)
    state: dict[str, Any] = {"image": image, "features": features, "optimizer": optimizer}

    def update() -> torch.Tensor:
        noise = 0.01 * torch.randn(3, FEATURES)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            seen = features(image + noise)
            loss: torch.Tensor = (seen.t() @ seen - torch.eye(6)).square().mean()
            loss.backward()
            return loss

        found: torch.Tensor = optimizer.step(closure).detach()
        return found

    train(run, state, update)


@program("Langevin dynamics: samples that are kept for the next step, a temperature", is_exact=True)
def _energy(run: Run) -> None:
    energy = nn.Sequential(nn.Linear(FEATURES, 8), nn.SiLU(), nn.Linear(8, 1))
    state: dict[str, Any] = {"model": energy, "optimizer": torch.optim.Adamax(energy.parameters(), 0.01)}
    state["buffer"] = torch.rand(8, FEATURES)

    def update(batch: torch.Tensor) -> torch.Tensor:
        chosen = torch.randint(8, (SIZE,))
        fresh = torch.rand(SIZE, 1) < 0.05
        samples = torch.where(fresh, torch.rand(SIZE, FEATURES), state["buffer"][chosen]).requires_grad_()
        for _ in range(3):
            (slope,) = torch.autograd.grad(energy(samples).sum(), samples)
            samples = (samples - 0.1 * slope + 0.01 * torch.randn_like(samples)).detach().requires_grad_()
        state["buffer"][chosen] = samples.detach()
        high, low = energy(samples.detach()), energy(batch)
        return descend(state, (low - high).mean() + 0.1 * (low.square() + high.square()).mean())

    loader: Any = hf.resumable(DataLoader(examples(), batch_size=SIZE, shuffle=True))  # type: ignore[arg-type]
    epochs(run, state, loader, update)


@program("PyG: a temporal graph, memories and last neighbours of nodes, emptied at each epoch", is_exact=True)
def _temporal_graph(run: Run) -> None:
    times = torch.arange(EXAMPLES)
    sources, targets, messages = 7 * times % 4, 4 + 5 * times % 4, examples()  # between four users and four items
    memory, embed, link = nn.GRUCell(FEATURES + 3, 3), nn.Linear(6, 3), nn.Bilinear(3, 3, 1)
    model = nn.ModuleList([memory, embed, link])
    state: dict[str, Any] = {"model": model, "optimizer": torch.optim.Adam(model.parameters(), 0.02), "events": {}}
    state |= {"memories": torch.zeros(8, 3), "updated": torch.zeros(8), "neighbours": torch.full((8, 2), -1)}

    def remembered() -> torch.Tensor:
        values = list(state["memories"])
        for node, message in state["events"].items():
            values[node] = memory(message[None], values[node][None])[0]
        return torch.stack(values)

    def update() -> torch.Tensor:
        start = state["optimizer"].state[embed.weight].get("step", torch.zeros(())).int().item() % EPOCH * SIZE
        if start == 0:
            state["events"].clear()
            state["memories"].zero_()
            state["updated"].zero_()
            state["neighbours"].fill_(-1)
        now = slice(start, start + SIZE)
        values = remembered()
        near = torch.where(state["neighbours"][:, :, None] < 0, 0, values[state["neighbours"]]).mean(1)
        ages = torch.exp(-(start - state["updated"]) / EXAMPLES)[:, None]
        seen = torch.tanh(embed(torch.cat([values, near * ages], 1)))
        close, far = (
            link(seen[sources[now]], seen[targets[now]]),
            link(seen[sources[now]], seen[torch.randint(4, 8, (SIZE,))]),
        )
        loss = descend(state, (nn.functional.softplus(-close) + nn.functional.softplus(far)).mean())
        state["memories"].copy_(values.detach())
        for time, source, target in zip(times[now].tolist(), sources[now].tolist(), targets[now].tolist(), strict=True):
            for node, other in ((source, target), (target, source)):
                state["events"][node] = torch.cat([messages[time], values[other].detach()])
                state["updated"][node] = time
                state["neighbours"][node] = torch.tensor([other, int(state["neighbours"][node, 0])])
        return loss

    train(run, state, update)


@program("gaussian-splatting: points that are split and pruned, moments that follow them", is_exact=True)
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
