"""Arrays that are put together from chunks as these arrive, each verified on the way."""

from __future__ import annotations

import errno
import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..format import ArrayMetadata, crc32c
from ..storage import aligned_empty
from .plan import CHECKSUM_BYTES
from .sources import Bytes

_COPY = 256 << 10  # arrays below this are copied out, so that a small one never keeps a whole extent in memory


class Form:
    """How the arrays of one shape and element type are read.

    Args:
        metadata: The arrays' metadata.

    Attributes:
        grid: How many chunks there are along each axis.
        chunk_count: How many chunks there are in all.
        data_bytes: Bytes of one chunk's values.
        stored_bytes: Bytes of one chunk in its file.
        copied: Whether the bytes of a chunk are copied out of the memory that they were read into.
    """

    __slots__ = ("chunk_count", "copied", "data_bytes", "dtype", "grid", "metadata", "stored_bytes", "whole")

    def __init__(self, metadata: ArrayMetadata) -> None:
        self.metadata = metadata
        self.dtype = metadata.dtype
        self.grid = metadata.grid
        self.chunk_count = metadata.chunk_count
        self.data_bytes = math.prod(metadata.chunk_shape) * metadata.dtype.itemsize
        self.stored_bytes = self.data_bytes + (CHECKSUM_BYTES if metadata.checksummed else 0)
        # An array of one chunk is a view of what was read, unless it is so small that copying is cheaper than keeping.
        self.whole = metadata.chunk_shape == metadata.shape
        self.copied = not self.whole or self.data_bytes < _COPY

    @property
    def nbytes(self) -> int:
        """Returns the bytes of a whole array."""
        return math.prod(self.metadata.shape) * self.dtype.itemsize


class Assembly:
    """The wanted arrays while their chunks arrive, from any number of threads.

    Memory for an array is taken when its first chunk has been verified: a description alone never costs any.

    Args:
        metadata: What the index says of each array.
        keep: Whether the arrays are wanted; otherwise chunks are only verified.

    Attributes:
        forms: How each array is read.
        keep: As above.
    """

    def __init__(self, metadata: Sequence[ArrayMetadata], *, keep: bool) -> None:
        forms: dict[ArrayMetadata, Form] = {}
        self.forms = [forms.get(one) or forms.setdefault(one, Form(one)) for one in metadata]
        self.keep = keep
        self._arrays: list[NDArray[Any] | None] = [None] * len(metadata)
        self._fill: dict[int, bytes] = {}
        self._damaged: set[int] = set()
        self._lock = threading.Lock()

    def fill(self, array: int, element: bytes) -> None:
        """Says what the elements of an array are where no chunk arrives."""
        self._fill[array] = element

    def give_up(self, array: int) -> None:
        """Says that an array is damaged: its chunks are still verified, and it takes no memory."""
        self._damaged.add(array)

    def accept(self, array: int, chunk: int, data: Bytes) -> str:
        """Checks a chunk and puts it where it belongs.

        Args:
            array: The wanted array that it belongs to.
            chunk: The chunk's number in the array's grid.
            data: Its bytes, as they are stored. They are kept, and must not be used otherwise, unless ``copied``.

        Returns:
            What is wrong with it, or nothing.
        """
        form = self.forms[array]
        size = form.data_bytes
        if data.size != form.stored_bytes:
            return f"chunk {chunk} should take {form.stored_bytes} bytes and takes {data.size}"
        values = data[:size]
        if size != form.stored_bytes:
            expected = int.from_bytes(data[size:].tobytes(), "little")
            found = crc32c(values)
            if found != expected:
                return f"chunk {chunk} has crc32c {found:08x} where {expected:08x} was written"
        if not self.keep or array in self._damaged:
            return ""
        view = values.view(form.dtype)
        if form.whole:
            if form.copied or not (view.flags.aligned and view.flags.writeable):
                view = view.copy()
            self._arrays[array] = view.reshape(form.metadata.shape)
        else:
            _insert(self._array(array), view.reshape(form.metadata.chunk_shape), chunk, form.metadata)
        return ""

    def finish(self) -> list[NDArray[Any] | None]:
        """Returns the arrays in this machine's byte order, None in the place of those that are damaged."""
        return [None if number in self._damaged else _native(self._array(number)) for number in range(len(self.forms))]

    def _array(self, number: int) -> NDArray[Any]:
        array = self._arrays[number]
        if array is not None:
            return array
        with self._lock:
            array = self._arrays[number]
            if array is None:
                array = self._arrays[number] = _empty(self.forms[number], self._fill.get(number))
            return array


def _insert(array: NDArray[Any], chunk: NDArray[Any], index: int, metadata: ArrayMetadata) -> None:
    """Copies a chunk into its array, without what lies beyond the array's end."""
    position = np.unravel_index(index, metadata.grid) if metadata.grid else ()
    starts = [int(i) * size for i, size in zip(position, metadata.chunk_shape, strict=True)]
    target = array[tuple(slice(start, start + size) for start, size in zip(starts, metadata.chunk_shape, strict=True))]
    target[...] = chunk[tuple(slice(0, size) for size in target.shape)]


def _empty(form: Form, fill: bytes | None) -> NDArray[Any]:
    try:
        array = aligned_empty(form.nbytes).view(form.dtype).reshape(form.metadata.shape)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise MemoryError(f"an array of {form.nbytes} bytes does not fit the memory that is left") from error
    if fill is not None:
        array.reshape(-1).view(np.uint8).reshape(-1, len(fill))[...] = np.frombuffer(fill, np.uint8)
    return array


def _native(array: NDArray[Any]) -> NDArray[Any]:
    """Returns an array in this machine's byte order; not all libraries compute with the other one."""
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
