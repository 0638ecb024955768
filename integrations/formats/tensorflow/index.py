"""Decode the index of a TensorFlow checkpoint, a table with one message per tensor. This module performs no I/O.

A protocol buffer message is a sequence of fields, each of which has a tag (field number and wire type) and a value
(https://protobuf.dev/programming-guides/encoding). The messages are defined in
``tensorflow/core/protobuf/tensor_bundle.proto`` (``BundleHeaderProto`` and ``BundleEntryProto``) and, in
``tensorflow/core/framework``, in ``tensor_shape.proto``, ``tensor_slice.proto`` and ``versions.proto``.

The table is a LevelDB table (https://github.com/google/leveldb/blob/main/doc/table_format.md). It consists of data
blocks with checksums, an index block that locates them, and a footer that locates the index block. Old checkpoints
compress blocks with snappy, which stores the uncompressed length, then literals and copies of earlier bytes
(https://github.com/google/snappy/blob/main/format_description.txt).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import ml_dtypes
import numpy as np

from ....engine.errors import DamagedCheckpointError, FormatVersionError
from ....engine.format import UINT64_MAX, Cursor, DType, crc32c, encode_varint

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED = {_FIXED64: 8, _FIXED32: 4}
_LARGEST_FIELD = (1 << 29) - 1
FOOTER_BYTES = 48
MAGIC = bytes.fromhex("57fb808b247547db")  # magic number at the end of a table
_TRAILER_BYTES = 5
_RAW, _SNAPPY = 0, 1
_KEYS_AMPLIFICATION = 64  # maximum total size of the keys without prefix compression, as a multiple of the file size
_KEYS_SMALL = 1 << 20  # total key size, in bytes, that is allowed in addition to this multiple
_RATIO = 24  # maximum compression ratio; a snappy copy of 64 bytes takes three bytes
STRING, VARIANT = 7, 21
_VERSION = 1  # the supported format version
_LARGEST = 1 << 62
_ESCAPES = {0: b"\0\xff", 0xFF: b"\xff\0"}
_MOST_AXES = 32  # limit of numpy 1; TensorFlow tensors may have up to 254 axes

Value = int | bytes  # a field value: an unsigned integer, or bytes (text or a nested message)


def fields(message: bytes) -> Iterator[tuple[int, Value]]:
    """Yield the field numbers and values of a message, in order."""
    cursor = Cursor(message, "a message")
    while cursor.remaining:
        tag = cursor.varint()
        number, wire_type = tag >> 3, tag & 7
        if not 1 <= number <= _LARGEST_FIELD:
            cursor.fail(f"it has the invalid field number {number}")
        if wire_type == _VARINT:
            yield number, cursor.varint(UINT64_MAX)
        elif wire_type == _BYTES:
            yield number, cursor.take(cursor.varint())
        elif wire_type in _FIXED:
            yield number, _little(cursor, _FIXED[wire_type])
        else:
            cursor.fail(f"its field {number} has the unknown wire type {wire_type}")


def _little(cursor: Cursor, count: int) -> int:
    return int.from_bytes(cursor.take(count), "little")


def unsigned(value: Value) -> int:
    if not isinstance(value, int):
        raise DamagedCheckpointError("a message has bytes where a number belongs")
    return value


def signed(value: Value) -> int:
    """Convert a field value to a signed 64-bit integer."""
    number = unsigned(value)
    return number - (1 << 64) if number >> 63 else number


def content(value: Value) -> bytes:
    if not isinstance(value, bytes):
        raise DamagedCheckpointError("a message has a number where bytes belong")
    return value


def text(value: Value) -> str:
    try:
        return content(value).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DamagedCheckpointError(f"a message has bytes that are not text: {error}") from error


_DTYPE_NAMES = (  # ordered as in the enum ``DataType`` in types.proto, starting from 1
    *("float32", "float64", "int32", "uint8", "int16", "int8", "", "complex64", "int64", "bool"),
    *("int8", "uint8", "int32", "bfloat16", "int16", "uint16"),  # quantised, except bfloat16; the scale is not stored
    *("uint16", "complex128", "float16", "", "", "uint32", "uint64", "float8_e5m2", "float8_e4m3fn"),
    *("float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e5m2fnuz"),
    *("int4", "uint4", "int2", "uint2", "float4_e2m1fn"),  # stored as one byte per element
)
_DTYPES: dict[int, DType] = {
    number: np.dtype(getattr(ml_dtypes, name, name)) for number, name in enumerate(_DTYPE_NAMES, 1) if name
}


class BundleHeader(NamedTuple):
    """The number of data files, and whether their data is big endian."""

    shards: int
    big_endian: bool


Slice = tuple[tuple[int, int] | None, ...]
"""A slice of a tensor: the start and the length along each axis; None selects the whole axis."""


def box_of(extents: Slice, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the start index and the shape of a slice in a tensor of the given shape."""
    if len(extents) != len(shape):
        raise DamagedCheckpointError(f"a slice has {len(extents)} axes, its tensor {len(shape)}")
    whole = [(0, size) if extent is None else extent for extent, size in zip(extents, shape, strict=True)]
    for (first, length), size in zip(whole, shape, strict=True):
        if first < 0 or length < 0 or first + length > size:
            raise DamagedCheckpointError(f"a slice begins at {first} and has {length} of {size}")
    return tuple(first for first, _ in whole), tuple(length for _, length in whole)


