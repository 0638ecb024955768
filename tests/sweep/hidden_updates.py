"""Programs whose updates depend on something that they do not hand over: counters, averages, caches, settings."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import os
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from .hidden_case import Run, program
from .hidden_programs import (
    EPOCH,
    EXAMPLES,
    FEATURES,
    SIZE,
    Batches,
    descend,
    examples,
    fit,
    loss_of,
    new_state,
    train,
)

# ---- counters and flags


@program("a warm-up counter in a closure")
def _warm_up(run: Run) -> None:
    state, batches = new_state(), Batches()

    def warm_up() -> Callable[[], None]:
        updates = 0

        def set_rate() -> None:
            nonlocal updates
            updates += 1
            state["optimizer"].param_groups[0]["lr"] = 0.05 * min(1.0, updates / 15)

        return set_rate

    set_rate = warm_up()

    def update() -> Any:
        set_rate()
        return fit(state, next(batches))

    train(run, state, update, data=batches)


@program("a schedule of torch")
def _schedule(run: Run) -> None:
    state, batches = new_state(), Batches()
    schedule = torch.optim.lr_scheduler.LambdaLR(state["optimizer"], lambda done: 0.9**done)

    def update() -> Any:
        loss = fit(state, next(batches))
        schedule.step()
        return loss

    train(run, state, update, data=batches)


class Rate:
    """A learning rate that goes up and down."""

    __slots__ = ("done", "optimizer")

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.done = optimizer, 0

    def step(self) -> None:
        """Set the rate of the next update."""
        self.done += 1
        self.optimizer.param_groups[0]["lr"] = 0.01 + 0.01 * abs(7 - self.done % 14)


@program("a schedule with slots")
def _slots(run: Run) -> None:
    state, batches = new_state(), Batches()
    rate = Rate(state["optimizer"])

    def update() -> Any:
        rate.step()
        return fit(state, next(batches))

    train(run, state, update, data=batches)


class Deep(nn.Module):
    """Counts its calls in the class, for a noise that declines."""

    calls: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Deep.calls += 1
        return self.layer(x * (1 + 1 / Deep.calls))  # type: ignore[no-any-return]


@program("an attribute of a class")
def _class_attribute(run: Run) -> None:
    Deep.calls = 0
    batches, model = Batches(), Deep()
    state = {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=0.05)}
    train(run, state, lambda: fit(state, next(batches)), data=batches)


EPOCHS = SimpleNamespace(done=0)


@program("epochs in a global")
def _epochs_in_a_global(run: Run) -> None:
    """Every epoch has an order of its own, and the program resumes within the epoch, as it computes the place."""
    EPOCHS.done = 0
    state, values = new_state(), examples()
    with run.callback() as checkpoint:
        state, start = checkpoint.restore_or_initialize(state)
        for step in range(start, run.total):
            order = np.random.default_rng(EPOCHS.done).permutation(EXAMPLES)
            place = SIZE * (step % EPOCH)
            loss = fit(state, values[order[place : place + SIZE]])
            EPOCHS.done += (step + 1) % EPOCH == 0
            if run.report(checkpoint, step + 1, state, loss):
                break


@program("the environment")
def _environment(run: Run) -> None:
    state, batches = new_state(), Batches()
    os.environ["HIDDEN_LEVEL"] = "1"
    run.ends.callback(os.environ.pop, "HIDDEN_LEVEL")

    def update() -> Any:
        level = int(os.environ["HIDDEN_LEVEL"])
        batch = next(batches) * (1 + 1 / level)
        os.environ["HIDDEN_LEVEL"] = str(level + 1)
        return fit(state, batch), batch

    train(run, state, update, data=batches)


class ActNorm(nn.Module):
    """Takes its scale from the first batch that it sees, as in Glow, and learns it from there on."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.bias = nn.Parameter(torch.ones(FEATURES)), nn.Parameter(torch.zeros(FEATURES))
        self.is_ready = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_ready:
            with torch.no_grad():
                self.bias.copy_(-x.mean(0))
                self.scale.copy_(1 / (x.std(0) + 0.5))
            self.is_ready = True
        return (x + self.bias) * self.scale


@program("a flag that the first step sets")
def _first_step(run: Run) -> None:
    batches, model = Batches(), nn.Sequential(ActNorm(), nn.Linear(FEATURES, 1))
    state = {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=0.05)}
    train(run, state, lambda: fit(state, next(batches)), data=batches)


