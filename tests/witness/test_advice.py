"""What a program hands over is exact after a resume, and what it keeps to itself is named by the witness.

Each program is one that an author may write, without and with the line that ``docs/exact_resume.md`` advises. It
crashes two steps after a save, and is started again.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import lightning.pytorch as lightning
import numpy as np
import pytest
import torch
from flax import struct
from tests.lightning_advice import ADVICE
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

import holdfast as hf
from holdfast.integrations.lightning import CheckpointCallback

StatefulDataLoader: Any = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

pytestmark = [*ADVICE, pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")]  # torchdata with torch 2.13

TOTAL, EPOCH = 16, 4  # steps


class CrashError(RuntimeError):
    """Ends a program between two steps."""


@dataclass
class Start:
    """One start of a program.

    Attributes:
        directory: The directory of its checkpoints.
        is_advised: Whether the program has the line of advice.
        every: How many steps lie between two saves.
        crash: The step after which it crashes; 0 for none.
        steps: What each step gave: the loss and the weights.
        checkpoint: Its callback.
    """

    directory: str
    is_advised: bool
    every: int
    crash: int = 0
    steps: dict[int, list[Any]] = field(default_factory=dict)
    checkpoint: Any = None

    def callback(self) -> Any:
        self.checkpoint = hf.CheckpointCallback(self.directory, save_interval_steps=self.every)
        return self.checkpoint

    def report(self, step: int, state: Any, loss: Any, **handed: Any) -> bool:
        """Report a step, and return whether it was the last one."""
        self.note(step, state["model"].parameters() if isinstance(state, dict) else [state.w], loss)
        self.checkpoint.on_step(step, state, metrics={"loss": loss}, **handed)
        if step == self.crash:
            self.fail()
        return step == TOTAL

    def note(self, step: int, weights: Any, loss: Any) -> None:
        arrays = [one.detach().numpy() if isinstance(one, torch.Tensor) else np.asarray(one) for one in weights]
        self.steps[step] = [float(loss), *(array.tobytes() for array in arrays)]

    def fail(self) -> None:
        self.checkpoint.manager.wait_until_finished()  # Nothing is compared with a step that was not committed.
        raise CrashError


Program = Callable[[Start], None]


@dataclass(frozen=True)
class Case:
    """A program, when it crashes, and what differs without the advice.

    Attributes:
        train: Trains once.
        layers: The layers that differ.
        every: How many steps lie between two saves.
        crash: The step after which it crashes.
        says: What the warning advises.
    """

    train: Program
    layers: set[str]
    every: int
    crash: int
    says: str


CASES: dict[str, Case] = {}


def case(name: str, *layers: str, every: int = 6, crash: int = 8, says: str = "") -> Callable[[Program], Program]:
    """Enter a program into the table."""

    def enter(train: Program) -> Program:
        CASES[name] = Case(train, {*layers}, every, crash, says)
        return train

    return enter


def new_state(model: Any = None) -> dict[str, Any]:
    model = nn.Linear(3, 1) if model is None else model
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)}


def fit(state: Any, x: torch.Tensor) -> torch.Tensor:
    """Train on a batch; return the loss."""
    loss: torch.Tensor = (state["model"](x) - x.sum(1, keepdim=True)).square().mean()
    state["optimizer"].zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    state["optimizer"].step()
    return loss.detach()


def train(start: Start, state: Any, batches: Iterator[Any], **extras: Any) -> None:
    """Train in a loop over steps."""
    with start.callback() as checkpoint:
        _, done = checkpoint.restore_or_initialize(state, **extras)
        for step in range(done + 1, TOTAL + 1):
            batch = next(batches)
            start.report(step, state, fit(state, batch), batch=batch, **extras)


def train_in_epochs(start: Start, loader: Any, **extras: Any) -> None:
    """Train in a loop over the epochs of a loader that has a state."""
    state = new_state()
    with start.callback() as checkpoint:
        _, step = checkpoint.restore_or_initialize(state, data=loader, **extras)
        while step < TOTAL:
            for batch in loader:
                step += 1
                if start.report(step, state, fit(state, batch), batch=batch, data=loader, **extras):
                    return


def rows() -> torch.Tensor:
    """Return two examples for each batch of an epoch."""
    return torch.sin(torch.arange(6.0 * EPOCH)).view(2 * EPOCH, 3)


# ---- loaders


class Turning:
    """Begins each epoch at another batch."""

    turns = 0

    def __len__(self) -> int:
        return EPOCH

    def __iter__(self) -> Iterator[Any]:
        self.turns += 1
        yield from rows().roll(2 * self.turns, 0).view(EPOCH, 2, 3)


@case("an attribute of a loader", "batch", "state")
def _attribute(start: Start) -> None:
    loader = Turning()
    state = (lambda: loader.turns, lambda turns: setattr(loader, "turns", turns)) if start.is_advised else None
    batches = hf.skip_to(loader, state=state)
    train(start, new_state(), batches, data=batches)


class Points:
    """Endless data whose ``set_state`` forgets something."""

    def __init__(self, forgets: bool) -> None:
        self.rng, self.forgets = np.random.default_rng(0), forgets

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> torch.Tensor:
        return torch.from_numpy(self.rng.normal(size=(2, 3)).astype(np.float32))

    def get_state(self) -> dict[str, Any]:
        return {"rng": self.rng.bit_generator.state}

    def set_state(self, state: dict[str, Any]) -> None:
        if not self.forgets:
            self.rng.bit_generator.state = state["rng"]


@case("a state that set_state does not take back", "batch", "state")
def _forgetful(start: Start) -> None:
    points = Points(forgets=not start.is_advised)
    train(start, new_state(), points, data=points)


class Noisy(Dataset[Any]):
    """Adds noise of a generator deep within the loader."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __len__(self) -> int:
        return 2 * EPOCH

    def __getitem__(self, index: int) -> torch.Tensor:
        return rows()[index] + self.rng.random(dtype=np.float32)


