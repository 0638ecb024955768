"""Decides after which training or validation batch a run stops, so that all of its processes stop at the same batch."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from ...engine.clock import seconds
from ...engine.distributed import ProcessGroup, Rendezvous
from ...engine.errors import BarrierTimeoutError, PeerFailedError
from ...engine.manager import CheckpointManager
from ..options import CallbackOptions
from .preemption import PreemptionSignal

logger = logging.getLogger("holdfast")

_WITHOUT_GRACE = 2.0  # time limit in seconds for the steps after a preemption if grace_secs is not set
_INTERVAL = 0.1  # interval between polls of the store, in seconds
_REQUESTS = 1000  # maximum number of store requests per second across all processes
_PATIENCE = 60.0  # timeout in seconds for answers from other processes, which normally answer within one batch

_Progress = tuple[int, int]  # (finished training batches and epochs, validation batches since the last of these)


class StepsAfterSignal:
    """The steps that all processes run after a save at a preemption; a resumed run is compared with these steps."""

    def __init__(self, options: CallbackOptions, manager: CheckpointManager, preemption: PreemptionSignal) -> None:
        self.left: int | None = None  # number of steps left before the run stops; None before the save
        self._options = options
        self._manager = manager
        self._preemption = preemption
        self._durations: deque[float] = deque(maxlen=20)  # durations of the last steps, in seconds
        self._last: float | None = None  # end time of the last step, on the monotonic clock
        self._until = 0.0  # deadline for the steps after the signal, on the monotonic clock

    def note_step(self) -> None:
        now = time.monotonic()
        if self._last is not None:
            self._durations.append(now - self._last)
        self._last = now

    def finish_saves(self) -> None:
        """Wait until all saves are durable and, as long as time permits, until the mirror has copies of them."""
        self._manager.wait_until_finished()
        self._manager.finish_mirror(self._preemption.seconds_left(self._options.grace_secs))

    def begin(self, left_in_epoch: int | None) -> bool:
        """Decide how many steps fit into a quarter of the grace period and the current epoch; return whether any do."""
        options, preemption = self._options, self._preemption
        most = self._manager.observer.steps_after_signal(options.witness_steps_after_signal if options.witness else 0)
        if not most:
            self.left = 0
            return False
        if not preemption.ends_run or preemption.number in (signal.SIGINT, signal.SIGHUP) or preemption.again:
            most = 0
        grace = options.grace_secs
        seconds_left = _WITHOUT_GRACE if grace is None else seconds(grace) / 4 - preemption.age
        longest = max(self._durations, default=math.inf)
        fitting = int(max(0.0, seconds_left) / (2 * longest)) if longest > 0 else most
        mine = max(0, min(most, fitting, most if left_in_epoch is None else left_in_epoch))
        self._until = time.monotonic() + seconds_left
        self.left = self._manager.processes.decide("the steps after the signal", lambda: mine)
        self._last = time.monotonic()  # do not count the save as part of the next step
        return self.left > 0

    def count(self) -> int:
        """Count one step, and return how many remain; in a single-process run, return 0 if time is running out."""
        assert self.left is not None
        longest = max(self._durations, default=math.inf)
        has_time = time.monotonic() + 2 * longest <= self._until and not self._preemption.again
        self.left = self.left - 1 if has_time or not self._manager.processes.alone else 0
        return self.left


class Stop:
    """Stops a single process after the batch in which a signal arrives, and JAX processes at the step chosen by JAX."""

    def __init__(self, preemption: PreemptionSignal) -> None:
        self._preemption = preemption

    def begin(self) -> None:
        """Called when training begins."""

    def after_batch(self) -> bool:
        """Return whether to stop now; called after each training batch and epoch."""
        return self._preemption.reached()

    def in_validation(self) -> bool:
        """Return whether to stop now; called after each validation batch."""
        return self._preemption.received

    def end(self, *, orderly: bool) -> None:
        """Called when training ends. ``orderly`` is False after an exception, even if only this process raised it."""


class AgreedStop(Stop):
    """Stops all processes at the same point, even if only one of them has received the signal."""

    # A thread in each process polls the store for a signal. After a signal, every process reports its progress and
    # waits at its current point, and all processes then stop at the first point that none has passed. Without a signal,
    # passing a point only takes a lock, and sends no messages.

    def __init__(
        self,
        group: Rendezvous,
        preemption: PreemptionSignal,
        validation_batches: Callable[[], float],
        timeout: float = _PATIENCE,
    ) -> None:
        super().__init__(preemption)
        self._group = group
        self._patience = min(timeout, _PATIENCE)
        self._validation_batches = validation_batches
        self._alarm = f"{quote(group.name, safe='')}/preempted"
        self._lock = threading.Lock()
        self._passed: _Progress = (0, 0)
        self._stop: _Progress | None = None
        self._number: int = signal.SIGTERM
        self._answered = False
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        self._thread = threading.Thread(target=self._watch, name="holdfast-preemption", daemon=True)
        self._thread.start()

    def after_batch(self) -> bool:
        with self._lock:
            self._passed = (self._passed[0] + 1, 0)
            return self._is_due()

    def in_validation(self) -> bool:
        with self._lock:
            self._passed = (self._passed[0], self._passed[1] + 1)
            return self._is_due()

    def end(self, *, orderly: bool) -> None:
        """Stop the thread. If other processes have yet to agree on a point, inform them that this process has ended."""
        self._ended.set()
        if not orderly or self._thread is None:
            return
        with self._lock:
            self._decline()
        self._thread.join(self._patience)
        self._group.close()

    def _is_due(self) -> bool:
        if self._stop is None or self._passed < self._stop:
            return False
        self._preemption.request(self._number)
        return True

    def _watch(self) -> None:
        interval = max(_INTERVAL, self._group.count / _REQUESTS)
        announced = False
        try:
            while not self._ended.wait(interval):
                if self._preemption.received and not announced:
                    self._group.coordinator.put(self._alarm, str(self._preemption.number).encode())
                    announced = True
                alarm = self._group.coordinator.try_get(self._alarm)
                if announced or alarm is not None:
                    self._number = int(alarm) if alarm is not None else self._preemption.number
                    self._agree()
                    return
        except Exception as error:  # another process has ended, which ends training anyway
            level = logging.DEBUG if self._ended.is_set() else logging.WARNING
            logger.log(level, "the processes could not agree on where to stop: %s", error)

    def _agree(self) -> None:
        with self._lock:
            if self._answered:
                return
            self._answered = True
            point = [*self._passed, self._validation_batches()]
            answers = self._group.gather("passed", json.dumps(point).encode(), self._patience)
            answer = None if answers is None else _first_open(list(map(json.loads, answers)))
            stop = json.loads(self._group.broadcast("stop", json.dumps(answer).encode(), self._patience))
            self._stop = None if stop is None else tuple(stop)

    def _decline(self) -> None:
        """Inform the other processes that this process has ended, so that they do not wait for it."""
        if self._answered:
            return
        self._answered, answer = True, json.dumps(None).encode()
        try:
            if self._group.index == 0:
                self._group.broadcast("stop", answer, self._patience)
            else:
                self._group.gather("passed", answer, self._patience)
        except Exception as error:  # the other processes have ended
            logger.debug("%s: %s", self._group.name, error)


def _first_open(answers: list[Any]) -> list[int] | None:
    """Return the first point that no process has passed, or None if any process has already ended training."""
    if None in answers:
        return None
    batches, validated, _ = max(answers)
    validations = {answer[2] for answer in answers}
    if len(validations) == 1 and validations != {math.inf}:
        return [batches, validated + 1]
    return [batches + 1, 0]  # do not stop within a validation, which may be shorter in some processes


def stop_of(
    processes: ProcessGroup, preemption: PreemptionSignal, validation_batches: Callable[[], float] = lambda: 0.0
) -> Stop:
    """Return the `Stop` of a process group. ``validation_batches`` returns the number of batches in a validation."""
    group = None if preemption.is_agreed else processes.rendezvous("where to stop")
    if group is None:
        return Stop(preemption)
    return AgreedStop(group, preemption, validation_batches, processes.timeout)


def barrier_exit(processes: ProcessGroup) -> None:
    """Make process 0 exit last, because it may host the store that connects the processes."""
    group = processes.rendezvous("end")
    if group is None:
        return
    with contextlib.closing(group):
        try:
            group.gather("ended", b"", min(_PATIENCE, processes.timeout))
        except (BarrierTimeoutError, PeerFailedError) as error:  # harmless, because all saves are complete
            logger.warning("not all processes have ended the run with this one: %s", error)
