"""Checkpoints for PyTorch Lightning: :class:`CheckpointCallback`, for ``lightning`` and for ``pytorch_lightning``."""

from .callback import CheckpointCallback
from .io import HoldfastCheckpointIO, load_checkpoint, load_from_checkpoint
from .stopping import Preempted

__all__ = ["CheckpointCallback", "HoldfastCheckpointIO", "Preempted", "load_checkpoint", "load_from_checkpoint"]
