"""The table of a TensorFlow checkpoint's index file: sorted keys with values. Pure: bytes in, entries out.

It is a LevelDB table (https://github.com/google/leveldb/blob/main/doc/table_format.md): blocks of entries, each with a
checksum, a block that says where they are, and a footer that says where that is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..errors import DamagedCheckpointError
from ..format import crc32c, encode_varint
from .tensorflow_snappy import uncompress
from .tensorflow_wire import read_varint

FOOTER_BYTES = 48
MAGIC = bytes.fromhex("57fb808b247547db")
"""The last bytes of a table."""
_TRAILER_BYTES = 5
_RAW, _SNAPPY = 0, 1
_KEYS_AMPLIFICATION = 64  # times the bytes of the file: what keys may come to that share their beginnings
_KEYS_SMALL = 1 << 20  # bytes of keys that are fine whatever the file's size


class _Handle(NamedTuple):
    offset: int
    size: int


def masked(crc: int) -> int:
    """Returns a checksum as it is stored: rotated, so that checksums of bytes that hold checksums stay good ones."""
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def looks_like_table(end: bytes) -> bool:
    """Whether a file that ends like this may be a table."""
    return end.endswith(MAGIC)


def read_table(content: bytes) -> list[tuple[bytes, bytes]]:
    """Reads all entries of a table and verifies every block of it.

    Args:
        content: The file.

    Returns:
        The keys, in ascending order, with their values.

    Raises:
        DamagedCheckpointError: It is no table, or not as it was written.
    """
    if len(content) < FOOTER_BYTES or not looks_like_table(content[-FOOTER_BYTES:]):
        raise DamagedCheckpointError("it does not end as an index file does: it is cut off, or no index file")
    end = len(content) - FOOTER_BYTES
    footer = content[end : -len(MAGIC)]
    metaindex, position = _handle(footer, 0)
    index, position = _handle(footer, position)
    if footer != b"".join(map(encode_varint, (*metaindex, *index))).ljust(len(footer), b"\0"):
        raise DamagedCheckpointError("its footer is not one that a writer of index files leaves")
    _block(content, metaindex, end)
    budget = _KEYS_AMPLIFICATION * len(content) + _KEYS_SMALL
    found: list[tuple[bytes, bytes]] = []
    reached, last = 0, None
    for _, value in _entries(_block(content, index, end)):
        handle, rest = _handle(value, 0)
        if rest != len(value) or handle.offset < reached:
            raise DamagedCheckpointError(f"the block at byte {handle.offset} is said to lie in another one")
        reached = handle.offset + handle.size
        before = len(found)
        for key, entry in _entries(_block(content, handle, end)):
            if last is not None and key <= last:
                raise DamagedCheckpointError(f"the keys of the block at byte {handle.offset} are not in order")
            last = key
            budget -= len(key)
            if budget < 0:
                raise DamagedCheckpointError("its keys are far longer than the whole file")
            found.append((key, entry))
        if len(found) == before:
            raise DamagedCheckpointError(f"the block at byte {handle.offset} holds no entry")
    return found


def _handle(data: bytes, position: int) -> tuple[_Handle, int]:
    offset, position = read_varint(data, position)
    size, position = read_varint(data, position)
    return _Handle(offset, size), position


def _block(content: bytes, handle: _Handle, end: int) -> bytes:
    """Returns the content of a block whose checksum is right."""
    stop = handle.offset + handle.size
    if stop + _TRAILER_BYTES > end:
        raise DamagedCheckpointError(f"the block at byte {handle.offset} has {handle.size} bytes, more than there are")
    kind = content[stop]
    stored = int.from_bytes(content[stop + 1 : stop + _TRAILER_BYTES], "little")
    if masked(crc32c(content[handle.offset : stop + 1])) != stored:
        raise DamagedCheckpointError(f"the block at byte {handle.offset} does not have the checksum noted for it")
    data = content[handle.offset : stop]
    if kind == _RAW:
        return data
    if kind == _SNAPPY:
        return uncompress(data)
    raise DamagedCheckpointError(f"the block at byte {handle.offset} has the unknown compression {kind}")


def _entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    if len(block) < 4:
        raise DamagedCheckpointError("a block is shorter than its end")
    restarts = int.from_bytes(block[-4:], "little")
    end = len(block) - 4 - 4 * restarts
    if end < 0:
        raise DamagedCheckpointError(f"a block of {len(block)} bytes claims {restarts} restarts")
    position, key = 0, b""
    while position < end:
        shared, position = read_varint(block, position)
        added, position = read_varint(block, position)
        size, position = read_varint(block, position)
        if shared > len(key) or added + size > end - position:
            raise DamagedCheckpointError("an entry of a block is longer than the block")
        key = key[:shared] + block[position : position + added]
        position += added + size
        yield key, block[position - size : position]
