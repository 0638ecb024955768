"""Checkpoints for JAX and Flax training loops: :class:`CheckpointCallback`."""

from __future__ import annotations

from .callback import CheckpointCallback
from .outcome import StepOutcome

__all__ = ["CheckpointCallback", "StepOutcome"]
