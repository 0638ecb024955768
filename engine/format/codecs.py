"""Checksums, digests, compression and varints: CRC-32C, XXH3, zstd and ULEB128.

CRC-32C (Castagnoli, RFC 3720 appendix B.4) protects all stored bytes. It is the checksum of the OCDBT format and of
zarr's ``crc32c`` codec. zstd (RFC 8878) compresses chunks on request, and TensorStore uses it for OCDBT nodes. A
compressed chunk is a zstd frame followed by its CRC-32C, as produced by zarr's codecs ``[bytes, zstd, crc32c]``.
128-bit XXH3 (https://github.com/Cyan4973/xxHash) detects changes to bytes in memory, and is never stored.

A varint has seven bits per byte, lowest bits first. The top bit of a byte is set if another byte follows. OCDBT stores
all counts and lengths as varints: https://google.github.io/tensorstore/kvstore/ocdbt/index.html#storage-format
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeAlias

import google_crc32c
import numpy as np
import xxhash
from numpy.typing import NDArray

from ..errors import DamagedCheckpointError

Data: TypeAlias = bytes | bytearray | memoryview | NDArray[np.uint8]

LEVELS = range(1, 23)  # zstd compression levels, from the fastest to the one with the smallest output

_PART = 1 << 20  # bytes decompressed at a time; allocating memory for larger parts takes longer than decompression
_HELD = 64 << 10  # maximum number of bytes hashed at a time without releasing the GIL
_RATIO = 1 << 15  # maximum compression ratio: a block of up to 128 KiB takes at least four bytes
_MAGIC = b"\x28\xb5\x2f\xfd"


def crc32c(data: Data) -> int:
    return int(google_crc32c.value(_frozen(data)))


def extend(crc: int, data: Data) -> int:
    return int(google_crc32c.extend(crc, _frozen(data)))


class ContentDigest:
    """An incremental 128-bit digest."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()

    def update(self, data: NDArray[np.uint8]) -> None:
        # If xxhash hashes more than about 100 kB at a time, it releases the GIL. A busy thread could then keep the GIL
        # for milliseconds before this thread gets it back.
        view = data.data
        for start in range(0, len(view), _HELD):
            self._hash.update(view[start : start + _HELD])

    def digest(self) -> bytes:
        return self._hash.digest()


def content_digest(data: NDArray[np.uint8]) -> bytes:
    """Return the 128-bit digest of a buffer, releasing the GIL."""
    return xxhash.xxh3_128_digest(data.data)


def checksums_of(parts: Sequence[bytes]) -> list[int]:
    """Return the CRC-32C of each byte string."""
    return list(map(google_crc32c.value, parts))


def _frozen(data: Data) -> bytes | NDArray[np.uint8]:
    # The C function accepts bytes and read-only arrays, but refuses buffers that could change during the call.
    if isinstance(data, bytes) or not len(data):
        return bytes(data)
    array = data.view() if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
    if not array.flags.c_contiguous:
        raise ValueError("a checksum needs contiguous memory; make the array contiguous first")
    array.flags.writeable = False
    return array


def _zstd() -> Any:
    """Import the zstd module lazily, because most programs never need it."""
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    return zstd


def compress_chunks(chunks: Sequence[NDArray[np.uint8]], level: int) -> list[bytes]:
    """Compress each chunk to a zstd frame followed by its CRC-32C, releasing the GIL."""
    compressor = _zstd().ZstdCompressor(level)
    frames = [compressor.compress(chunk.data, compressor.FLUSH_FRAME) for chunk in chunks]
    return [frame + crc32c(frame).to_bytes(4, "little") for frame in frames]


def decompress(data: bytes | NDArray[np.uint8], limit: int, *, frames: int = 1) -> bytes:
    """Decompress up to ``frames`` zstd frames, releasing the GIL. Declared sizes are never used to allocate memory."""
    return b"".join(_parts(data, limit, frames))


def decompress_exactly(
    frame: NDArray[np.uint8], size: int, memory: Callable[[int], NDArray[np.uint8]]
) -> NDArray[np.uint8]:
    """Decompress a zstd frame into a buffer, which ``memory`` allocates only if the buffer's size is plausible."""
    stated = _stated_size(frame)
    if stated is not None and stated != size:
        raise DamagedCheckpointError(f"it holds {stated} bytes, expected {size}")
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


