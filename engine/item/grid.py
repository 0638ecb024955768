"""How an array is cut into chunks, and which processes hold all of each. Pure.

Every chunk lies inside one part of its array, so that whoever holds the part can write the chunk, and nobody else is
asked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..tree import Part

_TOO_SMALL = 64  # a chunk less than this part of what it may be is worse than one that is too large


def chunk_shape(shape: tuple[int, ...], itemsize: int, limit: int, cuts: Sequence[int] = ()) -> tuple[int, ...]:
    """Cuts an array into chunks that are contiguous in C order, as far as its parts are.

    Args:
        shape: The array's shape.
        itemsize: Bytes an element.
        limit: Largest chunk in bytes. A single element may be larger, and so may a chunk where the parts' sizes have
            no divisors that come near it.
        cuts: For each axis a number of elements that a chunk's size divides, or 0; see `common_cuts`.

    Returns:
        The shape of a chunk: 1 on the leading axes, a part of one axis, and all that the cuts allow of the others. The
        part is as even as it can be, so that the last chunk (which is stored padded to full size) wastes little.

    >>> chunk_shape((1000, 10), 8, 32_000)
    (334, 10)
    >>> chunk_shape((1000, 10), 8, 32_000, (250, 5))
    (250, 5)
    """
    dims = [max(1, size) for size in shape]
    exact = [False] * len(dims)
    for axis, cut in enumerate(cuts):
        if cut:
            dims[axis], exact[axis] = cut, True
    if not dims or math.prod(dims) * itemsize <= limit:
        return tuple(dims)
    inner, axis = itemsize, len(dims) - 1
    while inner * dims[axis] <= limit:
        inner *= dims[axis]
        axis -= 1
    most = max(1, limit // inner)
    size = _divisor(dims[axis], most) if exact[axis] else -(-dims[axis] // -(-dims[axis] // most))
    return (*(1 for _ in range(axis)), size, *dims[axis + 1 :])


def common_cuts(shape: tuple[int, ...], parts: Sequence[Part] | None) -> tuple[int, ...]:
    """Finds for each axis the largest number that divides every place where one part ends and another begins.

    Args:
        shape: The array's shape.
        parts: Boxes that cover it exactly once; None is one for all.

    Returns:
        One number for each axis; 0 where nothing is cut.
    """
    if parts is None or not shape or 0 in shape:
        return (0,) * len(shape)
    starts, ends = _corners(parts)
    inside = np.where(ends < np.array(shape), ends, 0)
    return tuple(np.gcd.reduce(np.concatenate((starts, inside)), axis=0).tolist())


@dataclass(frozen=True, slots=True, eq=False)
class Holders:
    """Who holds the chunks of an array.

    Attributes:
        groups: Different groups of processes, each in ascending order.
        of_chunk: For each chunk, in C order, the position of its group in `groups`.
    """

    groups: Sequence[tuple[int, ...]]
    of_chunk: NDArray[np.int32]


def chunk_holders(shape: tuple[int, ...], chunks: tuple[int, ...], parts: Sequence[Part], processes: int) -> Holders:
    """Finds out who holds the chunks of an array.

    Args:
        shape: The array's shape, with no empty axis.
        chunks: The shape of a chunk, which divides the parts.
        parts: Boxes that cover the array exactly once.
        processes: How many processes there are.

    Returns:
        The groups that hold the same chunks.

    Raises:
        ValueError: The parts do not cover the array once, or are held by processes that there are not.
    """
    parts = [part for part in parts if 0 not in part.shape]
    starts, ends = _corners(parts)
    if (ends > np.array(shape)).any() or sum(math.prod(part.shape) for part in parts) != math.prod(shape):
        raise ValueError(f"its {len(parts)} parts do not cover its shape {list(shape)} exactly once")
    grid = [-(-size // chunk) for size, chunk in zip(shape, chunks, strict=True)]
    first, last = (starts // np.array(chunks)).tolist(), (-(-ends // np.array(chunks))).tolist()
    of_chunk = np.full(grid, -1, np.int32)
    groups: dict[tuple[int, ...], int] = {}
    for part, low, high in zip(parts, first, last, strict=True):
        of_chunk[tuple(map(slice, low, high))] = groups.setdefault(part.holders, len(groups))
    if (of_chunk < 0).any():
        raise ValueError(f"its {len(parts)} parts do not cover its shape {list(shape)} exactly once")
    for group in groups:
        if not group or min(group) < 0 or max(group) >= processes:
            raise ValueError(f"a part of it is held by the processes {list(group)}, of 0 to {processes - 1}")
    return Holders(list(groups), of_chunk.reshape(-1))


def _corners(parts: Sequence[Part]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns where the parts that are not empty begin and end, one row for each."""
    parts = [part for part in parts if 0 not in part.shape]
    starts = np.array([part.start for part in parts], np.int64)
    return starts, starts + np.array([part.shape for part in parts], np.int64)


def _divisor(number: int, most: int) -> int:
    """Returns the largest divisor up to `most`, or, if that is tiny, the smallest one above."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    divisors = sorted({*small, *(number // divisor for divisor in small)})
    below = max(divisor for divisor in divisors if divisor <= most)
    return below if below * _TOO_SMALL >= most else min(divisor for divisor in divisors if divisor > most)
