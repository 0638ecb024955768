"""The Lightning program in several processes, each of them real.

The processes are started as torchrun starts them; one process that is to be several starts the others itself, as
Lightning does it: by running this file, with arguments.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import random
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, callbacks
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from tests.endings import run_to_end
from tests.integrations.lightning import program
from tests.processes.harness import free_port
from tests.sweep.lightning_programs import FEATURES
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import holdfast as hf
from holdfast.integrations.lightning import CheckpointCallback

NOTICE = 0.5  # seconds a batch
SECONDS = 60  # after which a process says where it is, and ends


class Recorder(program.Recorder):
    """Goes slowly once one of the processes has been told to end, so that the others hear of it before the end."""

    slow_after: int | None = None
    began: Any = None

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if self.began is None:
            self.began = [program.plain(trainer.lightning_module.head.weight), trainer.fit_loop.batch_idx]
        super().on_train_batch_start(trainer, *args)
        self._give_notice(trainer)

    def on_validation_batch_start(self, trainer: Any, *args: Any) -> None:
        super().on_validation_batch_start(trainer, *args)
        self._give_notice(trainer)

    def _give_notice(self, trainer: Any) -> None:
        if self.slow_after is not None and trainer.global_step >= self.slow_after:
            time.sleep(NOTICE)


class Model(program.Model):
    """Saves something that every process has differently, small and large."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: Any = None
        for index in range(4):  # each of a size that any of the processes may be given to write
            self.register_buffer(f"own{index}", torch.zeros(64))

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        for index in range(4):
            self.get_buffer(f"own{index}").fill_(self.trainer.global_rank)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        rank = self.trainer.global_rank
        checkpoint["noted"] = {"rank": rank, "large": [torch.full((1 << 19,), float(rank))] * 2}
        if rank == 0:
            checkpoint["noted"]["first"] = [torch.ones(2)]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        noted = checkpoint["noted"]
        self.noted = [noted["rank"], sum(noted["large"]).sum().item(), noted["first"][0].tolist()]


class Failing(program.Model):
    """Has no state to save on one process at one step; with a directory, it saves itself there, and twice later."""

    def __init__(self, rank: int, step: int, directory: str | None = None) -> None:
        super().__init__()
        self.fails_at, self.directory = (rank, step), directory

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        trainer, since = self.trainer, self.trainer.global_step - self.fails_at[1]
        if self.directory is not None and since == 0:
            trainer.save_checkpoint(f"{self.directory}/{trainer.global_step}")
        if self.directory is not None and since in (1, 2):
            given = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
            trainer.strategy.save_checkpoint(given, f"{self.directory}/{trainer.global_step}")
        if self.directory is not None and since == 2:
            trainer.strategy.remove_checkpoint(f"{self.directory}/{trainer.global_step - 1}")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.fails_at == (self.trainer.global_rank, self.trainer.global_step):
            raise ValueError("no state today")


class Sharded(program.Model):
    """Has its parameters divided among the processes, and batch statistics of each one's own."""

    def configure_model(self) -> None:
        mesh: Any = self.device_mesh
        if mesh["tensor_parallel"].size() > 1:
            parallelize_module(self.head, mesh["tensor_parallel"], RowwiseParallel(input_layouts=Replicate()))
            return
        for layer in (self.backbone, self.head):
            if not isinstance(layer, FSDPModule):  # a trainer configures it once more before it tests
                fully_shard(layer, mesh=mesh["data_parallel"])

    def on_train_batch_end(self, *args: Any) -> None:
        weight: Any = self.head.weight
        self.average.mul_(0.5).add_(weight.full_tensor().detach(), alpha=0.5)


