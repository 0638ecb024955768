"""The earlier name of ``holdfast.CheckpointCallback`` for JAX and Flax training loops."""

from __future__ import annotations

from ..loop import CheckpointCallback, StepOutcome

__all__ = ["CheckpointCallback", "StepOutcome"]
