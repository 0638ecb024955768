"""The time before a program can train: the import, and opening a manager on a directory of many steps."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

STEPS = 2000

IMPORT = """
import time
began = time.perf_counter()
import holdfast
print(time.perf_counter() - began)
"""
FILL = """
import sys
import numpy as np
import holdfast as hf
with hf.CheckpointManager(sys.argv[1]) as manager:
    for step in range(1, int(sys.argv[2]) + 1):
        manager.save(step, {"weights": np.arange(4.0)}, metrics={"loss": 1 / step})
"""
OPEN = """
import sys, time
import holdfast as hf
began = time.perf_counter()
manager = hf.CheckpointManager(sys.argv[1])
assert len(manager.all_steps()) == int(sys.argv[2]) == manager.latest_step()
print(time.perf_counter() - began)
manager.close()
"""


def fill(directory: Path) -> None:
    """Save many small steps."""
    _run(FILL, str(directory), str(STEPS))


def measure_import() -> float:
    """Return the seconds of ``import holdfast`` in a new process."""
    return float(_run(IMPORT))


def measure_manager(directory: Path) -> float:
    """Return the seconds to open a manager and list its steps in a new process."""
    return float(_run(OPEN, str(directory), str(STEPS)))


def _run(program: str, *arguments: str) -> str:
    finished = subprocess.run(
        [sys.executable, "-c", program, *arguments], check=True, stdout=subprocess.PIPE, text=True
    )
    return finished.stdout
