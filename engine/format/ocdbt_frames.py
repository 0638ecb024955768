"""The envelope of every OCDBT manifest and node: magic number, length, version, compression, body, checksum.

https://google.github.io/tensorstore/kvstore/ocdbt/index.html#manifest-format
"""

from __future__ import annotations

import struct

from ..errors import DamagedCheckpointError, FormatVersionError
from .checksums import crc32c
from .cursor import Cursor
from .zstd import decompress

MANIFEST_MAGIC = 0x0CDB3A2A
NODE_MAGIC = 0x0CDB20DE

BODY_LIMIT = 256 << 20
"""Bytes of the largest body that is decoded; TensorStore's default node size is 8 MiB."""

FRAME_LIMIT = BODY_LIMIT + 64
"""Bytes of the largest frame that is read."""

_HEAD = struct.Struct(">I")
_LENGTH = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<I")
_SHORTEST = _HEAD.size + _LENGTH.size + 2 + _CHECKSUM.size


def encode_frame(magic: int, body: bytes) -> bytes:
    """Wraps an uncompressed body.

    Args:
        magic: What the body is, MANIFEST_MAGIC or NODE_MAGIC.
        body: The bytes to wrap.

    Returns:
        The frame.
    """
    frame = b"".join((_HEAD.pack(magic), _LENGTH.pack(_SHORTEST + len(body)), b"\0\0", body))
    return frame + _CHECKSUM.pack(crc32c(frame))


def decode_frame(magic: int, frame: bytes, source: str) -> Cursor:
    """Verifies a frame and unwraps its body, decompressing it where needed.

    Args:
        magic: What the body must be.
        frame: All bytes of the frame, and none after it.
        source: Where they were read, for error messages.

    Returns:
        A cursor at the start of the body.

    Raises:
        DamagedCheckpointError: The frame does not pass its own checks.
        FormatVersionError: It passes them, but is of a version or compression that is not known here.
    """
    if len(frame) < _SHORTEST:
        raise DamagedCheckpointError(f"{source} is damaged: {len(frame)} bytes are too few for an OCDBT frame")
    (found,) = _HEAD.unpack_from(frame)
    if found != magic:
        raise DamagedCheckpointError(f"{source} is damaged: expected it to begin with {magic:08x}, found {found:08x}")
    (length,) = _LENGTH.unpack_from(frame, _HEAD.size)
    if length != len(frame):
        raise DamagedCheckpointError(f"{source} is damaged: expected {length} bytes, found {len(frame)}")
    (stored,) = _CHECKSUM.unpack_from(frame, length - _CHECKSUM.size)
    content = frame[: -_CHECKSUM.size]
    computed = crc32c(content)
    if stored != computed:
        raise DamagedCheckpointError(
            f"{source} is damaged: expected the checksum {stored:08x}, computed {computed:08x} from its bytes"
        )
    cursor = Cursor(content, source)
    cursor.position = _HEAD.size + _LENGTH.size
    version, compression = cursor.varint(), cursor.varint()
    if version:
        raise FormatVersionError(f"{source} has OCDBT version {version}; this version of holdfast reads version 0")
    if compression == 0:
        return cursor
    if compression != 1:
        raise FormatVersionError(f"{source} is compressed with OCDBT method {compression}; known are 0 and 1 (zstd)")
    try:
        body = decompress(cursor.take(cursor.remaining), BODY_LIMIT)
    except DamagedCheckpointError as error:
        raise DamagedCheckpointError(f"{source} is damaged: {error}") from error
    return Cursor(body, source)
