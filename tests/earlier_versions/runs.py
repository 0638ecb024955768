"""Small runs that are stopped within an epoch, an accumulation or a validation; their checkpoints are kept.

``python -m tests.earlier_versions.runs DIRECTORY`` writes all of them with the holdfast that is installed: an archive
of each run's directory (a tenth of its size), and in ``ends.json`` what the runs are saved with, and what they end with
if nothing stops them. They hold their state in many places: in generators, attributes and positions of loaders, in
gradients that no optimizer has used yet.
The arithmetic is exact (integers and powers of two), as in :mod:`tests.earlier_versions.programs`.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import numpy as np
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from tests.earlier_versions.programs import Numbers
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

import holdfast as hf
from holdfast.integrations.lightning import CheckpointCallback, Preempted

SAMPLES, BATCH = 8, 2  # four batches an epoch
NEVER = 1000  # steps between two saves


# ---- data


class Noise:
    """A transform that draws from a generator of its own."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(7)

    def __call__(self, value: int) -> int:
        return 10 * value + int(self.rng.integers(8))


def shifting() -> Callable[[int], int]:
    """Returns a function that draws from a generator which only its closure holds."""
    rng = np.random.default_rng(3)
    return lambda value: value + 100 * int(rng.integers(4))


class Noisy(Dataset[torch.Tensor]):
    """Samples that draw from two generators, which are deep in the dataset."""

    def __init__(self) -> None:
        self.transform, self.shift = Noise(), shifting()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(self.shift(self.transform(index))))


class Plain(Noisy):
    """Samples that are always the same."""

    def __init__(self) -> None:
        """There is nothing to draw from."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(index))


class Shuffled(Sampler[int]):
    """Draws the order of an epoch from the global generator of torch."""

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(SAMPLES).tolist())


class Turning:
    """A loader whose epochs change its attributes: a count, an array and a list."""

    def __init__(self) -> None:
        self.turn, self.order, self.held = 0, np.arange(SAMPLES // BATCH), [1, 2, 3]

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.turn += 1
        self.order = np.roll(self.order, self.turn)
        self.held.append(self.held.pop(0))
        for index in self.order:
            yield torch.tensor([100.0 * self.turn + 10.0 * self.held[0] + float(index)])


class TurningWithNoise(Turning):
    """The same, with a generator deep in it; epochs draw from it as they begin."""

    def __init__(self) -> None:
        super().__init__()
        self.source = Noise()

    def __iter__(self) -> Iterator[torch.Tensor]:
        shift = self.source(0)
        for batch in super().__iter__():
            yield batch + 1000 * shift


class Drawn(IterableDataset[torch.Tensor]):
    """Draws from a global generator for each sample, between the draws of the model."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(SAMPLES):
            yield torch.tensor(100.0 * index + int(torch.randint(8, ())))


class Resumed(Sampler[int]):
    """Draws the order of an epoch from a generator; its state is how many indices it has given, and from where."""

    def __init__(self) -> None:
        self.rng = torch.Generator().manual_seed(5)
        self.begun, self.given, self.next = self.rng.get_state(), 0, 0

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        self.begun, self.given, self.next = self.rng.get_state(), self.next, 0
        for index in torch.randperm(SAMPLES, generator=self.rng).tolist()[self.given :]:
            self.given += 1
            yield index

    def state_dict(self) -> dict[str, Any]:
        return {"begun": self.begun, "given": self.given}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Lets the next iterator draw the order of the epoch again, and continue in it."""
        self.rng.set_state(state["begun"])
        self.begun, self.given, self.next = state["begun"], state["given"], state["given"]


class Counted:
    """A loader with a state: its iterator continues where it was, and an epoch ends with its last batch."""

    size = 3

    def __init__(self) -> None:
        self.epoch = self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.epoch, self.place = state["epoch"], state["place"]

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.place < self.size:
            self.place += 1
            yield torch.tensor([10.0 * self.epoch + self.place])
        self.epoch, self.place = self.epoch + 1, 0


class Sized(Counted):
    size = 4

    def __len__(self) -> int:
        return self.size


class Stream(IterableDataset[torch.Tensor]):
    """Has the state of an iterable dataset of Hugging Face: each iterator begins where the last load said."""

    def __init__(self) -> None:
        self.epoch = 0
        self._starting_state_dict: Mapping[str, Any] | None = None
        self._begin()

    def _begin(self) -> dict[str, int]:
        place = {"place": 0}
        start = self._starting_state_dict
        if start and self.epoch == start["epoch"]:
            place |= start["examples_iterable"]
        self._state_dict = {"examples_iterable": place, "epoch": self.epoch}
        return place

    def __iter__(self) -> Iterator[torch.Tensor]:
        place = self._begin()
        while place["place"] < SAMPLES // BATCH:
            place["place"] += 1
            yield torch.tensor([10.0 * self.epoch + place["place"]])

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self._state_dict)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Lets the iterators of the saved epoch begin at a position."""
        self._starting_state_dict = state

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


Stream.__name__, Stream.__module__ = "IterableDataset", "datasets.iterable_dataset"  # this is how it is recognised


