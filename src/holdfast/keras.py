"""The callback for Keras 3's ``model.fit``. ``import holdfast`` does not load this module, because it imports Keras."""

from .integrations.keras import CheckpointCallback

__all__ = ["CheckpointCallback"]
