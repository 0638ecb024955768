"""Programs that keep what their next steps depend on where nobody would look for it.

It is in threads, processes, files, closures, caches, classes, C extensions or compiled functions. Each is a function
that trains once, as a process would. What a new process would not have is set up at the beginning of the function.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import json
import os
import queue
import random
import sqlite3
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from .hidden_case import Run, hides
from .hidden_programs import EXAMPLES, FEATURES, SIZE, Batches, examples, fit, loss_of, new_state, train, train_on


def train_on_changed(run: Run, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Train on batches that a function changes, which nobody is told of."""
    state, batches = new_state(), Batches()
    train(run, state, lambda: fit(state, change(next(batches))), data=batches)


# ---- places in the data


@hides("a queue that is filled ahead")
def _filled_queue(run: Run) -> None:
    """As ``prefetch_to_device`` of flax does."""

    def fetched(batches: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
        waiting = deque(itertools.islice(batches, 2))
        while waiting:
            yield waiting.popleft()
            waiting.extend(itertools.islice(batches, 1))

    state, batches = new_state(), Batches()
    ahead = fetched(batches)
    train(run, state, lambda: fit(state, next(ahead)), data=batches)


@hides("a thread that fetches ahead")
def _fetching_thread(run: Run) -> None:
    state, batches = new_state(), Batches()
    thread = run.ends.enter_context(ThreadPoolExecutor(1))
    with run.callback() as checkpoint:
        state, start = checkpoint.restore_or_initialize(state, data=batches)
        batch = next(batches)
        for step in range(start + 1, run.total + 1):
            fetched = thread.submit(next, batches)
            loss = fit(state, batch)
            batch = fetched.result()
            if run.report(checkpoint, step, state, loss, data=batches):
                break


@hides("a generator function")
def _generator_function(run: Run) -> None:
    def batches() -> Iterator[torch.Tensor]:
        shuffle, values = random.Random(3), examples()
        while True:
            order = shuffle.sample(range(EXAMPLES), EXAMPLES)
            yield from (values[order[first : first + SIZE]] for first in range(0, EXAMPLES, SIZE))

    train_on(run, new_state(), batches())


@hides("a pipe of the kernel")
def _pipe(run: Run) -> None:
    """Indices wait in a pipe until they are read, and are put behind the others again."""
    state, values = new_state(), examples()
    out, into = os.pipe()
    run.ends.callback(os.close, out)
    run.ends.callback(os.close, into)
    os.write(into, bytes(np.random.default_rng(1).permutation(EXAMPLES).tolist()))

    def update() -> Any:
        chosen = os.read(out, SIZE)
        os.write(into, chosen[::-1])
        return fit(state, values[list(chosen)])

    train(run, state, update)


@hides("a cursor of sqlite3")
def _cursor(run: Run) -> None:
    state, base = new_state(), sqlite3.connect(":memory:")
    run.ends.callback(base.close)
    base.execute("create table examples (a real, b real, c real, d real)")
    base.executemany("insert into examples values (?, ?, ?, ?)", examples().tolist())
    rows = base.execute("select * from examples order by a")

    def update() -> Any:
        nonlocal rows
        if not (batch := rows.fetchmany(SIZE)):
            rows = base.execute("select * from examples order by a")
            batch = rows.fetchmany(SIZE)
        return fit(state, torch.tensor(batch))

    train(run, state, update)


@hides("an open text file")
def _text_file(run: Run) -> None:
    state, name = new_state(), os.path.join(run.files, "examples.jsonl")
    with open(name, "w", encoding="utf-8") as file:
        file.writelines(f"{json.dumps(row)}\n" for row in examples().tolist())
    lines = open(name, encoding="utf-8")  # noqa: SIM115 - it stays open from step to step
    run.ends.callback(lines.close)

    def update() -> Any:
        rows = [json.loads(lines.readline()) for _ in range(SIZE)]
        if lines.tell() == os.stat(name).st_size:
            lines.seek(0)
        return fit(state, torch.tensor(rows))

    train(run, state, update)


SIMULATOR = """
import json, random, sys
generator, place = random.Random(6), [0.0] * 4
for line in sys.stdin:
    action = json.loads(line)
    place = [0.8 * x + 0.1 * action + generator.gauss(0, 0.3) for x in place]
    print(json.dumps(place), flush=True)
"""


@hides("a simulator in another process")
def _simulator(run: Run) -> None:
    state = new_state()
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", SIMULATOR], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    run.ends.enter_context(process)  # closes its input, at which it ends
    action = 0.0

    def update() -> Any:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{action}\n")
        return fit(state, torch.tensor([json.loads(process.stdout.readline())]))

    train(run, state, update)


@hides("a thread that keeps an average")
def _averaging_thread(run: Run) -> None:
    asked: queue.SimpleQueue[Any] = queue.SimpleQueue()
    answered: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def average() -> None:
        mean = torch.zeros(FEATURES)
        for x in iter(asked.get, None):
            mean = 0.8 * mean + 0.2 * x.mean(0)
            answered.put(mean)

    thread = threading.Thread(target=average)
    thread.start()
    run.ends.callback(thread.join)
    run.ends.callback(asked.put, None)

    def centred(batch: torch.Tensor) -> torch.Tensor:
        asked.put(batch)
        return batch.sub(answered.get())

    train_on_changed(run, centred)


# ---- counters, averages and settings


@hides("a warm-up counter in a closure")
def _warm_up(run: Run) -> None:
    state, batches, updates = new_state(), Batches(), 0

    def update() -> Any:
        nonlocal updates
        updates += 1
        state["optimizer"].param_groups[0]["lr"] = 0.05 * min(1.0, updates / 15)
        return fit(state, next(batches))

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


@hides("a schedule with slots")
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


@hides("an attribute of a class")
def _class_attribute(run: Run) -> None:
    Deep.calls = 0
    batches, model = Batches(), Deep()
    state = {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=0.05)}
    train(run, state, lambda: fit(state, next(batches)), data=batches)


