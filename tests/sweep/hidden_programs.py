"""Programs whose batches come from something that they do not hand over: a place in the data, or an order that changes.

Each is a function that trains once, as a process would. It hands over a model and an optimizer, and hides something
that the next steps depend on. What a new process would not have is set up at the beginning of the function.
"""

from __future__ import annotations

import array
import heapq
import itertools
import json
import os
import queue
import random
import sqlite3
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from .hidden_case import Run, program

EXAMPLES, FEATURES, SIZE = 10, 4, 2  # examples, their features, examples in a batch
EPOCH = EXAMPLES // SIZE  # batches


# ---- what the programs have in common


def new_state() -> dict[str, Any]:
    """Return a model and its optimizer."""
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1))
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)}


def examples() -> torch.Tensor:
    """Return the examples, by rows."""
    return torch.sin(torch.arange(EXAMPLES * FEATURES, dtype=torch.float32)).view(EXAMPLES, FEATURES)


def loss_of(state: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the loss of a batch."""
    return nn.functional.mse_loss(state["model"](x), x.sum(1, keepdim=True))


def descend(state: Any, loss: torch.Tensor) -> torch.Tensor:
    """Take one step of the optimizer; return the loss."""
    state["optimizer"].zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    state["optimizer"].step()
    return loss.detach()


def fit(state: Any, x: torch.Tensor) -> torch.Tensor:
    """Train on a batch; return the loss."""
    return descend(state, loss_of(state, x))


def train(run: Run, state: Any, update: Callable[[], Any], **extras: Any) -> None:
    """Train with an update that returns the loss, or the loss and the batch."""
    with run.callback() as checkpoint:
        state, start = checkpoint.restore_or_initialize(state, **extras)
        for step in range(start + 1, run.total + 1):
            told = update()
            loss, batch = told if isinstance(told, tuple) else (told, None)
            named = extras if batch is None else {**extras, "batch": batch}
            if run.report(checkpoint, step, state, loss, **named):
                break


class Batches:
    """Batches of a shuffled epoch after the other, with a place that can be saved."""

    def __init__(self) -> None:
        self._examples = examples()
        self._generator = np.random.default_rng(7)
        self._order: list[int] = []

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self

    def __next__(self) -> torch.Tensor:
        if not self._order:
            self._order = self._generator.permutation(EXAMPLES).tolist()
        chosen, self._order = self._order[:SIZE], self._order[SIZE:]
        return self._examples[chosen]

    def get_state(self) -> dict[str, Any]:
        return {"order": self._order, "generator": self._generator.bit_generator.state}

    def set_state(self, state: Any) -> None:
        self._order, self._generator.bit_generator.state = state["order"], state["generator"]


# ---- places in the data


@program("a batch in flight")
def _batch_in_flight(run: Run) -> None:
    state, batches = new_state(), Batches()
    with run.callback() as checkpoint:
        state, start = checkpoint.restore_or_initialize(state, data=batches)
        batch = next(batches)
        for step in range(start + 1, run.total + 1):
            loss = fit(state, batch)
            used, batch = batch, next(batches)
            if run.report(checkpoint, step, state, loss, data=batches, batch=used):
                break


@program("a queue that is filled ahead")
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


@program("a thread that fetches ahead")
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


@program("a generator function")
def _generator_function(run: Run) -> None:
    def batches() -> Iterator[torch.Tensor]:
        shuffle, values = random.Random(3), examples()
        while True:
            order = shuffle.sample(range(EXAMPLES), EXAMPLES)
            yield from (values[order[first : first + SIZE]] for first in range(0, EXAMPLES, SIZE))

    state, drawn = new_state(), batches()

    def update() -> Any:
        batch = next(drawn)
        return fit(state, batch), batch

    train(run, state, update)


@program("an iterator over a shuffled list")
def _shuffled_list(run: Run) -> None:
    state, values = new_state(), list(torch.split(examples(), SIZE))
    left: Iterator[torch.Tensor] = iter(())

    def update() -> Any:
        nonlocal left
        batch = next(left, None)
        if batch is None:
            random.shuffle(values)
            left = iter(values)
            batch = next(left)
        return fit(state, batch)

    train(run, state, update)


@program("itertools.cycle")
def _cycle(run: Run) -> None:
    state, values = new_state(), itertools.cycle(torch.split(examples(), SIZE))
    train(run, state, lambda: fit(state, next(values)))


@program("a pipe of the kernel")
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


@program("a cursor of sqlite3")
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


@program("an open text file")
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


@program("a loader of torch, begun anew")
def _unhanded_loader(run: Run) -> None:
    state, values = new_state(), examples()
    shuffle = torch.Generator().manual_seed(4)
    loader: DataLoader[Any] = DataLoader(list(values), batch_size=SIZE, shuffle=True, generator=shuffle)  # type: ignore[arg-type]
    drawn = itertools.chain.from_iterable(itertools.repeat(loader))
    train(run, state, lambda: fit(state, next(drawn)))


# ---- other processes, threads and files


SIMULATOR = """
import json, random, sys
generator, place = random.Random(6), [0.0] * 4
for line in sys.stdin:
    action = json.loads(line)
    place = [0.8 * x + 0.1 * action + generator.gauss(0, 0.3) for x in place]
    print(json.dumps(place), flush=True)
"""


@program("a simulator in another process")
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


@program("a thread that keeps an average")
def _averaging_thread(run: Run) -> None:
    state, batches = new_state(), Batches()
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

    def update() -> Any:
        batch = next(batches)
        asked.put(batch)
        return fit(state, batch - answered.get()), batch

    train(run, state, update, data=batches)


@program("weights of examples in a file")
def _weights_in_a_file(run: Run) -> None:
    """The file is written at every step, so that a resumed run finds weights of steps that it does again."""
    state, values, name = new_state(), examples(), os.path.join(run.files, "weights.npy")
    if not os.path.exists(name):
        np.save(name, np.ones(EXAMPLES))

    def update() -> Any:
        weights = np.load(name)
        chosen = np.argsort(-weights, kind="stable")[:SIZE]
        loss = fit(state, values[chosen])
        weights *= 1.1
        weights[chosen] = min(float(loss), 1.0)
        np.save(name, weights)
        return loss

    train(run, state, update)


@program("names of threads", in_process=True)
def _names_of_threads(run: Run) -> None:
    """Each shard is read by a thread, which finds its shard by the number in its name."""
    state, values = new_state(), examples()

    def update() -> Any:
        read: list[torch.Tensor] = []

        def work() -> None:
            number = int(threading.current_thread().name.split("-")[1].split()[0])
            read.append(values[[number % EXAMPLES, 3 * number % EXAMPLES]])

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return fit(state, read[0])

    train(run, state, update)


# ---- orders that depend on what was trained


@program("hard examples")
def _hard_examples(run: Run) -> None:
    state, values, losses = new_state(), examples(), np.full(EXAMPLES, np.inf)

    def update() -> Any:
        chosen = np.argsort(-losses, kind="stable")[:SIZE]
        losses[:] *= 1.2
        loss = fit(state, values[chosen])
        losses[chosen] = float(loss)
        return loss

    train(run, state, update)


@program("a curriculum on a heap")
def _curriculum(run: Run) -> None:
    state, values = new_state(), examples()
    heap = [(float(value.norm()), index) for index, value in enumerate(values)]
    heapq.heapify(heap)

    def update() -> Any:
        chosen = [heapq.heappop(heap) for _ in range(SIZE)]
        loss = fit(state, values[[index for _, index in chosen]])
        for easy, index in chosen:
            heapq.heappush(heap, (easy + 1 + float(loss), index))
        return loss

    train(run, state, update)


@program("a replay buffer")
def _replay(run: Run) -> None:
    state, batches = new_state(), Batches()
    buffer: list[torch.Tensor] = []

    def update() -> Any:
        buffer.append(next(batches))
        return fit(state, torch.cat(random.choices(buffer, k=2)))

    train(run, state, update, data=batches)


@program("a ring of losses in an array")
def _ring(run: Run) -> None:
    state, batches = new_state(), Batches()
    ring = array.array("d", [1.0] * 4)

    def update() -> Any:
        x = next(batches)
        loss = loss_of(state, x)
        value = float(loss.detach())
        weight = value / (value + sum(ring) / len(ring))
        ring.append(value)
        ring.pop(0)
        descend(state, loss * weight)
        return loss.detach(), x

    train(run, state, update, data=batches)