def of_torchdata(dataset: Any, **options: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

    return StatefulDataLoader(dataset, **options)


def shuffled_by_torchdata() -> Any:
    """Returns a loader of torchdata that shuffles by a generator of its own; the dataset draws, too."""
    return of_torchdata(Noisy(), batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(5))


def of_nodes() -> Any:
    from torchdata import nodes  # type: ignore[import-untyped]

    sampler = torch.utils.data.SequentialSampler(Plain())
    return nodes.Loader(nodes.Batcher(nodes.MapStyleWrapper(Plain(), sampler), BATCH))


# ---- loops


def seed() -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)


def values_of(model: Any, optimizer: Any) -> list[float]:
    """Returns the weight, and what the optimizer has for it."""
    [weight] = model.parameters()
    momentum = optimizer.state[weight].get("momentum_buffer") if optimizer.state else None
    return [float(weight.detach()), 0.0 if momentum is None else float(momentum)]


def run_loop(
    place: Path,
    end: int,
    interval: int,
    make_data: Callable[[], Any],
    *,
    every: int = 1,
    draws: bool = False,
    counts: bool = False,
) -> dict[str, Any]:
    """Trains up to a step, from the newest checkpoint if there is one.

    ``every`` is the number of batches whose gradients are accumulated, ``draws`` lets each step draw from global
    generators, and ``counts`` counts the epochs, after the loop over their batches.
    """
    seed()
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    data, seen = make_data(), []
    extras: dict[str, Any] = {"data": data, **({"epoch": 0} if counts else {})}
    with hf.CheckpointCallback(place, save_interval_steps=interval, save_at_end=False) as checkpoint:
        state, start = checkpoint.restore_or_initialize({"model": model, "optimizer": optimizer}, **extras)
        extras = {name: checkpoint.extras[name] for name in extras}
        saved, step, without = values_of(model, optimizer), start, 0
        while step < end:
            begun = step
            for batch in data:
                number = float(torch.as_tensor(batch).sum())
                if draws:
                    number += 1000 * int(torch.randint(8, ())) + 10000 * int(np.random.randint(8))
                seen.append(number)
                model(torch.full((1, 1), number, dtype=torch.float64)).sum().backward()
                if (step + 1) % every == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                step += 1
                checkpoint.on_step(step, state, **extras)
                if step == end:
                    break
            if counts:
                extras["epoch"] += 1
            without = 0 if step > begun else without + 1
            assert without < 3, "the data has come to an end"
    return {"start": start, "saved": saved, "seen": seen, "end": [*values_of(model, optimizer), extras.get("epoch", 0)]}


def loop(make_data: Callable[[], Any], **options: Any) -> Callable[..., dict[str, Any]]:
    return lambda place, end, interval, stop: run_loop(place, end, interval, make_data, **options)


# ---- runs of Lightning trainers


class Model(lightning.LightningModule):
    """Notes its batches, and asks the process to end in the validation that follows a step."""

    def __init__(self, stop: int, draws: bool) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
        torch.nn.init.zeros_(self.layer.weight)
        self.switch = torch.nn.Identity()  # its mode is switched at a step
        self.stop, self.draws = stop, draws
        self.seen, self.means = list[float](), list[float]()
        self.start, self.saved = -1, list[float]()

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        if self.start < 0:
            self.start, self.saved = self.trainer.global_step, values_of(self, self.trainer.optimizers[0])

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        parts = batch if isinstance(batch, list | tuple) else [batch]
        number = float(sum(1000**place * part.sum() for place, part in enumerate(parts) if part is not None))
        if self.draws:
            number += 1000 * int(torch.randint(8, ()))
        if self.trainer.global_step == 2:
            self.switch.eval()
        number += 0.5 * self.switch.training
        self.seen.append(number)
        self.log("mean", number, on_step=False, on_epoch=True, batch_size=1)
        loss: torch.Tensor = self.layer(torch.full((1, 1), number, dtype=torch.float64)).sum()
        return loss

    def on_train_epoch_end(self) -> None:
        self.means.append(float(self.trainer.callback_metrics["mean"]))

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("measured", float(batch.sum()), batch_size=1)
        if self.trainer.global_step == self.stop:
            self.stop = -1
            signal.raise_signal(signal.SIGTERM)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.5)


