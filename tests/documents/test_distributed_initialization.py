"""The document's section on the distributed system of jax: its calls, for one process and for two."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from tests.starts import Program

PROGRAM = """
import sys
import jax
import numpy as np
import holdfast as hf

directory, address, processes, process_id = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
if processes:
    jax.distributed.initialize(coordinator_address=address, num_processes=processes, process_id=process_id)
    assert (jax.process_count(), jax.process_index()) == (processes, process_id)
with hf.CheckpointManager(directory, hf.AsyncCheckpointer(hf.PyTreeCheckpointHandler())) as manager:
    save_args = {"step": hf.SaveArgs(aggregate=True)}
    manager.save(1, {"w": np.arange(100_000), "step": 1}, save_kwargs={"save_args": save_args})
    manager.wait_until_finished()
    restored = manager.restore(1)
    assert restored["w"].tolist() == list(range(100_000)) and restored["step"] == 1
"""


@pytest.mark.xdist_group("programs")
@pytest.mark.parametrize("processes", [0, 1, 2], ids=["not initialized", "one process", "two processes"])
def test_distributed_initialization(tmp_path: Path, processes: int) -> None:
    """One process needs no initialization, and works with it; of two, both save and both restore."""
    with socket.socket() as unused:
        unused.bind(("localhost", 0))
        address = f"localhost:{unused.getsockname()[1]}"
    command = ["-c", PROGRAM, tmp_path / "run", address, processes]
    errors = [tmp_path / f"{process_id}.errors" for process_id in range(max(1, processes))]
    running = [Program(*command, process_id, backend="jax", stderr=str(path)) for process_id, path in enumerate(errors)]
    statuses = [process.wait() for process in running]
    assert statuses == [0] * len(running), "\n".join(path.read_text() for path in errors)
    assert (tmp_path / "run" / "1" / "checkpoint.json").exists()
