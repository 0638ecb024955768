"""The callback for Keras 3's ``model.fit``. ``import holdfast`` does not import this module, which imports Keras."""

from .integrations.keras import CheckpointCallback

__all__ = ["CheckpointCallback"]
