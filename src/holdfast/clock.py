"""The clock of managers and callbacks, which tests can replace with their own (``clock=``)."""

from .engine.clock import Clock, SystemClock

__all__ = ["Clock", "SystemClock"]
