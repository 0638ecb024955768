"""The callback for ``model.fit`` of Keras 3. ``import holdfast`` does not import this module, which imports Keras."""

from .integrations.keras import CheckpointCallback

__all__ = ["CheckpointCallback"]