@program("turns of two players")
def _turns(run: Run) -> None:
    """Three updates of the critic come before one of the actor, as in Wasserstein GANs."""
    batches = Batches()
    state: dict[str, Any] = {"actor": nn.Linear(FEATURES, FEATURES), "critic": nn.Linear(FEATURES, 1)}
    state["optimizer"] = torch.optim.SGD([*state["actor"].parameters(), *state["critic"].parameters()], lr=0.01)
    turns = itertools.count()

    def update() -> Any:
        x = next(batches)
        made = state["critic"](state["actor"](x.cos())).mean()
        return descend(state, -made if next(turns) % 4 == 3 else made - state["critic"](x).mean())

    train(run, state, update, data=batches)


@program("the patience of a plateau")
def _patience(run: Run) -> None:
    """Halves the rate after three steps without a loss that is better by 0.1."""
    state, batches = new_state(), Batches()
    best, bad = float("inf"), 0

    def update() -> Any:
        nonlocal best, bad
        loss = fit(state, next(batches))
        best, bad = (float(loss), 0) if float(loss) < best - 0.1 else (best, bad + 1)
        if bad == 3:
            state["optimizer"].param_groups[0]["lr"] *= 0.5
            bad = 0
        return loss

    train(run, state, update, data=batches)


# ---- averages and states of optimizers


@program("gradients summed by hand")
def _summed_gradients(run: Run) -> None:
    """A step is a micro-batch, and every fourth one updates the weights."""
    state, batches = new_state(), Batches()
    parameters = list(state["model"].parameters())
    sums, count = [torch.zeros_like(one) for one in parameters], 0

    def update() -> Any:
        nonlocal count
        loss = loss_of(state, next(batches))
        for total, gradient in zip(sums, torch.autograd.grad(loss, parameters), strict=True):
            total += gradient / 4
        count += 1
        if count % 4 == 0:
            for one, total in zip(parameters, sums, strict=True):
                one.grad = total.clone()
                total.zero_()
            state["optimizer"].step()
        return loss.detach()

    train(run, state, update, data=batches)


@program("a loss scale by hand")
def _loss_scale(run: Run) -> None:
    """Gradients pass through float16; where one overflows, the update is skipped, and the scale halved."""
    state, batches = new_state(), Batches()
    scale, good = 2.0**20, 0

    def update() -> Any:
        nonlocal scale, good
        loss = loss_of(state, next(batches))
        state["optimizer"].zero_grad()
        (loss * scale).backward()  # type: ignore[no-untyped-call]
        halves = [one.grad.half() for one in state["model"].parameters()]
        if not all(one.isfinite().all() for one in halves):
            scale, good = scale / 2, 0
            return loss.detach()
        for one, half in zip(state["model"].parameters(), halves, strict=True):
            one.grad = half.float() / scale
        state["optimizer"].step()
        good += 1
        if good % 4 == 0:
            scale *= 2
        return loss.detach()

    train(run, state, update, data=batches)


@program("Welford's statistics in numbers")
def _welford(run: Run) -> None:
    state, batches = new_state(), Batches()
    count, mean, squares = 0, 0.0, 0.0

    def update() -> Any:
        nonlocal count, mean, squares
        batch = next(batches)
        for value in batch.flatten().tolist():
            count += 1
            difference = value - mean
            mean += difference / count
            squares += difference * (value - mean)
        return fit(state, (batch - mean) / (squares / count + 1e-5) ** 0.5)

    train(run, state, update, data=batches)


