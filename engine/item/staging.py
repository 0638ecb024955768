"""Copies of arrays whose memory the training loop goes on writing to, in buffers that are used again and again."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..storage import aligned_empty
from ..tree import ArrayLeaf, Piece, ValueLeaf
from .sources import Bytes

_ALIGNMENT = 64
_SHARED = 64 << 20  # bytes; a smaller snapshot is not worth a thread


class Snapshot(list[ArrayLeaf | ValueLeaf]):
    """Leaves whose arrays lie in a staging buffer, which is used again once this list is gone."""


class StagingBuffer:
    """Memory for the snapshot of one tree; it grows to the largest tree and is kept.

    Fresh memory costs several times as much as the copy itself, as the system hands it out page by page; so only the
    first save of a run is slow.
    """

    def __init__(self) -> None:
        self._memory: Bytes = np.empty(0, np.uint8)
        self._last: weakref.ref[Snapshot] | None = None

    @property
    def nbytes(self) -> int:
        """Returns how much memory is held, in bytes."""
        return self._memory.nbytes

    def prepare(self, nbytes: int) -> None:
        """Sets memory aside, so that the first snapshot need not.

        Args:
            nbytes: How much will be needed, in bytes.
        """
        if nbytes > self._memory.nbytes:
            self._memory = np.empty(0, np.uint8)  # given back first: never both at once
            self._memory = aligned_empty(nbytes)

    def needed(self, leaves: Sequence[ArrayLeaf | ValueLeaf]) -> int:
        """Returns how much memory a snapshot takes, in bytes."""
        return sum(map(_space, leaves))

    def snapshot(self, leaves: Sequence[ArrayLeaf | ValueLeaf]) -> Snapshot:
        """Copies whatever may change.

        Args:
            leaves: Leaves on the host.

        Returns:
            The leaves, with copies in place of the arrays that may change after this call. The copies are good for as
            long as this very list is alive.
        """
        if self._last is not None and self._last() is not None:
            self._memory = np.empty(0, np.uint8)  # one handler for two items: the other copies are yet to be written
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
        _copy(pending, offset)
        return copies


def _copy(pending: Sequence[tuple[NDArray[Any], NDArray[Any]]], nbytes: int) -> None:
    """Copies arrays; two threads share a large snapshot, as one core does not use all of the memory's bandwidth."""
    queue = iter(pending)

    def work() -> None:
        for copy, array in iter(lambda: next(queue, None), None):
            copy[...] = array

    helper = threading.Thread(target=work, name="holdfast-snapshot", daemon=True) if nbytes >= _SHARED else None
    if helper is not None:
        helper.start()
    work()
    if helper is not None:
        helper.join()


def _space(leaf: ArrayLeaf | ValueLeaf) -> int:
    if isinstance(leaf, ValueLeaf) or not leaf.volatile:
        return 0
    return sum(_aligned(math.prod(piece.array.shape) * piece.array.dtype.itemsize) for piece in leaf.pieces)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
