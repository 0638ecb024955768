"""Arrays that lie in files of other libraries, with what it takes to read them."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DamagedCheckpointError

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class StoredPart:
    """Elements of an array that lie in one stretch of a file.

    Attributes:
        start: Index of its first element in the whole array, one number for each axis.
        shape: How many elements it has along each axis.
        file: The file's path inside the tree's location; ``""`` if that is the file.
        offset: First byte.
        length: Bytes from the first element to the last.
        dtype: Of the elements as they are stored, byte order included.
        strides: Elements from one to the next along each axis; None for C order without gaps.
        crc32: The checksum of these bytes, where the file has one for exactly them.
        finish: What is done to the elements once they are read, such as conjugating them; None for nothing.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    offset: int
    length: int
    dtype: np.dtype[Any]
    strides: tuple[int, ...] | None = None
    crc32: int | None = None
    finish: Callable[[NDArray[Any]], NDArray[Any]] | None = None

    def array(self, data: Bytes) -> NDArray[Any]:
        """Returns the elements in this machine's byte order: a view of ``data`` where that is possible.

        Raises:
            DamagedCheckpointError: The bytes are not those that were written.
        """
        if self.crc32 is not None and zlib.crc32(data.data) != self.crc32:
            raise DamagedCheckpointError(
                f"{self.length} bytes at offset {self.offset} do not have the checksum {self.crc32:08x} noted for them"
            )
        if 0 in self.shape:
            return np.zeros(self.shape, self.dtype.newbyteorder("="))
        last = (
            math.prod(self.shape) - 1
            if self.strides is None
            else sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        )
        if len(data) != (last + 1) * self.dtype.itemsize or min(self.strides or (0,)) < 0:
            raise DamagedCheckpointError(f"{len(data)} bytes do not hold {self.dtype} elements of shape {self.shape}")
        elements = data.view(self.dtype)
        if self.strides is None:
            found: NDArray[Any] = elements.reshape(self.shape)
        else:
            steps = [stride * self.dtype.itemsize for stride in self.strides]
            found = np.lib.stride_tricks.as_strided(elements, self.shape, steps, writeable=False)
        if not found.dtype.isnative:
            found = found.astype(found.dtype.newbyteorder("="))
        return found if self.finish is None else self.finish(found)


class StoredArray:
    """An array in the files of another library; a leaf as long as nobody has asked for its elements.

    Args:
        dtype: Of the elements.
        shape: Of the whole array.
        details: What kind of leaf it is, for :class:`~holdfast.engine.tree.Saved`.
        parts: Finds the parts that cover it exactly once; called when it is read, and only then.
    """

    __slots__ = ("_parts", "details", "dtype", "shape")

    def __init__(
        self,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        details: Mapping[str, Any],
        parts: Callable[[], Sequence[StoredPart]],
    ) -> None:
        self.dtype = dtype
        self.shape = shape
        self.details = dict(details)
        self._parts = parts

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def whole(self) -> StoredPart:
        """Returns the one part of an array that lies in one stretch.

        Raises:
            DamagedCheckpointError: It lies in several.
        """
        found = self._parts()
        if len(found) != 1:
            raise DamagedCheckpointError(f"the array lies in {len(found)} parts")
        return found[0]

    def parts(self) -> Sequence[StoredPart]:
        """Returns the parts that cover the array exactly once.

        Raises:
            DamagedCheckpointError: They do not, or what describes them cannot be read.
        """
        found = self._parts()
        if math.prod(self.shape) != sum(math.prod(part.shape) for part in found):
            raise DamagedCheckpointError(f"the parts do not hold as many elements as an array of shape {self.shape}")
        boxes = [part for part in found if 0 not in part.shape]
        for part in boxes:
            ends = [first + size for first, size in zip(part.start, part.shape, strict=True)]
            if len(ends) != len(self.shape) or any(end > size for end, size in zip(ends, self.shape, strict=True)):
                raise DamagedCheckpointError(f"a part at {part.start} of shape {part.shape} lies outside {self.shape}")
        if len(boxes) > 1:
            low = np.array([part.start for part in boxes])
            high = low + np.array([part.shape for part in boxes])
            for index in range(1, len(boxes)):
                if np.any(np.all((low[index] < high[:index]) & (low[:index] < high[index]), axis=1)):
                    raise DamagedCheckpointError(f"two parts overlap at {boxes[index].start}")
        return boxes


class Unreadable:
    """A leaf that would need code to be run: it is listed, and refused when it is asked for.

    Args:
        what: What it is, for people.
    """

    __slots__ = ("what",)

    def __init__(self, what: str) -> None:
        self.what = what
