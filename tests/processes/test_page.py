"""The page on several processes: its programs run as printed, with as many processes as it says."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.documents.examples import Examples
from tests.processes.harness import Process, run_processes

import holdfast as hf

ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def train(process: Process, directory: str, program: str) -> None:
    """Runs the program in one of several processes that are connected already, as imports take long."""
    import torch.distributed

    os.chdir(directory)
    sys.stdout = open("output", "a", buffering=1)  # noqa: SIM115 - the process ends with the program
    distributed: Any = torch.distributed
    distributed.init_process_group = lambda backend: None
    distributed.destroy_process_group = lambda: None
    exec(compile(program, "train.py", "exec"), {"__name__": "__main__"})


@pytest.mark.examples("docs/several_processes.md", "python 1", "console 1")
def test_torch(examples: Examples, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    assert examples.commands() == [f"torchrun --nproc-per-node {count} train.py" for count in (2, 3)]
    for count in (2, 3):
        run_processes(train, count, str(tmp_path), examples["python 1"], backend="torch")
    lines = (tmp_path / "output").read_text().splitlines()
    assert lines == ["steps 0 to 20, of 2 processes", "steps 20 to 40, of 3 processes"]
    found = hf.load(tmp_path / "runs" / "fsdp")
    assert found["step"] == 40
    assert found["model"]["0.weight"].shape == (32, 8)


@pytest.mark.examples("docs/several_processes.md", "python 2")
def test_jax(examples: Examples, tmp_path: Path) -> None:
    pytest.importorskip("jax")
    one_device = "--xla_force_host_platform_device_count=1 --xla_backend_optimization_level=0"
    environment = {**ONE_THREAD, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": one_device}
    for start in (0, 20):
        (tmp_path / "train_jax.py").write_text(examples["python 2"].replace("29517", str(port())))
        programs = [
            subprocess.Popen(
                [sys.executable, "train_jax.py", str(index), "2"],
                cwd=tmp_path,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for index in range(2)
        ]
        for index, program in enumerate(programs):
            output, errors = program.communicate(timeout=120)
            assert program.returncode == 0, output + errors
            assert output.splitlines()[-1] == f"process {index}: steps {start} to {start + 20}"
    found = hf.load(tmp_path / "runs" / "jax")
    assert found["state"]["w"].shape == (12,)
    assert found["process/0"]["batches"] != found["process/1"]["batches"]
