"""Re-export ``holdfast.CheckpointCallback`` under its earlier module name, for JAX and Flax training loops."""

from __future__ import annotations

from ..loop import CheckpointCallback, StepOutcome

__all__ = ["CheckpointCallback", "StepOutcome"]
