"""Leaves in groups that fit into memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..item import SavedLeaf


def batches(leaves: Sequence[SavedLeaf], limit: int) -> Iterator[list[SavedLeaf]]:
    """Cuts leaves into groups of not more than ``limit`` bytes, unless a single leaf has more."""
    group: list[SavedLeaf] = []
    waiting = 0
    for leaf in leaves:
        if group and waiting + leaf.nbytes > limit:
            yield group
            group, waiting = [], 0
        group.append(leaf)
        waiting += leaf.nbytes
    if group:
        yield group
