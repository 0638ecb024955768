"""Programs of torch and Lightning that keep to themselves what their next steps depend on, or hand it over.

Each is a function that trains once, as a process would, without or with the line that ``docs/exact_resume.md`` advises.
"""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import lightning.pytorch as lightning
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

import holdfast as hf
from holdfast.integrations.lightning import CheckpointCallback

from . import cases
from .cases import InterruptionError
from .hidden_case import Run, hiding
from .lightning_runs import QUIET

EXAMPLES, FEATURES, SIZE = 10, 4, 2  # examples, their features, examples in a batch
EPOCH = EXAMPLES // SIZE  # batches


# ---- what the programs have in common


def new_state(model: Any = None) -> dict[str, Any]:
    """Return a model and its optimizer."""
    model = model or nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1))
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)}


def examples() -> torch.Tensor:
    """Return the examples, by rows."""
    return torch.sin(torch.arange(EXAMPLES * FEATURES, dtype=torch.float32)).view(EXAMPLES, FEATURES)


def loader_of(**options: Any) -> DataLoader[torch.Tensor]:
    """Return a loader of the examples."""
    data: Any = examples()
    return DataLoader(data, batch_size=SIZE, **options)


def shuffled() -> Any:
    """Return a loader that shuffles the examples, and has a place that is saved."""
    return hf.resumable(loader_of(shuffle=True))


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


def train_on(run: Run, state: Any, batches: Iterator[Any], **extras: Any) -> None:
    """Train on batches, which may be among the extras."""

    def update() -> tuple[Any, Any]:
        batch = next(batches)
        return fit(state, batch), batch

    train(run, state, update, **extras)


def epochs(run: Run, state: Any, loader: Any, update: Any, at_end: Any = lambda: None, **extras: Any) -> None:
    """Train in nested loops over epochs; ``update`` returns the loss of a batch, ``at_end`` follows each epoch."""
    with run.callback() as checkpoint:
        state, step = checkpoint.restore_or_initialize(state, data=loader, **extras)
        while step < run.total:
            for batch in loader:
                loss = update(batch)
                step += 1
                if step % EPOCH == 0:
                    at_end()
                if run.report(checkpoint, step, state, loss, data=loader, batch=batch, **extras) or step == run.total:
                    return


class Batches(cases.Batches):
    """Batches of the examples."""

    def __init__(self, *, forgets: bool = False) -> None:
        super().__init__(examples(), SIZE, forgets=forgets)


# ---- places in the data


@hiding("the place in a loader", "batch", "state")
def _place(run: Run) -> None:
    batches = hf.skip_to(loader_of(shuffle=True, generator=torch.Generator().manual_seed(4)))
    train_on(run, new_state(), batches, **run.handed(data=batches))


@hiding("a state that set_state does not take back", "batch", "state")
def _forgetful(run: Run) -> None:
    batches = Batches(forgets=not run.is_advised)
    train_on(run, new_state(), batches, data=batches)


@hiding("a batch in flight", "batch", "state")
def _batch_in_flight(run: Run) -> None:
    state, batches = new_state(), Batches()
    with run.callback() as checkpoint:
        fresh = run.handed(ahead=torch.zeros(SIZE, FEATURES))
        state, start = checkpoint.restore_or_initialize(state, data=batches, **fresh)
        ahead = checkpoint.extras["ahead"] if start and run.is_advised else next(batches)
        for step in range(start + 1, run.total + 1):
            batch, ahead = ahead, next(batches)
            handed = run.handed(ahead=ahead)
            if run.report(checkpoint, step, state, fit(state, batch), data=batches, batch=batch, **handed):
                break


class Turning:
    """Begins each epoch at another batch."""

    turns = 0

    def __len__(self) -> int:
        return EPOCH

    def __iter__(self) -> Iterator[Any]:
        self.turns += 1
        yield from examples().roll(2 * self.turns, 0).view(EPOCH, SIZE, FEATURES)


