"""What one process needs of the arrays that it holds, to write its share of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..tree import ArrayLeaf, Box, Piece
from .catalog import Catalog, Chunks, HostLeaf
from .plan import ArraySpec


def own_share(catalog: Catalog, leaves: Sequence[HostLeaf], chunks: Chunks) -> list[HostLeaf]:
    """Cuts down leaves to what a process writes of them.

    Args:
        catalog: The arrays of a tree.
        leaves: The leaves of the tree, with what this process holds.
        chunks: The chunks that it writes.

    Returns:
        The leaves. Those that somebody may still change have only the elements that are written, as views.
    """
    found = list(leaves)
    arrays, numbers = chunks
    order = np.lexsort((numbers, arrays))
    ends = np.searchsorted(arrays[order], np.arange(len(catalog.forms)), "right").tolist()
    start = 0
    for position, form, end in zip(catalog.positions.tolist(), catalog.forms, ends, strict=True):
        own, start = numbers[order[start:end]], end
        leaf = leaves[position]
        # Elements that are stored as bytes have an axis that the leaf does not have.
        if isinstance(leaf, ArrayLeaf) and leaf.volatile and len(own) < form.spec.chunks and form.stored.extra is None:
            boxes = list(_boxes(form.spec, own))
            found[position] = replace(leaf, pieces=[part for piece in leaf.pieces for part in _parts(piece, boxes)])
    return found


def _boxes(spec: ArraySpec, numbers: NDArray[np.int64]) -> Iterator[Box]:
    """Generates the boxes that some chunks of an array cover, in ascending order; neighbours together."""
    current: Box | None = None
    for number in numbers.tolist():
        start = spec.place(number)
        new = Box.at(start, spec.extent(start))
        if current is not None:
            joined = Box(current.start, new.stop)
            if joined.size == current.size + new.size:  # it goes on along one axis
                current = joined
                continue
            yield current
        current = new
    if current is not None:
        yield current


def _parts(piece: Piece, boxes: Sequence[Box]) -> Iterator[Piece]:
    """Generates the parts of a piece that lie in boxes."""
    own = Box.at(piece.start, piece.array.shape)
    for box in boxes:
        common = box.common(own)
        if common is not None:
            yield Piece(common.start, piece.array[common.within(own)])
