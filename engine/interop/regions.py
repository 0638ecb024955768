"""Which regions of an array are read so that boxes of it can be cut out, when nothing is known of its chunks.

Boxes that fill most of the box around all of them are read as one: chunks are decoded once, although several boxes have
something of them. Boxes that are far apart are read one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..tree import Box


def gather(boxes: Sequence[Box]) -> list[Box]:
    """Returns the regions to read: one for all boxes, or the boxes that are different, without those of no elements."""
    wanted = list(dict.fromkeys(box for box in boxes if box.size))
    if len(wanted) < 2:
        return wanted
    start = tuple(min(box.start[axis] for box in wanted) for axis in range(len(wanted[0].start)))
    stop = tuple(max(box.stop[axis] for box in wanted) for axis in range(len(wanted[0].stop)))
    around = Box(start, stop)
    return [around] if 2 * sum(box.size for box in wanted) >= around.size else wanted


def cut(box: Box, regions: Sequence[Box], arrays: Sequence[NDArray[Any]], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Takes a box out of the region that holds it.

    Args:
        box: One of the boxes that were given to :func:`gather`.
        regions: What it returned.
        arrays: The elements of the regions.
        dtype: What a box without elements has none of.

    Returns:
        The elements of the box; a view of those of the region.
    """
    for region, array in zip(regions, arrays, strict=True):
        if box.size and box.common(region) == box:
            return array[box.within(region)]
    return np.empty(box.shape, dtype)
