"""The preemption signal: a flag that SIGTERM sets, and that a loop checks when a step is finished."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any, Self

logger = logging.getLogger("holdfast")

Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None


class PreemptionSignal:
    """Remembers that the process was asked to end, so that the loop can save first.

    Schedulers announce a preemption with SIGTERM and kill the process some seconds later. The handler installed here
    only sets a flag (nothing else is safe in the middle of a step) and then calls the handler that was there before.
    It is installed from the main thread only, as Python allows, and never beside ``jax.distributed``, whose own
    handler makes all processes agree on one step: there, :meth:`reached` asks it.

    Processes forked while the handler is installed, such as data-loading workers, still end at SIGTERM.

    Args:
        signals: The signals that announce a preemption.

    >>> preemption = PreemptionSignal()
    >>> preemption.request()
    >>> preemption.received
    True
    """

    def __init__(self, signals: Sequence[signal.Signals] = (signal.SIGTERM,)) -> None:
        self._signals = tuple(signals)
        self._received = False
        self._process: int | None = None
        self._previous: dict[int, Handler] = {}

    @property
    def received(self) -> bool:
        """Whether the signal has arrived; costs an attribute, so evaluation loops may ask for it as well."""
        return self._received

    @property
    def installed(self) -> bool:
        """Whether the handler is in place, in this process."""
        return self._process == os.getpid()

    def request(self) -> None:
        """Set the flag as the signal would: for tests, and for other sources of preemptions."""
        self._received = True

    def reached(self, step: int) -> bool:
        """Return whether to save and stop at this step, the same on every process of a ``jax.distributed`` run.

        Args:
            step: The step just finished. In a ``jax.distributed`` run every process must ask for every step.
        """
        if not self._received and _jax_is_distributed():
            from jax.experimental import multihost_utils

            self._received = bool(multihost_utils.reached_preemption_sync_point(step))
        return self._received

    def install(self) -> bool:
        """Install the handler; once is enough.

        Returns:
            Whether it is in place. False away from the main thread, where Python allows no handlers, and in a
            ``jax.distributed`` run, where JAX owns the signal.
        """
        if self.installed:
            return True
        if _jax_is_distributed():
            return False
        if threading.current_thread() is not threading.main_thread():
            logger.warning(
                "SIGTERM is not handled: signal handlers can only be installed from the main thread; "
                "a preemption loses the steps since the last save"
            )
            return False
        self._process = os.getpid()
        for number in self._signals:
            self._previous[number] = signal.signal(number, self._handle)
        return True

    def restore(self) -> None:
        """Put the handlers back that were there before.

        A handler that was installed later, on top of this one, stays; signals that it passes on go to the earlier one.
        """
        if not self.installed:
            return
        self._process = None
        if threading.current_thread() is not threading.main_thread():
            return
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL if previous is None else previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous.get(number)
        active = self.installed
        if active:
            self._received = True
        if callable(previous):
            previous(number, frame)
        elif not active and previous != signal.SIG_IGN:
            # A forked worker, or a handler on top of ours that outlived it: the signal has its usual effect.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def __enter__(self) -> Self:
        self.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.restore()


def _jax_is_distributed() -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and bool(jax.distributed.is_initialized())
