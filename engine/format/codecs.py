"""Checksums, digests and compression: CRC-32C, which protects every byte that is stored, XXH3, and zstd.

CRC-32C (Castagnoli, RFC 3720 appendix B.4) is the checksum of the OCDBT format and of zarr's codec ``crc32c``. zstd
(RFC 8878) compresses chunks on request, and TensorStore compresses OCDBT nodes with it. A compressed chunk is one zstd
frame and the CRC-32C of the frame, as zarr's codecs ``[bytes, zstd, crc32c]`` define it. XXH3 with 128 bits tells
whether bytes in memory have changed (https://github.com/Cyan4973/xxHash); it is never stored.
"""

from __future__ import annotations

import sys
from typing import TypeAlias

import google_crc32c
import numpy as np
import xxhash
from numpy.typing import NDArray

from ..errors import DamagedCheckpointError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

from collections.abc import Callable, Iterator, Sequence

Data: TypeAlias = bytes | bytearray | memoryview | NDArray[np.uint8]

LEVELS = range(1, 23)  # the levels of compression, from the fastest to the smallest

_PART = 1 << 20  # bytes that are decompressed at a time; fresh memory for more costs more than decompressing
_HELD = 64 << 10  # bytes that are hashed at a time without letting other threads run
_RATIO = 1 << 15  # the most bytes of content for a byte of a frame: a block of 128 KiB takes at least four
_MAGIC = b"\x28\xb5\x2f\xfd"
_OPTIONS = {int(zstd.DecompressionParameter.window_log_max): 27}  # a frame that needs a larger window is refused


def crc32c(data: Data) -> int:
    return int(google_crc32c.value(_frozen(data)))


def extend(crc: int, data: Data) -> int:
    return int(google_crc32c.extend(crc, _frozen(data)))


class ContentDigest:
    """The 128-bit digest of bytes that come in pieces."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()

    def update(self, data: NDArray[np.uint8]) -> None:
        # Above some 100 kB, xxhash lets go of the interpreter; another thread that computes would then keep it for
        # milliseconds, for each piece.
        view = data.data
        for start in range(0, len(view), _HELD):
            self._hash.update(view[start : start + _HELD])

    def digest(self) -> bytes:
        return self._hash.digest()


def content_digest(data: NDArray[np.uint8]) -> bytes:
    """Return the 128-bit digest of some bytes; other threads run meanwhile."""
    return xxhash.xxh3_128_digest(data.data)


def checksums_of(data: NDArray[np.uint8], starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[np.uint32]:
    """Compute the CRC-32C of many short stretches of some bytes."""
    value, frozen = google_crc32c.value, np.asarray(_frozen(data))
    spans = zip(starts.tolist(), stops.tolist(), strict=True)
    return np.array([value(frozen[start:stop]) for start, stop in spans], np.uint32)


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


def compress_chunks(chunks: Sequence[NDArray[np.uint8]], level: int) -> list[bytes]:
    """Compress chunks without holding the interpreter; several threads may do so at once."""
    compressor = zstd.ZstdCompressor(level)
    frames = [compressor.compress(chunk.data, compressor.FLUSH_FRAME) for chunk in chunks]
    return [frame + crc32c(frame).to_bytes(4, "little") for frame in frames]


def decompress(frame: bytes | NDArray[np.uint8], limit: int) -> bytes:
    """Decompress one zstd frame without holding the interpreter; take only the memory that its content needs."""
    return b"".join(_parts(frame, limit))


def decompress_exactly(
    frame: NDArray[np.uint8], size: int, memory: Callable[[int], NDArray[np.uint8]]
) -> NDArray[np.uint8]:
    """Decompress one zstd frame of ``size`` bytes into ``memory``, which is asked for once the size is plausible."""
    promised = _promised(frame)
    if promised is not None and promised != size:
        raise DamagedCheckpointError(f"it holds {promised} bytes, expected {size}")
    if size > len(frame) * _RATIO:
        raise DamagedCheckpointError(f"its {len(frame)} bytes cannot hold the expected {size}")
    content = memory(size)
    position = 0
    for part in _parts(frame, size):
        content[position : position + len(part)] = np.frombuffer(part, np.uint8)
        position += len(part)
    if position != size:
        raise DamagedCheckpointError(f"it holds {position} bytes, expected {size}")
    return content


def _promised(frame: bytes | NDArray[np.uint8]) -> int | None:
    """Return the size of the content that a frame states, if it states one."""
    data = frame if isinstance(frame, bytes) else frame.data
    if bytes(data[:4]) != _MAGIC:
        raise DamagedCheckpointError("its zstd frame does not begin with the magic number")
    try:
        return zstd.get_frame_info(data).decompressed_size
    except zstd.ZstdError as error:
        raise DamagedCheckpointError(f"its zstd frame cannot be decompressed ({error})") from error


def _parts(frame: bytes | NDArray[np.uint8], limit: int) -> Iterator[bytes]:
    """Generate the content of a frame in parts that stay in the processor's cache."""
    promised = _promised(frame)
    if promised is not None and promised > limit:
        raise DamagedCheckpointError(f"its zstd frame promises {promised} bytes, more than the limit of {limit}")
    decompressor = zstd.ZstdDecompressor(options=_OPTIONS)
    data = frame if isinstance(frame, bytes) else frame.data
    left = limit
    while not decompressor.eof:
        try:
            part = decompressor.decompress(data, min(left + 1, _PART))
        except zstd.ZstdError as error:
            raise DamagedCheckpointError(f"its zstd frame cannot be decompressed ({error})") from error
        left -= len(part)
        if left < 0:
            raise DamagedCheckpointError(f"its zstd frame holds more than the limit of {limit} bytes")
        if decompressor.needs_input and not decompressor.eof:
            break
        yield part
        data = b""  # the decompressor keeps what it has not read yet
    if not decompressor.eof or decompressor.unused_data:
        raise DamagedCheckpointError("its zstd frame does not end where the data does")
