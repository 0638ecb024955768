"""Checksums and digests: CRC-32C, which protects every byte that is stored, and XXH3.

CRC-32C (Castagnoli, RFC 3720 appendix B.4) is the checksum of the OCDBT format and of zarr's codec ``crc32c``. XXH3
with 128 bits tells whether bytes in memory have changed (https://github.com/Cyan4973/xxHash); it is never stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import google_crc32c
import xxhash

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Data: TypeAlias = "bytes | bytearray | memoryview | NDArray[np.uint8]"

_HELD = 64 << 10  # bytes that are hashed at a time without letting other threads run


def crc32c(data: Data) -> int:
    return int(google_crc32c.value(_frozen(data)))


def extend(crc: int, data: Data) -> int:
    return int(google_crc32c.extend(crc, _frozen(data)))


class ContentDigest:
    """The 128-bit digest of bytes that come in pieces."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()

    def update(self, data: NDArray[np.uint8]) -> None:
        # Above some 100 kB, xxhash releases the interpreter lock; another thread that computes would then hold it for
        # milliseconds, for each piece.
        view = data.data
        for start in range(0, len(view), _HELD):
            self._hash.update(view[start : start + _HELD])

    def digest(self) -> bytes:
        return self._hash.digest()


def content_digest(data: NDArray[np.uint8]) -> bytes:
    """Return the 128-bit digest of a buffer; other threads run meanwhile."""
    return xxhash.xxh3_128_digest(data.data)


def checksums_of(parts: Sequence[bytes]) -> list[int]:
    """Compute the CRC-32C of each of many short parts."""
    return list(map(google_crc32c.value, parts))


def _frozen(data: Data) -> bytes | NDArray[np.uint8]:
    # The C function takes bytes and read-only arrays as they are, and refuses buffers that could change under it.
    if isinstance(data, bytes):
        return data
    if isinstance(data, bytearray | memoryview):
        if not len(data):
            return b""
        import numpy as np  # not above: documents are bytes, and a listing of checkpoints reads nothing else

        array = np.frombuffer(data, np.uint8)
    else:
        if not data.flags.c_contiguous:
            raise ValueError("a checksum needs contiguous memory; make the array contiguous first")
        if not data.flags.writeable:
            return data
        array = data.view()
    array.flags.writeable = False
    return array
