"""Programs with worker processes, as their authors would write them, run as jobs of their own.

The job is a session of its own, as a scheduler starts it. Before the batch that follows the given step it prints
``ready`` and its process group, and waits for a line: meanwhile the signal is sent.
"""

from __future__ import annotations

import importlib
import itertools
import multiprocessing
import os
import sys
from collections.abc import Iterator
from typing import Any

STEPS = 4
HELD: list[Any] = []  # what a program holds at its end, as one does that is written without functions


class Samples:
    """A data set: 32 batches of two numbers."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> float:
        return float(index)


def produce(queue: Any) -> None:
    """Loads data in a process that was spawned, as Grain does."""
    for index in itertools.count():
        queue.put(2.0 * (index % 8))


def loaded_by_torch(**options: Any) -> Iterator[float]:
    from torch.utils.data import DataLoader

    loader: Any = DataLoader(Samples(), 2, num_workers=2, **options)  # type: ignore[arg-type]
    while True:
        iterator = iter(loader)
        HELD[:] = [iterator]
        for batch in iterator:
            yield float(batch.sum())


def loaded_by_a_process() -> Iterator[float]:
    context = multiprocessing.get_context("spawn")
    queue: Any = context.Queue(2)
    process = context.Process(target=produce, args=(queue,), daemon=True)
    process.start()
    HELD[:] = [process, queue]
    while True:
        yield queue.get(timeout=30)


LOADERS: dict[str, Any] = {
    "torch, persistent": lambda: loaded_by_torch(persistent_workers=True),
    "torch, by a fork server": lambda: loaded_by_torch(persistent_workers=True, multiprocessing_context="forkserver"),
    "a spawned process": loaded_by_a_process,
}


def wait_for_signal() -> None:
    print("ready", os.getpgid(0), flush=True)
    while os.read(0, 1) != b"\n":
        pass


def loop(kind: str, directory: str, signal_at: int | None) -> None:
    """A training loop of no framework."""
    import numpy as np

    from holdfast import CheckpointCallback

    with CheckpointCallback(directory, save_interval_steps=1000) as checkpoint:
        state, start = checkpoint.restore_or_initialize({"sum": np.zeros(())})
        batches = LOADERS[kind]()
        for step in range(start, STEPS):
            batch = next(batches)
            if step == signal_at:
                wait_for_signal()
            for _ in range(8):  # of one update; more batches than are loaded ahead
                batch += next(batches)
            state = {"sum": state["sum"] + batch}
            if checkpoint.on_step(step + 1, state).should_stop:
                break
    sys.exit(checkpoint.exit_status)


class Source(Samples):
    """The same numbers for Grain, which compares a source with that of a checkpoint by its text."""

    def __repr__(self) -> str:
        return "Source()"


def with_torchdata(kind: str) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

    return StatefulDataLoader(Samples(), 8, shuffle=True, num_workers=2, persistent_workers="persistent" in kind)


def with_grain(kind: str) -> Any:
    import grain  # type: ignore[import-untyped]
    from absl import flags

    flags.FLAGS([kind])
    reads = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)  # by default, 500 elements by 16 threads
    if "loader" in kind:
        sampler = grain.samplers.IndexSampler(64, grain.sharding.NoSharding(), shuffle=True, num_epochs=None, seed=3)
        options = {"sampler": sampler, "operations": [grain.transforms.Batch(8)], "worker_count": 2}
        return iter(grain.DataLoader(data_source=Source(), read_options=reads, **options))
    data = grain.MapDataset.source(Source()).seed(3).shuffle().repeat().batch(8).to_iter_dataset(reads)
    return iter(data.mp_prefetch(grain.MultiprocessingOptions(num_workers=2)))


def loop_with_position(kind: str, directory: str, signal_at: int | None) -> None:
    """A loop of torch that continues with the very next batch; it notes the samples of every update."""
    import torch

    from holdfast import CheckpointCallback

    torch.manual_seed(5)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    data = (with_grain if "grain" in kind else with_torchdata)(kind)
    step, steps = 0, 20
    callback = CheckpointCallback(directory, save_interval_steps=1000, witness_steps_after_signal=0)
    with callback as checkpoint, open(f"{directory}.log", "a") as log:  # which has what is done once
        _, step = checkpoint.restore_or_initialize({"model": model, "optimizer": optimizer}, data=data)
        while step < steps and not checkpoint.should_stop:
            for batch in data:
                if step == signal_at:
                    wait_for_signal()
                optimizer.zero_grad()
                model(torch.as_tensor(batch).float() / 64).square().sum().backward()
                optimizer.step()
                step += 1
                print(step, *map(int, batch), file=log, flush=True)
                state = {"model": model, "optimizer": optimizer}
                if checkpoint.on_step(step, state, data=data).should_stop or step == steps:
                    break
    sys.exit(checkpoint.exit_status)


def train(kind: str, directory: str, signal_at: int | None) -> None:
    """A Lightning trainer, with workers for training and validation."""
    import lightning.pytorch as lightning
    import torch
    from tests.integrations.lightning import program
    from tests.sweep.lightning_programs import samples
    from torch.utils import data as of_torch

    from holdfast.integrations.lightning import CheckpointCallback

    class Signal(lightning.Callback):
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == signal_at and trainer.fit_loop.batch_idx % 5 == 0:
                wait_for_signal()

    torch.manual_seed(5)
    data = samples(40, seed=1)
    options_of_trainer: dict[str, Any] = {**program.QUIET, "max_epochs": 2, "accumulate_grad_batches": 5}
    options: dict[str, Any] = {"num_workers": 2, "persistent_workers": "persistent" in kind}
    make: Any = of_torch.DataLoader
    if "torchdata" in kind:
        make = importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader
    checkpoint = CheckpointCallback(directory, save_interval_steps=1000)
    # Accumulated, so that the update after the signal needs more batches than the loader has loaded already.
    trainer = lightning.Trainer(callbacks=[checkpoint, Signal()], **options_of_trainer)
    shuffled = {**options, "shuffle": "torchdata" in kind}
    trainer.fit(program.Model(), make(data, 2, **shuffled), make(data, 2, **options))


def serve(kind: str, directory: str, signal_at: int | None) -> int:
    """Runs a program as a job; returns its status."""
    job = os.fork()
    if job == 0:
        os.setsid()
        plain = loop_with_position if kind.startswith(("torchdata", "grain")) else loop
        (train if kind.startswith("lightning") else plain)(kind, directory, signal_at)
        sys.exit()
    return os.waitstatus_to_exitcode(os.waitpid(job, 0)[1])
