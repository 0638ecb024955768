"""Variable-length unsigned integers (ULEB128) and a cursor over binary fields that checks all it reads.

A varint has seven bits a byte, the lowest first; the top bit of a byte is set where another one follows. OCDBT stores
every count and length so: https://google.github.io/tensorstore/kvstore/ocdbt/index.html#storage-format
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from ..errors import DamagedCheckpointError

INT64_MAX, UINT64_MAX = (1 << 63) - 1, (1 << 64) - 1
_MAX_BYTES = 10  # of the encoding of a 64-bit number


def encode_varint(value: int) -> bytes:
    if not 0 <= value < 1 << 64:
        raise ValueError(f"a varint holds 0 to 2**64 - 1, not {value}")
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def varint_sizes(values: NDArray[Any]) -> NDArray[np.int64]:
    values = values.astype(np.uint64, copy=False)
    sizes = np.ones(values.shape, np.int64)
    largest = int(values.max()) if values.size else 0
    for shift in range(7, 64, 7):
        if largest >> shift == 0:
            break
        sizes += values >= np.uint64(1 << shift)
    return sizes


def encode_varints(values: NDArray[Any]) -> bytes:
    values = values.astype(np.uint64, copy=False)
    if not values.size or values.max() < 128:
        return values.astype(np.uint8).tobytes()
    sizes = varint_sizes(values)
    ends = np.cumsum(sizes)
    starts = ends - sizes
    out = np.empty(int(ends[-1]), np.uint8)
    for k in range(int(sizes.max())):
        some = np.flatnonzero(sizes > k)
        digit = (values[some] >> np.uint64(7 * k)) & np.uint64(127)
        more = (sizes[some] > k + 1).astype(np.uint8) << 7
        out[starts[some] + k] = digit.astype(np.uint8) | more
    return out.tobytes()


def decode_varints(data: NDArray[np.uint8], count: int) -> tuple[NDArray[np.uint64], int]:
    """Decode a column of numbers; return them and the bytes they took."""
    if count > data.size:
        raise ValueError(f"{count} numbers cannot lie in {data.size} bytes")
    first = data[:count]
    if not count or first.max() < 128:
        return first.astype(np.uint64), count
    ends = np.flatnonzero(data[: count * _MAX_BYTES] < 128)[:count]
    if ends.size < count:
        raise ValueError(f"found only {ends.size} of {count} numbers")
    starts = np.empty_like(ends)
    starts[0] = 0
    starts[1:] = ends[:-1] + 1
    sizes = ends - starts + 1
    longest = int(sizes.max())
    if longest > _MAX_BYTES or (longest == _MAX_BYTES and data[ends[sizes == _MAX_BYTES]].max() > 1):
        raise ValueError("a number does not fit 64 bits")
    values = np.zeros(count, np.uint64)
    for k in range(longest):
        some = np.flatnonzero(sizes > k)
        digit = data[starts[some] + k].astype(np.uint64) & np.uint64(127)
        values[some] |= digit << np.uint64(7 * k)
    return values, int(ends[-1]) + 1


class Cursor:
    """Reads fields one after the other, and checks that the bytes are there before it allocates anything for them."""

    def __init__(self, data: bytes, source: str) -> None:
        self.data = data
        self.position = 0
        self.source = source

    @property
    def remaining(self) -> int:
        return len(self.data) - self.position

    def fail(self, what: str) -> NoReturn:
        raise DamagedCheckpointError(f"{self.source} is damaged: {what}")

    def take(self, count: int) -> bytes:
        if count > self.remaining:
            self.fail(f"expected {count} more bytes at offset {self.position}, found {self.remaining}")
        self.position += count
        return self.data[self.position - count : self.position]

    def byte(self) -> int:
        return self.take(1)[0]

    def column(self, count: int) -> NDArray[np.uint8]:
        """Read `count` unsigned bytes, one number each."""
        return np.frombuffer(self.take(count), np.uint8)

    def varint(self, limit: int = INT64_MAX) -> int:
        data, position = self.data, self.position
        end = min(len(data), position + _MAX_BYTES)
        value = shift = 0
        while position < end:
            byte = data[position]
            position += 1
            value |= (byte & 127) << shift
            if byte < 128:
                self.position = position
                if value > limit:
                    self.fail(f"the number {value} before offset {position} exceeds its limit of {limit}")
                return value
            shift += 7
        return self.fail(f"a number at offset {self.position} is cut off, or does not fit 64 bits")

    def varints(self, count: int, limit: int = INT64_MAX) -> NDArray[np.int64]:
        values = self.wide_varints(count)
        if count and int(values.max()) > limit:
            self.fail(f"the number {int(values.max())} before offset {self.position} exceeds its limit of {limit}")
        return values.astype(np.int64)

    def wide_varints(self, count: int) -> NDArray[np.uint64]:
        try:
            values, size = decode_varints(np.frombuffer(self.data, np.uint8)[self.position :], count)
        except ValueError as error:
            self.fail(f"{error} at offset {self.position}")
        self.position += size
        return values

    def finish(self) -> None:
        if self.remaining:
            self.fail(f"{self.remaining} bytes follow where it should end")
