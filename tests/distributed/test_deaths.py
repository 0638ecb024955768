"""The errors of the other processes when one of several real ones is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.processes.harness import Backend, Process, run_outcomes, told

import holdfast as hf
from holdfast.engine.distributed import current_coordinator, next_rendezvous
from holdfast.engine.errors import BarrierTimeoutError, PeerFailedError


def meet(process: Process, timeout: float) -> tuple[str, Any]:
    rendezvous = next_rendezvous(current_coordinator(), "meeting")
    try:
        rendezvous.barrier("all are up", 30)
        process.reached("up")
        rendezvous.barrier("all are still here", timeout)
    except BarrierTimeoutError as error:
        return "timeout", error.missing
    except PeerFailedError as error:
        return "failure", error.process
    time.sleep(0.2)
    return "met", None


OUTCOMES: dict[str, tuple[Backend, int, int, dict[str, Any], list[Any]]] = {
    "jax misses the dead at the next barrier": ("jax", 3, 1, {}, [("timeout", (1,))]),
    "torch misses the dead at the next barrier": ("torch", 3, 1, {}, [("timeout", (1,))]),
    # It ends the others later than our timeout.
    "jax without recoverability": ("jax", 3, 2, {"recoverable": False}, [("timeout", (2,))]),
    "torch tells at once that process 0 is gone": ("torch", 3, 0, {}, [("failure", 0)]),
    "jax ends all others when process 0 is gone": ("jax", 3, 0, {}, [-signal.SIGABRT, ("failure", 0)]),
    "a store in a file survives process 0": ("torch", 2, 0, {"store": "file"}, [("timeout", (0,))]),
}


@pytest.mark.parametrize(("backend", "count", "victim", "options", "expected"), OUTCOMES.values(), ids=OUTCOMES)
def test_the_others_when_a_process_dies(
    backend: Backend, count: int, victim: int, options: dict[str, Any], expected: list[Any]
) -> None:
    ended = run_outcomes(meet, count, 1.5, backend=backend, kill=(victim, "up"), **options)
    assert ended[victim].value is None
    for outcome in (one for index, one in enumerate(ended) if index != victim):
        assert (outcome.value or outcome.status) in expected, told(ended)


def meet_frozen(process: Process, directory: str, moment: str) -> str | None:
    """Process 1 stops process 0 as an operator would (SIGSTOP), and says how its next joint action ends."""
    import torch.distributed as distributed

    pids: list[Any] = [None, None]
    distributed.all_gather_object(pids, os.getpid())
    options = hf.CheckpointManagerOptions(barrier_timeout_secs=3)  # the first save is within it, too
    manager = hf.CheckpointManager(directory, options=options) if moment != "the start" else None
    if manager is not None:
        manager.save(1, {"w": np.zeros(4)})
        manager.wait_until_finished()
        distributed.barrier()
    said = None
    if process.index == 1:
        os.kill(pids[0], signal.SIGSTOP)
        try:
            manager = manager or hf.CheckpointManager(directory, options=options)
            if moment == "a save":
                manager.save(2, {"w": np.ones(4)})
                manager.wait_until_finished()
            else:
                manager.restore_latest()
        except hf.HoldfastError as error:
            said = str(error)
        finally:
            with contextlib.suppress(hf.HoldfastError):
                if manager is not None:
                    manager.close()
            os.kill(pids[0], signal.SIGCONT)
    distributed.barrier()
    return said


@pytest.mark.parametrize("moment", ["a save", "a restore", "the start"])
def test_a_frozen_process_0_of_torch_is_not_awaited_for_ever(tmp_path: Path, moment: str) -> None:
    """Neither is the connection to its store, which is made with the manager."""
    _, ended = run_outcomes(meet_frozen, 2, str(tmp_path), moment, backend="torch", timeout=20)
    assert "has not answered for 3 s" in (ended.value or ""), ended
