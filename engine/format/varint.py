"""Variable-length unsigned integers (ULEB128), whole columns at a time.

Seven bits a byte, the lowest first; the top bit of a byte says that another one follows. See
https://google.github.io/tensorstore/kvstore/ocdbt/index.html#storage-format, where every count and length is one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_BYTES = 10
"""Bytes of the longest encoding of a 64-bit number."""


def encode_varint(value: int) -> bytes:
    """Encodes one number between 0 and 2**64 - 1."""
    if not 0 <= value < 1 << 64:
        raise ValueError(f"a varint holds 0 to 2**64 - 1, not {value}")
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def varint_sizes(values: NDArray[Any]) -> NDArray[np.int64]:
    """Counts the bytes that each number's encoding takes.

    Args:
        values: Non-negative integers, one axis.

    Returns:
        A number from 1 to 10 for each value.
    """
    values = values.astype(np.uint64, copy=False)
    sizes = np.ones(values.shape, np.int64)
    largest = int(values.max()) if values.size else 0
    for shift in range(7, 64, 7):
        if largest >> shift == 0:
            break
        sizes += values >= np.uint64(1 << shift)
    return sizes


def encode_varints(values: NDArray[Any]) -> bytes:
    """Encodes a column of numbers, one after the other.

    Args:
        values: Non-negative integers, one axis.

    Returns:
        The encodings, joined.
    """
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
    """Decodes a column of numbers.

    Args:
        data: The bytes, which begin with the column and may go on after it.
        count: How many numbers the column has.

    Returns:
        The numbers, and how many bytes they took.

    Raises:
        ValueError: The bytes end too early, or a number does not fit 64 bits. Nothing that grows with `count` is
            allocated before `count` is known to be at most the number of bytes.
    """
    if count > data.size:
        raise ValueError(f"{count} numbers cannot lie in {data.size} bytes")
    first = data[:count]
    if not count or first.max() < 128:
        return first.astype(np.uint64), count
    ends = np.flatnonzero(data[: count * MAX_BYTES] < 128)[:count]
    if ends.size < count:
        raise ValueError(f"found only {ends.size} of {count} numbers")
    starts = np.empty_like(ends)
    starts[0] = 0
    starts[1:] = ends[:-1] + 1
    sizes = ends - starts + 1
    longest = int(sizes.max())
    if longest > MAX_BYTES or (longest == MAX_BYTES and data[ends[sizes == MAX_BYTES]].max() > 1):
        raise ValueError("a number does not fit 64 bits")
    values = np.zeros(count, np.uint64)
    for k in range(longest):
        some = np.flatnonzero(sizes > k)
        digit = data[starts[some] + k].astype(np.uint64) & np.uint64(127)
        values[some] |= digit << np.uint64(7 * k)
    return values, int(ends[-1]) + 1
