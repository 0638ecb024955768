"""CRC-32C, the checksum of every byte that holdfast stores.

CRC-32C (Castagnoli, RFC 3720 appendix B.4) is what both the OCDBT format and zarr's ``crc32c`` codec use.
"""

from __future__ import annotations

from typing import TypeAlias

import google_crc32c
import numpy as np
from numpy.typing import NDArray

Data: TypeAlias = bytes | bytearray | memoryview | NDArray[np.uint8]


def crc32c(data: Data) -> int:
    """Computes the CRC-32C of some bytes.

    Args:
        data: The bytes. Arrays must be contiguous; none is copied.

    Returns:
        The checksum, an unsigned 32-bit number.
    """
    return int(google_crc32c.value(_frozen(data)))


def checksums_of(data: NDArray[np.uint8], starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[np.uint32]:
    """Computes the CRC-32C of many short stretches of some bytes.

    Args:
        data: The bytes, contiguous, with one axis.
        starts: Where each stretch begins.
        stops: Where it ends.

    Returns:
        The checksum of each.
    """
    value, frozen = google_crc32c.value, np.asarray(_frozen(data))
    spans = zip(starts.tolist(), stops.tolist(), strict=True)
    return np.array([value(frozen[start:stop]) for start, stop in spans], np.uint32)


def extend(crc: int, data: Data) -> int:
    """Continues a checksum over more bytes.

    Args:
        crc: The checksum of everything before, 0 when there is nothing before.
        data: The bytes that follow.

    Returns:
        The checksum of both together.
    """
    return int(google_crc32c.extend(crc, _frozen(data)))


def _frozen(data: Data) -> bytes | NDArray[np.uint8]:
    # The C function takes bytes and read-only arrays as they are, and refuses buffers that could change under it.
    if isinstance(data, bytes):
        return data
    if isinstance(data, np.ndarray):
        if not data.flags.c_contiguous:
            raise ValueError("a checksum needs contiguous memory; make the array contiguous first")
        if not data.flags.writeable:
            return data
        array = data.view()
    else:
        if not len(data):
            return b""
        array = np.frombuffer(data, np.uint8)
    array.flags.writeable = False
    return array
