"""Checkpointing for PyTorch Lightning, from either the ``lightning`` or the ``pytorch_lightning`` package."""

from .callback import CheckpointCallback
from .io import HoldfastCheckpointIO, load_checkpoint, load_from_checkpoint
from .stopping import Preempted

__all__ = ["CheckpointCallback", "HoldfastCheckpointIO", "Preempted", "load_checkpoint", "load_from_checkpoint"]
