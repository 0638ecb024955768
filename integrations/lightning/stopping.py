"""How a run ends after a signal.

The handlers of signals replace those of Lightning. A run saves at its next point between two batches, or before the
next validation; a validation is left at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import torch

from ...engine.distributed import ProcessGroup
from ...engine.errors import PREEMPTED, HoldfastError
from ..loop import PreemptionSignal
from . import private_api
from .private_api import LoopHooks
from .strategies import Path, mapped


class Preempted(SystemExit):
    """Ends the process after the run was asked to end and has saved: as the signal would, or with 75 if requeued."""

    def __init__(self, code: int = 128 + signal.SIGTERM) -> None:
        super().__init__(code)


def leave(trainer: Any, preemption: PreemptionSignal) -> NoReturn:
    """End a run after a signal, when nothing is left to save."""
    private_api.release_children(trainer)
    raise Preempted(preemption.exit_status)


class Signals:
    """The signals of one call of a trainer; Lightning's handlers would end it while gradients are being accumulated."""

    def __init__(self, trainer: Any, preemption: PreemptionSignal, processes: ProcessGroup) -> None:
        self._connector = private_api.signal_connector(trainer)
        self._preemption = preemption
        self._processes = processes
        self._left = False
        self._requeue_signal = take_over_requeue(trainer)
        if self._requeue_signal is not None:
            preemption.add(self._requeue_signal, PREEMPTED)
        self._hooks = LoopHooks()
        self._hooks.place(self._connector, "register_signal_handlers", self._register)
        self._hooks.place(self._connector, "teardown", self._teardown)

    def _register(self, original: Callable[[], None]) -> None:
        """Replace Lightning's handler of SIGTERM, until the run ends, by one that only sets a flag."""
        original()
        connector, preemption = self._connector, self._preemption
        is_lightnings = private_api.is_lightnings_handler(signal.getsignal(signal.SIGTERM))
        in_main_thread = threading.current_thread() is threading.main_thread()
        if signal.SIGTERM not in preemption.signals or not is_lightnings or not in_main_thread:
            preemption.install()
            return
        before = private_api.handler_before_lightnings(connector, signal.SIGTERM)
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
            preemption.install()
            if connector.received_sigterm:
                connector.received_sigterm = False
                preemption.request()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def end(self, error: object = None) -> None:
        """End the handling of signals; ``error`` is the exception that ends the run, if any."""
        self._left = isinstance(error, Preempted)
        self._preemption.restore()
        if not self._left:
            self._hooks.remove()

    def _teardown(self, original: Callable[[], None]) -> None:
        original()
        if self._left:
            self._hooks.remove()
            if self._preemption.number == self._requeue_signal:
                requeue(self._processes)


# ---- SLURM: the requeue signal saves a step of the run, and Lightning's own files for requeueing are left alone
#
# At that signal, Lightning saves ``hpc_ckpt_N.ckpt`` inside the handler, perhaps in the middle of a batch, and asks
# SLURM to requeue the job. Later calls of ``fit``, ``validate``, ``test`` and ``predict`` begin with the file that has
# the highest number, before any hook of a callback.


logger = logging.getLogger("holdfast")

_PATIENCE = 120.0  # The other processes wait so many seconds for ``scontrol``.

_OURS = "holdfast_requeues"  # The attribute of an environment that notes that this integration requeues its job.


def take_over_requeue(trainer: Any) -> signal.Signals | None:
    """Take the requeue signal from Lightning; return it, or None if the job is not to be requeued."""
    environment = private_api.cluster_environment(trainer)
    if "SLURMEnvironment" not in private_api.kinds_of(environment):
        return None
    if environment.auto_requeue:
        environment.auto_requeue = False
        vars(environment)[_OURS] = True
    if _OURS not in vars(environment) or environment.requeue_signal is None:
        return None
    return signal.Signals(environment.requeue_signal)


def requeue(processes: ProcessGroup) -> None:
    """Put the job back into SLURM's queue, which ends it at once. All processes call this, and wait for process 0."""
    group = processes.rendezvous("requeue")
    if group is None:
        _requeue()
        return
    with contextlib.closing(group):
        try:
            if processes.is_primary:
                _requeue()
            group.broadcast("requeued", b"", _PATIENCE)
        except HoldfastError as error:  # Process 0 has ended.
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


# ---- copies of a checkpoint in memory that is reused


class Copies:
    """Copies Lightning's dictionaries, one after the other, into the same host memory, as fresh memory costs more."""

    def __init__(self) -> None:
        self._memory: dict[Path, torch.Tensor] = {}

    def of(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of all containers and arrays, in the memory of the last copy."""
        copied: dict[str, Any] = mapped(self._copy, checkpoint, None)
        return copied

    def _copy(self, value: Any, path: Path, _: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value.copy() if isinstance(value, np.ndarray) else value
        tensor = value.detach()
        if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            return tensor.clone()
        memory = self._memory.get(path)
        like = torch.empty_like(tensor, device="meta")  # It is dense, with the tensor's order of axes.
        facts = like.shape, like.dtype, like.stride()
        if memory is None or (memory.shape, memory.dtype, memory.stride()) != facts:
            memory = self._memory[path] = torch.empty_like(tensor, device="cpu")
        return memory.copy_(tensor)