@hiding("an attribute of a loader", "batch", "state")
def _attribute(run: Run) -> None:
    loader = Turning()
    state = (lambda: loader.turns, lambda turns: setattr(loader, "turns", turns)) if run.is_advised else None
    batches = hf.skip_to(loader, state=state)
    train_on(run, new_state(), batches, data=batches)


class Noisy(Dataset[Any]):
    """Adds noise of a generator deep within the loader."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return examples()[index] + self.rng.random(dtype=np.float32)


@hiding("a generator deep in a loader", "batch", "state")
def _deep_generator(run: Run) -> None:
    data = Noisy()
    batches = hf.skip_to(DataLoader(data, SIZE), generators=[data.rng] if run.is_advised else [])
    train_on(run, new_state(), batches, data=batches)


@hiding("a generator deep in a loader with a state", "batch", "state")
def _deep_generator_beside_a_state(run: Run) -> None:
    data, state = Noisy(), new_state()
    epochs(run, state, StatefulDataLoader(data, SIZE), lambda batch: fit(state, batch), **run.handed(rng=data.rng))


class Order(Sampler[int]):
    """Shuffles the examples of each epoch, and has no state."""

    def __init__(self) -> None:
        self.epoch = self.place = 0

    def __len__(self) -> int:
        return EXAMPLES

    def __iter__(self) -> Iterator[int]:
        order = np.random.default_rng(self.epoch).permutation(EXAMPLES).tolist()
        while self.place < len(order):
            self.place += 1
            yield order[self.place - 1]
        self.epoch, self.place = self.epoch + 1, 0


class OrderWithState(Order):
    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.place = state["epoch"], state["place"]


@hiding("a sampler without a state", "batch", "state")
def _sampler(run: Run) -> None:
    state, sampler = new_state(), OrderWithState() if run.is_advised else Order()
    loader = StatefulDataLoader(list(examples()), SIZE, sampler=sampler)
    epochs(run, state, loader, lambda batch: fit(state, batch))


class Buffered(IterableDataset[Any]):
    """Shuffles in a buffer; without a generator of its own, it draws in between the draws of the model."""

    def __init__(self, generator: torch.Generator | None) -> None:
        self.generator = generator

    def __iter__(self) -> Iterator[Any]:
        buffer = list(examples()[:2])
        for row in examples():
            place = int(torch.randint(len(buffer), (), generator=self.generator))
            yield buffer[place]
            buffer[place] = row + torch.rand((), generator=self.generator)


@hiding("draws in the process of the model", "batch", "state", every=7, error=9)
def _drawing(run: Run) -> None:
    own = torch.Generator().manual_seed(3) if run.is_advised else None
    batches = hf.skip_to(DataLoader(Buffered(own), SIZE), generators=[] if own is None else [own])
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(FEATURES, 1))
    train_on(run, new_state(model), batches, data=batches)


@hiding("weights of examples in a file", "state")
def _weights_in_a_file(run: Run) -> None:
    """The file is written at every step, so that a resumed run finds weights of steps that it does again."""
    state, name = new_state(), os.path.join(run.files, "weights.npy")
    held = state if run.is_advised else {}
    held["weights"] = np.load(name) if os.path.exists(name) and not run.is_advised else np.ones(EXAMPLES)

    def update() -> Any:
        weights = held["weights"]
        chosen = np.argsort(-weights, kind="stable")[:SIZE]
        loss = fit(state, examples()[chosen])
        weights *= 1.1
        weights[chosen] = min(float(loss), 1.0)
        np.save(name, weights)
        return loss

    train(run, state, update)


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


@hiding("a replay buffer", "metrics", "state")
def _replay(run: Run) -> None:
    state, batches, replay = new_state(), Batches(), Replay()

    def update() -> Any:
        replay.batches.append(next(batches))
        return fit(state, torch.cat(replay.choice.choices(replay.batches, k=2)))

    train(run, state, update, data=batches, **run.handed(replay=replay))


class Walk:
    """An environment."""

    def __init__(self) -> None:
        self.np_random, self.place = np.random.default_rng(), np.zeros((1, FEATURES), np.float32)

    def reset(self, seed: int) -> None:
        self.np_random, self.place = np.random.default_rng(seed), np.zeros((1, FEATURES), np.float32)

    def __next__(self) -> torch.Tensor:
        self.place = (0.9 * self.place + self.np_random.normal(size=(1, FEATURES))).astype(np.float32)
        return torch.from_numpy(self.place)


@hiding("an environment", "batch", "state")
def _environment(run: Run) -> None:
    env: Any = Walk()
    env.reset(seed=7)
    train_on(run, new_state() | run.handed(env=env), env)


# ---- models, optimizers and states


class Warming(nn.Linear):
    """Counts its calls in an attribute, or in a buffer."""

    calls: Any

    def __init__(self, has_buffer: bool) -> None:
        super().__init__(FEATURES, 1)
        if has_buffer:
            self.register_buffer("calls", torch.tensor(0))
        else:
            self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        out: torch.Tensor = super().forward(x) * (1 - 0.5**self.calls)
        return out


def drawn() -> Iterator[torch.Tensor]:
    """Yield batches of the global generator, which every save has."""
    while True:
        yield torch.randn(SIZE, FEATURES)


@hiding("a number in a module", "metrics", "state")
def _number(run: Run) -> None:
    train_on(run, new_state(Warming(has_buffer=run.is_advised)), drawn())


class Perturbed(nn.Linear):
    def __init__(self, rng: np.random.Generator) -> None:
        super().__init__(FEATURES, 1)
        self.rng = rng

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.rng.random()


@hiding("a generator in a module", "metrics", "state")
def _generator(run: Run) -> None:
    rng = np.random.default_rng(5)
    train_on(run, new_state(Perturbed(rng)), drawn(), **run.handed(rng=rng))


class Adapting(torch.optim.SGD):
    """Lowers its learning rate by a factor that is an attribute, or an option of its groups."""

    def __init__(self, parameters: Any, has_option: bool) -> None:
        super().__init__(parameters, lr=0.1)
        self.places: list[dict[str, Any]] = self.param_groups if has_option else [vars(self)]
        self.places[0]["factor"] = 1.0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # It takes no closure.
        self.places[0]["factor"] *= 0.8
        self.param_groups[0]["lr"] = 0.1 * self.places[0]["factor"]
        super().step()


@hiding("a number in an optimizer", "state")
def _optimizer(run: Run) -> None:
    model = nn.Linear(FEATURES, 1)
    train_on(run, {"model": model, "optimizer": Adapting(model.parameters(), run.is_advised)}, drawn())


@hiding("a mean teacher", "metrics", "state")
def _mean_teacher(run: Run) -> None:
    state, batches = new_state(), Batches()
    teacher = copy.deepcopy(state["model"]).requires_grad_(False)

    def update() -> Any:
        x = next(batches)
        loss = descend(state, loss_of(state, x) + (state["model"](x) - teacher(x)).square().mean())
        for slow, fast in zip(teacher.parameters(), state["model"].parameters(), strict=True):
            slow.lerp_(fast.detach(), 0.1)
        return loss

    train(run, state | run.handed(teacher=teacher), update, data=batches)


@hiding("the patience of a plateau", "state")
def _patience(run: Run) -> None:
    """Halves the rate after three steps without a loss that is better by 0.1."""
    state, batches, plateau = new_state(), Batches(), {"best": float("inf"), "bad": 0}
    with run.callback() as checkpoint:
        state, start = checkpoint.restore_or_initialize(state, data=batches, **run.handed(plateau=plateau))
        best, bad = checkpoint.extras.get("plateau", plateau).values()
        for step in range(start + 1, run.total + 1):
            loss = fit(state, next(batches))
            best, bad = (float(loss), 0) if float(loss) < best - 0.1 else (best, bad + 1)
            if bad == 3:
                state["optimizer"].param_groups[0]["lr"] *= 0.5
                bad = 0
            handed = run.handed(plateau={"best": best, "bad": bad})
            if run.report(checkpoint, step, state, loss, data=batches, **handed):
                break


@hiding(
    "a scheduler", "state", says="The LambdaLR of the optimizer is not saved: pass it to restore_or_initialize and on_"
)
def _scheduler(run: Run) -> None:
    state, batches = new_state(), drawn()
    scheduler = torch.optim.lr_scheduler.LambdaLR(state["optimizer"], lambda done: 1 / (1 + done))

    def update() -> Any:
        loss = fit(state, next(batches))
        scheduler.step()
        return loss

    train(run, state, update, **run.handed(scheduler=scheduler))


@hiding(
    "state dicts that are made at each step", "metrics", "state", says="which only load_state_dict puts back: call it"
)
def _state_dicts(run: Run) -> None:
    parts, batches = new_state(), drawn()
    with run.callback() as checkpoint:
        states, start = checkpoint.restore_or_initialize({name: part.state_dict() for name, part in parts.items()})
        for name, part in parts.items() if run.is_advised else ():
            part.load_state_dict(states[name])
        for step in range(start + 1, run.total + 1):
            loss = fit(parts, next(batches))
            if run.report(checkpoint, step, {name: part.state_dict() for name, part in parts.items()}, loss):
                break


MICRO = 4  # steps or micro-batches between two updates


@hiding("gradients of micro-batches", "gradients", says="end each step with an optimizer that uses its gradients")
def _micro_batches(run: Run) -> None:
    """Without the advice, each of four micro-batches is a step."""
    state = new_state()
    with run.callback() as checkpoint:
        _, start = checkpoint.restore_or_initialize(state)
        for step in range(start + 1, run.total + 1):
            for _ in range(MICRO if run.is_advised else 1):
                x = torch.randn(SIZE, FEATURES)
                loss = loss_of(state, x)
                loss.backward()  # type: ignore[no-untyped-call]
            if run.is_advised or step % MICRO == 0:
                state["optimizer"].step()
                state["optimizer"].zero_grad()
            if run.report(checkpoint, step, state, loss.detach(), batch=x):
                break


ZEROED = "sets them to zero before an optimizer uses them, do so before"


@hiding("gradients of another loss", "gradients", says=ZEROED, every=6, error=7)
def _gradients_of_another_loss(run: Run) -> None:
    """A critic, which is trained more often, leaves gradients in the model; without the advice, they add up.

    Surely inexact is the first step after the save: step 8 sets them to zero, and proves the resume if it is compared.
    """
    state, critic = new_state(), nn.Linear(1, 1)
    state |= {"critic": critic, "of_critic": torch.optim.SGD(critic.parameters(), 0.1)}
    with run.callback() as checkpoint:
        _, start = checkpoint.restore_or_initialize(state)
        for step in range(start + 1, run.total + 1):
            if run.is_advised:
                state["optimizer"].zero_grad()
            x = torch.randn(SIZE, FEATURES)
            loss = critic(state["model"](x)).mean()
            state["of_critic"].zero_grad()
            loss.backward()
            state["of_critic"].step()
            if step % MICRO == 0:
                descend(state, -critic(state["model"](x)).mean())
            if run.report(checkpoint, step, state, loss.detach(), batch=x):
                break


# ---- epochs


@hiding("the epoch", "counters", every=EPOCH, error=EPOCH + 2)
def _epoch(run: Run) -> None:
    """A lost count changes no weight here; ``epoch=`` shows it."""
    loader, state = StatefulDataLoader(list(examples()), SIZE), new_state()
    with run.callback() as checkpoint:
        _, step = checkpoint.restore_or_initialize(state, data=loader, **run.handed(epoch=0))
        for epoch in count(checkpoint.extras.get("epoch", 0)):
            for batch in loader:
                step += 1
                now = epoch + (step % EPOCH == 0)
                if run.report(checkpoint, step, state, fit(state, batch), data=loader, epoch=now) or step == run.total:
                    return


CALLED_LAST = "Either the loop changes the state after on_step: call it last, after scheduler.step() and averages"


@hiding(
    "a schedule that is stepped after the last save of an epoch",
    "state",
    says=CALLED_LAST,
    every=EPOCH,
    error=EPOCH + 2,
)
def _schedule(run: Run) -> None:
    loader, state = StatefulDataLoader(list(examples()), SIZE), new_state()
    optimizer, schedules = state["optimizer"], torch.optim.lr_scheduler  # one of others, which are not named as unsaved
    halved: list[Any] = [schedules.StepLR(optimizer, 1, 0.5) for _ in range(2)]
    state["schedule"] = schedules.SequentialLR(optimizer, halved, [2])
    with run.callback() as checkpoint:
        _, step = checkpoint.restore_or_initialize(state, data=loader)
        while step < run.total:
            for batch in loader:
                step += 1
                loss = fit(state, batch)
                if run.is_advised and step % EPOCH == 0:
                    state["schedule"].step()
                if run.report(checkpoint, step, state, loss, data=loader):
                    return
            if not run.is_advised:
                state["schedule"].step()


# ---- Lightning


class Recorder(lightning.Callback):
    """Notes what each step gives, and interrupts the run."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if trainer.global_step and trainer.global_step == self.run.error:
            self.run.checkpoint.manager.wait_until_finished()
            raise InterruptionError
        if trainer.global_step + 1 == self.run.told:
            self.run.tell()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        state = {"model": module, "optimizer": trainer.optimizers[0]}
        self.run.note(trainer.global_step, state, outputs["loss"], batch=batch, epoch=trainer.current_epoch)


