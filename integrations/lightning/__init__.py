"""Checkpoints for PyTorch Lightning: :class:`CheckpointCallback`, for ``lightning`` and for ``pytorch_lightning``."""

from __future__ import annotations

from .callback import CheckpointCallback
from .saver import Preempted
from .store import load_checkpoint

__all__ = ["CheckpointCallback", "Preempted", "load_checkpoint"]
