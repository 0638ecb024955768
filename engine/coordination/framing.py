"""Values of any size in a store that takes small ones only."""

from __future__ import annotations

import struct

import google_crc32c

PART_SIZE = 512 * 1024
"""Largest value that is stored under one key, in bytes: jax's service takes 4 MiB, a torch TCPStore 8 MiB."""

_HEADER = struct.Struct("<QI")  # length of the value and its crc32c
_ROOM = PART_SIZE - _HEADER.size


def part_names(key: str, length: int) -> list[str]:
    """Names the keys under which a value of so many bytes is stored."""
    return [key, *(f"{key}/{number}" for number in range(1, 1 + -(-max(length - _ROOM, 0) // PART_SIZE)))]


def split(value: bytes) -> list[bytes]:
    """Cuts a value into parts of at most `PART_SIZE` bytes; the first says what all of them make up."""
    head = _HEADER.pack(len(value), google_crc32c.value(value)) + value[:_ROOM]
    return [head, *(value[begin : begin + PART_SIZE] for begin in range(_ROOM, len(value), PART_SIZE))]


def announced(first: bytes) -> int:
    """Says how long a value is, from its first part.

    Raises:
        ValueError: It is not the first part of a value.
    """
    if len(first) < _HEADER.size:
        raise ValueError(f"a value begins with {_HEADER.size} bytes that describe it, and this one has {len(first)}")
    length: int = _HEADER.unpack_from(first)[0]
    return length


def join(parts: list[bytes]) -> bytes:
    """Puts a value together.

    Raises:
        ValueError: These are not the parts of one value.
    """
    length, expected = _HEADER.unpack_from(parts[0])
    value = b"".join([parts[0][_HEADER.size :], *parts[1:]])
    if len(value) != length:
        raise ValueError(f"{length} bytes were announced, and {len(value)} arrived")
    if google_crc32c.value(value) != expected:
        raise ValueError("its checksum is not the one that was announced")
    return value
