"""Signals, taken over from Lightning, and how a run ends that one of them has asked to end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from ..loop import PreemptionSignal
from .strategies import release_children
from .wall import LoopHooks


class Preempted(SystemExit):
    """Ends the process after the run was asked to end and has saved: as the signal would, or with 75 if requeued."""

    def __init__(self, code: int = 128 + signal.SIGTERM) -> None:
        super().__init__(code)


def leave(trainer: Any, preemption: PreemptionSignal) -> NoReturn:
    """End a run that was asked to end, and has nothing left to save."""
    release_children(trainer)
    raise Preempted(preemption.exit_status)


class Signals:
    """The signals of one call of ``fit``, ``validate``, ``test`` or ``predict``, from ``setup`` to its end.

    They are taken over where Lightning installs handlers of its own, which end a run after any batch, also after one
    whose gradients are still being accumulated, which no checkpoint holds.

    Args:
        trainer: The trainer.
        preemption: The flag that the signals set.
        finish: Called last, when Lightning has ended a run that was left.
    """

    def __init__(self, trainer: Any, preemption: PreemptionSignal, finish: Callable[[], None]) -> None:
        self._connector = trainer._signal_connector
        self._preemption = preemption
        self._finish = finish
        self._left = False
        self._hooks = LoopHooks()
        self._hooks.place(self._connector, "register_signal_handlers", self._register)
        self._hooks.place(self._connector, "teardown", self._teardown)

    def _register(self, original: Callable[[], None]) -> None:
        original()
        take_over(self._connector, self._preemption)

    def end(self, error: object = None) -> None:
        """End the handling of signals, after an error perhaps."""
        self._left = isinstance(error, Preempted)
        self._preemption.restore()
        if not self._left:
            self._hooks.remove()

    def _teardown(self, original: Callable[[], None]) -> None:
        original()
        if self._left:
            self._hooks.remove()
            self._finish()


def take_over(connector: Any, preemption: PreemptionSignal) -> None:
    """Put a flag in the place of Lightning's own handler of SIGTERM, on top of the handler before that.

    When the run ends Lightning puts back what was there before its own handler, as always.
    """
    is_lightnings = type(signal.getsignal(signal.SIGTERM)).__name__ == "_HandlersCompose"
    in_main_thread = threading.current_thread() is threading.main_thread()
    if signal.SIGTERM not in preemption.signals or not is_lightnings or not in_main_thread:
        preemption.install()
        return
    before = connector._original_handlers.get(signal.SIGTERM)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
        preemption.install()
        if connector.received_sigterm:
            connector.received_sigterm = False
            preemption.request()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
