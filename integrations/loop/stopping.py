"""Where a run stops that was asked to end: at the next point, or at the first point that all processes agree on."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import threading
from collections.abc import Callable
from typing import Any, Protocol
from urllib.parse import quote

from ...engine.distributed import ProcessGroup, Rendezvous
from ...engine.errors import BarrierTimeoutError, PeerFailedError
from .preemption import PreemptionSignal

logger = logging.getLogger("holdfast")

_INTERVAL = 0.1  # seconds between two looks at the store
_LOOKS = 1000  # a second that the store gets from all processes together
_PATIENCE = 60.0  # seconds: all are at most a batch from where they answer

_Progress = tuple[int, int]  # batches and epochs that were finished, and batches of a validation since then


class Stop(Protocol):
    """Decides at each point where a run can leave whether it has to."""

    def begin(self) -> None:
        """Start when training begins."""
        ...

    def after_batch(self) -> bool:
        """Return whether to leave, after a training batch or an epoch."""
        ...

    def in_validation(self) -> bool:
        """Return whether to leave, after a batch of a validation."""
        ...

    def end(self, *, orderly: bool) -> None:
        """End when training has ended; ``orderly`` is False after an exception, perhaps in this process only."""
        ...


class OwnStop:
    """Stops a single process at the next point after its signal."""

    def __init__(self, preemption: PreemptionSignal) -> None:
        self._preemption = preemption

    def begin(self) -> None:
        pass

    def after_batch(self) -> bool:
        return self._preemption.received

    def in_validation(self) -> bool:
        return self._preemption.received

    def end(self, *, orderly: bool) -> None:
        pass


class AgreedStop:
    """Stops all processes at the same point, although perhaps only one of them has received the signal.

    A thread of each process checks the store now and then for a signal. If there is one, every process reports how far
    it is, and all leave at the first point that none has passed; while they exchange this, no process passes a point.
    Points at which there is nothing to report cost a lock, and no message.
    """

    def __init__(
        self,
        group: Rendezvous,
        preemption: PreemptionSignal,
        validation_batches: Callable[[], float],
        timeout: float = _PATIENCE,
    ) -> None:
        self._group = group
        self._patience = min(timeout, _PATIENCE)
        self._preemption = preemption
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
        """Stop the thread. Processes that want to agree later learn that this one passes no more points."""
        self._ended.set()
        if not orderly or self._thread is None:
            return
        with self._lock:
            if not self._answered:
                self._answered = True
                self._decline()
        self._thread.join(self._patience)
        self._group.close()

    def _is_due(self) -> bool:
        if self._stop is None or self._passed < self._stop:
            return False
        self._preemption.request(self._number)
        return True

    def _watch(self) -> None:
        interval = max(_INTERVAL, self._group.count / _LOOKS)
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
        except Exception as error:  # a process is gone: training ends by that
            logger.warning("the processes could not agree on where to stop: %s", error)

    def _agree(self) -> None:
        with self._lock:
            if self._answered:
                return
            self._answered = True
            stop = self._exchange([*self._passed, self._validation_batches()])
            if stop is not None:
                self._stop = (stop[0], stop[1])

    def _exchange(self, point: list[Any]) -> Any:
        answers = self._group.gather("passed", json.dumps(point).encode(), self._patience)
        answer = None if answers is None else _first_open([json.loads(one) for one in answers])
        return json.loads(self._group.broadcast("stop", json.dumps(answer).encode(), self._patience))

    def _decline(self) -> None:
        """Answer that this process passes no more points."""
        answer = json.dumps(None).encode()
        try:
            if self._group.index == 0:
                self._group.broadcast("stop", answer, self._patience)
            else:
                self._group.gather("passed", answer, self._patience)
        except Exception as error:  # the others have ended, and do not ask any more
            logger.debug("%s: %s", self._group.name, error)


def _first_open(answers: list[Any]) -> list[int] | None:
    """Return the first point that no process has passed; None if one of them passes no more."""
    if any(answer is None for answer in answers):
        return None
    batches, validated = max((answer[0], answer[1]) for answer in answers)
    validations = {answer[2] for answer in answers}
    if len(validations) == 1 and validations != {float("inf")}:
        return [batches, validated + 1]
    return [batches + 1, 0]  # some would find it in the middle of a validation, others at its end


def part(processes: ProcessGroup) -> None:
    """Let process 0, which may keep the store that connects them, wait until the others have ended."""
    group = processes.rendezvous("end")
    if group is None:
        return
    with contextlib.closing(group):
        try:
            group.gather("ended", b"", min(_PATIENCE, processes.timeout))
        except (BarrierTimeoutError, PeerFailedError) as error:  # nothing of this process is lost by that
            logger.warning("not all processes have ended the run with this one: %s", error)
