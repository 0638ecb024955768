"""Checkpoints for JAX and Flax training loops: ``holdfast.CheckpointCallback`` under its earlier name."""

from __future__ import annotations

from ..loop import CheckpointCallback, StepOutcome

__all__ = ["CheckpointCallback", "StepOutcome"]
