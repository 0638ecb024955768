"""Checkpointing in Ray Train workers, for ``TorchTrainer`` and ``JaxTrainer``."""

from .callback import CheckpointCallback, PreemptedError
from .components import RemoteComponent
from .worker import run_directory

__all__ = ["CheckpointCallback", "PreemptedError", "RemoteComponent", "run_directory"]
