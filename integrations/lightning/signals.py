"""SIGTERM, taken over from Lightning."""

from __future__ import annotations

import signal
import threading
from typing import Any

from ..preemption import PreemptionSignal

_CAN_BLOCK = hasattr(signal, "pthread_sigmask")  # not on Windows


def take_over_sigterm(trainer: Any, preemption: PreemptionSignal) -> None:
    """Puts a flag in the place of Lightning's own handler, on top of what was there before that.

    Lightning ends a run after any batch, also after one whose gradients are still being accumulated, which no
    checkpoint holds. When the run ends it puts back what was there before its own handler, as always.

    Args:
        trainer: The trainer, after it has installed its handler.
        preemption: The flag. It is set if the signal has arrived already.
    """
    connector = trainer._signal_connector
    if connector.received_sigterm:
        connector.received_sigterm = False
        preemption.request()
    is_lightnings = type(signal.getsignal(signal.SIGTERM)).__name__ == "_HandlersCompose"
    if not is_lightnings or threading.current_thread() is not threading.main_thread():
        preemption.install()
        return
    before = connector._original_handlers.get(signal.SIGTERM)
    if _CAN_BLOCK:
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
        preemption.install()
    finally:
        if _CAN_BLOCK:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
