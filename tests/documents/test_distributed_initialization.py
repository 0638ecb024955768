"""The document's section on the distributed system of jax: its calls, for one process and for two."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("processes", [0, 1, 2], ids=["not initialized", "one process", "two processes"])
def test_distributed_initialization(tmp_path: Path, processes: int) -> None:
    """One process needs no initialization, and works with it; of two, both save and both restore."""
    with socket.socket() as unused:
        unused.bind(("localhost", 0))
        address = f"localhost:{unused.getsockname()[1]}"
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(tmp_path / "run"), address, str(processes), str(process_id)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for process_id in range(max(1, processes))
    ]
    errors = [process.communicate(timeout=120)[1] for process in running]
    assert [process.returncode for process in running] == [0] * len(running), "\n".join(errors)
    assert (tmp_path / "run" / "1" / "checkpoint.json").exists()
