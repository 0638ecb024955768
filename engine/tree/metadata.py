"""What is known of a saved leaf without reading it."""

from __future__ import annotations

from dataclasses import dataclass

from .comparison import spell, variant_of
from .leaves import ARRAY_KINDS, NUMBER_KINDS, Saved
from .names import display


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


def compare_metadata(name: str, wanted: LeafMetadata, saved: Saved) -> str | None:
    """Compares a leaf of a template that was made from a checkpoint with the leaf that was saved.

    Args:
        name: The leaf's name.
        wanted: The leaf of the template.
        saved: What the checkpoint says.

    Returns:
        None if they fit, otherwise a line as `compare` writes it.
    """
    found = metadata_of(saved)
    arrays = ARRAY_KINDS - {"key"}
    alike = wanted.kind == found.kind or {wanted.kind, found.kind} <= arrays
    free = wanted.kind in {"str", "bytes"} or wanted.kind in NUMBER_KINDS  # how these are stored depends on the value
    if alike and (free or (wanted.shape, wanted.dtype) == (found.shape, found.dtype)):
        return None
    expected = wanted.kind if free else str(wanted)
    actual = spell(saved.kind, saved.dtype, saved.shape, variant_of(saved))
    return f"{display(name)}: expected {expected} (template), found {actual} (checkpoint)"
