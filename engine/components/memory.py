"""A tree in memory, seen as if it were stored: so that values come from there as they come from a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..item import Problem, SavedLeaf
from ..storage import Location
from ..tree import ArrayLeaf, Saved, Skeleton, describe, flatten


class MemoryTree:
    """A tree of values; implements `TreeSource`.

    Args:
        tree: The tree; it must not change while this is in use.
        document: Which objects there were, as `SavedGraph.of_document` reads it; None where containers say all.
        location: Where the tree came from, for messages.

    Raises:
        UnsupportedLeafError: A leaf is of a kind that has no place in a checkpoint; names every such leaf.
    """

    def __init__(self, tree: Any, document: Any, location: Location) -> None:
        flat = flatten(tree)
        described = describe(flat.names, flat.values)
        self.location = location
        self.skeleton = Skeleton(flat.structure)
        self.leaves = [
            SavedLeaf(
                name, Saved(one.details, one.dtype, one.shape) if isinstance(one, ArrayLeaf) else Saved(one.details)
            )
            for name, one in zip(flat.names, described, strict=True)
        ]
        self._arrays = {
            name: one for name, one in zip(flat.names, described, strict=True) if isinstance(one, ArrayLeaf)
        }
        self._document = document

    def graph_document(self) -> Any:
        """Returns which objects there were."""
        return self._document

    def read(self, leaves: Sequence[SavedLeaf]) -> list[NDArray[Any] | None]:
        """Returns copies of arrays; None for plain values."""
        return [_copied(self._arrays[leaf.name]) if leaf.name in self._arrays else None for leaf in leaves]

    def verify(self) -> list[Problem]:
        """Finds nothing: what is in memory carries no checksums."""
        return []


def _copied(leaf: ArrayLeaf) -> NDArray[Any]:
    array = np.empty(leaf.shape, leaf.dtype)
    for piece in leaf.pieces:
        if not piece.start:
            array[...] = piece.array
            continue
        box = tuple(slice(start, start + size) for start, size in zip(piece.start, piece.array.shape, strict=True))
        array[box] = piece.array
    return array