class Regression(lightning.LightningModule):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.layer(batch), batch.sum(1, keepdim=True))
        self.log("loss", loss)
        return loss


def train_with_lightning(run: Run, loader: Any, layer: nn.Module | None = None) -> None:
    run.checkpoint = CheckpointCallback(run.directory, save_interval_steps=run.every)
    limits: dict[str, Any] = {**QUIET, "max_epochs": -1, "max_steps": run.total}
    trainer = lightning.Trainer(callbacks=[Recorder(run), run.checkpoint], **limits)
    try:
        trainer.fit(Regression(layer or nn.Linear(FEATURES, 1)), loader)
    except SystemExit:
        run.stopped = True


class Placed:
    """A loader with a state, which begins the next epoch as its iterator ends, if it is advised to."""

    def __init__(self, is_advised: bool) -> None:
        self.epoch = self.place = 0
        self.is_resumed, self.is_advised = False, is_advised

    def __iter__(self) -> Iterator[Any]:
        if not self.is_advised and not self.is_resumed and self.place:
            self.epoch, self.place = self.epoch + 1, 0
        self.is_resumed = False
        batches = examples().roll(self.epoch, 0).view(EPOCH, SIZE, FEATURES)
        while self.place < EPOCH:
            self.place += 1
            yield batches[self.place - 1]
        if self.is_advised:
            self.epoch, self.place = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.place, self.is_resumed = state["epoch"], state["place"], True


@hiding("a loader with a state in a trainer", "counters", every=EPOCH, error=EPOCH + 2)
def _loader_in_a_trainer(run: Run) -> None:
    train_with_lightning(run, Placed(run.is_advised))


class Seeded(Buffered):
    """Seeds a generator of its own as each epoch begins."""

    def __iter__(self) -> Iterator[Any]:
        self.generator = torch.Generator().manual_seed(int(torch.randint(1 << 62, ())))
        return super().__iter__()


@hiding("draws in the process of the model of a trainer", "batch", "state", every=7, error=9)
def _drawing_in_a_trainer(run: Run) -> None:
    data = (Seeded if run.is_advised else Buffered)(None)
    train_with_lightning(run, DataLoader(data, SIZE), nn.Sequential(nn.Dropout(0.5), nn.Linear(FEATURES, 1)))


@hiding("a number in the module of a trainer", "metrics", "state")
def _number_in_a_trainer(run: Run) -> None:
    train_with_lightning(run, loader_of(shuffle=True), Warming(run.is_advised))