@case("a generator deep in a loader", "batch", "state")
def _deep_generator(start: Start) -> None:
    data = Noisy()
    batches = hf.skip_to(DataLoader(data, batch_size=2), generators=[data.rng] if start.is_advised else [])
    train(start, new_state(), batches, data=batches)


@case("a generator deep in a loader with a state", "batch", "state")
def _deep_generator_beside_a_state(start: Start) -> None:
    data = Noisy()
    train_in_epochs(start, StatefulDataLoader(data, batch_size=2), **({"rng": data.rng} if start.is_advised else {}))


class Order(Sampler[int]):
    """Shuffles the examples of each epoch, and has no state."""

    def __init__(self) -> None:
        self.epoch = self.place = 0

    def __len__(self) -> int:
        return 2 * EPOCH

    def __iter__(self) -> Iterator[int]:
        order = np.random.default_rng(self.epoch).permutation(2 * EPOCH).tolist()
        while self.place < len(order):
            self.place += 1
            yield order[self.place - 1]
        self.epoch, self.place = self.epoch + 1, 0


class OrderWithState(Order):
    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.place = state["epoch"], state["place"]


@case("a sampler without a state", "batch", "state")
def _sampler(start: Start) -> None:
    sampler = OrderWithState() if start.is_advised else Order()
    train_in_epochs(start, StatefulDataLoader(list(rows()), batch_size=2, sampler=sampler))


class Buffered(IterableDataset[Any]):
    """Shuffles in a buffer; without a generator of its own, it draws in between the draws of the model."""

    def __init__(self, generator: torch.Generator | None) -> None:
        self.generator = generator

    def __iter__(self) -> Iterator[Any]:
        buffer = list(rows()[:2])
        for row in rows():
            place = int(torch.randint(len(buffer), (), generator=self.generator))
            yield buffer[place]
            buffer[place] = row + torch.rand((), generator=self.generator)


