"""The observer of a manager (``observer=``): what a rehearsal or a trace is told about a run, and may change."""

from __future__ import annotations

from .engine.observer import (
    Observer,
)

__all__ = [
    "Observer",
]
