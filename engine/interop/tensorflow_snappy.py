"""The compression of blocks in old TensorFlow checkpoints, snappy. Pure: bytes in, bytes out.

A stream is the length of the content, then literals and copies of what came before
(https://github.com/google/snappy/blob/main/format_description.txt).
"""

from __future__ import annotations

from ..errors import DamagedCheckpointError
from .tensorflow_wire import read_varint

_RATIO = 24  # bytes that one compressed byte can stand for: a copy of 64 bytes takes three


def uncompress(data: bytes) -> bytes:
    """Returns the content of a stream.

    Args:
        data: The stream.

    Raises:
        DamagedCheckpointError: It is none; found out before more memory is taken than it could fill.
    """
    size, position = read_varint(data, 0)
    if size > _RATIO * len(data):
        raise DamagedCheckpointError(f"{len(data)} compressed bytes claim to stand for {size}")
    out = bytearray()
    while position < len(data):
        tag = data[position]
        position += 1
        kind, upper = tag & 3, tag >> 2
        if kind == 0:
            if upper >= 60:
                upper, position = _number(data, position, upper - 59)
            length = upper + 1
            if length > len(data) - position:
                raise DamagedCheckpointError("a compressed block is cut off")
            out += data[position : position + length]
            position += length
        else:
            if kind == 1:
                low, position = _number(data, position, 1)
                offset, length = (tag >> 5 << 8) | low, (upper & 7) + 4
            else:
                offset, position = _number(data, position, 2 if kind == 2 else 4)
                length = upper + 1
            if not 1 <= offset <= len(out):
                raise DamagedCheckpointError("a compressed block repeats what is not there")
            if offset >= length:
                begin = len(out) - offset
                out += out[begin : begin + length]
            else:  # what is copied is still being written
                out += (bytes(out[-offset:]) * (length // offset + 1))[:length]
        if len(out) > size:
            break
    if len(out) != size:
        raise DamagedCheckpointError(f"a compressed block says that it holds {size} bytes, and does not")
    return bytes(out)


def _number(data: bytes, position: int, count: int) -> tuple[int, int]:
    if count > len(data) - position:
        raise DamagedCheckpointError("a compressed block is cut off")
    return int.from_bytes(data[position : position + count], "little"), position + count
