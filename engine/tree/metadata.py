"""What is known of a saved leaf without reading it."""

from __future__ import annotations

from dataclasses import dataclass

from .leaves import Saved


@dataclass(frozen=True, slots=True)
class LeafMetadata:
    """What is known of a saved leaf without reading it.

    In a template it stands for the leaf as it was saved (numpy arrays and Python values), of this shape and dtype.

    Attributes:
        kind: What it was: ``"numpy"``, ``"jax"``, ``"torch"``, ``"key"``, ``"int"``, ``"str"``, ...
        shape: Its shape; ``()`` for a value that is no array.
        dtype: The name of its element type, or None for a value that is no array.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: str | None

    def __str__(self) -> str:
        return self.kind if self.dtype is None else f"{self.dtype}{list(self.shape)}"


def metadata_of(saved: Saved) -> LeafMetadata:
    """Returns what a checkpoint says of a leaf."""
    return LeafMetadata(saved.kind, saved.shape or (), None if saved.dtype is None else str(saved.dtype))