@dataclass(frozen=True, slots=True)
class BundleEntry:
    """The index entry of one tensor, or of one slice of a tensor."""

    kind: int  # element type, a TensorFlow DataType number
    shape: tuple[int, ...]
    shard: int  # index of the data file
    offset: int  # byte offset in the data file
    size: int  # size of the data in bytes
    checksum: int  # masked CRC-32C of the data
    slices: tuple[Slice, ...]  # the slices of the tensor; empty if it is not partitioned

    @property
    def dtype(self) -> DType | None:
        """The element dtype; None for text, variants and unknown types."""
        return _DTYPES.get(self.kind)

    @property
    def count(self) -> int:
        return math.prod(self.shape)


def decode_header(message: bytes) -> BundleHeader:
    values = dict(fields(message))
    shards, big_endian = signed(values.get(1, 0)), unsigned(values.get(2, 0))
    _check_version(content(values.get(3, b"")))
    if shards < 0 or big_endian not in (0, 1):
        raise DamagedCheckpointError(f"its header claims {shards} data files of byte order {big_endian}")
    return BundleHeader(shards, big_endian == 1)


def decode_entry(message: bytes, header: BundleHeader) -> BundleEntry:
    values = dict(fields(message))
    number_of_type, shard, offset, size, checksum = (signed(values.get(number, 0)) for number in (1, 3, 4, 5, 6))
    shape = _shape(content(values.get(2, b"")))
    stored = [content(value) for number, value in fields(message) if number == 7] if 7 in values else []
    slices = tuple(tuple(_extent(content(value)) for number, value in fields(part) if number == 1) for part in stored)
    entry = BundleEntry(number_of_type, shape, shard, offset, size, checksum, slices)
    if not (0 <= shard < max(header.shards, 1) and 0 <= offset <= _LARGEST and 0 <= size <= _LARGEST):
        raise DamagedCheckpointError(f"it claims {size} bytes at offset {offset} of file {shard} of {header.shards}")
    dtype = entry.dtype
    if dtype is not None and not slices and size != entry.count * dtype.itemsize:
        raise DamagedCheckpointError(f"{dtype} of shape {list(shape)} does not take {size} bytes, as its entry claims")
    return entry


def slice_key(name: bytes, extents: Slice) -> bytes:
    """Return the table key of a slice, in the encoding of ``core/lib/strings/ordered_code.cc``.

    >>> slice_key(b"w", ((64, 2), None)).hex()
    '007700010102c04082807f'
    """
    key = b"\0" + b"".join(_ESCAPES.get(byte, bytes([byte])) for byte in name) + b"\0\1"
    key += bytes([1, len(extents)]) if extents else b"\0"
    for extent in extents:
        first, length = (0, -1) if extent is None else extent
        key += ordered(first) + ordered(length)
    return key


def ordered(number: int) -> bytes:
    """Encode a signed integer for a slice key. Encodings sort like integers, and small integers take fewer bytes."""
    length = (~number if number < 0 else number).bit_length() // 7 + 1
    marks = ((1 << length) - 1) << (7 * length)  # the number of leading one bits is the number of bytes
    return ((number & ((1 << 8 * length) - 1)) ^ marks).to_bytes(length, "big")


def _check_version(message: bytes) -> None:
    needed, bad = 0, []
    for number, value in fields(message):
        if number == 2:
            needed = signed(value)
        elif number == 3:
            bad += [signed(value)] if isinstance(value, int) else list(value)
    if needed > _VERSION or _VERSION in bad:
        raise FormatVersionError(
            f"it needs version {needed} of the TensorFlow checkpoint format; this version of holdfast reads "
            f"{_VERSION}: update holdfast, or save it again with an older TensorFlow"
        )


def _shape(message: bytes) -> tuple[int, ...]:
    sizes = []
    for number, value in fields(message):
        if number == 2:
            sizes.append(signed(dict(fields(content(value))).get(1, 0)))
        elif number == 3 and unsigned(value):
            raise DamagedCheckpointError("its shape is unknown")
    if len(sizes) > _MOST_AXES or min(sizes, default=0) < 0 or math.prod(size or 1 for size in sizes) > _LARGEST >> 4:
        raise DamagedCheckpointError(f"{sizes[:_MOST_AXES]} is not the shape of an array")
    return tuple(sizes)


def _extent(message: bytes) -> tuple[int, int] | None:
    parts = dict(fields(message))
    return (signed(parts.get(1, 0)), signed(parts[2])) if 2 in parts else None


