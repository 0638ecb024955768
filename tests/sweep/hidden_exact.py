"""Programs of the same kinds that hand over all that their next steps depend on: none of them may be called inexact."""

from __future__ import annotations

import queue
import random
import sqlite3
import threading
from typing import Any

import jax
import numpy as np
import torch
from flax import nnx
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

import holdfast as hf

from . import hidden_jax
from .hidden_case import Run, program
from .hidden_programs import EPOCH, EXAMPLES, FEATURES, SIZE, Batches, descend, examples, fit, loss_of, new_state, train

# ---- places in the data


@program("a batch in flight, handed over", is_exact=True)
def _batch_in_flight(run: Run) -> None:
    state, batches = new_state(), Batches()
    with run.callback() as checkpoint:
        state, start = checkpoint.restore_or_initialize(state, data=batches, following=torch.zeros(SIZE, FEATURES))
        following = checkpoint.extras["following"] if start else next(batches)
        for step in range(start + 1, run.total + 1):
            batch, following = following, next(batches)
            if run.report(checkpoint, step, state, fit(state, batch), data=batches, following=following, batch=batch):
                break


class Ahead:
    """Batches that a thread fetches ahead; the place is that of the last one that was taken."""

    def __init__(self, run: Run) -> None:
        self._batches, self._run = Batches(), run
        self._place = self._batches.get_state()
        self._fetched: queue.Queue[Any] = queue.Queue()
        self._asked: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._begun = False

    def _fetch(self) -> None:
        while self._asked.get():
            batch = next(self._batches)
            self._fetched.put((batch, self._batches.get_state()))

    def __next__(self) -> torch.Tensor:
        if not self._begun:
            thread = threading.Thread(target=self._fetch)
            thread.start()
            self._run.ends.callback(thread.join)
            self._run.ends.callback(self._asked.put, False)
            self._asked.put(True)  # one batch is always fetched ahead
            self._begun = True
        self._asked.put(True)
        batch, self._place = self._fetched.get()
        return batch  # type: ignore[no-any-return]

    def get_state(self) -> Any:
        return self._place

    def set_state(self, state: Any) -> None:
        self._batches.set_state(state)
        self._place = state


@program("a thread that fetches ahead, with the place of the batch", is_exact=True)
def _fetching_thread(run: Run) -> None:
    state, batches = new_state(), Ahead(run)
    train(run, state, lambda: fit(state, next(batches)), data=batches)


@program("an order and a generator, handed over", is_exact=True)
def _order(run: Run) -> None:
    state, values, shuffle = new_state(), examples(), np.random.default_rng(3)
    with run.callback() as checkpoint:
        state, start = checkpoint.restore_or_initialize(state, order=np.arange(EXAMPLES), shuffle=shuffle)
        order = checkpoint.extras["order"]
        for step in range(start, run.total):
            if step % EPOCH == 0:
                order = shuffle.permutation(EXAMPLES)
            batch = values[order[SIZE * (step % EPOCH) :][:SIZE]]
            loss = fit(state, batch)
            if run.report(checkpoint, step + 1, state, loss, order=order, shuffle=shuffle, batch=batch):
                break


class Rows:
    """Rows of a table, from a place that can be saved."""

    def __init__(self, base: sqlite3.Connection) -> None:
        self.base, self.place = base, 0

    def fetch(self) -> list[Any]:
        """Return the next rows."""
        rows = self.base.execute("select * from examples order by a limit ? offset ?", (SIZE, self.place)).fetchall()
        self.place = (self.place + SIZE) % EXAMPLES
        return rows

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


@program("rows of sqlite3 from a place", is_exact=True)
def _rows(run: Run) -> None:
    base = sqlite3.connect(":memory:")
    run.ends.callback(base.close)
    base.execute("create table examples (a real, b real, c real, d real)")
    base.executemany("insert into examples values (?, ?, ?, ?)", examples().tolist())
    state, rows = new_state(), Rows(base)
    train(run, state, lambda: fit(state, torch.tensor(rows.fetch())), data=rows)