def run_trainer(
    place: Path,
    end: int,
    interval: int,
    stop: int,
    make_data: Callable[[], Any],
    validates: bool = False,
    draws: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Trains up to a step, from the newest checkpoint if there is one; ``stop`` ends it in a validation."""
    seed()
    trainer = lightning.Trainer(
        max_steps=end,
        accelerator="cpu",
        callbacks=[CheckpointCallback(place, save_interval_steps=interval, save_at_end=False)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **options,
    )
    model = Model(stop, draws)
    try:
        trainer.fit(model, make_data(), DataLoader(Noisy(), batch_size=SAMPLES // 2) if validates else None)
    except Preempted:
        assert stop >= 0
    metrics = [float(trainer.callback_metrics[name]) for name in sorted(trainer.callback_metrics)]
    return {
        "start": model.start,
        "saved": model.saved,
        "seen": model.seen,
        "end": [*values_of(model, trainer.optimizers[0]), *model.means[-1:], *metrics],
    }


def trainer(make_data: Callable[[], Any], **options: Any) -> Callable[..., dict[str, Any]]:
    return lambda place, end, interval, stop: run_trainer(place, end, interval, stop, make_data, **options)


# ---- all of them


@dataclasses.dataclass(frozen=True)
class Run:
    """A run that is saved at one step, and ends at another."""

    train: Callable[..., dict[str, Any]]
    saved_at: int
    end: int
    in_validation: bool = False

    def whole(self, place: Path) -> dict[str, Any]:
        """Trains to the end: from a checkpoint if there is one, otherwise from the beginning."""
        return self.train(place, self.end, NEVER, -1)

    def write(self, place: Path) -> dict[str, Any]:
        if self.in_validation:
            return self.train(place, self.end, NEVER, self.saved_at)
        return self.train(place, self.saved_at, self.saved_at, -1)


def skipping(make_loader: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: hf.skip_to(make_loader())


def noisy() -> Any:
    return DataLoader(Noisy(), batch_size=BATCH)


def of_global_order() -> Any:
    return DataLoader(Plain(), batch_size=BATCH, sampler=Shuffled())


def half_as_long() -> Any:
    """Returns a loader that begins twice in an epoch, each time in an order from the global generator of torch."""
    values: Any = [1.0, 2.0, 4.0, 8.0]  # a list will do as a dataset
    return DataLoader(values, batch_size=2, shuffle=True)


RUNS = {
    # an iterator over a loader without a state; an epoch has four batches
    "skip_generators": Run(loop(skipping(noisy)), 6, 11),
    "skip_generators_end": Run(loop(skipping(noisy)), 8, 11),
    "skip_attributes": Run(loop(skipping(TurningWithNoise)), 6, 11),
    "skip_attributes_end": Run(loop(skipping(Turning)), 8, 11),
    "skip_global": Run(loop(skipping(of_global_order), draws=True), 6, 11),
    # loaders of torchdata, and streams of Hugging Face
    "torchdata": Run(loop(shuffled_by_torchdata), 6, 11),
    "torchdata_end": Run(loop(shuffled_by_torchdata), 8, 11),
    "torchdata_epoch": Run(loop(shuffled_by_torchdata, counts=True), 8, 11),
    "torchdata_sampler": Run(loop(lambda: of_torchdata(Plain(), batch_size=BATCH, sampler=Resumed())), 6, 11),
    "nodes": Run(loop(of_nodes), 6, 11),
    "stream": Run(loop(Stream), 6, 11),
    "stream_in_torchdata": Run(loop(lambda: of_torchdata(Stream(), batch_size=None)), 6, 11),
    # other state of a loop
    "accumulation": Run(loop(Numbers, every=2), 5, 9),
    "global_generators": Run(loop(Numbers, draws=True), 5, 9),
    # trainers
    "trainer_generators": Run(trainer(noisy), 6, 11),
    "trainer_attributes": Run(trainer(TurningWithNoise), 6, 11),
    "trainer_attributes_end": Run(trainer(Turning), 8, 11),
    "trainer_state": Run(trainer(Sized), 6, 11),
    "trainer_ahead": Run(trainer(Counted), 5, 10),
    "trainer_ahead_end": Run(trainer(Counted), 6, 10),
    "trainer_torchdata": Run(trainer(shuffled_by_torchdata), 6, 11),
    "trainer_several": Run(trainer(lambda: CombinedLoader([Counted(), Sized()], "max_size_cycle")), 6, 11),
    "trainer_several_plain": Run(
        trainer(lambda: CombinedLoader([noisy(), half_as_long()], "max_size_cycle"), draws=True), 7, 11
    ),
    "trainer_draws": Run(trainer(lambda: DataLoader(Drawn(), batch_size=BATCH), draws=True), 6, 11),
    "trainer_validation": Run(trainer(Turning, validates=True, val_check_interval=2), 6, 11, in_validation=True),
    "trainer_validation_end": Run(trainer(Sized, validates=True), 8, 11, in_validation=True),
    "trainer_accumulation": Run(trainer(Turning, accumulate_grad_batches=2), 3, 6),
}


def write_all(place: Path) -> None:
    """Writes the archive of each run, and what the runs are saved with and end with."""
    ends = {}
    for name, run in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            saved, copied = Path(folder, "saved"), Path(folder, "copied")
            begun = run.write(saved)
            (saved / "owner.json").unlink()  # it names the machine
            shutil.make_archive(str(place / name), "xztar", saved)
            again = run.whole(Path(shutil.copytree(saved, copied)))
            whole = run.whole(Path(folder, "whole"))
        left = whole["seen"][len(begun["seen"]) :]
        ends[name] = {"start": run.saved_at, "saved": begun["end"][:2], "seen": left, "end": whole["end"]}
        print(name, "resumes exactly" if again == ends[name] else f"differs: {again}, {ends[name]}")
    (place / "ends.json").write_text(json.dumps(ends, indent=1) + "\n")


if __name__ == "__main__":
    write_all(Path(sys.argv[1]))
