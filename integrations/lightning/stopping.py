"""When a run leaves after SIGTERM: at the next point, or at one that all of its processes agree on."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from typing import Any, Protocol
from urllib.parse import quote

from ...engine.coordination import Group
from ..preemption import PreemptionSignal

logger = logging.getLogger("holdfast")

_INTERVAL = 0.1  # seconds between two looks at the store
_LOOKS = 1000  # a second that the store gets from all processes together
_PATIENCE = 60.0  # seconds: all are at most a batch from where they answer

_Point = tuple[int, int]  # batches and epochs that were finished, and batches of a validation since then


class Stop(Protocol):
    """Tells at each point where a run can leave whether it has to."""

    def begin(self) -> None:
        """Training begins."""
        ...

    def after_batch(self) -> bool:
        """Tells it after a training batch, and after an epoch."""
        ...

    def in_validation(self) -> bool:
        """Tells it after a batch of a validation."""
        ...

    def end(self, *, orderly: bool) -> None:
        """Training has ended.

        Args:
            orderly: Whether it ends in all processes, rather than by an exception in perhaps only one of them.
        """
        ...


class OwnStop:
    """Of a single process: as soon as it has been told.

    Args:
        preemption: The flag that SIGTERM sets.
    """

    def __init__(self, preemption: PreemptionSignal) -> None:
        self._preemption = preemption

    def begin(self) -> None:
        """Training begins."""

    def after_batch(self) -> bool:
        """Tells whether to leave."""
        return self._preemption.received

    def in_validation(self) -> bool:
        """Tells whether to leave."""
        return self._preemption.received

    def end(self, *, orderly: bool) -> None:
        """Training has ended."""


class AgreedStop:
    """Of several processes, of which perhaps only one has been told: all leave at the same point.

    A thread of each process looks now and then whether any has been told. If so, all say how far they are, and are to
    leave at the first point that none has passed; while they say so, nobody passes one. Points at which nothing is to
    be said cost a lock, and no word to the others.

    Args:
        group: The processes, for this alone.
        preemption: The flag that SIGTERM sets.
        validation_batches: Returns how many batches a validation has. They may leave in the middle of one where all
            have as many.
    """

    def __init__(self, group: Group, preemption: PreemptionSignal, validation_batches: Callable[[], float]) -> None:
        self._group = group
        self._preemption = preemption
        self._validation_batches = validation_batches
        self._alarm = f"{quote(group.name, safe='')}/told"
        self._lock = threading.Lock()
        self._passed: _Point = (0, 0)
        self._stop: _Point | None = None
        self._answered = False
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Starts to look."""
        self._thread = threading.Thread(target=self._watch, name="holdfast-preemption", daemon=True)
        self._thread.start()

    def after_batch(self) -> bool:
        """Tells whether to leave here."""
        with self._lock:
            self._passed = (self._passed[0] + 1, 0)
            return self._is_due()

    def in_validation(self) -> bool:
        """Tells whether to leave here."""
        with self._lock:
            self._passed = (self._passed[0], self._passed[1] + 1)
            return self._is_due()

    def end(self, *, orderly: bool) -> None:
        """Stops looking. Others that want to agree now are told that this process passes no more points."""
        self._ended.set()
        if not orderly or self._thread is None:
            return
        with self._lock:
            if not self._answered:
                self._answered = True
                self._decline()
        self._thread.join(_PATIENCE)
        self._group.close()

    def _is_due(self) -> bool:
        if self._stop is None or self._passed < self._stop:
            return False
        self._preemption.request()
        return True

    def _watch(self) -> None:
        interval = max(_INTERVAL, self._group.count / _LOOKS)
        told = False
        try:
            while not self._ended.wait(interval):
                if self._preemption.received and not told:
                    self._group.coordinator.put(self._alarm, b"1")
                    told = True
                if told or self._group.coordinator.try_get(self._alarm) is not None:
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

    def _exchange(self, said: list[Any]) -> Any:
        answers = self._group.gather("passed", json.dumps(said).encode(), _PATIENCE)
        answer = None if answers is None else _first_open([json.loads(one) for one in answers])
        return json.loads(self._group.broadcast("stop", json.dumps(answer).encode(), _PATIENCE))

    def _decline(self) -> None:
        """Answers that this process passes no more points."""
        word = json.dumps(None).encode()
        try:
            if self._group.index == 0:
                self._group.broadcast("stop", word, _PATIENCE)
            else:
                self._group.gather("passed", word, _PATIENCE)
        except Exception as error:  # nobody is there any more who could have asked
            logger.debug("%s: %s", self._group.name, error)


def _first_open(answers: list[Any]) -> list[int] | None:
    """Returns the first point that no process has passed; None if one of them passes no more."""
    if any(answer is None for answer in answers):
        return None
    batches, validated = max((answer[0], answer[1]) for answer in answers)
    validations = {answer[2] for answer in answers}
    if len(validations) == 1 and validations != {float("inf")}:
        return [batches, validated + 1]
    return [batches + 1, 0]  # some would find it in the middle of a validation, others at its end
