"""Which process holds which part of a DTensor, computed from its mesh and placements without asking anybody.

Placements are applied from the first axis of the mesh to the last: each divides what the ones before it have left, as
``torch.distributed.tensor`` defines it.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from .leaves import Details, LeafProblem, Part

Interval = tuple[int, int]
"""Consecutive indices along an axis: the first, and the one after the last."""


class Division(NamedTuple):
    """How one axis of a mesh divides an array.

    Attributes:
        axis: The array's axis that is divided, or None where each process of that axis of the mesh has all of it.
        rounds: Into how many blocks the axis is cut before each is divided: 1, or more for a ``_StridedShard``.
    """

    axis: int | None
    rounds: int = 1


@dataclass(frozen=True, eq=False)
class Mesh:
    """The processes of a ``DeviceMesh``.

    Attributes:
        shape: How many there are along each axis.
        processes: Their ranks in the program, the last axis changing fastest.
        names: Of the axes.
    """

    shape: tuple[int, ...]
    processes: tuple[int, ...]
    names: tuple[str, ...]

    @cached_property
    def places(self) -> dict[int, tuple[int, ...]]:
        """The coordinates of each process."""
        return dict(zip(self.processes, itertools.product(*map(range, self.shape)), strict=True))


class Layout(NamedTuple):
    """Where the elements of an array are.

    Attributes:
        mesh: The processes that have it.
        divisions: One for each axis of the mesh.
        shape: Of the whole array.
    """

    mesh: Mesh
    divisions: tuple[Division, ...]
    shape: tuple[int, ...]

    def parts(self) -> tuple[Part, ...]:
        """Gives the parts of the array in the order of their places, each with those who hold it."""
        return _parts(self)

    def intervals(self, process: int) -> list[list[Interval]] | None:
        """Says what a process holds: for each axis of the array, some of its indices, in the order of its memory.

        Returns:
            None if it is not in the mesh.
        """
        place = self.mesh.places.get(process)
        if place is None:
            return None
        held: list[list[Interval]] = [[(0, size)] if size else [] for size in self.shape]
        for (axis, rounds), count, index in zip(self.divisions, self.mesh.shape, place, strict=True):
            if axis is not None:
                held[axis] = _divide(held[axis], rounds, count, index)
        return [_joined(each) for each in held]

    def share(self, process: int) -> Share | None:
        """Says what a process holds, in boxes. None if it is not in the mesh."""
        return _share(self, process)

    def describe(self) -> Details:
        """Gives JSON facts about the layout, in the form that a jax sharding has; they are not to be changed."""
        return _describe(self)


class Share(NamedTuple):
    """What one process holds of an array.

    Attributes:
        shape: Of its own tensor.
        boxes: For each box of elements, where it begins in the whole array, and where it is in its own tensor.
    """

    shape: tuple[int, ...]
    boxes: tuple[tuple[tuple[int, ...], tuple[slice, ...]], ...]


def layout_of(tensor: Any) -> Layout:
    """Gives the layout of a DTensor.

    Raises:
        LeafProblem: A placement that does not say which process holds what.
    """
    ndim = len(tensor.shape)
    divisions = tuple([_division(placement, ndim) for placement in tensor.placements])
    return Layout(_mesh(tensor.device_mesh), divisions, tuple(tensor.shape))


def boxes(held: Sequence[Sequence[Interval]]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], tuple[slice, ...]]]:
    """Generates the boxes that a process holds.

    Args:
        held: As `Layout.intervals` gives it.

    Yields:
        Where the box begins in the whole array, its shape, and where it is in the process's own tensor.
    """
    local = []
    for intervals in held:
        begin, each = 0, []
        for low, high in intervals:
            each.append((low, high - low, slice(begin, begin + high - low)))
            begin += high - low
        local.append(each)
    for combination in itertools.product(*local):
        yield (
            tuple([low for low, _, _ in combination]),
            tuple([size for _, size, _ in combination]),
            tuple([part for _, _, part in combination]),
        )


@lru_cache(maxsize=4096)
def _parts(layout: Layout) -> tuple[Part, ...]:
    processes = layout.mesh.processes
    if 0 in layout.shape:
        return (Part((0,) * len(layout.shape), layout.shape, tuple(sorted(processes))),)
    holders: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for process in processes:
        for start, shape, _ in boxes(layout.intervals(process) or []):
            holders.setdefault((start, shape), []).append(process)
    return tuple(Part(start, shape, tuple(sorted(some))) for (start, shape), some in sorted(holders.items()))


@lru_cache(maxsize=4096)
def _share(layout: Layout, process: int) -> Share | None:
    held = layout.intervals(process)
    if held is None:
        return None
    shape = tuple([sum(high - low for low, high in each) for each in held])
    return Share(shape, tuple([(start, place) for start, _, place in boxes(held)]))


@lru_cache(maxsize=4096)
def _describe(layout: Layout) -> Details:
    mesh = layout.mesh
    spec = [
        [name for name, division in zip(mesh.names, layout.divisions, strict=True) if division.axis == axis]
        for axis in range(len(layout.shape))
    ]
    facts: Details = {
        "type": "DTensor",
        "mesh": {"axes": [list(pair) for pair in zip(mesh.names, mesh.shape, strict=True)]},
        "spec": [(names if len(names) > 1 else names[0]) if names else None for names in spec],
    }
    if any(division.rounds > 1 for division in layout.divisions):
        facts["rounds"] = [division.rounds for division in layout.divisions]
    return facts


def _divide(held: list[Interval], rounds: int, count: int, index: int) -> list[Interval]:
    """Takes one of several shares of the indices: of each of so many blocks of equal size, the same share."""
    shares = []
    size = sum(high - low for low, high in held)
    for block in range(rounds):
        begin, end = _chunk(0, size, rounds, block)
        shares += _taken(held, *_chunk(begin, end, count, index))
    return shares


def _chunk(begin: int, end: int, count: int, index: int) -> Interval:
    # As torch.chunk does it: all of one size, but for the last ones, which may be smaller or empty.
    size = math.ceil((end - begin) / count)
    return min(begin + index * size, end), min(begin + (index + 1) * size, end)


def _taken(held: list[Interval], begin: int, end: int) -> list[Interval]:
    """Takes the indices at some places in the order in which they are held."""
    taken, place = [], 0
    for low, high in held:
        first, last = max(begin - place, 0), min(end - place, high - low)
        if first < last:
            taken.append((low + first, low + last))
        place += high - low
    return taken


def _joined(intervals: list[Interval]) -> list[Interval]:
    joined: list[Interval] = []
    for low, high in intervals:
        if joined and joined[-1][1] == low:
            joined[-1] = (joined[-1][0], high)
        else:
            joined.append((low, high))
    return joined


def _division(placement: Any, ndim: int) -> Division:
    kind = type(placement).__name__
    if kind == "Replicate":
        return Division(None)
    if kind in {"Shard", "_StridedShard"}:
        axis = int(placement.dim)
        return Division(axis % ndim if ndim else axis, int(getattr(placement, "split_factor", 1)))
    if placement.is_partial():
        raise LeafProblem(f"is a DTensor with {placement!r}, not summed up yet; redistribute it to Shard or Replicate")
    raise LeafProblem(f"is a DTensor with the placement {placement!r}, which is not known here; redistribute it")


def _mesh(mesh: Any) -> Mesh:
    found = _known.get(mesh)
    if found is None:
        names = mesh.mesh_dim_names or [str(axis) for axis in range(mesh.ndim)]
        ranks = mesh.mesh
        found = _interned(tuple(ranks.shape), tuple(ranks.reshape(-1).tolist()), tuple(map(str, names)))
        _known[mesh] = found
    return found


_known: weakref.WeakKeyDictionary[Any, Mesh] = weakref.WeakKeyDictionary()
_interned = lru_cache(maxsize=64)(Mesh)  # equal meshes are one object, which is quickly found in other caches
