"""The callback for ``model.fit`` of Keras 3. It is no attribute of ``holdfast`` until it is imported, as Keras is."""

from .integrations.keras import CheckpointCallback

__all__ = ["CheckpointCallback"]