def _stated_size(frame: bytes | NDArray[np.uint8]) -> int | None:
    data = frame if isinstance(frame, bytes) else frame.data
    if bytes(data[:4]) != _MAGIC:
        raise DamagedCheckpointError("its zstd frame does not begin with the magic number")
    zstd = _zstd()
    try:
        size: int | None = zstd.get_frame_info(data).decompressed_size
    except zstd.ZstdError as error:
        raise DamagedCheckpointError(f"its zstd frame cannot be decompressed ({error})") from error
    return size


def _parts(frame: bytes | NDArray[np.uint8], limit: int, frames: int = 1) -> Iterator[bytes]:
    """Yield the decompressed contents of frames in parts that fit in the CPU cache."""
    stated = _stated_size(frame)
    if stated is not None and stated > limit:
        raise DamagedCheckpointError(f"its zstd frame promises {stated} bytes, more than the limit of {limit}")
    zstd = _zstd()
    data = frame if isinstance(frame, bytes) else frame.data
    left = limit
    for _ in range(frames):
        # Frames that require a window of more than 128 MiB are refused.
        decompressor = zstd.ZstdDecompressor(options={int(zstd.DecompressionParameter.window_log_max): 27})
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
            data = b""  # the decompressor has buffered the remaining input
        data = decompressor.unused_data
        if not decompressor.eof or not data:
            break
    if not decompressor.eof or decompressor.unused_data:
        raise DamagedCheckpointError("its zstd frame does not end where the data does")


# ---- varints

INT64_MAX, UINT64_MAX = (1 << 63) - 1, (1 << 64) - 1
_MAX_BYTES = 10  # maximum length of an encoded 64-bit number, in bytes


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
    positions = np.arange(sizes.max())
    digits = (values[:, None] >> (7 * positions).astype(np.uint64)).astype(np.uint8) | 128
    digits[np.arange(len(values)), sizes - 1] &= 127
    return digits[positions < sizes[:, None]].tobytes()


def decode_varints(data: NDArray[np.uint8], count: int) -> tuple[NDArray[np.uint64], int]:
    """Decode a column of numbers; return the numbers and their encoded size in bytes."""
    if count > data.size:
        raise ValueError(f"{count} numbers cannot fit in {data.size} bytes")
    if not count:
        return np.zeros(0, np.uint64), 0
    ends = (data[: count * _MAX_BYTES] < 128).nonzero()[0][:count] + 1
    if ends.size < count:
        raise ValueError(f"found only {ends.size} of {count} numbers")
    total = int(ends[-1])
    sizes = ends.copy()  # np.diff with `prepend` takes five times as long for short arrays
    sizes[1:] -= ends[:-1]
    longest = int(sizes.max())
    if longest > _MAX_BYTES or (longest == _MAX_BYTES and data[ends[sizes == _MAX_BYTES] - 1].max() > 1):
        raise ValueError("a number does not fit 64 bits")
    digits = (data[:total] & 127).astype(np.uint64)
    starts = ends - sizes
    digits <<= ((np.arange(total) - starts.repeat(sizes)) * 7).astype(np.uint64)
    return np.bitwise_or.reduceat(digits, starts), total


class Cursor:
    """A reader of consecutive fields that allocates memory for a field only after checking that its bytes exist."""

    def __init__(self, data: bytes, source: str) -> None:
        self.data = data
        self.position = 0
        self.source = source

    @property
    def remaining(self) -> int:
        return len(self.data) - self.position

    def fail(self, reason: str) -> NoReturn:
        raise DamagedCheckpointError(f"{self.source} is damaged: {reason}")

    def take(self, count: int) -> bytes:
        if count > self.remaining:
            self.fail(f"expected {count} more bytes at offset {self.position}, found {self.remaining}")
        self.position += count
        return self.data[self.position - count : self.position]

    def byte(self) -> int:
        return self.take(1)[0]

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
        return values.view(np.int64)

    def wide_varints(self, count: int) -> NDArray[np.uint64]:
        first = self.data[self.position : self.position + count]
        if first.isascii() and len(first) == count:  # a fast path, because most columns have one byte per number
            self.position += count
            return np.frombuffer(first, np.uint8).astype(np.uint64)
        try:
            values, size = decode_varints(np.frombuffer(self.data, np.uint8)[self.position :], count)
        except ValueError as error:
            self.fail(f"{error} at offset {self.position}")
        self.position += size
        return values

    def finish(self) -> None:
        if self.remaining:
            self.fail(f"{self.remaining} bytes follow where it should end")
