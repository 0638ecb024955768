"""A training program of two processes, for torchrun or as a program of jax.distributed; with troubles on demand.

``launched.py torch|jax DIR STEPS [TROUBLE@STEP ...]``: troubles happen once each, to process 1: ``crash``, ``kill``,
``hang``, ``term``; ``parent`` and ``supervisor`` send SIGTERM to its parent, and to the parent of that. With jax, the
environment has the process (``PROCESS``) and the port of the coordinator (``PORT``).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np

import holdfast as hf


def begin(library: str) -> int:
    """Meets the other process; returns the number of this one."""
    if library == "torch":
        import torch.distributed as dist

        dist.init_process_group("gloo")
        return dist.get_rank()
    import jax

    process = int(os.environ["PROCESS"])
    address = f"127.0.0.1:{os.environ['PORT']}"
    jax.distributed.initialize(address, 2, process, heartbeat_timeout_seconds=10)
    return process


def end(library: str) -> None:
    if library == "torch":
        import torch.distributed as dist

        dist.destroy_process_group()
    else:
        import jax

        jax.distributed.shutdown()  # type: ignore[no-untyped-call]  # it has no annotations


def main(library: str, directory: str, steps: int, *troubles: str) -> int:
    process = begin(library)
    noise = np.random.default_rng(process)
    state: Any = {"weights": np.ones(64, np.float32)}
    with hf.CheckpointCallback(directory, save_interval_steps=2, max_to_keep=2) as checkpoint:
        state, start = checkpoint.restore_or_initialize(state, rng=noise)
        for step in range(start + 1, steps + 1):
            noise.normal(size=64)
            change = np.random.default_rng(step).normal(size=64)  # the same in both
            state = {"weights": (0.9 * state["weights"] + change).astype(np.float32)}
            for trouble in troubles:
                kind, _, when = trouble.partition("@")
                if process == 1 and step == int(when):
                    happen(kind, Path(f"{directory}.{trouble}"))
            if checkpoint.on_step(step, state, rng=noise).should_stop:
                break
    end(library)
    return checkpoint.exit_status


def happen(trouble: str, mark: Path) -> None:
    if mark.exists():
        return
    mark.touch()
    if trouble == "crash":
        raise RuntimeError("a mistake in the program")
    if trouble == "hang":
        threading.Event().wait()
    if trouble in ("kill", "term"):
        os.kill(os.getpid(), signal.SIGKILL if trouble == "kill" else signal.SIGTERM)
        return
    parent = os.getppid()
    stat = Path("/proc", str(parent), "stat").read_bytes()
    grandparent = int(stat[stat.rindex(b")") + 2 :].split()[1])
    os.kill(parent if trouble == "parent" else grandparent, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:]))
