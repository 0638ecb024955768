"""What has to be true of every array leaf that several processes describe."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.engine.pytree import ArrayLeaf, describe
from holdfast.engine.pytree.leaves import Part

Facts = tuple[tuple[Part, ...] | None, Any]
"""Parts and details of a leaf: what all processes have to agree on."""


def described(value: Any) -> ArrayLeaf:
    [leaf] = describe(["x"], [value])
    assert isinstance(leaf, ArrayLeaf)
    return leaf


def checked(value: Any, process: int, expected: NDArray[Any]) -> Facts:
    """Describes a value in one process, and compares it with what the whole array is."""
    leaf = described(value)
    assert (leaf.dtype, leaf.shape) == (expected.dtype, expected.shape)
    held = np.zeros(leaf.shape, np.int64)
    if leaf.parts is None:
        held += 1
    else:
        everything = np.zeros(leaf.shape, np.int64)
        for part in leaf.parts:
            assert part.holders == tuple(sorted(set(part.holders)))
            everything[box(part.start, part.shape)] += 1
            held[box(part.start, part.shape)] += process in part.holders
        assert (everything == 1).all(), leaf.parts
        assert list(leaf.parts) == sorted(leaf.parts, key=lambda part: part.start)
    covered = np.zeros(leaf.shape, np.int64)
    for piece in leaf.pieces:
        index = box(piece.start, piece.array.shape)
        np.testing.assert_array_equal(piece.array, expected[index], strict=True)
        covered[index] += 1
    np.testing.assert_array_equal(covered, held)
    return leaf.parts, leaf.details


def box(start: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(low, low + size) for low, size in zip(start, shape, strict=True))


def agreed(facts: list[dict[str, Facts]]) -> dict[str, Facts]:
    """Gives what all processes say, which has to be the same."""
    for other in facts[1:]:
        assert other == facts[0]
    return facts[0]


def holders(facts: Facts) -> list[tuple[int, ...]] | None:
    """Gives the holders of each part."""
    return None if facts[0] is None else [part.holders for part in facts[0]]
