"""The preemption signal: a flag that SIGTERM sets, and that a loop checks when a step is finished."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any, Self

from ...engine.checkpoint import SaveReport
from ...engine.pytree import loaded
from ..workers import expose_workers, exposed_workers, protect_workers

logger = logging.getLogger("holdfast")

_ONE_CTRL_C = 1.0  # seconds in which several are one

WITHOUT_GRACE = 10.0
"""Seconds that a process takes for the mirror before it ends early, where ``grace_secs`` is not known."""

Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None


class PreemptionSignal:
    """Remembers that the process was asked to end, so that the loop can save first.

    Schedulers announce a preemption with SIGTERM and kill the process some seconds later. The handler installed here
    only sets a flag (nothing else is safe in the middle of a step) and then calls the handler that was there before.
    It is installed from the main thread only, as Python allows, and never beside ``jax.distributed``, whose own
    handler makes all processes agree on one step: there, :meth:`reached` asks it.

    Schedulers send the signal to every process of a job. Processes that :mod:`multiprocessing` starts from now until
    :meth:`restore`, such as the workers of data loaders, survive it, since the step that is to be saved may need them;
    they end with this process. Those of a bare ``os.fork`` end at the signal.

    Args:
        signals: The signals that announce a preemption.

    >>> preemption = PreemptionSignal()
    >>> preemption.request()
    >>> preemption.received
    True
    """

    def __init__(self, signals: Sequence[signal.Signals] = (signal.SIGTERM,)) -> None:
        self._signals = tuple(signals)
        self._received: int | None = None
        self._since = 0.0  # when the signal arrived, on the monotonic clock
        self._statuses: dict[int, int] = {}
        self._process: int | None = None
        self._previous: dict[int, Handler] = {}
        protect_workers(self)

    @property
    def signals(self) -> tuple[signal.Signals, ...]:
        """The signals that announce a preemption."""
        return self._signals

    @property
    def received(self) -> bool:
        """Whether the signal has arrived; costs an attribute, so evaluation loops may ask for it as well."""
        return self._received is not None

    @property
    def number(self) -> int:
        """The signal that has arrived; SIGTERM where it is not known, or none has."""
        return self._received or signal.SIGTERM

    @property
    def exit_status(self) -> int:
        """The status of a process that ends as the signal that has arrived would end it."""
        return self._statuses.get(self.number, 128 + self.number)

    @property
    def installed(self) -> bool:
        """Whether the handler is in place, in this process."""
        return self._process == os.getpid()

    @property
    def is_agreed(self) -> bool:
        """Whether JAX makes all processes agree on the step to stop at, which :meth:`reached` then asks."""
        return _jax_is_distributed()

    def request(self, number: int = signal.SIGTERM) -> None:
        """Set the flag as the signal would: for tests, and for other sources of preemptions."""
        if self._received is None:
            self._received, self._since = number, time.monotonic()

    def seconds_left(self, grace: float | None) -> float:
        """Return how long the process may still take, with some reserve, if it has ``grace`` seconds in all."""
        if grace is None:
            return WITHOUT_GRACE
        return max(0.0, 0.9 * (grace - (time.monotonic() - self._since)))

    def add(self, number: signal.Signals, status: int) -> None:
        """Let one more signal announce a preemption, with an exit status of its own; call it before :meth:`install`."""
        self._statuses[number] = status
        if number not in self._signals:
            self._signals = (*self._signals, number)

    def reached(self) -> bool:
        """Return whether to save and stop now, the same on every process of a ``jax.distributed`` run.

        In such a run every process must ask after every step, and equally often.
        """
        if not self.received and _jax_is_distributed() and _jax_agreement.reached():
            self.request()
        return self.received

    def install(self) -> bool:
        """Install the handler; once is enough.

        Returns:
            Whether it is in place. False away from the main thread, where Python allows no handlers, and in a
            ``jax.distributed`` run, where JAX owns the signal.
        """
        if self.installed:
            return True
        protect_workers(self)
        if exposed := exposed_workers():
            logger.warning(
                "%d worker processes were started before the checkpoint callback was made: a %s to the whole job ends "
                "them, and then the step may not be saved; make the callback before anything that starts workers",
                len(exposed),
                self._names(),
            )
        if _jax_is_distributed():
            return False
        if threading.current_thread() is not threading.main_thread():
            logger.warning(
                "%s is not handled: signal handlers can only be installed from the main thread; "
                "a preemption loses the steps since the last save",
                self._names(),
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
        expose_workers(self)
        if not self.installed:
            return
        self._process = None
        if threading.current_thread() is not threading.main_thread():
            return
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL if previous is None else previous)

    def _names(self) -> str:
        return " or ".join(one.name for one in self._signals)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous.get(number)
        active = self.installed
        if active:
            self.request(number)
            # Python's own handler of Ctrl-C would raise before the step is saved. It is for those who ask again; a
            # terminal and a launcher may both pass the same Ctrl-C on.
            if previous is signal.default_int_handler and time.monotonic() - self._since < _ONE_CTRL_C:
                return
        if callable(previous):
            previous(number, frame)
        elif not active and previous != signal.SIG_IGN:
            # A forked process, or a handler on top of ours that outlived it: the signal has its usual effect.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def __enter__(self) -> Self:
        self.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.restore()


class GraceCheck:
    """Warns of saves that take longer than a process has after the signal; a listener of a manager."""

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._exceeded = False

    def __call__(self, report: SaveReport) -> None:
        """Look at a save; several long ones in a row are reported once."""
        exceeded = report.total_seconds > self._grace
        if exceeded and not self._exceeded:
            logger.warning(
                "saving step %s took %.1f s, longer than grace_secs=%g: after a preemption the process may be killed "
                "before its last step is durable. Save more often, ask the scheduler for more time, or save less",
                report.step,
                report.total_seconds,
                self._grace,
            )
        self._exceeded = exceeded


class _JaxAgreement:
    """The point at which all processes of a ``jax.distributed`` run stop.

    JAX agrees once for each connection, on "the largest number that a process has passed so far, plus one", and is true
    only when it is passed that very number. The numbers here therefore count the calls since the connection was made,
    whichever run makes them: the first number after a resume would otherwise be far beyond the one agreed on, and a
    second run in the same process would start below it. Once reached, it stays reached, as JAX reports no later signal.
    """

    def __init__(self) -> None:
        self._connection: Any = None
        self._calls = 0
        self._reached = False

    def reached(self) -> bool:
        """Return whether all processes are to stop at this call."""
        from jax.experimental import multihost_utils

        connection = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
        connection = getattr(connection, "preemption_sync_manager", None)
        if connection is not self._connection:
            self._connection, self._calls, self._reached = connection, 0, False
        if not self._reached:
            self._calls += 1
            self._reached = bool(multihost_utils.reached_preemption_sync_point(self._calls))
        return self._reached


_jax_agreement = _JaxAgreement()


def _jax_is_distributed() -> bool:
    jax = loaded("jax")
    return jax is not None and bool(jax.distributed.is_initialized())
