"""The document's section on the distributed system of jax, for one process; several are tested in tests/processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import socket, sys
import jax
import numpy as np
import holdfast as hf

if sys.argv[2] == "initialized":
    with socket.socket() as one:
        one.bind(("localhost", 0))
        port = one.getsockname()[1]
    jax.distributed.initialize(f"localhost:{port}", num_processes=1, process_id=0)
with hf.CheckpointManager(sys.argv[1], hf.AsyncCheckpointer(hf.PyTreeCheckpointHandler())) as manager:
    manager.save(1, {"w": jax.numpy.arange(3)})
    manager.wait_until_finished()
    assert manager.restore(1)["w"].tolist() == [0, 1, 2]
"""


def test_distributed_initialization(tmp_path: Path) -> None:
    """With it, and, as it is not needed for one process, without."""
    running = [
        subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path / how), how], stderr=subprocess.PIPE, text=True)
        for how in ("initialized", "not")
    ]
    for process in running:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
