"""Takes snapshots: copies the arrays that the training loop may modify to a buffer that later saves reuse.

The trees that a run saves have the same structure. `KnownTree` caches everything that depends only on the structure,
so from the second save on, the loop waits only for the copy and for a comparison of containers and leaf metadata.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..forks import Lock
from ..pytree import (
    ArrayLeaf,
    Arrival,
    Copy,
    DeviceArray,
    Flattened,
    KnownLeaves,
    Outline,
    Piece,
    PinnedLeaf,
    PinnedMemory,
    TreeDef,
    ValueLeaf,
    collection_paused,
    copy_tensors,
    tensors_over,
)
from ..storage import aligned_empty, parallel_map, round_up
from .digests import Bytes
from .plan import HostLeaf, batches

_ALIGNMENT = 64
_SHARED = 64 << 20  # minimum size, in bytes, of a snapshot that two threads copy
_BATCH = 4 << 20  # bytes of small tensors that one thread copies at a time

_Copy = tuple[Any, Any]  # (destination, source): two arrays, or two lists of tensors
_HELD = ValueLeaf({})  # placeholder for a leaf that is not copied


class Snapshot(list[HostLeaf]):
    """List of leaves whose arrays are in a staging buffer; the buffer is reused once the list is garbage-collected."""

    def __init__(
        self, leaves: Sequence[HostLeaf] = (), known_leaves: KnownLeaves | None = None, held: Sequence[Any] = ()
    ) -> None:
        super().__init__(leaves)
        self._known_leaves = known_leaves
        self._held = held
        self.arrival: Arrival | None = None  # pending copies from accelerators

    def complete(self) -> None:
        """Fill in the leaves that were not copied. Call this in the background before using the list."""
        for leaf in self:
            if type(leaf) is PinnedLeaf:
                leaf.to_numpy()
        if self._known_leaves is not None:
            for position, value in zip(self._known_leaves.held, self._held, strict=True):
                self[position] = self._known_leaves.held_leaf(position, value)
            self._known_leaves, self._held = None, ()

    def in_turn(self) -> Iterator[int]:
        """Wait for copies from accelerators; after each wait, yield the number of leading leaves that can be read."""
        if self.arrival is not None:
            yield from self.arrival.in_turn()
            self.arrival = None
        yield len(self)


class StagingBuffer:
    """Reusable memory for one snapshot at a time; it grows to the size of the largest tree.

    The memory is kept between saves, because the system allocates new memory page by page, which takes several times
    as long as the copy. ``pinned_bytes`` limits the pinned memory for copies from accelerators. ``lock`` is held while
    a snapshot is taken, because several threads may share a handler. A copied or unpickled buffer is empty.
    """

    def __init__(self, pinned_bytes: int = 0) -> None:
        self.lock = Lock()
        self.pinned_bytes = pinned_bytes
        self._pinned: PinnedMemory | None = None  # allocated when needed
        self.memory: Bytes = np.empty(0, np.uint8)
        self._last: weakref.ref[Snapshot] | None = None

    def __reduce__(self) -> tuple[type[StagingBuffer], tuple[int]]:
        return StagingBuffer, (self.pinned_bytes,)

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes + (0 if self._pinned is None else self._pinned.nbytes)

    @property
    def is_free(self) -> bool:
        """True if the last snapshot is no longer in use."""
        return self._last is None or self._last() is None

    def snapshot(self, leaves: Sequence[HostLeaf]) -> Snapshot:
        if not self.is_free:
            # The last snapshot is still being written (one handler may save two items), so allocate new memory.
            self.memory = np.empty(0, np.uint8)
            self._pinned = None
        on_host, on_devices = snapshot_bytes(leaves)
        if on_host > self.memory.nbytes:
            self.memory = np.empty(0, np.uint8)  # free the old buffer first, so that only one exists at a time
            self.memory = aligned_empty(on_host)
        pinned = self._pinned
        if on_devices:
            pinned = self._pinned = pinned or PinnedMemory(self.pinned_bytes)
            pinned.begin(on_devices)
        copies = Snapshot()
        pending: list[_Copy] = []
        started: list[Copy] = []
        offset = 0
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, ValueLeaf) or not leaf.volatile:
                copies.append(leaf)
                continue
            pieces = []
            for piece in leaf.pieces:
                array = piece.array
                if pinned is not None and isinstance(array, DeviceArray):
                    for part, memory in pinned.places(piece):
                        started.append(Copy(memory, part.array, position))
                        pieces.append(Piece(part.start, memory))
                    continue
                end = offset + array.nbytes
                copy = self.memory[offset:end].view(array.dtype).reshape(array.shape)
                pending.append((copy, array))
                pieces.append(Piece(piece.start, copy))
                offset = round_up(end, _ALIGNMENT)
            copies.append(replace(leaf, pieces=pieces, volatile=False))
        self.copy(copies, pending, offset, started)
        return copies

    def copy(self, copies: Snapshot, pending: Sequence[_Copy], nbytes: int, started: Sequence[Copy]) -> None:
        """Fill a snapshot; while it exists, the buffer is in use. Accelerator copies may continue after the call."""
        self._last = weakref.ref(copies)
        if started:
            assert self._pinned is not None
            copies.arrival = self._pinned.start(started)
        # Use two threads for a large snapshot, because one core cannot saturate the memory bandwidth.
        parallel_map(_copy, pending, 2 if nbytes >= _SHARED else 1, name="holdfast-snapshot")


class KnownTree:
    """The cached structure of a saved tree, for fast snapshots of later trees with the same structure.

    It holds names, containers, leaf metadata and views of the staging buffer, but neither leaves nor their values. It
    rejects any tree whose structure or metadata would be stored differently. ``copies`` is the snapshot in the buffer;
    chunks that other processes write may be missing from it.
    """

    def __init__(self, flat: Flattened, leaves: Sequence[HostLeaf], copies: Snapshot, staging: StagingBuffer) -> None:
        self.names = flat.names
        self._staging = staging
        self._memory = staging.memory
        self._is_copied = [isinstance(leaf, ArrayLeaf) and leaf.volatile for leaf in leaves]
        is_whole = [
            copied and [piece.array.shape for piece in _pieces(copy)] == [getattr(leaf, "shape", None)]
            for copied, copy, leaf in zip(self._is_copied, copies, leaves, strict=True)
        ]
        self._leaves = KnownLeaves(flat.values, leaves, is_whole, staging.pinned_bytes)

    def settle(self, structure: TreeDef | None, copies: Snapshot) -> None:
        """Prepare for the snapshot of the next tree; runs in the background."""
        self.outline = Outline(structure)
        self._copies = [leaf if copied else _HELD for leaf, copied in zip(copies, self._is_copied, strict=True)]
        self._nbytes = sum(piece.array.nbytes for leaf in self._copies for piece in _pieces(leaf))
        self._arrays = [_pieces(copies[position])[0].array for position in self._leaves.arrays]
        arrays = [_pieces(copies[position])[0].array for position in self._leaves.tensors]
        tensors = tensors_over(arrays, self._leaves.tensor_facts) if arrays else []  # torch may not be imported
        numbers = batches(range(len(arrays)), lambda number: arrays[number].nbytes, _BATCH)
        self._tensors = [([tensors[number] for number in batch], batch[0]) for batch in numbers]

    def snapshot(self, tree: Any) -> Snapshot | None:
        """Copy a tree over the last snapshot; return None if the structure differs or that snapshot is still in use."""
        if not self._staging.is_free or self._staging.memory is not self._memory:
            return None
        with collection_paused():
            try:
                values = self.outline.leaves_of(tree)
                taken = None if values is None else self._leaves.take(values)
            except Exception:  # the regular snapshot will raise the error again, with the leaf's name
                return None
            if taken is None:
                return None
            copies = Snapshot(self._copies, self._leaves, taken.held)
            pending: list[_Copy] = list(zip(self._arrays, taken.arrays, strict=True))
            pending += [(batch, taken.tensors[first : first + len(batch)]) for batch, first in self._tensors]
            started: list[Copy] = []
            for position, leaf in zip(self._leaves.others, taken.others, strict=True):
                if not self._is_copied[position]:
                    copies[position] = leaf
                    continue
                for target, source in _parts(_pieces(copies[position]), _pieces(leaf)):
                    if isinstance(source, DeviceArray):
                        started.append(Copy(target, source, position))
                    else:
                        pending.append((target, source))
            self._staging.copy(copies, pending, self._nbytes, started)
        return copies


def _pieces(leaf: HostLeaf) -> Sequence[Piece]:
    return leaf.pieces if isinstance(leaf, ArrayLeaf) else ()


def _parts(copies: Sequence[Piece], pieces: Sequence[Piece]) -> Iterator[_Copy]:
    """Yield the destination array and the source array of each copy; a source may be only a part of a piece."""
    if [copy.box for copy in copies] == [piece.box for piece in pieces]:
        yield from zip((copy.array for copy in copies), (piece.array for piece in pieces), strict=True)
        return
    for copy in copies:
        around = next(piece for piece in pieces if piece.box.common(copy.box) == copy.box)
        yield copy.array, around.array[copy.box.within(around.box)]


def _copy(pair: _Copy) -> None:
    copy, source = pair
    if isinstance(copy, list):
        copy_tensors(copy, source)
    else:
        copy[...] = source


def snapshot_bytes(leaves: Sequence[HostLeaf]) -> tuple[int, int]:
    """Return the total sizes in bytes of the host arrays and of the accelerator arrays in a snapshot."""
    on_host = on_devices = 0
    for leaf in leaves:
        if isinstance(leaf, ArrayLeaf) and leaf.volatile:
            for piece in leaf.pieces:
                nbytes = round_up(piece.array.nbytes, _ALIGNMENT)
                if isinstance(piece.array, DeviceArray):
                    on_devices += nbytes
                else:
                    on_host += nbytes
    return on_host, on_devices
