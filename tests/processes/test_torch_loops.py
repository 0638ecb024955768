"""A training loop of several torch processes: SIGTERM to one or to all of them stops all at one step."""

from __future__ import annotations

import logging
import os
import signal
import time
from pathlib import Path
from typing import Self

import pytest
from tests.processes.harness import Process, run_processes

import holdfast as hf

STEPS = 60
NOTICE = 0.02  # seconds a step after the signal, so that the others hear of it before the end


def train(process: Process, directory: str, told: dict[int, int]) -> tuple[int, int, int, list[float]]:
    """Trains to the end or to a preemption: the first step, the last, the exit status, the parameters."""
    import torch

    model = torch.nn.Linear(2, 1)
    torch.nn.init.constant_(model.weight, 1.0)
    optimizer = torch.optim.Adam(model.parameters())
    step = 0
    with hf.CheckpointCallback(directory, save_interval_steps=1000, save_at_end=not told) as checkpoint:
        state, start = checkpoint.restore_or_initialize({"model": model, "optimizer": optimizer})
        for step in range(start + 1, STEPS + 1):
            model(torch.full((1, 2), float(step))).sum().backward()
            for parameter in model.parameters():
                torch.distributed.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
            if told.get(process.index) == step:
                os.kill(os.getpid(), signal.SIGTERM)
            if told and step >= min(told.values()):
                time.sleep(NOTICE)
            if checkpoint.on_step(step, state).should_stop:
                break
    return start, step, checkpoint.exit_status, model.weight.tolist()


def test_all_save_the_same_step(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    whole = run_processes(train, 2, str(tmp_path / "whole"), {}, backend="torch")
    for name, told in {"one": {1: 3}, "all, at different steps": {0: 3, 1: 4}}.items():
        stopped = run_processes(train, 2, str(tmp_path / name), told, backend="torch")
        (last,) = {step for _, step, _, _ in stopped}
        assert 3 <= last < STEPS
        assert {status for _, _, status, _ in stopped} == {75}
        assert [entry.step for entry in hf.list_checkpoints(tmp_path / name)] == [last]
    resumed = run_processes(train, 2, str(tmp_path / "one"), {}, backend="torch")
    assert {status for _, _, status, _ in resumed} == {0}
    assert [(step, parameters) for _, step, _, parameters in resumed] == [(STEPS, one[3]) for one in whole]


def accumulate(process: Process, directory: str) -> tuple[bool, list[str]]:
    """Reports each micro-batch as a step; what is logged, and whether a checkpoint holds gradients."""
    import torch

    model = torch.nn.Linear(2, 1)
    with Logged() as logged, hf.CheckpointCallback(directory, save_interval_steps=1) as checkpoint:
        state, _ = checkpoint.restore_or_initialize({"model": model})
        for step in (1, 2):
            model(torch.ones(1, 2)).sum().backward()
            checkpoint.on_step(step, state)
    return "accumulated_gradients" in hf.load(directory, item="extras"), logged.warnings


class Logged(logging.Handler):
    """Collects the warnings of holdfast."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.warnings: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.warnings.append(record.getMessage())

    def __enter__(self) -> Self:
        logging.getLogger("holdfast").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("holdfast").removeHandler(self)


def test_several_processes_warn_of_gradients_that_they_do_not_save(tmp_path: Path) -> None:
    for held, warnings in run_processes(accumulate, 2, str(tmp_path), backend="torch"):
        assert not held
        assert [text.startswith("step 1 is saved without the gradients of 2 parameters") for text in warnings] == [True]


def restore_own_view(process: Process, directory: str) -> str:
    """Opens one path that is another directory in each process, like a disk of each node."""
    os.chdir(Path(directory, str(process.index)))
    with hf.CheckpointManager("/proc/self/cwd/run", options=READER) as reader:
        try:
            reader.restore_latest()
        except hf.CheckpointNotFoundError as error:
            return str(error)
    return ""


READER = hf.CheckpointManagerOptions(read_only=True, barrier_timeout_secs=20)


def test_a_step_that_one_process_does_not_see_is_an_error(tmp_path: Path) -> None:
    """Before, all looked again and again until the stack was full."""
    pytest.importorskip("torch")
    hf.save(tmp_path / "0" / "run" / "3", {"w": 1.0})
    (tmp_path / "1").mkdir()
    for text in run_processes(restore_own_view, 2, str(tmp_path), backend="torch"):
        assert "/proc/self/cwd/run: process 0 sees step 3, and process 1 does not" in text