def resharded(name: str, states: list[Any], index: int, count: int) -> Any:
    """Gives each process the order of the first one, as many samples into the epoch."""
    logging.getLogger("tests").info("%s of %d for %d of %d", name, len(states), index, count)
    return {"order": states[0]["order"], "place": states[0]["place"] * len(states) // count}


GLOBAL_BATCH = 12


class Undeclared:
    """Has a position of all processes, and does not say so."""

    def __init__(self, position: Any) -> None:
        self.position = position
        self.state_dict, self.load_state_dict = position.get_state, position.set_state

    def __iter__(self) -> Any:
        return self.position


class Numbered(Dataset[Any]):
    """Samples that begin with their numbers."""

    def __len__(self) -> int:
        return 6 * GLOBAL_BATCH

    def __getitem__(self, index: int) -> Any:
        return np.full(FEATURES, index, np.float32), np.zeros(1, np.float32)


class Share:
    """Has the order of one process's share of the data, and shuffles it further in each epoch."""

    def __init__(self, index: int, count: int) -> None:
        self.order = [*range(index, len(Numbered()), count)]
        self.share = set(self.order)

    def __len__(self) -> int:
        return len(self.share)

    def __iter__(self) -> Any:
        random.shuffle(self.order)
        assert set(self.order) == self.share, "this is the share of another process"
        for number in self.order:
            yield [torch.as_tensor(np.stack([part, part])) for part in Numbered()[number]]


def of_all(kind: str, index: int, count: int) -> Any:
    """Makes a loader whose position is one of all processes."""
    sampler: Any = DistributedSampler(Numbered(), num_replicas=count, rank=index, seed=3)
    loader = DataLoader(Numbered(), GLOBAL_BATCH // count, sampler=sampler)
    position = hf.skip_to(loader, index if kind == "of all, apart" else 0, global_batch_size=GLOBAL_BATCH)
    if kind == "of all, named":
        return Undeclared(position)
    if kind.startswith("of all, beside"):
        size = 2 if kind == "of all, beside the same batches" else GLOBAL_BATCH // count
        return {"a": position, "b": DataLoader(Numbered(), size)}
    return position


class Seen(Callback):
    """Writes the numbers of the samples that were trained on into a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        with open(self.path, "a") as file:
            features = (batch["a"] if isinstance(batch, dict) else batch)[0]
            file.write("".join(f"{int(number)}\n" for number in torch.as_tensor(features)[:, 0]))


def fit(
    directory: str,
    index: int,
    count: int,
    *,
    seed: int = 1,
    alike: bool | None = None,
    loader: str = "shuffled",
    checkpoint: Any = None,
    strategy: Any = "ddp",
    average: bool = False,
    memory: str | None = None,  # for local steps; each process is a host
    reshard: bool = False,
    noted: bool = False,
    wide: bool = False,
    fails_at: Any = None,
    saves_itself: bool = False,
    ckpt_path: str | None = None,
    test: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Trains as one of several processes; returns what is to be compared bit by bit."""
    # Under tensor parallelism, all processes have the parameters that are not divided, and read the same data.
    torch.manual_seed(seed := 100 * seed + (0 if alike or (alike is None and strategy == "tensor") else index))
    random.seed(seed)
    when = {name: options.pop(name) for name in list(options) if name.endswith("_after")}
    recorder = Recorder(**{name: step for name, (process, step) in when.items() if process in (index, "all")})
    recorder.slow_after = min((step for _, step in when.values()), default=None)
    model = Model() if noted else program.Model()
    if strategy in ("fsdp2", "tensor"):
        tensor = count if strategy == "tensor" else 1
        strategy, model = ModelParallelStrategy(count // tensor, tensor), Sharded()
    elif strategy == "ddp with own buffers":
        strategy = DDPStrategy(broadcast_buffers=False)
    if fails_at is not None:
        rank, step = fails_at
        model = Failing(rank, step, directory if saves_itself else None)
    if wide:
        model.configure_optimizers = lambda: {  # type: ignore[method-assign]
            "optimizer": (optimizer := program.Wide(model.parameters())),
            "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8),
        }
    checkpoint = {"save_interval_steps": 1, "witness_steps_after_signal": 0, **(checkpoint or {})}
    if memory is not None:
        local = hf.Local(f"{memory}/{index}", every=2, host=f"host{index}")
        checkpoint |= {"local": local, "barrier_timeout_secs": 20}
    if reshard:
        checkpoint["reshard"] = resharded
    callback = CheckpointCallback(directory, **checkpoint)
    others: list[Any] = [callbacks.EMAWeightAveraging(decay=0.5)] if average else []
    if loader == "share":
        train: Any = Share(index, count)
    elif loader.startswith("of all"):
        train = of_all(loader, index, count)
        others.append(Seen(Path(directory).with_name(f"seen-{count}-{index}")))
    else:
        train = program.training_loader(loader)
    options = {"devices": count, "strategy": strategy, "max_epochs": 3, **options}
    trainer = program.trainer(callback, recorder, *others, **options)
    trainer.fit(model, train, program.validation_loader(), ckpt_path=ckpt_path)
    found = {
        "final": program.Outcome(trainer, model, recorder).final,
        "first_step": recorder.first_step,
        "events": recorder.events,
        "random": [torch.rand(2).tolist(), random.random()],
        "steps": callback.manager.all_steps(),
        "began": recorder.began,
        "noted": getattr(model, "noted", None),
    }
    if test is not None:
        trainer.test(model, program.validation_loader(), ckpt_path=test, verbose=False)
        found["tested"] = [trainer.ckpt_path, program.plain(model.head.weight)]
    return found


def launch(directory: str, results: str, count: int, options: dict[str, Any]) -> list[int]:
    """Runs one program; returns the statuses of its processes, negative for signals.

    Args:
        directory: Of the checkpoints.
        results: The folder for what the processes report and say.
        count: How many processes.
        options: Of `fit`.
    """
    port, children = free_port(), []
    for index in range(count):
        child = os.fork()
        if child == 0 and "devices" in options:
            sys.argv[1:] = [directory, json.dumps(options)]
            sys.modules["__main__"] = sys.modules[__name__]  # Lightning runs this again
            run(directory, Path(results), 0, options["devices"], options)
        if child == 0:
            environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "tests"}
            environment |= {"RANK": index, "LOCAL_RANK": index, "GROUP_RANK": 0, "WORLD_SIZE": count}
            os.environ |= {name: str(value) for name, value in environment.items()}
            run(directory, Path(results), index, count, options)
        children.append(child)
    statuses: dict[int, int] = {}
    while len(statuses) < count:
        child, status = os.wait()
        statuses[child] = os.waitstatus_to_exitcode(status)
        if statuses[child] == -signal.SIGKILL:  # as launchers do: no process may wait for one that is gone
            for other in set(children) - statuses.keys():
                os.kill(other, signal.SIGKILL)
    return [statuses[child] for child in children]


def run(directory: str, results: Path, index: int, count: int, options: dict[str, Any]) -> None:
    """Is one process. Ends as a program does that has come to the end of its script, or to an exception."""
    log = os.open(results / f"{index}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    logging.basicConfig(level=logging.INFO, force=True)  # The process it was forked from may have handlers.
    warnings.simplefilter("ignore")
    run_to_end(train, directory, results, index, count, options)


def train(directory: str, results: Path, index: int, count: int, options: dict[str, Any]) -> None:
    if (page := options.get("page")) is not None:
        os.chdir(directory)
        exec(compile(page, "train_lightning.py", "exec"), {"__name__": "__main__"})
        return
    found = fit(directory, index, count, **options)
    (results / f"{index}.json").write_text(json.dumps(found))


if __name__ == "__main__":  # as Lightning starts the other processes
    warnings.simplefilter("ignore")
    fit(sys.argv[1], int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"]), **json.loads(sys.argv[2]))
