"""Text, and whatever else is bytes, in the data files of TensorFlow checkpoints. Pure: bytes in, values out."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DamagedCheckpointError, UnsupportedLeafError
from ..format import Cursor, crc32c
from ..format.checksums import extend
from .tensorflow_messages import VARIANT, BundleEntry
from .tensorflow_table import masked
from .tensorflow_wire import read_varint

MOST_LEAVES = 1 << 16
"""How many elements may become leaves of their own."""
_CHECKSUM_BYTES = 4
_PADDING = 4  # times the bytes of the file: what an array may take whose elements are all as long as the longest
_SMALL = 1 << 20  # bytes of such an array that are fine


def decode_texts(data: bytes, entry: BundleEntry, *, big_endian: bool) -> list[bytes]:
    """Reads a tensor of text, or of variants, which are messages.

    Args:
        data: Its bytes.
        entry: What the index says of it.
        big_endian: The byte order of the file.

    Returns:
        The elements in C order.

    Raises:
        DamagedCheckpointError: They are not those that were written.
    """
    order = "big" if big_endian else "little"
    return _variants(data, entry, order) if entry.kind == VARIANT else _texts(data, entry, order)


def as_leaves(texts: list[bytes], entry: BundleEntry) -> Any:
    """Returns text as a leaf or, where numpy's arrays of bytes cannot hold it, as lists of leaves, as variants are.

    Args:
        texts: The elements in C order.
        entry: What the index says of them.

    Raises:
        UnsupportedLeafError: They would be very many leaves.
    """
    shape = entry.shape
    if not shape:
        return texts[0]
    longest = max(map(len, texts), default=0)
    fits = max(longest, 1) * len(texts) <= _PADDING * sum(map(len, texts)) + _SMALL
    if not texts or (entry.kind != VARIANT and fits and not any(text.endswith(b"\0") for text in texts)):
        return np.array(texts, f"S{max(longest, 1)}").reshape(shape)
    if len(texts) > MOST_LEAVES:
        raise UnsupportedLeafError(f"{len(texts)} pieces of text that no array of numpy can hold")
    return _nested(texts, shape)


def as_objects(texts: list[bytes], shape: tuple[int, ...]) -> bytes | NDArray[Any]:
    """Returns text as TensorFlow does: bytes, or an array of objects that are bytes."""
    if not shape:
        return texts[0]
    found = np.empty(len(texts), object)
    found[:] = texts
    return found.reshape(shape)


def _texts(data: bytes, entry: BundleEntry, order: Any) -> list[bytes]:
    if not data and not entry.count:
        return []
    cursor = Cursor(data, "its text")
    lengths = cursor.wide_varints(entry.count)
    noted = cursor.take(_CHECKSUM_BYTES)
    if any(lengths >> np.uint64(32)):
        fixed = b"".join(int(length).to_bytes(8 if length >> 32 else 4, order) for length in lengths.tolist())
    else:
        fixed = lengths.astype(np.dtype(np.uint32).newbyteorder(order)).tobytes()
    crc = crc32c(fixed)
    if masked(crc).to_bytes(_CHECKSUM_BYTES, order) != noted:
        raise DamagedCheckpointError("the lengths of its text do not have the checksum noted for them")
    if masked(extend(extend(crc, noted), data[cursor.position :])) != entry.checksum:
        raise DamagedCheckpointError("its text does not have the checksum noted for it")
    found = [cursor.take(length) for length in lengths.tolist()]
    cursor.finish()
    return found


def _variants(data: bytes, entry: BundleEntry, order: Any) -> list[bytes]:
    """Reads messages, each with its length in front, and behind it a checksum of everything up to there."""
    found, position, crc = [], 0, 0
    for _ in range(entry.count):
        length, position = read_varint(data, position)
        if length > len(data) - position - _CHECKSUM_BYTES:
            raise DamagedCheckpointError(f"a variant claims {length} bytes of {len(data)}")
        found.append(data[position : position + length])
        position += length
        noted = data[position : position + _CHECKSUM_BYTES]
        position += _CHECKSUM_BYTES
        crc = extend(extend(crc, length.to_bytes(8, order)), found[-1])
        if masked(crc).to_bytes(_CHECKSUM_BYTES, order) != noted:
            raise DamagedCheckpointError("a variant does not have the checksum noted for it")
        crc = extend(crc, noted)
    if position != len(data) or (data and masked(crc) != entry.checksum):
        raise DamagedCheckpointError("its variants do not have the checksum noted for them")
    return found


def _nested(texts: list[bytes], shape: tuple[int, ...]) -> Any:
    if len(shape) == 1:
        return texts
    step = math.prod(shape[1:])
    return [_nested(texts[first * step : (first + 1) * step], shape[1:]) for first in range(shape[0])]
