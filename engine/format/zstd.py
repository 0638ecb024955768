"""Decompression of zstd frames, which TensorStore's OCDBT writer makes by default.

Python has no zstd before 3.14, but TensorStore has: its ``zip`` driver decompresses members of method 93. It returns
as many bytes as the archive's directory promises, and a streaming writer leaves the size out of the frame. So the
frame is extended, without decompressing it: its last block is followed by a stored block holding a random marker, and
by as many blocks of zeros as could be asked for. Where the marker turns up is where the data ended.

The formats are those of RFC 8878 (zstd) and of PKWARE's APPNOTE 6.3.10 (zip).
"""

from __future__ import annotations

import os
import struct

from ..errors import DamagedCheckpointError

_MAGIC = b"\x28\xb5\x2f\xfd"
_BLOCK = 128 << 10  # bytes of the largest block's content
_RAW, _REPEATED, _COMPRESSED = 0, 1, 2
_MARKER = 32  # bytes
_WINDOW_LIMIT = 128 << 20  # bytes; what zstd's own decoder accepts unless told otherwise
_RATIO = 512  # TensorStore refuses archive members that promise more than 1024 times their compressed size


def content_limit(data: bytes) -> int:
    """Says how much one zstd frame can hold at most, without decompressing it.

    Args:
        data: The frame, and nothing after it.

    Returns:
        A number of bytes that its content does not exceed, at most some thirty thousand times its own size.

    Raises:
        DamagedCheckpointError: The bytes are no such frame.
    """
    start, _, promised = _parse_header(data)
    _, _, bound = _walk_blocks(data, start)
    return bound if promised is None else min(promised, bound)


def decompress(data: bytes, limit: int) -> bytes:
    """Decompresses one zstd frame.

    Args:
        data: The frame, and nothing after it.
        limit: The largest size of the content, in bytes, that is accepted; less than 1 GiB. At most this much memory,
            plus a block, is taken.

    Returns:
        The content.

    Raises:
        DamagedCheckpointError: The bytes are no such frame, or its content is larger than `limit`.
    """
    if not 0 <= limit < 1 << 30:
        raise ValueError(f"limit must be between 0 and 1 GiB, not {limit}")
    start, descriptor, promised = _parse_header(data)
    if promised is not None and promised > limit:
        raise DamagedCheckpointError(f"its zstd frame promises {promised} bytes, more than the limit of {limit}")
    last, end, bound = _walk_blocks(data, start)
    if end + 4 * (descriptor >> 2 & 1) != len(data):
        raise DamagedCheckpointError("its zstd frame does not end where the data does")
    marker = os.urandom(_MARKER)
    size = min(bound, limit)
    zeros = -(-size // _BLOCK) or 1
    block = _block_header(_REPEATED, _BLOCK) + b"\0"
    parts = [
        _MAGIC,
        bytes((0, _window_descriptor(data, descriptor, promised))),
        data[start:last],
        bytes((data[last] & 0xFE,)),
        data[last + 1 : end],
        _block_header(_RAW, _MARKER),
        marker,
        block * (zeros - 1),
        _block_header(_REPEATED, _BLOCK, last=True) + b"\0",
    ]
    content = _unzip(b"".join(parts), size + _MARKER)
    found = content.rfind(marker)
    if found < 0:
        raise DamagedCheckpointError(f"its zstd frame holds more than the limit of {limit} bytes")
    if promised is not None and found != promised:
        raise DamagedCheckpointError(f"its zstd frame promises {promised} bytes, found {found}")
    return content[:found]


def _parse_header(data: bytes) -> tuple[int, int, int | None]:
    """Returns where the blocks start, the frame header descriptor, and the size of the content if it is given."""
    if len(data) < 6 or data[:4] != _MAGIC:
        raise DamagedCheckpointError("it holds no zstd frame where one is announced")
    descriptor = data[4]
    if descriptor & 0b1011:
        raise DamagedCheckpointError("its zstd frame needs a dictionary or uses a reserved bit")
    single = descriptor >> 5 & 1
    field = (single, 2, 4, 8)[descriptor >> 6]
    at = 5 + (1 - single)
    start = at + field
    if len(data) < start:
        raise DamagedCheckpointError("its zstd frame is cut off in the header")
    if not field:
        return start, descriptor, None
    return start, descriptor, int.from_bytes(data[at:start], "little") + (256 if field == 2 else 0)


def _window_descriptor(data: bytes, descriptor: int, promised: int | None) -> int:
    """Returns the descriptor of a window that suffices for the frame, and for blocks of full size."""
    if promised is not None and descriptor >> 5 & 1:
        exponent = max(7, (max(promised, 1) - 1).bit_length() - 10)
        return exponent << 3
    found = data[5]
    window = (1 << (10 + (found >> 3))) // 8 * (8 + (found & 7))
    if window > _WINDOW_LIMIT:
        raise DamagedCheckpointError(f"its zstd frame needs a window of {window} bytes; the limit is {_WINDOW_LIMIT}")
    return max(found, 7 << 3)


def _walk_blocks(data: bytes, position: int) -> tuple[int, int, int]:
    """Returns the offset of the last block, the offset after it, and an upper bound of the content's size."""
    bound = 0
    while True:
        if position + 3 > len(data):
            raise DamagedCheckpointError("its zstd frame is cut off")
        header = int.from_bytes(data[position : position + 3], "little")
        kind, size = header >> 1 & 3, header >> 3
        if kind > _COMPRESSED or size > _BLOCK:
            raise DamagedCheckpointError("its zstd frame has a block of an unknown kind or size")
        bound += _BLOCK if kind == _COMPRESSED else size
        end = position + 3 + (1 if kind == _REPEATED else size)
        if end > len(data):
            raise DamagedCheckpointError("its zstd frame is cut off")
        if header & 1:
            return position, end, bound
        position = end


def _block_header(kind: int, size: int, *, last: bool = False) -> bytes:
    return (size << 3 | kind << 1 | last).to_bytes(3, "little")


def _unzip(frame: bytes, size: int) -> bytes:
    """Decompresses the first `size` bytes of a frame as a member of a zip archive in memory."""
    import tensorstore as ts

    name = b"frame"
    frame += bytes(max(0, size // _RATIO - len(frame)))
    checksum, zip_version, method, date = 0, 63, 93, 0x21
    common = struct.pack("<HHHHHIIIHH", zip_version, 0, method, 0, date, checksum, len(frame), size, len(name), 0)
    local = b"PK\3\4" + common + name
    central = b"PK\1\2" + struct.pack("<H", zip_version) + common + struct.pack("<HHHII", 0, 0, 0, 0, 0) + name
    end = b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, 1, 1, len(central), len(local) + len(frame), 0)
    context = ts.Context()
    try:
        archive = ts.KvStore.open({"driver": "memory"}, context=context).result()
        archive.write("archive.zip", b"".join((local, frame, central, end))).result()
        base = {"driver": "memory", "path": "archive.zip"}
        members = ts.KvStore.open({"driver": "zip", "base": base}, context=context).result()
        return bytes(members.read(name).result().value)
    except (ValueError, NotImplementedError, OSError) as error:
        raise DamagedCheckpointError(f"its zstd frame cannot be decompressed ({error})") from error
