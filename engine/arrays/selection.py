"""Basic indexing of an array that is not read yet: the boxes that an index needs, and the elements it selects of them.

The rules are those of https://numpy.org/doc/stable/user/basics.indexing.html#basic-indexing.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..pytree import Box


class Selection:
    """The elements of an array that integers, slices, an ellipsis and ``None`` select.

    Args:
        index: The index.
        shape: The shape of the array.
        chunks: The shape of its chunks. No box covers a chunk without selected elements.

    Attributes:
        boxes: The boxes of the array to read, in the order that :meth:`combine` expects.

    Raises:
        IndexError: The index is not a basic one, has too many axes or lies outside the array.
    """

    def __init__(self, index: Any, shape: tuple[int, ...], chunks: tuple[int, ...]) -> None:
        index = index if isinstance(index, tuple) else (index,)
        ranges: list[range] = []
        # The index of the result among the selected elements: an integer drops its axis, and None adds one.
        self._view: list[Any] = [...] if any(entry is ... for entry in index) else []
        for entry in _one_for_each_axis(index, len(shape)):
            if entry is None:
                self._view.append(None)
            elif isinstance(entry, slice):
                self._view.append(slice(None))
                ranges.append(range(shape[len(ranges)])[entry])
            else:
                self._view.append(0)
                ranges.append(_element(operator.index(entry), len(ranges), shape))
        self._shape = tuple(map(len, ranges))
        runs = list(map(_runs, ranges, chunks))
        # A run covers all that is selected of its axis, or one element.
        places = [[slice(None)] if len(found) == 1 else [slice(n, n + 1) for n in range(len(found))] for found in runs]
        self._runs, self._places = list(product(*runs)), list(product(*places))
        self.boxes = [Box(tuple(map(min, found)), tuple(max(run) + 1 for run in found)) for found in self._runs]

    def combine(self, parts: Sequence[NDArray[Any]], dtype: np.dtype[Any]) -> Any:
        """Return the selected elements in memory of their own; a numpy scalar where all of the index is integers.

        Args:
            parts: The elements of :attr:`boxes`; arrays that no one else uses.
            dtype: The dtype of the array.
        """
        cuts = [
            part[tuple(slice(None, None, run.step) for run in runs)]
            for part, runs in zip(parts, self._runs, strict=True)
        ]
        if len(cuts) == 1 and cuts[0].size == parts[0].size:
            found = np.ascontiguousarray(cuts[0]).reshape(self._shape)
        else:
            found = np.empty(self._shape, dtype)
            for place, cut in zip(self._places, cuts, strict=True):
                found[place] = cut
        return found[tuple(self._view)]


def _one_for_each_axis(index: tuple[Any, ...], axes: int) -> list[Any]:
    """Expand the ellipsis of an index, or add one at its end, so that each axis has an entry besides the None."""
    for entry in index:
        if not (entry is None or entry is ... or isinstance(entry, slice) or _is_integer(entry)):
            raise IndexError(
                f"expected integers, slices, ... and None, found {type(entry).__name__}; read a slice around the "
                "elements, and index the array that it gives"
            )
    count = sum(entry is not None and entry is not ... for entry in index)
    if count > axes:
        raise IndexError(f"too many indices: the array has {axes} axes, and the index has {count}")
    places = [number for number, entry in enumerate(index) if entry is ...]
    if len(places) > 1:
        raise IndexError("an index can have only one ellipsis (...)")
    place = places[0] if places else len(index)
    return [*index[:place], *[slice(None)] * (axes - count), *index[place + len(places) :]]


def _is_integer(entry: Any) -> bool:
    return hasattr(entry, "__index__") and not isinstance(entry, bool | np.bool_) and np.ndim(entry) == 0


def _element(number: int, axis: int, shape: tuple[int, ...]) -> range:
    if not -shape[axis] <= number < shape[axis]:
        raise IndexError(f"index {number} is out of bounds for axis {axis} with size {shape[axis]}")
    return range(number % shape[axis], number % shape[axis] + 1)


def _runs(selected: range, chunk: int) -> list[range]:
    """Divide what is selected along an axis where steps may skip whole chunks."""
    if abs(selected.step) <= chunk:
        return [selected] if selected else []
    return [range(number, number + 1) for number in selected]
