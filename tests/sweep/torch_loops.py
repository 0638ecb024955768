"""torch programs with a loop of their own: data loaders, several runs, states that depend on the step."""

from __future__ import annotations

import importlib
import importlib.util
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

import holdfast as hf

from .cases import Run
from .torch_programs import FEATURES, batch, descend, network, update

TOTAL = 12

Loop = Callable[[Run], Any]  # trains, and returns everything that has to be equal


def _new_state(model: nn.Module) -> dict[str, Any]:
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=0.05)}


def _fit(state: Any, x: torch.Tensor) -> None:
    descend(state["optimizer"], nn.functional.mse_loss(state["model"](x), x.sum(1, keepdim=True)))


def train(run: Run, state: Any, step: Callable[[Any, int], object], **extras: Any) -> Any:
    """Train with a function that does a step with the state, and return the state."""
    with run.callback() as checkpoint:
        state, start = checkpoint.restore_or_initialize(state, **extras)
        for number in range(start + 1, run.total + 1):
            step(state, number)
            if run.report(checkpoint, number, state, **extras):
                break
    return state


# ---- data loaders


class Examples(Dataset[Any]):
    """Twelve examples; with noise that is drawn where they are made, if that is asked for."""

    def __init__(self, noise: bool = False) -> None:
        self.values = torch.linspace(-1, 1, 12 * FEATURES).view(12, FEATURES)
        self.noise = noise

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        value = self.values[index]
        return value + 0.1 * torch.randn(FEATURES) + random.random() + np.random.rand() if self.noise else value