@program("orders by the number of the epoch", is_exact=True)
def _epochs(run: Run) -> None:
    state, values = new_state(), examples()
    with run.callback() as checkpoint:
        state, start = checkpoint.restore_or_initialize(state)
        for step in range(start, run.total):
            order = np.random.default_rng(step // EPOCH).permutation(EXAMPLES)
            loss = fit(state, values[order[SIZE * (step % EPOCH) :][:SIZE]])
            if run.report(checkpoint, step + 1, state, loss, epoch=(step + 1) // EPOCH):
                break


@program("hf.skip_to", is_exact=True)
def _skip_to(run: Run) -> None:
    dataset: Any = list(examples())
    sampler: Any = DistributedSampler(dataset, num_replicas=1, rank=0, seed=3)
    loader: DataLoader[Any] = DataLoader(dataset, SIZE, sampler=sampler)
    state, batches = new_state(), hf.skip_to(loader)

    def update() -> Any:
        batch = next(batches)
        return fit(state, batch), batch

    train(run, state, update, data=batches)


@program("a loader of torchdata", is_exact=True)
def _torchdata(run: Run) -> None:
    state, loader = new_state(), StatefulDataLoader(list(examples()), SIZE, shuffle=True)
    with run.callback() as checkpoint:
        state, step = checkpoint.restore_or_initialize(state, data=loader)
        while step < run.total:
            for batch in loader:
                step += 1
                if run.report(checkpoint, step, state, fit(state, batch), data=loader) or step == run.total:
                    return


# ---- updates


@program("a schedule of torch in the state", is_exact=True)
def _schedule(run: Run) -> None:
    state, batches = new_state(), Batches()
    state["schedule"] = torch.optim.lr_scheduler.LambdaLR(state["optimizer"], lambda done: 0.9**done)

    def update() -> Any:
        loss = fit(state, next(batches))
        state["schedule"].step()
        return loss

    train(run, state, update, data=batches)


@program("a mean teacher in the state", is_exact=True)
def _mean_teacher(run: Run) -> None:
    state, batches = new_state(), Batches()
    average: Any = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)  # type: ignore[no-untyped-call]
    state["teacher"] = torch.optim.swa_utils.AveragedModel(state["model"], multi_avg_fn=average)

    def update() -> Any:
        x = next(batches)
        with torch.no_grad():
            taught = state["teacher"](x)
        loss = descend(state, loss_of(state, x) + (state["model"](x) - taught).square().mean())
        state["teacher"].update_parameters(state["model"])
        return loss

    train(run, state, update, data=batches)


class Replay:
    """The last batches, and a generator that chooses among them."""

    def __init__(self) -> None:
        self.batches: list[torch.Tensor] = []
        self.choice = random.Random(5)

    def state_dict(self) -> dict[str, Any]:
        return {"batches": list(self.batches), "choice": self.choice.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches = list(state["batches"])
        self.choice.setstate(state["choice"])


@program("a replay buffer with a state", is_exact=True)
def _replay(run: Run) -> None:
    state, batches, replay = new_state(), Batches(), Replay()

    def update() -> Any:
        replay.batches.append(next(batches))
        return fit(state, torch.cat(replay.choice.choices(replay.batches, k=2)))

    train(run, state, update, data=batches, replay=replay)


class Standardized(nn.Module):
    """A linear model of inputs whose moments it keeps in buffers."""

    count: torch.Tensor
    sums: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, 1)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("sums", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += x.numel()
        self.sums += torch.stack([x.sum(), x.square().sum()])
        mean, square = self.sums / self.count
        return self.layer((x - mean) / (square - mean.square() + 1e-5).sqrt())  # type: ignore[no-any-return]


@program("statistics in buffers", is_exact=True)
def _statistics(run: Run) -> None:
    model, batches = Standardized(), Batches()
    state = {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=0.05)}
    train(run, state, lambda: fit(state, next(batches)), data=batches)


@program("the patience of a plateau in plain values", is_exact=True)
def _patience(run: Run) -> None:
    state, batches = new_state(), Batches()
    with run.callback() as checkpoint:
        state, start = checkpoint.restore_or_initialize(state, data=batches, plateau={"best": float("inf"), "bad": 0})
        best, bad = checkpoint.extras["plateau"].values()
        for step in range(start + 1, run.total + 1):
            loss = fit(state, next(batches))
            best, bad = (float(loss), 0) if float(loss) < best - 0.1 else (best, bad + 1)
            if bad == 3:
                state["optimizer"].param_groups[0]["lr"] *= 0.5
                bad = 0
            if run.report(checkpoint, step, state, loss, data=batches, plateau={"best": best, "bad": bad}):
                break


@program("a generator of masks, handed over", is_exact=True)
def _generator(run: Run) -> None:
    state, batches, masks = new_state(), Batches(), torch.Generator().manual_seed(8)

    def update() -> Any:
        return fit(state, next(batches) * (torch.rand(FEATURES, generator=masks) > 0.3))

    train(run, state, update, data=batches, masks=masks)


# ---- jax and Lightning


@program("a key in the state", is_exact=True)
def _key(run: Run) -> None:
    batches = Batches()

    @jax.jit
    def compiled(state: Any, x: Any) -> Any:
        key, now = jax.random.split(state["key"])
        masked = x * jax.random.bernoulli(now, 0.7, x.shape)
        params, loss = hidden_jax.descend(state["params"], lambda params: hidden_jax.error_of(params, masked))
        return {"params": params, "key": key}, loss

    state = {"params": hidden_jax.new_params(), "key": jax.random.key(0)}
    hidden_jax.train(run, state, lambda state: compiled(state, next(batches).numpy()), data=batches)


@program("statistics in the state", is_exact=True)
def _linen_statistics(run: Run) -> None:
    batches = Batches()
    train_state, statistics = hidden_jax.new_train_state()

    def update(state: Any) -> Any:
        train_state, statistics, loss = hidden_jax.step_with_statistics(
            state["train"], state["statistics"], next(batches).numpy()
        )
        return {"train": train_state, "statistics": statistics}, loss

    hidden_jax.train(run, {"train": train_state, "statistics": statistics}, update, data=batches)


class Masked(nnx.Module):
    """Drops inputs, by keys and counts that are variables of its own."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dropout, self.layer = nnx.Dropout(0.3, rngs=rngs), nnx.Linear(FEATURES, 1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.layer(self.dropout(x))


@program("dropout in a module of nnx", is_exact=True)
def _nnx_dropout(run: Run) -> None:
    batches, model = Batches(), Masked(nnx.Rngs(0, dropout=1))
    hidden_jax.train(run, model, lambda model: hidden_jax.step_of_nnx(model, next(batches).numpy()), data=batches)


class Queue(hidden_jax.Regression):
    """Contrasts a batch with the features of earlier ones, which are in a buffer."""

    queue: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(4))

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss: torch.Tensor = self.loss_of(batch) + (self.layer(batch).mean() * self.queue.mean()).square()
        self.queue = torch.cat([self.queue[1:], self.layer(batch).detach().mean().view(1)])
        return loss


@program("a queue in a buffer of Lightning", is_exact=True)
def _lightning(run: Run) -> None:
    hidden_jax.fit(run, Queue())