@case("draws in the process of the model", "batch", "state")
def _drawing(start: Start) -> None:
    own = torch.Generator().manual_seed(3) if start.is_advised else None
    batches = hf.skip_to(DataLoader(Buffered(own), batch_size=2), generators=[] if own is None else [own])
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 1))
    train(start, new_state(model), batches, data=batches)


# ---- models, optimizers and states


class Warming(nn.Linear):
    """Counts its calls in an attribute, or in a buffer."""

    calls: Any

    def __init__(self, has_buffer: bool) -> None:
        super().__init__(3, 1)
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
        yield torch.randn(2, 3)


@case("a number in a module", "metrics", "state")
def _number(start: Start) -> None:
    train(start, new_state(Warming(has_buffer=start.is_advised)), drawn())


class Perturbed(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 1)
        self.rng = np.random.default_rng(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.rng.random()


@case("a generator in a module", "metrics", "state")
def _generator(start: Start) -> None:
    model = Perturbed()
    train(start, new_state(model), drawn(), **({"rng": model.rng} if start.is_advised else {}))


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


@case("a number in an optimizer", "state")
def _optimizer(start: Start) -> None:
    model = nn.Linear(3, 1)
    train(start, {"model": model, "optimizer": Adapting(model.parameters(), start.is_advised)}, drawn())


@struct.dataclass
class Static:
    w: Any
    done: Any = struct.field(pytree_node=False, default=0)  # type: ignore[no-untyped-call]  # flax leaves it so


@struct.dataclass
class Leaf:
    w: Any
    done: Any = 0


@case("a static field", "metrics", "state")
def _static_field(start: Start) -> None:
    state: Any = Leaf(jnp.ones(3)) if start.is_advised else Static(jnp.ones(3))
    with start.callback() as checkpoint:
        state, first = checkpoint.restore_or_initialize(state)
        for step in range(first + 1, TOTAL + 1):
            x = jax.random.normal(jax.random.key(step), (3,))
            w = state.w - 0.1 * 0.9**state.done * (state.w - x)
            state = state.replace(w=w, done=state.done + 1)
            start.report(step, state, jnp.square(w - x).mean())


@case(
    "a scheduler", "state", says="The LambdaLR of the optimizer is not saved: pass it to restore_or_initialize and on_"
)
def _scheduler(start: Start) -> None:
    state, batches = new_state(), drawn()
    scheduler = torch.optim.lr_scheduler.LambdaLR(state["optimizer"], lambda done: 1 / (1 + done))
    extras = {"scheduler": scheduler} if start.is_advised else {}
    with start.callback() as checkpoint:
        _, done = checkpoint.restore_or_initialize(state, **extras)
        for step in range(done + 1, TOTAL + 1):
            loss = fit(state, next(batches))
            scheduler.step()
            start.report(step, state, loss, **extras)


@case(
    "state dicts that are made at each step", "metrics", "state", says="which only load_state_dict puts back: call it"
)
def _state_dicts(start: Start) -> None:
    parts, batches = new_state(), drawn()
    with start.callback() as checkpoint:
        states, done = checkpoint.restore_or_initialize({name: part.state_dict() for name, part in parts.items()})
        for name, part in parts.items() if start.is_advised else ():
            part.load_state_dict(states[name])
        for step in range(done + 1, TOTAL + 1):
            loss = fit(parts, next(batches))
            start.note(step, parts["model"].parameters(), loss)
            states = {name: part.state_dict() for name, part in parts.items()}
            checkpoint.on_step(step, states, metrics={"loss": loss})
            if step == start.crash:
                start.fail()


@case("gradients of micro-batches", "gradients", says="end each step with an optimizer that uses its gradients")
def _micro_batches(start: Start) -> None:
    """Without the advice, each of four micro-batches is a step."""
    state = new_state()
    with start.callback() as checkpoint:
        _, done = checkpoint.restore_or_initialize(state)
        for step in range(done + 1, TOTAL + 1):
            for _ in range(EPOCH if start.is_advised else 1):
                x = torch.randn(2, 3)
                loss = (state["model"](x) - x.sum(1, keepdim=True)).square().mean()
                loss.backward()
            if start.is_advised or step % EPOCH == 0:
                state["optimizer"].step()
                state["optimizer"].zero_grad()
            start.report(step, state, loss.detach(), batch=x)


ZEROED = "sets them to zero before an optimizer uses them, do so before"


@case("gradients of another loss", "gradients", crash=7, says=ZEROED)
def _gradients_of_another_loss(start: Start) -> None:
    """A critic, which is trained more often, leaves gradients in the model; without the advice, they add up.

    Only the first step after the save is compared: step 8 sets them to zero, and would prove the resume.
    """
    state, critic = new_state(), nn.Linear(1, 1)
    state |= {"critic": critic, "of_critic": torch.optim.SGD(critic.parameters(), 0.1)}
    with start.callback() as checkpoint:
        _, done = checkpoint.restore_or_initialize(state)
        for step in range(done + 1, TOTAL + 1):
            if start.is_advised:
                state["optimizer"].zero_grad()
            x = torch.randn(2, 3)
            loss = critic(state["model"](x)).mean()
            state["of_critic"].zero_grad()
            loss.backward()
            state["of_critic"].step()
            if step % EPOCH == 0:
                state["optimizer"].zero_grad()
                (-critic(state["model"](x))).mean().backward()
                state["optimizer"].step()
            start.report(step, state, loss.detach(), batch=x)


# ---- counters of epochs


@case("the epoch", "counters", every=EPOCH, crash=EPOCH + 2)
def _epoch(start: Start) -> None:
    """A lost count changes no weight here; ``epoch=`` shows it."""
    loader, state = StatefulDataLoader(list(rows()), batch_size=2), new_state()
    with start.callback() as checkpoint:
        extras = {"epoch": 0} if start.is_advised else {}
        _, step = checkpoint.restore_or_initialize(state, data=loader, **extras)
        for epoch in count(checkpoint.extras.get("epoch", 0)):
            for batch in loader:
                step += 1
                is_last = step % EPOCH == 0
                if start.report(step, state, fit(state, batch), data=loader, epoch=epoch + is_last):
                    return


CALLED_LAST = "Either the loop changes the state after on_step: call it last, after scheduler.step() and averages"


@case(
    "a schedule that is stepped after the last save of an epoch",
    "state",
    every=EPOCH,
    crash=EPOCH + 2,
    says=CALLED_LAST,
)
def _schedule(start: Start) -> None:
    loader, state = StatefulDataLoader(list(rows()), batch_size=2), new_state()
    optimizer, schedules = state["optimizer"], torch.optim.lr_scheduler  # one of others, which are not named as unsaved
    halved: list[Any] = [schedules.StepLR(optimizer, 1, 0.5) for _ in range(2)]
    state["schedule"] = schedules.SequentialLR(optimizer, halved, [2])
    with start.callback() as checkpoint:
        _, step = checkpoint.restore_or_initialize(state, data=loader)
        while step < TOTAL:
            for batch in loader:
                step += 1
                loss = fit(state, batch)
                if start.is_advised and step % EPOCH == 0:
                    state["schedule"].step()
                if start.report(step, state, loss, data=loader):
                    return
            if not start.is_advised:
                state["schedule"].step()


class Walk:
    """An environment."""

    def __init__(self) -> None:
        self.np_random, self.place = np.random.default_rng(), np.zeros((1, 3), np.float32)

    def reset(self, seed: int) -> None:
        self.np_random, self.place = np.random.default_rng(seed), np.zeros((1, 3), np.float32)

    def __next__(self) -> torch.Tensor:
        self.place = (0.9 * self.place + self.np_random.normal(size=(1, 3))).astype(np.float32)
        return torch.from_numpy(self.place)


@case("an environment", "batch", "state")
def _environment(start: Start) -> None:
    env: Any = Walk()
    env.reset(seed=7)
    train(start, new_state() | ({"env": env} if start.is_advised else {}), env)


# ---- Lightning


class Module(lightning.LightningModule):
    """A model of a trainer, which crashes as a batch begins."""

    def __init__(self, start: Start, layer: nn.Module) -> None:
        super().__init__()
        self.start, self.layer = start, layer

    def on_train_batch_start(self, *args: Any) -> None:
        if self.start.crash and self.global_step == self.start.crash:
            self.start.fail()

    def training_step(self, batch: Any, index: int) -> Any:
        loss = (self.layer(batch) - batch.sum(1, keepdim=True)).square().mean()
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, *args: Any) -> None:
        self.start.note(self.global_step, self.layer.parameters(), outputs["loss"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def train_with_lightning(start: Start, loader: Any, layer: nn.Module | None = None) -> None:
    start.checkpoint = CheckpointCallback(start.directory, save_interval_steps=start.every)
    trainer = lightning.Trainer(
        max_epochs=TOTAL // EPOCH,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[start.checkpoint],
    )
    trainer.fit(Module(start, layer or nn.Linear(3, 1)), loader)


class Placed:
    """A loader with a state, which begins the next epoch as its iterator ends, if it is advised to."""

    def __init__(self, is_advised: bool) -> None:
        self.epoch = self.place = 0
        self.is_resumed, self.is_advised = False, is_advised

    def __iter__(self) -> Iterator[Any]:
        if not self.is_advised and not self.is_resumed and self.place:
            self.epoch, self.place = self.epoch + 1, 0
        self.is_resumed = False
        batches = rows().roll(self.epoch, 0).view(EPOCH, 2, 3)
        while self.place < EPOCH:
            self.place += 1
            yield batches[self.place - 1]
        if self.is_advised:
            self.epoch, self.place = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.place, self.is_resumed = state["epoch"], state["place"], True


@case("a loader with a state in a trainer", "counters", every=EPOCH, crash=EPOCH + 2)
def _loader_in_a_trainer(start: Start) -> None:
    train_with_lightning(start, Placed(start.is_advised))


class Seeded(Buffered):
    """Seeds a generator of its own as each epoch begins."""

    def __iter__(self) -> Iterator[Any]:
        self.generator = torch.Generator().manual_seed(int(torch.randint(1 << 62, ())))
        return super().__iter__()


@case("draws in the process of the model of a trainer", "batch", "state")
def _drawing_in_a_trainer(start: Start) -> None:
    data = (Seeded if start.is_advised else Buffered)(None)
    train_with_lightning(start, DataLoader(data, batch_size=2), nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 1)))


