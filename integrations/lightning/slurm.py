"""SLURM: the requeue signal saves a step of the run, and Lightning's own files for requeueing are left alone.

Lightning saves ``hpc_ckpt_N.ckpt`` inside the signal handler, perhaps in the middle of a batch, asks SLURM to requeue
the job, and begins with the highest of these files from then on, for ``fit``, ``validate``, ``test`` and ``predict``,
before any hook of a callback.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import subprocess
import sys
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


class RequeuePath(str):
    """The file of Lightning's that a trainer begins with because it is there, and was not told to begin with.

    The callback may come with the module (``configure_callbacks``), which a trainer asks later than it looks for files.
    """


def left_alone(path: Any) -> bool:
    """Return whether a path is such a file, and say that it is left alone."""
    if isinstance(path, RequeuePath):
        logger.warning("%s is left alone: Lightning saved it for requeueing; ckpt_path='hpc' begins with it", path)
        return True
    return False


def leave_requeue_files(callback: type) -> None:
    """Keep trainers that have such a callback from beginning with a file of Lightning's without being told to."""
    for package in ("lightning.pytorch", "pytorch_lightning"):
        module: Any = sys.modules.get(f"{package}.trainer.connectors.checkpoint_connector")
        if module is not None:
            _wrap(module._CheckpointConnector, callback)


def _wrap(connector: Any, callback: type) -> None:
    original = connector._parse_ckpt_path

    @functools.wraps(original)
    def parse(self: Any, state_fn: Any, ckpt_path: Any, model_provided: bool, model_connected: bool) -> Any:
        has_callback = any(isinstance(one, callback) for one in self.trainer.callbacks)
        if ckpt_path is None and "SLURM_NTASKS" in os.environ and (found := self._hpc_resume_path):
            if not has_callback:
                begun = original(
                    self, state_fn, ckpt_path, model_provided=model_provided, model_connected=model_connected
                )
                return RequeuePath(begun) if begun == found else begun
            left_alone(RequeuePath(found))
            # What a trainer does where there is no such file.
            if state_fn != "fit" and model_provided:
                return None
            ckpt_path = "last" if state_fn == "fit" else "best"
        return original(self, state_fn, ckpt_path, model_provided=model_provided, model_connected=model_connected)

    connector._parse_ckpt_path = parse
