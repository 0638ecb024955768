"""Preemptions of a worker of Ray: SIGTERM, which only the main thread of its actor handles, and drained nodes."""

from __future__ import annotations

import logging
import signal
import weakref
from collections.abc import Sequence
from types import FrameType
from typing import Any

from ..loop import PreemptionSignal
from .worker import is_drained

logger = logging.getLogger("holdfast")

DRAINED = 1000
"""The number, in place of that of a signal, that says that Ray takes a node away."""

_TIMEOUT = 30.0  # seconds to wait for the main thread of the actor, which Ray keeps free

_here: weakref.WeakValueDictionary[int, WorkerSignal] = weakref.WeakValueDictionary()  # An actor's call finds it there.


class WorkerSignal(PreemptionSignal):
    """The preemption signal of a worker of Ray Train, whose loop runs in a thread beside the main thread.

    The handlers are installed in the main thread of the actor, by a call to the actor. They do not call the handler of
    Ray, which ends the process at once. The workers agree on the step among themselves, also where JAX would.
    """

    def __init__(self, signals: Sequence[signal.Signals]) -> None:
        super().__init__(signals)
        _here[id(self)] = self

    @property
    def is_agreed(self) -> bool:
        """False: JAX's own handler is replaced, and does not know of drained nodes."""
        return False

    @property
    def received(self) -> bool:
        """Whether a signal has arrived, or Ray has announced that a node is taken away."""
        if self._received is None and is_drained():
            self.request(DRAINED)
        return super().received

    def install(self) -> bool:
        """Install the handlers in the main thread of the actor; return whether they are installed."""
        if not self.installed:
            self._in_main_thread("install")
        return self.installed

    def restore(self) -> None:
        """Restore the previous handlers in the main thread of the actor."""
        if self.installed:
            self._in_main_thread("restore")
        super().restore()

    def _in_main_thread(self, method: str) -> None:
        import ray

        try:
            # An actor of Ray Train runs a function for each holder of its handle, in its main thread.
            actor: Any = ray.get_runtime_context().current_actor
            ray.get(actor.execute.remote(_call, id(self), method), timeout=_TIMEOUT)
        except Exception as error:
            if method == "install":
                logger.warning(
                    "%s is not handled, as the main thread of this worker of Ray cannot be reached: %s; a preemption "
                    "without a notice from Ray loses the steps since the last save",
                    self._names(),
                    error,
                )

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.installed:
            self.request(number)
        else:
            super()._handle(number, frame)


def _call(key: int, method: str) -> None:
    if (found := _here.get(key)) is not None:
        getattr(PreemptionSignal, method)(found)