@case("a number in the module of a trainer", "metrics", "state")
def _number_in_a_trainer(start: Start) -> None:
    train_with_lightning(start, DataLoader(rows(), batch_size=2, shuffle=True), Warming(start.is_advised))  # type: ignore[arg-type]


# ---- the test


@pytest.mark.one_in(3)
@pytest.mark.parametrize("is_advised", [False, True], ids=["kept", "handed over"])
@pytest.mark.parametrize("name", CASES)
def test_a_resume_is_exact_with_what_was_handed_over_and_named_without(
    name: str, is_advised: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case, starts = CASES[name], list[Start]()
    for directory, crash in ("whole", 0), ("run", case.crash), ("run", 0):
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(0)
        starts.append(Start(str(tmp_path / directory), is_advised, case.every, crash))
        with contextlib.suppress(CrashError):
            case.train(starts[-1])
    whole, before, after = starts
    assert (max(before.steps), max(whole.steps)) == (case.crash, TOTAL)
    proof = after.checkpoint.proof
    if is_advised:
        assert (proof.exact, proof.differs) == (True, ())
        assert proof.steps[0] == case.every + 1
        assert after.steps == {step: whole.steps[step] for step in range(case.every + 1, TOTAL + 1)}
        assert "not exact" not in caplog.text
    else:
        assert proof.exact is False
        assert case.layers <= {*proof.differs}
        assert f"not exact from step {case.every + 1} on" in caplog.text
        assert case.says in caplog.text
