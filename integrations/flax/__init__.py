"""Checkpoints for JAX and Flax training loops: :class:`CheckpointCallback`."""

from __future__ import annotations

from ..loop import StepOutcome
from .callback import CheckpointCallback

__all__ = ["CheckpointCallback", "StepOutcome"]