class Lines(IterableDataset[Any]):
    """A stream that knows where it is; its workers take turns."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        first, stride = (0, 1) if info is None else (info.id, info.num_workers)
        while first + self.place * stride < 12:
            index = first + self.place * stride
            self.place += 1
            yield torch.full((FEATURES,), 0.1 * index)
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


def _stateful(run: Run, dataset: Callable[[], Any], **options: Any) -> Any:
    loaders: Any = importlib.import_module("torchdata.stateful_dataloader")
    run.seed()
    if options.get("generator"):
        options["generator"] = torch.Generator().manual_seed(5)
    loader = loaders.StatefulDataLoader(dataset(), batch_size=3, **options)
    with run.callback() as checkpoint:
        state, step = checkpoint.restore_or_initialize(_new_state(network()), data=loader)
        # The first loop over a stream that had ended yields nothing.
        for _ in range(step // 4, 3 + (dataset is Lines)):
            for x in loader:
                _fit(state, x)
                step += 1
                if run.report(checkpoint, step, state, data=loader) or step == run.total:
                    return state
    return state


def _skipped(run: Run) -> Any:
    run.seed()
    sampler: Any = DistributedSampler(Examples(), num_replicas=1, rank=0, seed=3)
    batches = hf.skip_to(DataLoader(Examples(noise=True), batch_size=3, sampler=sampler))
    return train(run, _new_state(network()), lambda state, _: _fit(state, next(batches)), data=batches)


def _resumable(run: Run, redraw: Any = "batches", **options: Any) -> Any:
    """Epochs of a plain loader, in a loop without a break that looks whether to stop."""
    run.seed()
    loader = hf.resumable(DataLoader(Examples(noise=redraw == "batches"), batch_size=3, **options), redraw=redraw)
    with run.callback() as checkpoint:
        state, step = checkpoint.restore_or_initialize(_new_state(network()), data=loader)
        for _ in range(loader.epoch, 3):
            for x in loader:
                _fit(state, x)
                step += 1
                run.report(checkpoint, step, state, data=loader)
                if step == run.total:
                    return state
    return state


def _in_memory(run: Run) -> Any:
    """Epochs without a loader: an order that is drawn anew, and slices of it."""
    run.seed()
    examples, order = Examples().values, torch.arange(12)
    with run.callback() as checkpoint:
        state, start = checkpoint.restore_or_initialize(_new_state(network()), order=order)
        order = checkpoint.extras["order"]
        for step in range(start, run.total):
            if step % 4 == 0:
                order = torch.randperm(12)
            _fit(state, examples[order[3 * (step % 4) :][:3]])
            if run.report(checkpoint, step + 1, state, order=order):
                break
    return {**state, "order": order}


# ---- generators


def _generators(run: Run) -> Any:
    """Draws from the generators of torch, numpy and Python, and from some of its own."""
    run.seed()
    own, python, torch_own = np.random.default_rng(1), random.Random(2), torch.Generator().manual_seed(3)

    def step(state: Any, _: int) -> None:
        order = np.arange(FEATURES)
        np.random.shuffle(order)
        x = batch()[0][:, order] + random.gauss(0, 1) + float(own.normal()) * python.random()
        _fit(state, x + torch.randn(1, generator=torch_own))

    state = train(run, _new_state(network()), step, numpy=own, python=python, torch=torch_own)
    return {**state, "own": [own, python, torch_own]}


# ---- states that depend on the step


def _groups_added(run: Run) -> Any:
    """A second layer with a group of its own from the fifth step on: the program asks before it builds."""
    run.seed()
    state = _new_state(nn.Sequential(nn.Linear(FEATURES, FEATURES)))

    def grow() -> None:
        state["model"].append(nn.Linear(FEATURES, 1))
        state["optimizer"].add_param_group({"params": list(state["model"][-1].parameters()), "lr": 0.01})

    with run.callback() as checkpoint:
        found = checkpoint.peek()
        if found is not None and found.step is not None and found.step > 4:
            grow()
        _, start = checkpoint.restore_or_initialize(state)
        for step in range(start + 1, run.total + 1):
            if step == 5:
                grow()
            update(state["model"], state["optimizer"])
            if run.report(checkpoint, step, state):
                break
    return state


def _activation_checkpointing(run: Run) -> Any:
    """Activation checkpointing, which every other start switches on."""
    run.seed()
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.Sequential(nn.Tanh(), nn.Linear(8, 8)), nn.Linear(8, 1))
    if run.turn % 2:
        model[1] = checkpoint_wrapper.checkpoint_wrapper(model[1])
    state = train(run, _new_state(model), lambda state, _: update(model, state["optimizer"]))
    return {"parameters": list(model.parameters()), "optimizer": state["optimizer"]}


# ---- several runs in one program


def _pretrained(run: Run) -> Any:
    """Four steps of pretraining, and then the head of a classifier on what they have made."""
    run.seed()
    body = nn.Linear(FEATURES, FEATURES)
    first = {"model": body, "optimizer": torch.optim.Adam(body.parameters(), lr=0.05)}
    with run.callback("-pretraining") as checkpoint:
        _, start = checkpoint.restore_or_initialize(first)
        for step in range(start + 1, min(4, run.total) + 1):
            update(body, first["optimizer"])
            if run.report(checkpoint, step, first):
                return first
    model = nn.Sequential(body.requires_grad_(False), nn.Dropout(0.2), nn.Linear(FEATURES, 1))
    second = {"model": model, "optimizer": torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)}
    with run.callback("-finetuning") as checkpoint:
        _, start = checkpoint.restore_or_initialize(second)
        for step in range(start + 1, run.total - 4 + 1):
            update(model, second["optimizer"])
            if run.report(checkpoint, step, second, before=4):
                return second
    return [first, second]


# ---- other libraries around the loop


def _accelerated(run: Run) -> Any:
    """Accelerate with gradients that are accumulated over the two batches of a step."""
    accelerate: Any = importlib.import_module("accelerate")
    run.seed()
    model = network()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    schedule = torch.optim.lr_scheduler
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    prepared = accelerator.prepare(model, optimizer, schedule.LambdaLR(optimizer, lambda step: 1 / (1 + step)))

    def step(state: Any, _: int) -> None:
        for x, y in (batch(), batch()):
            with accelerator.accumulate(state["model"]):
                accelerator.backward(nn.functional.mse_loss(state["model"](x), y))
                state["optimizer"].step()
                state["schedule"].step()
                state["optimizer"].zero_grad()

    return train(run, dict(zip(("model", "optimizer", "schedule"), prepared, strict=True)), step)


def _fabric(run: Run) -> Any:
    fabric = importlib.import_module("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    run.seed()
    model = network()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.05))

    def step(*_: Any) -> None:
        x, y = batch()
        optimizer.zero_grad()
        fabric.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()

    return train(run, {"model": model, "optimizer": optimizer}, step)


def _noisy() -> Examples:
    return Examples(noise=True)


LOOPS: dict[str, Loop] = {
    "a stateful loader": partial(_stateful, dataset=Examples),
    "a stateful loader that shuffles": partial(_stateful, dataset=Examples, shuffle=True),
    "a stateful loader with a generator": partial(_stateful, dataset=Examples, shuffle=True, generator=True),
    "a stateful loader of noise": partial(_stateful, dataset=_noisy, shuffle=True),
    "a stateful loader over a stream": partial(_stateful, dataset=Lines),
    "two workers": partial(_stateful, dataset=Examples, num_workers=2),
    "two workers that shuffle": partial(_stateful, dataset=Examples, num_workers=2, shuffle=True),
    "two workers over a stream": partial(_stateful, dataset=Lines, num_workers=2),
    "two persistent workers": partial(
        _stateful, dataset=Examples, num_workers=2, shuffle=True, persistent_workers=True
    ),
    "skip_to": _skipped,
    "resumable": partial(_resumable, shuffle=True),
    "resumable, by indices": partial(_resumable, redraw="indices", shuffle=True),
    "resumable, two workers": partial(_resumable, redraw="indices", shuffle=True, num_workers=2),
    "slices in memory": _in_memory,
    "generators": _generators,
    "a group that is added": _groups_added,
    "activation checkpointing": _activation_checkpointing,
    "pretraining and finetuning": _pretrained,
    "Fabric": _fabric,
}
if importlib.util.find_spec("accelerate") is not None:
    LOOPS["Accelerate"] = _accelerated
