"""SLURM: the requeue signal saves a step of the run, and Lightning's own files for requeueing are left alone.

Lightning saves ``hpc_ckpt_N.ckpt`` inside the signal handler, perhaps in the middle of a batch, asks SLURM to requeue
the job, and begins with the highest of these files from then on, for ``fit``, ``validate``, ``test`` and ``predict``,
before any hook of a callback.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import weakref
from typing import Any

from ...engine.distributed import ProcessGroup
from ...engine.errors import HoldfastError

logger = logging.getLogger("holdfast")

_PATIENCE = 120.0  # seconds, of the other processes for ``scontrol``

_taken_over: weakref.WeakSet[Any] = weakref.WeakSet()


def take_over_requeue(trainer: Any) -> signal.Signals | None:
    """Take the requeue signal from Lightning; return it, or None where the job is not to be requeued."""
    environment = trainer._accelerator_connector.cluster_environment
    if "SLURMEnvironment" not in {kind.__name__ for kind in type(environment).__mro__}:
        return None
    if environment.auto_requeue:
        environment.auto_requeue = False
        _taken_over.add(environment)
    if environment not in _taken_over or environment.requeue_signal is None:
        return None
    return signal.Signals(environment.requeue_signal)


def requeue(processes: ProcessGroup) -> None:
    """Put the job back into SLURM's queue; all processes call it, as SLURM may end a job when one of them has ended.

    SLURM ends the job as soon as it is asked, so this comes last.
    """
    group = processes.rendezvous("requeue")
    if group is None:
        _requeue()
        return
    with contextlib.closing(group):
        try:
            if processes.is_primary:
                _requeue()
            group.broadcast("requeued", b"", _PATIENCE)
        except HoldfastError as error:  # process 0 has ended
            logger.debug("%s: %s", group.name, error)


def _requeue() -> None:
    job = os.environ.get("SLURM_JOB_ID")
    if (array := os.environ.get("SLURM_ARRAY_JOB_ID")) is not None:
        job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    command = ["scontrol", "requeue", str(job)]
    logger.info("the run is saved; requeueing it: %s", " ".join(command))
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        problem = done.stderr.strip() if done.returncode else None
    except OSError as error:
        problem = str(error)
    if problem is not None:
        logger.warning("%s failed: %s. The run is saved; submit the same job again", " ".join(command), problem)
