"""Training loops of several torch processes: what is saved of each of them, and what is refused or named."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.processes.harness import Logged, Process, run_outcomes, run_processes, told
from tests.processes.meshes import torch_mesh

import holdfast as hf


def go_on(
    directory: str, state: Any, last: int, update: Callable[[int], object], extras: Any = None, **options: Any
) -> list[str]:
    """Trains to a step, which is not saved for being the last; returns the warnings."""
    extras = extras or {}
    with Logged() as logged, hf.CheckpointCallback(directory, save_at_end=False, **options) as checkpoint:
        state, step = checkpoint.restore_or_initialize(state, **extras)
        while step < last:
            step += 1
            update(step)
            checkpoint.on_step(step, state, **extras)
    return logged.warnings


def validate(process: Process, directory: str, last: int) -> tuple[list[float], list[str]]:
    """Trains with FSDP2, with a forward pass alone before each report; returns the weights and the warnings."""
    import torch
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    fully_shard(model, mesh=torch_mesh(process.count))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def update(step: int) -> None:
        model(torch.full((2, 3), float(step))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(torch.ones(2, 3))

    warnings = go_on(directory, {"model": model, "optimizer": optimizer}, last, update, save_interval_steps=2)
    parts: Any = model.parameters()
    return [value for part in parts for value in part.full_tensor().flatten().tolist()], warnings


def test_a_validation_before_the_report_leaves_the_shards_of_fsdp(tmp_path: Path) -> None:
    """The state of the optimizer is saved, and the next backward pass finds its parts."""
    whole = run_processes(validate, 2, str(tmp_path / "whole"), 5, backend="torch")
    run_processes(validate, 2, str(tmp_path / "run"), 3, backend="torch")
    assert run_processes(validate, 2, str(tmp_path / "run"), 5, backend="torch") == whole
    assert [warnings for _, warnings in whole] == [[], []]


def save_wrapped(process: Process, directory: str) -> None:
    """Saves an object whose state has a DTensor, as that of a wrapper around a module."""
    import torch
    from torch.distributed.tensor import Shard, distribute_tensor

    class Wrapper:
        def __init__(self) -> None:
            self.w = distribute_tensor(torch.ones(4, 3), torch_mesh(process.count), [Shard(0)])

        def state_dict(self) -> dict[str, Any]:
            return {"w": self.w}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.w = state["w"]

    wrapper = Wrapper()
    go_on(directory, {}, 1, lambda step: None, {"wrapper": wrapper}, save_interval_steps=1)


def test_an_object_whose_state_is_divided_is_refused_with_advice(tmp_path: Path) -> None:
    ended = run_outcomes(save_wrapped, 2, str(tmp_path), backend="torch")
    advice = "Hand over the module, optimizer or arrays, not an object"
    assert any(advice in (one.error or "") for one in ended), told(ended)


def average(process: Process, directory: str, last: int) -> dict[str, tuple[list[Any], list[str]]]:
    """Trains models with buffers, each process on its own rows; returns their tensors, and what the witness says."""
    return {name: average_by(process, f"{directory}/{name}", AVERAGES[name][0], last) for name in AVERAGES}


def average_by(process: Process, directory: str, options: dict[str, Any], last: int) -> tuple[list[Any], list[str]]:
    import torch

    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 24), torch.nn.BatchNorm1d(24), torch.nn.Tanh(), torch.nn.Linear(24, 1)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), **options)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(process.index))

    def update(step: int) -> None:
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()

    warnings = go_on(directory, {"model": model, "optimizer": optimizer}, last, update, save_interval_steps=3)
    return [tensor.tolist() for tensor in model.state_dict().values()], warnings


AVERAGES = {
    "buffers of process 0": ({"find_unused_parameters": True}, [""] * 4),
    "buffers of each process": (  # process 0 names them at its first save, too
        {"find_unused_parameters": True, "broadcast_buffers": False},
        ["", *[rf"not exact from step 4 on in process {index}: state .*running_mean" for index in (1, 2, 3)]],
    ),
    "other order of gradients": (
        {},
        [rf"not exact from step 4 on in process {index}: .*find_unused_parameters=True" for index in range(4)],
    ),
}


def test_batch_normalization(tmp_path: Path) -> None:
    """Stopped after a step that is not saved, and resumed, bit for bit or with a warning of each that differs."""
    whole = run_processes(average, 4, str(tmp_path / "whole"), 6, backend="torch")
    run_processes(average, 4, str(tmp_path / "run"), 4, backend="torch")
    resumed = run_processes(average, 4, str(tmp_path / "run"), 6, backend="torch")
    for name, (_, expected) in AVERAGES.items():
        for found, undisturbed, pattern in zip(resumed, whole, expected, strict=True):
            tensors, warnings = found[name]
            named = [text for text in warnings if not re.match(r"step 6 is saved although .*running_mean", text)]
            assert (tensors == undisturbed[name][0]) == (not pattern), name
            assert len(named) == bool(pattern), name
            assert all(re.match(pattern, text) for text in named), name
        others = [text for run in (whole, resumed) for text in run[0][name][1] if "although other" in text]
        assert len(others) == (2 if name == "buffers of each process" else 0), name

    # On another number of processes, objects without states are no news.
    (alone,) = run_processes(average, 1, str(tmp_path / "run"), 7, backend="torch")
    for _, (warning,) in alone.values():
        assert re.match(r"step 6 in .* was saved by 4 processes, and 1 continue: the random generators", warning)


def save_own(process: Process, directory: str) -> list[list[str]]:
    """Saves arrays of each process as if they were of all; returns what is logged for each of them."""
    import jax
    import numpy as np

    return [
        go_on(f"{directory}/{number}", {"w": np.ones(2)}, 2, lambda step: None, {"noise": noise}, save_interval_steps=1)
        for number, noise in enumerate([np.arange(3) + process.index, jax.random.key(process.index)])
    ]


def test_arrays_of_each_process_that_are_saved_once_are_named(tmp_path: Path) -> None:
    first, second = run_processes(save_own, 2, str(tmp_path), backend="jax")
    for (warning,) in first:
        assert warning.startswith("step 1 is saved although other processes hold other values of noise")
        assert "an object with get_state and set_state" in warning
    assert second == [[], []]


def train_with_zero(process: Process, directory: str, steps: int) -> tuple[str, list[float], list[float]]:
    """Trains with a ZeroRedundancyOptimizer; returns why it is refused, the learning rates and the weights."""
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = torch.nn.Linear(3, 1)
    torch.nn.init.constant_(model.weight, 1.0)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    refusal = ""
    rates: list[float] = []
    with hf.CheckpointCallback(directory, save_at_end=False, save_interval_steps=2) as checkpoint:
        try:
            checkpoint.restore_or_initialize({"model": model, "optimizer": optimizer})
        except hf.errors.UnsupportedLeafError as error:
            refusal = str(error)
        parts = {"shard": optimizer.optim, "scheduler": scheduler}
        state, step = checkpoint.restore_or_initialize({"model": model}, **parts)
        for group, rate in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
            group["lr"] = rate
        while step < steps:
            step += 1
            model(torch.full((1, 3), float(step))).square().sum().backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            rates += map(float, scheduler.get_last_lr())
            checkpoint.on_step(step, state, **parts)
    return refusal, rates, model.weight.tolist()


def test_an_optimizer_divided_among_processes_is_refused_with_advice_that_is_exact(tmp_path: Path) -> None:
    whole = run_processes(train_with_zero, 2, str(tmp_path / "whole"), 5, backend="torch")
    assert all("optimizer: a ZeroRedundancyOptimizer divides" in text and "shard=" in text for text, _, _ in whole)
    run_processes(train_with_zero, 2, str(tmp_path / "run"), 3, backend="torch")
    resumed = run_processes(train_with_zero, 2, str(tmp_path / "run"), 5, backend="torch")
    assert [(rates, weights) for _, rates, weights in resumed] == [(rates[2:], weights) for _, rates, weights in whole]


def begin(process: Process, directory: str, case: str) -> None:
    """Begins a run in which something differs between the processes."""
    import torch
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.optim import PostLocalSGDOptimizer

    other = process.index == 1
    model: Any = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 3 if case == "shape" and other else 1))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    extras = {"data": iter([1])} if case == "extra" and other else {}
    options: Any = {"resume": "must"} if case == "resume" and other else {}
    if case == "directory":
        directory = f"{directory}/{process.index}"
    elif case == "local SGD":
        optimizer = PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(period=2))
    elif case == "stages":
        model, optimizer = model[process.index % 2], None
    elif case in ("whole", "shards"):
        strategy = ShardingStrategy.NO_SHARD if case == "whole" else ShardingStrategy.FULL_SHARD
        model[1] = FullyShardedDataParallel(model[1], device_id=torch.device("cpu"), sharding_strategy=strategy)
        optimizer = None
    with hf.CheckpointCallback(directory, save_interval_steps=1, barrier_timeout_secs=20, **options) as checkpoint:
        state, step = checkpoint.restore_or_initialize({"model": model, "optimizer": optimizer}, **extras)
        if case == "plain":
            checkpoint.on_step(step + 1, state)


# Whether there is a step already; the error of the processes that do as usual.
BEGINNINGS: dict[str, tuple[bool, str]] = {
    "whole": (False, ""),
    "local SGD": (False, "UnsupportedLeafError: optimizer: a PostLocalSGDOptimizer trains other .*optimizer=optimizer"),
    "shards": (False, "UnsupportedLeafError: model: a FullyShardedDataParallel divides .*fully_shard"),
    "stages": (False, r"OptionError: the processes train other parameters \(model.bias \[1\], .*\{\}, model=model"),
    "directory": (True, "StateError: the options of the managers differ.*directory: process 0 has '/"),
    "resume": (
        True,
        "StateError: the options of the callbacks differ.*resume: process 0 has 'auto', and process 1 has 'must'",
    ),
    "extra": (True, ".*process 1 failed: OptionError.*data"),
    "shape": (True, ".*process 1 failed: TreeMismatchError.*weight"),
}


def begin_or_resume(process: Process, directory: str, case: str) -> None:
    if BEGINNINGS[case][0]:
        begin(process, directory, "plain")
    begin(process, directory, case)


@pytest.mark.parametrize("case", BEGINNINGS)
def test_what_differs_between_the_processes_is_told_to_all_before_the_first_step(tmp_path: Path, case: str) -> None:
    """Else a resume gives all of them the values of process 0, or the others wait for a timeout without a reason."""
    _, error = BEGINNINGS[case]
    first, _, third = run_outcomes(begin_or_resume, 3, str(tmp_path), case, backend="torch")
    for one in (first, third):
        assert re.match(f"{error}.*$" if error else "$", one.error or "", re.DOTALL), one
        assert "BarrierTimeoutError" not in (one.error or "")


APART = {"state": ["step 2 is saved"], "later": ["step 4 is saved"], "extras": []}  # with the warnings of process 0


def train_all_apart(process: Process, directory: str, last: int) -> list[tuple[list[float], list[str]]]:
    return [train_apart(process, f"{directory}/{kind}", kind, last) for kind in APART]


def train_apart(process: Process, directory: str, kind: str, last: int) -> tuple[list[float], list[str]]:
    """Trains another model in each process, in the state or as extras; returns the weights and the warnings."""
    import torch

    torch.manual_seed(0 if kind == "later" else process.index)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    parts = {"model": model, "optimizer": optimizer}

    def update(step: int) -> None:
        optimizer.zero_grad()
        own = process.index if kind == "later" and step > 2 else 0
        model(torch.full((1, 3), float(step + own))).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    state, extras = ({}, parts) if kind == "extras" else (parts, {})
    warnings = go_on(directory, state, last, update, extras, save_interval_steps=2)
    return model.weight.flatten().tolist(), warnings


def test_other_values_in_each_process_warn_once_and_are_exact_as_extras(tmp_path: Path) -> None:
    whole = run_processes(train_all_apart, 2, str(tmp_path / "whole"), 9, backend="torch")
    run_processes(train_all_apart, 2, str(tmp_path / "run"), 5, backend="torch")
    resumed = run_processes(train_all_apart, 2, str(tmp_path / "run"), 9, backend="torch")
    for number, (kind, expected) in enumerate(APART.items()):
        same = [one[number][0] == other[number][0] for one, other in zip(resumed, whole, strict=True)]
        assert all(same) == (kind == "extras"), kind
        found = [[text.partition(" although")[0] for text in each[number][1]] for each in whole]
        assert found == [expected, []], kind


def restore_own_view(process: Process, directory: str) -> None:
    """Opens one path that is another directory in each process, like a disk of each node."""
    os.chdir(Path(directory, str(process.index)))
    options = hf.CheckpointManagerOptions(read_only=True, barrier_timeout_secs=20)
    with hf.CheckpointManager("/proc/self/cwd/run", options=options) as reader:
        reader.restore_latest()


def test_a_step_that_one_process_does_not_see_is_an_error(tmp_path: Path) -> None:
    """They do not look again and again."""
    hf.save(tmp_path / "0" / "run" / "3", {"w": 1.0})
    (tmp_path / "1").mkdir()
    for one in run_outcomes(restore_own_view, 2, str(tmp_path), backend="torch"):
        assert (one.error or "").startswith("CheckpointNotFoundError: ")
        assert "/proc/self/cwd/run: process 0 sees step 3, and process 1 does not" in (one.error or "")


def write_alone(process: Process, directory: str) -> str:
    """Saves as if the processes had been connected only after the manager was made."""
    import torch

    text = ""
    with hf.CheckpointManager(directory, coordinator=hf.processes.Alone()) as manager:
        for index in range(process.count):
            if index == process.index:
                try:
                    manager.save(index, {"w": 1.0})
                except hf.errors.OwnershipError as error:
                    text = str(error)
            torch.distributed.barrier()
    return text


def test_processes_that_work_alone_in_one_directory_are_told_to_connect_first(tmp_path: Path) -> None:
    first, second = run_processes(write_alone, 2, str(tmp_path), backend="torch")
    assert not first
    assert "another run is writing to this directory" in second
    assert "connect the processes first (init_process_group)" in second


def leave_alone(process: Process, directory: str) -> tuple[str, list[str]]:
    """Ends a run whose other process has died."""
    with Logged() as logged:
        try:
            with hf.CheckpointCallback(directory, save_interval_steps=1000, barrier_timeout_secs=2) as checkpoint:
                state, _ = checkpoint.restore_or_initialize({"w": [1.0]})
                checkpoint.on_step(1, state)
                process.reached("the end")
        except hf.SaveFailedError as error:
            return str(error), logged.warnings
    return "", []


def test_a_run_whose_last_save_missed_a_process_does_not_wait_for_it_to_end(tmp_path: Path) -> None:
    """It waits for the process once, in the save, and not again at its end."""
    outcomes = run_outcomes(leave_alone, 2, str(tmp_path), backend="torch", kill=(1, "the end"))
    message, warnings = outcomes[0].value
    assert "process 1 of 2 did not reach" in message
    assert not [text for text in warnings if "have ended the run" in text]


def fail_before_a_save(process: Process, directory: str) -> None:
    """Trains a model whose state cannot be taken on process 1 at the second save."""
    import torch

    class Model(torch.nn.Linear):
        fails = False

        def get_extra_state(self) -> torch.Tensor:
            if self.fails:
                raise ValueError("no state today")
            return torch.zeros(1)

        def set_extra_state(self, state: torch.Tensor) -> None:
            pass

    model = Model(2, 1)

    def update(step: int) -> None:
        model.fails = step == 2 and process.index == 1

    go_on(directory, {"model": model}, 2, update, save_interval_steps=1, barrier_timeout_secs=600)


def test_a_process_that_fails_before_its_part_of_a_save_stops_that_of_the_others_at_once(tmp_path: Path) -> None:
    """They do not wait for the timeout of the barrier, which would not say why."""
    first, second, third = run_outcomes(fail_before_a_save, 3, str(tmp_path), backend="torch")
    assert second.error == "ValueError: no state today"
    for one in (first, third):
        assert "process 1 failed: ValueError: no state today" in (one.error or "")
    assert [entry.step for entry in hf.list_checkpoints(tmp_path)] == [1]