@hides("the environment")
def _environment(run: Run) -> None:
    batches = Batches()
    os.environ["HIDDEN_LEVEL"] = "1"
    run.ends.callback(os.environ.pop, "HIDDEN_LEVEL")

    def scaled(batch: torch.Tensor) -> torch.Tensor:
        level = int(os.environ["HIDDEN_LEVEL"])
        os.environ["HIDDEN_LEVEL"] = str(level + 1)
        return batch * (1 + 1 / level)

    train_on(run, new_state(), map(scaled, batches), data=batches)


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


@hides("a flag that the first step sets")
def _first_step(run: Run) -> None:
    batches, model = Batches(), nn.Sequential(ActNorm(), nn.Linear(FEATURES, 1))
    state = {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=0.05)}
    train(run, state, lambda: fit(state, next(batches)), data=batches)


@hides("momentum in a list")
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


@hides("slow weights by weak references")
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


@hides("a scaler of scikit-learn")
def _sklearn(run: Run) -> None:
    from sklearn.preprocessing import StandardScaler  # type: ignore[import-untyped]

    scaler = StandardScaler()

    def scaled(batch: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.float32(scaler.partial_fit(batch.numpy()).transform(batch.numpy())))

    train_on_changed(run, scaled)


@functools.cache
def _shift(index: int) -> torch.Tensor:
    return torch.randn(FEATURES) / 10


@hides("functools.lru_cache")
def _lru_cache(run: Run) -> None:
    """Every example has a shift of its own, which is drawn when it is first seen."""
    _shift.cache_clear()
    values = examples()

    def shifted(batch: torch.Tensor) -> torch.Tensor:
        return torch.stack([row + _shift(int((values == row).all(1).nonzero())) for row in batch])

    train_on_changed(run, shifted)


@hides("rand of the C library")
def _libc(run: Run) -> None:
    library = ctypes.CDLL(None)
    library.srand(5)
    train_on_changed(run, lambda batch: batch.roll(library.rand() % FEATURES, 1))


@hides("a digest of all batches")
def _digest(run: Run) -> None:
    batches, seen = Batches(), hashlib.sha256()

    def signed(batch: torch.Tensor) -> torch.Tensor:
        seen.update(batch.numpy().tobytes())
        return batch * torch.tensor([1.0 if byte & 1 else -1.0 for byte in seen.digest()[:FEATURES]])

    train_on(run, new_state(), map(signed, batches), data=batches)


@hides("a setting of the process")
def _default_dtype(run: Run) -> None:
    """Warms up with noise in single precision, and goes on in double."""
    steps = itertools.count(1)
    run.ends.callback(torch.set_default_dtype, torch.float32)

    def noised(batch: torch.Tensor) -> torch.Tensor:
        if next(steps) == 4:
            torch.set_default_dtype(torch.float64)
        return batch + (torch.rand(FEATURES) - 0.5).float() / 10

    train_on_changed(run, noised)
