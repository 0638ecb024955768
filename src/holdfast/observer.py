"""The observer of a manager (``observer=``), by which a rehearsal or a trace sees a run and may change it."""

from .engine.observer import Observer

__all__ = ["Observer"]
