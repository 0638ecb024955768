"""The clock of managers and callbacks, which a test replaces with its own (``clock=``)."""

from __future__ import annotations

from .engine.clock import Clock, SystemClock

__all__ = ["Clock", "SystemClock"]