def uncompress(data: bytes) -> bytes:
    """Decompress a snappy block."""
    cursor = Cursor(data, "a compressed block")
    size = cursor.varint()
    if size > _RATIO * len(data):
        raise DamagedCheckpointError(f"{len(data)} compressed bytes claim a content of {size}")
    out = bytearray()
    while cursor.remaining:
        tag = cursor.byte()
        element, upper = tag & 3, tag >> 2
        if element == 0:
            out += cursor.take((upper if upper < 60 else _little(cursor, upper - 59)) + 1)
        else:
            if element == 1:
                offset, length = (tag >> 5 << 8) | cursor.byte(), (upper & 7) + 4
            else:
                offset, length = _little(cursor, 2 if element == 2 else 4), upper + 1
            if not 1 <= offset <= len(out):
                raise DamagedCheckpointError("a compressed block copies bytes before its beginning")
            if offset >= length:
                begin = len(out) - offset
                out += out[begin : begin + length]
            else:  # the copy overlaps its own output
                out += (bytes(out[-offset:]) * (length // offset + 1))[:length]
        if len(out) > size:
            break
    if len(out) != size:
        raise DamagedCheckpointError(f"a compressed block claims {size} bytes, found {len(out)}")
    return bytes(out)


class _Handle(NamedTuple):
    offset: int
    size: int


def masked(crc: int) -> int:
    """Mask a CRC for storage by rotating it and adding a constant, because a CRC of data that contains CRCs is weak."""
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def read_table(content: bytes) -> list[tuple[bytes, bytes]]:
    """Read all entries of a table, and verify the checksum of every block."""
    if len(content) < FOOTER_BYTES or not content.endswith(MAGIC):
        raise DamagedCheckpointError("it does not end like an index file: it is cut off, or not an index file")
    end = len(content) - FOOTER_BYTES
    footer = content[end : -len(MAGIC)]
    cursor = Cursor(footer, "its footer")
    metaindex, index = _handle(cursor), _handle(cursor)
    if footer != b"".join(map(encode_varint, (*metaindex, *index))).ljust(len(footer), b"\0"):
        raise DamagedCheckpointError("its footer is not what TensorFlow writes")
    _block(content, metaindex, end)
    budget = _KEYS_AMPLIFICATION * len(content) + _KEYS_SMALL
    entries: list[tuple[bytes, bytes]] = []
    reached, last = 0, None
    for _, value in _entries(_block(content, index, end)):
        cursor = Cursor(value, "the place of a block")
        handle = _handle(cursor)
        if cursor.remaining or handle.offset < reached:
            raise DamagedCheckpointError(f"the block at byte {handle.offset} overlaps another one")
        reached = handle.offset + handle.size
        before = len(entries)
        for key, entry in _entries(_block(content, handle, end)):
            if last is not None and key <= last:
                raise DamagedCheckpointError(f"the keys of the block at byte {handle.offset} are not in order")
            last = key
            budget -= len(key)
            if budget < 0:
                raise DamagedCheckpointError("its keys are far longer than the whole file")
            entries.append((key, entry))
        if len(entries) == before:
            raise DamagedCheckpointError(f"the block at byte {handle.offset} holds no entry")
    return entries


def _handle(cursor: Cursor) -> _Handle:
    return _Handle(cursor.varint(), cursor.varint())


def _block(content: bytes, handle: _Handle, end: int) -> bytes:
    """Verify the checksum of a block, and return its uncompressed contents."""
    stop = handle.offset + handle.size
    if stop + _TRAILER_BYTES > end:
        raise DamagedCheckpointError(
            f"the block at byte {handle.offset} claims {handle.size} bytes, more than the file has"
        )
    compression = content[stop]
    stored = int.from_bytes(content[stop + 1 : stop + _TRAILER_BYTES], "little")
    if masked(crc32c(content[handle.offset : stop + 1])) != stored:
        raise DamagedCheckpointError(f"the block at byte {handle.offset} does not match the checksum in the file")
    data = content[handle.offset : stop]
    if compression == _RAW:
        return data
    if compression == _SNAPPY:
        return uncompress(data)
    raise DamagedCheckpointError(f"the block at byte {handle.offset} has the unknown compression {compression}")


def _entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    if len(block) < 4:
        raise DamagedCheckpointError("a block is shorter than its end")
    restarts = int.from_bytes(block[-4:], "little")
    end = len(block) - 4 - 4 * restarts
    if end < 0:
        raise DamagedCheckpointError(f"a block of {len(block)} bytes claims {restarts} restarts")
    cursor, key = Cursor(block[:end], "a block"), b""
    while cursor.remaining:
        shared, added, size = cursor.varint(), cursor.varint(), cursor.varint()
        if shared > len(key):
            cursor.fail(f"an entry shares {shared} bytes with a key of {len(key)}")
        key = key[:shared] + cursor.take(added)
        yield key, cursor.take(size)
