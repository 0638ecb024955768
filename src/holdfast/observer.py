"""The manager's observer interface (``observer=``), through which a rehearsal or trace follows and may alter a run."""

from .engine.observer import Observer

__all__ = ["Observer"]
