"""The manager's observer interface (``observer=``), which lets a rehearsal or trace follow a run and alter it."""

from .engine.observer import Observer

__all__ = ["Observer"]
