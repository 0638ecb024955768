"""Boxes: the elements of an array between a start and a stop along each axis."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


class Box(NamedTuple):
    """A part of an array.

    Attributes:
        start: Index of its first element, one number for each axis.
        stop: Index after its last element along each axis, never before the start.
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def at(cls, start: Sequence[int], shape: Sequence[int]) -> Box:
        """Returns the box that begins at an element and has a number of them along each axis."""
        return cls(tuple(start), tuple([low + size for low, size in zip(start, shape, strict=True)]))

    @property
    def shape(self) -> tuple[int, ...]:
        """How many elements it has along each axis."""
        return tuple([stop - start for start, stop in zip(self.start, self.stop, strict=True)])

    @property
    def size(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    def common(self, other: Box) -> Box | None:
        """Returns the elements that lie in another box as well; None where there are none."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(low < high for low, high in zip(start, stop, strict=True)) else None

    def within(self, other: Box) -> tuple[slice, ...]:
        """Returns the index of this box in an array that holds the elements of another one, which has all of them."""
        return tuple(
            [
                slice(low - origin, high - origin)
                for low, high, origin in zip(self.start, self.stop, other.start, strict=True)
            ]
        )


def whole(shape: Sequence[int]) -> Box:
    """Returns the box of all elements of an array."""
    return Box((0,) * len(shape), tuple(shape))


def box_of(index: Sequence[Any] | None, shape: Sequence[int]) -> Box:
    """Returns the box that a tuple of slices takes from an array.

    Args:
        index: Slices with steps of 1; None, and axes that it does not reach, stand for everything.
        shape: The array's shape.
    """
    bounds = [part.indices(size)[:2] for part, size in zip(index or (), shape, strict=False)]
    bounds += [(0, size) for size in shape[len(bounds) :]]
    return Box(tuple([low for low, _ in bounds]), tuple([max(low, high) for low, high in bounds]))
