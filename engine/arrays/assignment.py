"""Assigns the chunks of a tree to processes, for multi-process saves and restores.

Every chunk lies within one part of its array, and any process that holds this part can write the chunk. A chunk with a
single holder is written by that process. All other chunks are distributed among their holders to balance the load in
bytes. Chunks with few holders are assigned first, because they leave the least choice, and large chunks are assigned
before small ones. Every process computes the same assignment without communication. Arrays with equal chunks and
holders are distributed together, so the cost depends on the number of such classes, not on the number of chunks.

In a restore, the processes that need a chunk take the role of its holders.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import UnsupportedLeafError
from ..pytree import Part, format_path, whole
from ..storage import round_up
from .digests import CHECKSUM_BYTES, CHUNK_ALIGNMENT, Integers
from .grid import ArraySpec
from .plan import Catalog, ChunkIds

_BY_PROCESS_0 = 16 << 20  # maximum total size in bytes of the unsharded tensors that process 0 writes alone
_ROUNDS = 8  # maximum number of iterations to balance the loads of overlapping groups


class ReplicaGroups(NamedTuple):
    """The processes that hold each chunk of an array."""

    groups: Sequence[tuple[int, ...]]  # distinct groups of processes, each in ascending order
    of_chunk: NDArray[np.int32]  # index into `groups` for each chunk, in C order


def _positions_by_id(ids: NDArray[Any], count: int) -> list[Integers]:
    """Return, for each id below ``count``, the positions at which it occurs, in ascending order."""
    ends = np.cumsum(np.bincount(ids, minlength=count))
    return np.split(np.argsort(ids, kind="stable"), ends[:-1])


def replica_groups(
    shape: tuple[int, ...], chunks: tuple[int, ...], parts: Sequence[Part], processes: int
) -> ReplicaGroups:
    """Return the holders of each chunk of an array; raise ValueError if the parts do not cover it exactly once."""
    parts = [part for part in parts if 0 not in part.shape]
    spec, limits = ArraySpec(shape, chunks, 1), whole(shape)
    of_chunk = np.full(spec.grid, -1, np.int32)
    groups: dict[tuple[int, ...], int] = {}
    fits = sum(math.prod(part.shape) for part in parts) == math.prod(shape)
    if fits and all(part.box.common(limits) == part.box for part in parts):
        for part in parts:
            of_chunk[spec.cells(part.box)] = groups.setdefault(part.holders, len(groups))
    if not fits or (of_chunk < 0).any():
        raise ValueError(f"its {len(parts)} parts do not cover its shape {list(shape)} exactly once")
    for group in groups:
        if not group or min(group) < 0 or max(group) >= processes:
            raise ValueError(
                f"part of it is held by processes {list(group)}, expected only processes 0 to {processes - 1}"
            )
    return ReplicaGroups(list(groups), of_chunk.reshape(-1))


class ArrayClass(NamedTuple):
    """Arrays with the same chunks and the same holders."""

    arrays: Integers  # array numbers, ascending
    nbytes: int  # size of a chunk in a data file, in bytes
    replicas: ReplicaGroups  # processes that hold each chunk


def write_assignment(catalog: Catalog, processes: int, by_process_0: int = _BY_PROCESS_0) -> ChunkAssignment:
    """Assign every chunk of a tree to one of the processes that hold it."""
    classes = []
    groups = _positions_by_id(catalog.encoding_ids, len(catalog.distinct)) if catalog.names else []
    # Sort by size and array number, which do not depend on the order of the leaves in the tree.
    for numbers in sorted(groups, key=lambda numbers: (catalog.encodings[numbers[0]].spec.nbytes, numbers[0])):
        encoding = catalog.encodings[numbers[0]]
        spec, parts = encoding.spec, encoding.parts
        replicas = ReplicaGroups((tuple(range(processes)),), np.zeros(spec.chunks, np.int32))
        if parts is None and encoding.is_tensor:
            by_process_0 -= spec.nbytes * len(numbers)
        if parts is None and (not spec.shape or (encoding.is_tensor and by_process_0 >= 0)):
            # Scalars such as the current time, and buffers such as the averages of batch normalization, may differ
            # between processes. Process 0 writes them, because DistributedDataParallel uses the buffers of process 0.
            replicas = ReplicaGroups(((0,),), np.zeros(spec.chunks, np.int32))
        elif parts is not None and spec.chunks:
            try:
                replicas = replica_groups(spec.shape, spec.chunk_shape, parts, processes)
            except ValueError as error:
                raise UnsupportedLeafError(
                    f"the leaf {format_path(catalog.names[numbers[0]])} cannot be saved: {error}"
                ) from error
        nbytes = round_up(spec.chunk_nbytes + CHECKSUM_BYTES, CHUNK_ALIGNMENT)
        classes.append(ArrayClass(numbers, nbytes, replicas))
    return ChunkAssignment(classes, processes)


@dataclass(slots=True, eq=False)
class _ChunkBatch:
    """The chunks of an array class that the same group of processes holds, ordered by array."""

    array_class: ArrayClass
    numbers: Integers  # chunk numbers, the same for every array
    ends: Integers | None = None  # position in the batch at which each holder's chunks end; None before the assignment

    @property
    def count(self) -> int:
        return len(self.array_class.arrays) * len(self.numbers)

    def between(self, start: int, stop: int) -> ChunkIds:
        arrays, chunks = np.divmod(np.arange(start, stop), len(self.numbers))
        return self.array_class.arrays[arrays], self.numbers[chunks]


class ChunkAssignment:
    """Assigns each chunk to one of its holders."""

    def __init__(self, classes: Sequence[ArrayClass], processes: int) -> None:
        self._classes = classes
        self._loads: Integers = np.zeros(processes, np.int64)  # bytes that each process writes or reads
        batches: dict[tuple[int, ...], list[_ChunkBatch]] = {}
        for array_class in classes:
            if not len(array_class.replicas.of_chunk):
                continue
            groups = array_class.replicas.groups
            for group, numbers in zip(
                groups, _positions_by_id(array_class.replicas.of_chunk, len(groups)), strict=True
            ):
                if len(group) == 1:
                    self._loads[group[0]] += array_class.nbytes * len(numbers) * len(array_class.arrays)
                else:
                    batches.setdefault(group, []).append(_ChunkBatch(array_class, numbers))
        self._batches = {group: batches[group] for group in sorted(batches, key=lambda group: (len(group), group))}
        self._assign()

    def chunks_of(self, process: int) -> ChunkIds:
        nothing = np.zeros(0, np.int64)
        chunks: list[ChunkIds] = [(nothing, nothing)]
        for array_class in self._classes:
            replicas = array_class.replicas
            if (process,) not in replicas.groups:
                continue
            numbers = np.flatnonzero(replicas.of_chunk == replicas.groups.index((process,)))
            chunks.append((np.repeat(array_class.arrays, len(numbers)), np.tile(numbers, len(array_class.arrays))))
        for group, batches in self._batches.items():
            if process not in group:
                continue
            position = group.index(process)
            for batch in batches:
                assert batch.ends is not None
                start = int(batch.ends[position - 1]) if position else 0
                chunks.append(batch.between(start, int(batch.ends[position])))
        arrays, numbers = (np.concatenate(column) for column in zip(*chunks, strict=True))
        return arrays, numbers

    def _assign(self) -> None:
        members = {group: np.array(group) for group in self._batches}
        expected = self._expected(members)
        for group in self._batches:
            self._loads[members[group]] += expected[group]
        for group, batches in self._batches.items():
            loads = self._loads[members[group]] - expected[group]
            for batch in sorted(batches, key=lambda batch: -batch.array_class.nbytes):
                nbytes = batch.array_class.nbytes
                counts = _even_counts(loads, batch.count, nbytes)
                loads += counts * nbytes
                batch.ends = np.cumsum(counts)
            self._loads[members[group]] = loads

    def _expected(self, members: dict[tuple[int, ...], NDArray[np.int64]]) -> dict[tuple[int, ...], Integers]:
        """Return the ideal number of bytes for each holder in each group, as if chunks could be split at any byte."""
        # Groups can overlap, like the rows and columns of a mesh. In each round, every group in turn assigns its bytes
        # to its least loaded holders. This converges to the most even distribution.
        expected = {group: np.zeros(len(group), np.int64) for group in self._batches}
        loads = self._loads.copy()
        for _ in range(_ROUNDS if len(self._batches) > 1 else 1):
            moved = 0
            for group, batches in self._batches.items():
                others = loads[members[group]] - expected[group]
                level = _level(others, sum(batch.count * batch.array_class.nbytes for batch in batches))
                filled = np.maximum(level - others, 0)
                moved = max(moved, int(np.abs(filled - expected[group]).max()))
                expected[group] = filled
                loads[members[group]] = others + filled
            if moved * 100 <= int(loads.max()):
                break
        return expected


def _level(loads: Integers, nbytes: int) -> int:
    """Return the level that the smallest loads reach when ``nbytes`` bytes are spread over them (water-filling)."""
    ordered = np.sort(loads)
    # Raising the first k loads to the next load takes k times the next load, minus the sum of the first k loads.
    below = np.cumsum(ordered)
    needed = ordered[1:] * np.arange(1, len(ordered)) - below[:-1]
    count = int(np.searchsorted(needed, nbytes, "left")) + 1
    return (nbytes + int(below[count - 1])) // count


def _even_counts(loads: Integers, count: int, nbytes: int) -> Integers:
    """Return how many chunks of ``nbytes`` bytes to assign to each holder to make the loads as even as possible."""
    counts = np.maximum(_level(loads, count * nbytes) - loads, 0) // nbytes
    left = count - int(counts.sum())
    while left > 0:
        least = np.argsort(loads + counts * nbytes, kind="stable")[:left]
        counts[least] += 1
        left -= len(least)
    return counts
