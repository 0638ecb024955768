"""Small arrays, many at once: what is done for each of ten thousand has to be next to nothing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..format import checksums_of
from ..storage import aligned_empty
from .forms import Form
from .plan import CHECKSUM_BYTES, CHUNK_ALIGNMENT
from .sources import Bytes

_BLOCK = 64 << 10  # bytes that such arrays share: what one of them may hold on to
_LARGE_BLOCK = 2 << 20  # the same where there are many: one huge page costs less than thirty small ones
_WASTE = 256  # bytes between two arrays that are copied along


def small_arrays(
    data: Bytes, starts: NDArray[np.int64], forms: Sequence[Form], *, keep: bool
) -> tuple[list[NDArray[Any] | None], NDArray[np.int64]]:
    """Verifies chunks that are whole small arrays, and copies them out.

    Args:
        data: The memory that they were read into.
        starts: Where each chunk begins in there, in ascending order; its checksum follows it.
        forms: How each array is read.
        keep: Whether the arrays are wanted; otherwise the chunks are only verified.

    Returns:
        The arrays, a few dozen to one block of memory; and the positions of those that are not there, as they do not
        verify, or lie where their elements would not be aligned.
    """
    sizes = np.array([form.data_bytes for form in forms], np.int64)
    stops = starts + sizes
    expected = data[stops[:, None] + np.arange(CHECKSUM_BYTES)].view("<u4")[:, 0]
    found = checksums_of(data, starts, stops)
    good = (found == expected) & ((starts - starts[0]) % CHUNK_ALIGNMENT == 0)
    arrays: list[NDArray[Any] | None] = [None] * len(forms)
    if not keep:
        return arrays, np.flatnonzero(found != expected)
    rows = np.flatnonzero(good)
    first, last = starts[rows], stops[rows]
    size = _BLOCK if sizes.sum() < _LARGE_BLOCK else _LARGE_BLOCK
    apart = (first[1:] - last[:-1] > _WASTE) | ((first[1:] - first[:1]) // size != (first[:-1] - first[:1]) // size)
    bounds = [0, *(np.flatnonzero(apart) + 1).tolist(), len(rows)]
    for low, high in pairwise(bounds):
        if low == high:
            continue
        origin = int(first[low])
        end = int(last[high - 1])
        block = aligned_empty(end - origin) if end - origin > _BLOCK else np.empty(end - origin, np.uint8)
        block[:] = data[origin:end]
        places = (first[low:high] - origin).tolist()
        for row, place in zip(rows[low:high].tolist(), places, strict=True):
            form = forms[row]
            arrays[row] = np.ndarray(form.shape, form.dtype, block, place)
    return arrays, np.flatnonzero(~good)
