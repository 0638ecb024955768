"""The page on several processes: its programs run as printed, with as many processes as it says."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.documents.examples import Examples, blocks_of
from tests.processes.harness import Process, run_outcomes, run_processes

import holdfast as hf


def run_program(process: Process, directory: str, program: str, *arguments: str) -> None:
    """Runs the program in one of several processes that are connected already, as imports take long."""
    os.chdir(directory)
    sys.argv = ["train.py", *arguments]
    sys.stdout = open("output", "a", buffering=1)  # noqa: SIM115 - the process ends with the program
    try:
        exec(compile(program, "train.py", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        if end.code:
            raise AssertionError(f"status {end.code}") from end


def printed(number: int, page: str = "docs/several_processes.md") -> list[str]:
    """Returns the lines of one of the blocks of a page that show what is printed."""
    blocks = [block for block in blocks_of(page) if block.language == "text"]
    return blocks[number].text.splitlines()


def train(process: Process, directory: str, program: str) -> None:
    import torch.distributed

    distributed: Any = torch.distributed
    distributed.init_process_group = lambda backend: None
    distributed.destroy_process_group = lambda: None
    run_program(process, directory, program)


def train_jax(process: Process, directory: str, program: str) -> None:
    import jax

    distributed: Any = jax.distributed

    def initialize(address: str, *numbers: int) -> None:
        assert (address, numbers) == ("localhost:29517", (process.count, process.index))

    distributed.initialize = initialize
    run_program(process, directory, program, str(process.index), str(process.count))


@pytest.mark.examples("docs/several_processes.md", "python 1", "console 1", "console 4")
def test_torch(examples: Examples, tmp_path: Path) -> None:
    counts = (4, 2, 3)
    assert examples.commands() == [f"torchrun --nproc-per-node {count} train.py" for count in counts]
    for count in counts:
        run_processes(train, count, str(tmp_path), examples["python 1"], backend="torch")
    lines = (tmp_path / "output").read_text().splitlines()
    assert lines == [*printed(0), *printed(3)]
    found = hf.load(tmp_path / "runs" / "fsdp")
    assert found["extras"]["data"] == {"epoch": 2, "samples": 12}  # 21 steps of 12 samples, of 120 in an epoch
    assert found["state"]["model"]["0"]["weight"].shape == (32, 8)


@pytest.mark.examples("docs/several_processes.md", "python 2", "console 2")
def test_jax(examples: Examples, tmp_path: Path) -> None:
    assert examples.commands() == ["for index in 0 1; do python train_jax.py $index 2 & done; wait"]
    for _ in range(2):
        run_processes(train_jax, 2, str(tmp_path), examples["python 2"])
    lines = (tmp_path / "output").read_text().splitlines()
    assert sorted(lines[:2]) == printed(1)
    assert sorted(lines[2:]) == [f"process {index}: steps 21 to 40" for index in range(2)]
    found = hf.load(tmp_path / "runs" / "jax")
    assert found["state"]["w"].shape == (12,)
    assert found["process/0"]["batches"] != found["process/1"]["batches"]


@pytest.mark.examples("docs/local_tier.md", "python 2", "console 1")
def test_local_steps(examples: Examples, tmp_path: Path) -> None:
    start, lose, again = examples.commands()
    assert start == again == "torchrun --nproc-per-node 2 train_local.py"
    assert lose == "rm -r /dev/shm/holdfast/host1"
    program = examples["python 2"].replace("/dev/shm/holdfast", str(tmp_path / "memory"))
    killed = run_outcomes(train, 2, str(tmp_path), program, backend="torch")
    assert [outcome.status for outcome in killed] == [-9, -9]
    shutil.rmtree(tmp_path / "memory" / "host1")
    run_processes(train, 2, str(tmp_path), program, backend="torch")
    lines = (tmp_path / "output").read_text().splitlines()
    assert [*sorted(lines[:2]), *sorted(lines[2:])] == printed(-1, "docs/local_tier.md")
