"""A reader of binary fields that trusts nothing it reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import numpy as np

from ..errors import DamagedCheckpointError
from .varint import decode_varints

if TYPE_CHECKING:
    from numpy.typing import NDArray

INT64_MAX = (1 << 63) - 1


class Cursor:
    """Reads fields one after the other from bytes in memory.

    Every read checks that the bytes are there before anything that depends on a count is allocated.

    Args:
        data: The bytes.
        source: What they are, for error messages, such as "manifest.ocdbt".
    """

    __slots__ = ("_array", "data", "position", "source")

    def __init__(self, data: bytes, source: str) -> None:
        self.data = data
        self.position = 0
        self.source = source
        self._array = np.frombuffer(data, np.uint8)

    @property
    def remaining(self) -> int:
        """Bytes not read yet."""
        return len(self.data) - self.position

    def fail(self, what: str) -> NoReturn:
        """Raises DamagedCheckpointError for this source."""
        raise DamagedCheckpointError(f"{self.source} is damaged: {what}")

    def take(self, count: int) -> bytes:
        """Reads `count` bytes."""
        if count > self.remaining:
            self.fail(f"expected {count} more bytes at offset {self.position}, found {self.remaining}")
        self.position += count
        return self.data[self.position - count : self.position]

    def byte(self) -> int:
        """Reads one unsigned byte."""
        return self.take(1)[0]

    def column(self, count: int) -> NDArray[np.uint8]:
        """Reads `count` unsigned bytes, one number each."""
        return np.frombuffer(self.take(count), np.uint8)

    def varint(self, limit: int = INT64_MAX) -> int:
        """Reads one varint of at most `limit`."""
        if self.position < len(self.data) and self.data[self.position] < 128:  # the common case, without arrays
            value = self.byte()
        else:
            value = int(self.wide_varints(1)[0])
        if value > limit:
            self.fail(f"the number {value} before offset {self.position} exceeds its limit of {limit}")
        return value

    def varints(self, count: int, limit: int = INT64_MAX) -> NDArray[np.int64]:
        """Reads `count` varints, each at most `limit` (which is at most 2**63 - 1)."""
        values = self.wide_varints(count)
        if count and int(values.max()) > limit:
            self.fail(f"the number {int(values.max())} before offset {self.position} exceeds its limit of {limit}")
        return values.astype(np.int64)

    def wide_varints(self, count: int) -> NDArray[np.uint64]:
        """Reads `count` varints of up to 64 bits."""
        try:
            values, size = decode_varints(self._array[self.position :], count)
        except ValueError as error:
            self.fail(f"{error} at offset {self.position}")
        self.position += size
        return values

    def finish(self) -> None:
        """Checks that everything was read."""
        if self.remaining:
            self.fail(f"{self.remaining} bytes follow where it should end")