class Teacher:
    """A mean teacher: the average of the weights, in a plain attribute."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = {name: value.detach().clone() for name, value in model.named_parameters()}

    def follow(self, model: nn.Module) -> None:
        """Move towards the weights of the model."""
        for name, value in model.named_parameters():
            self.weights[name].lerp_(value.detach(), 0.1)


@program("a mean teacher")
def _mean_teacher(run: Run) -> None:
    state, batches = new_state(), Batches()
    teacher = Teacher(state["model"])

    def update() -> Any:
        x = next(batches)
        taught = torch.func.functional_call(state["model"], teacher.weights, (x,))
        loss = descend(state, loss_of(state, x) + (state["model"](x) - taught).square().mean())
        teacher.follow(state["model"])
        return loss

    train(run, state, update, data=batches)


@program("momentum in a list")
def _momentum_in_a_list(run: Run) -> None:
    model, batches = nn.Linear(FEATURES, 1), Batches()
    state = {"model": model}
    velocities = [torch.zeros_like(one) for one in model.parameters()]

    def update() -> Any:
        loss = loss_of(state, next(batches))
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for one, velocity, gradient in zip(model.parameters(), velocities, gradients, strict=True):
                one.sub_(velocity.mul_(0.9).add_(gradient), alpha=0.05)
        return loss.detach()

    train(run, state, update, data=batches)


@program("slow weights by weak references")
def _lookahead(run: Run) -> None:
    """Lookahead: every second update pulls the weights back towards slow ones."""
    state, batches = new_state(), Batches()
    slow: Any = weakref.WeakKeyDictionary()
    for part in state["model"]:
        slow[part] = [one.detach().clone() for one in part.parameters()]
    updates = iter(itertools.cycle((False, True)))

    def update() -> Any:
        loss = fit(state, next(batches))
        if next(updates):
            with torch.no_grad():
                for part, weights in slow.items():
                    for weight, one in zip(weights, part.parameters(), strict=True):
                        one.copy_(weight.lerp_(one, 0.5))
        return loss

    train(run, state, update, data=batches)


@program("a scaler of scikit-learn")
def _sklearn(run: Run) -> None:
    from sklearn.preprocessing import StandardScaler  # type: ignore[import-untyped]

    state, batches, scaler = new_state(), Batches(), StandardScaler()

    def update() -> Any:
        batch = next(batches)
        scaled = scaler.partial_fit(batch.numpy()).transform(batch.numpy())
        return fit(state, torch.from_numpy(np.float32(scaled)))

    train(run, state, update, data=batches)


# ---- caches


@functools.cache
def _shift(index: int) -> torch.Tensor:
    return torch.randn(FEATURES) / 10


@program("functools.lru_cache")
def _lru_cache(run: Run) -> None:
    """Every example has a shift of its own, which is drawn when it is first seen."""
    _shift.cache_clear()
    state, values, steps = new_state(), examples(), Batches()

    def update() -> Any:
        batch = next(steps)
        indices = [int((values == row).all(1).nonzero()) for row in batch]
        return fit(state, torch.stack([row + _shift(index) for row, index in zip(batch, indices, strict=True)]))

    train(run, state, update, data=steps)


LABELS: dict[bytes, torch.Tensor] = {}


@program("labels in a cache")
def _labels(run: Run) -> None:
    """Labels are those that the model itself gives an example when it first sees it."""
    LABELS.clear()
    state, batches = new_state(), Batches()

    def update() -> Any:
        batch = next(batches)
        for row in batch:
            LABELS.setdefault(row.numpy().tobytes(), state["model"](row).detach())
        taught = torch.stack([LABELS[row.numpy().tobytes()] for row in batch])
        return descend(state, loss_of(state, batch) + (state["model"](batch) - taught).square().mean())

    train(run, state, update, data=batches)


# ---- generators, and states of C extensions


@program("a private generator of masks")
def _private_generator(run: Run) -> None:
    state, batches, masks = new_state(), Batches(), torch.Generator().manual_seed(8)

    def update() -> Any:
        mask = torch.rand(FEATURES, generator=masks) > 0.3
        return fit(state, next(batches) * mask)

    train(run, state, update, data=batches)


@program("rand of the C library")
def _libc(run: Run) -> None:
    library = ctypes.CDLL(None)
    library.srand(5)
    state, batches = new_state(), Batches()
    train(run, state, lambda: fit(state, next(batches).roll(library.rand() % FEATURES, 1)), data=batches)


@program("a digest of all batches")
def _digest(run: Run) -> None:
    state, batches, seen = new_state(), Batches(), hashlib.sha256()

    def update() -> Any:
        batch = next(batches)
        seen.update(batch.numpy().tobytes())
        signs = torch.tensor([1.0 if byte & 1 else -1.0 for byte in seen.digest()[:FEATURES]])
        return fit(state, batch * signs), batch * signs

    train(run, state, update, data=batches)


@program("a setting of the process")
def _default_dtype(run: Run) -> None:
    """Warms up with noise in single precision, and goes on in double."""
    state, batches, steps = new_state(), Batches(), itertools.count(1)
    run.ends.callback(torch.set_default_dtype, torch.float32)

    def update() -> Any:
        if next(steps) == 4:
            torch.set_default_dtype(torch.float64)
        noise = torch.rand(FEATURES) - 0.5
        return fit(state, next(batches) + noise.float() / 10)

    train(run, state, update, data=batches)


class Crop:
    """Augments more strongly while the loss falls."""

    def __init__(self) -> None:
        self.strength, self.last = 0.1, float("inf")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.strength * torch.randn_like(x)

    def adapt(self, loss: float) -> None:
        """Take the loss of the last batch into account."""
        self.strength *= 1.2 if loss < self.last else 0.9
        self.last = loss


@program("an augmentation that adapts")
def _augmentation(run: Run) -> None:
    state, batches, crop = new_state(), Batches(), Crop()

    def update() -> Any:
        batch = crop(next(batches))
        loss = fit(state, batch)
        crop.adapt(float(loss))
        return loss, batch

    train(run, state, update, data=batches)
