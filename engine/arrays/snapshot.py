"""Copies of arrays that the training loop goes on changing, in memory that is reused from save to save."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..pytree import Piece, ValueLeaf
from ..storage import aligned_empty, parallel_map
from .plan import Bytes, HostLeaf

_ALIGNMENT = 64
_SHARED = 64 << 20  # bytes; a smaller snapshot is not worth a thread


class Snapshot(list[HostLeaf]):
    """Leaves whose arrays lie in a staging buffer; the buffer is reused once this list is gone."""


class StagingBuffer:
    """Memory for the snapshot of one tree; it grows to the largest tree and is kept.

    Fresh memory costs several times as much as the copy itself, because the system hands it out page by page; only the
    first save of a run pays for it.
    """

    def __init__(self) -> None:
        self._memory: Bytes = np.empty(0, np.uint8)
        self._last: weakref.ref[Snapshot] | None = None

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    def prepare(self, nbytes: int) -> None:
        """Allocate memory, so that the first snapshot need not."""
        if nbytes > self._memory.nbytes:
            self._memory = np.empty(0, np.uint8)  # freed first: never hold both
            self._memory = aligned_empty(nbytes)

    def needed(self, leaves: Sequence[HostLeaf]) -> int:
        return sum(map(_space, leaves))

    def snapshot(self, leaves: Sequence[HostLeaf]) -> Snapshot:
        if self._last is not None and self._last() is not None:
            # One handler saves two items: the copies of the other item are not written yet.
            self._memory = np.empty(0, np.uint8)
        self.prepare(self.needed(leaves))
        copies = Snapshot()
        self._last = weakref.ref(copies)
        pending: list[tuple[NDArray[Any], NDArray[Any]]] = []
        offset = 0
        for leaf in leaves:
            if isinstance(leaf, ValueLeaf) or not leaf.volatile:
                copies.append(leaf)
                continue
            pieces = []
            for piece in leaf.pieces:
                array = piece.array
                end = offset + array.nbytes
                copy = self._memory[offset:end].view(array.dtype).reshape(array.shape)
                pending.append((copy, array))
                pieces.append(Piece(piece.start, copy))
                offset = _aligned(end)
            copies.append(replace(leaf, pieces=pieces, volatile=False))
        # Two threads share a large snapshot: one core does not use all of the memory's bandwidth.
        parallel_map(_copy, pending, 2 if offset >= _SHARED else 1, name="holdfast-snapshot")
        return copies


def _copy(pair: tuple[NDArray[Any], NDArray[Any]]) -> None:
    copy, array = pair
    copy[...] = array


def _space(leaf: HostLeaf) -> int:
    if isinstance(leaf, ValueLeaf) or not leaf.volatile:
        return 0
    return sum(_aligned(math.prod(piece.array.shape) * piece.array.dtype.itemsize) for piece in leaf.pieces)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
