"""End a run after a signal.

The signal handlers in this module replace Lightning's. The run saves before the next batch or validation and then ends;
validation in progress is aborted at once.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from ...engine.distributed import ProcessGroup
from ...engine.errors import PREEMPTED, HoldfastError
from ..loop import PreemptionSignal, StepsAfterSignal, Stop, barrier_exit
from . import private_api
from .private_api import LoopHooks
from .steps import Fit
from .store import RunStore


class Preempted(SystemExit):
    """Raised to end the process after a signal, with the signal's exit status or, if the job is requeued, status 75."""

    def __init__(self, code: int = 128 + signal.SIGTERM) -> None:
        super().__init__(code)


def leave(trainer: Any, preemption: PreemptionSignal) -> NoReturn:
    """End the process after a signal. Call this only when nothing is left to save."""
    private_api.release_children(trainer)
    raise Preempted(preemption.exit_status)


@dataclass(frozen=True)
class FitStop:
    """Ends a ``fit`` after a signal: at the next consistent point, or after recording a few more steps."""

    fit: Fit
    points: Stop
    steps: StepsAfterSignal

    def let_steps_follow(self) -> bool:
        """Wait until the save is durable; return whether to record further steps for comparison."""
        self.steps.finish_saves()
        loop = self.fit.trainer.fit_loop
        left = loop.max_batches - loop.epoch_loop.batch_idx - 2  # exclude the last batch, which validation may follow
        return self.steps.begin(None if math.isinf(left) else int(left))

    def leave(self, step: int) -> NoReturn:
        """Wait until all saves are durable and, in process 0, until the other processes are done; then end the run."""
        try:
            self.steps.finish_saves()
        finally:
            barrier_exit(self.fit.store.processes)
        self.fit.say("preempted: stopping after step %d in %s", step, self.fit.store.directory)
        leave(self.fit.trainer, self.fit.preemption)


class Signals:
    """Handles signals during one trainer call. Lightning's handlers could end the call while gradients accumulate."""

    def __init__(self, trainer: Any, preemption: PreemptionSignal, store: RunStore) -> None:
        self._connector = private_api.signal_connector(trainer)
        self._preemption = preemption
        self._store = store
        self._requeue_signal = take_over_requeue(trainer)
        if self._requeue_signal is not None:
            preemption.add(self._requeue_signal, PREEMPTED)
        self._hooks = LoopHooks()
        self._hooks.place(self._connector, "register_signal_handlers", self._register)

    def _register(self, original: Callable[[], None]) -> None:
        """Until the run ends, replace Lightning's SIGTERM handler with one that only sets a flag."""
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
        """Restore the previous handlers; ``error`` is the exception that ends the run, if any."""
        self._preemption.restore()
        self._hooks.remove()
        if isinstance(error, Preempted) and self._preemption.number == self._requeue_signal:
            self._store.at_teardown.callback(partial(requeue, self._store.processes))


# ---- SLURM: save a step after the requeue signal, and ignore Lightning's own requeue files
#
# After this signal, Lightning would save ``hpc_ckpt_N.ckpt`` in its handler, possibly in the middle of a batch, and ask
# SLURM to requeue the job. Later calls to ``fit``, ``validate``, ``test`` and ``predict`` would load the file with the
# highest number before any hook of a callback could prevent it.


logger = logging.getLogger("holdfast")

_PATIENCE = 120.0  # maximum time, in seconds, that other processes wait for ``scontrol``

_OURS = "holdfast_requeues"  # attribute set on a cluster environment whose job holdfast requeues


def take_over_requeue(trainer: Any) -> signal.Signals | None:
    """Stop Lightning from handling the requeue signal. Return the signal, or None if the job should not be requeued."""
    environment = private_api.cluster_environment(trainer)
    if "SLURMEnvironment" not in private_api.class_names(environment):
        return None
    if environment.auto_requeue:
        environment.auto_requeue = False
        vars(environment)[_OURS] = True
    if _OURS not in vars(environment) or environment.requeue_signal is None:
        return None
    return signal.Signals(environment.requeue_signal)


def requeue(processes: ProcessGroup) -> None:
    """Make SLURM end the job at once and requeue it. In this collective call, all processes wait for process 0."""
    try:
        processes.decide("requeue", _requeue, work_timeout=_PATIENCE)
    except HoldfastError as error:  # process 0 has already ended
        logger.debug("requeue: %s", error)


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
