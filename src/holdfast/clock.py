"""The clock of managers and callbacks, which a test replaces with its own (``clock=``)."""

from .engine.clock import Clock, SystemClock

__all__ = ["Clock", "SystemClock"]
