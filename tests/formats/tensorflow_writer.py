"""Writes index and data files of TensorFlow's checkpoints, byte by byte, right ones and wrong ones."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.engine.format import crc32c
from holdfast.integrations.formats.tensorflow.index import MAGIC, masked

Pairs = Sequence[tuple[bytes, bytes]]
Pack = Callable[[bytes], bytes]
FLOAT, INT32, STRING, BOOL, VARIANT = 1, 3, 7, 10, 21
ONE = np.ones(1, np.float32).tobytes()


def varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def message(*parts: tuple[int, int | bytes]) -> bytes:
    """Encodes fields: numbers as varints, bytes with their length."""
    found = b""
    for number, value in parts:
        if isinstance(value, bytes):
            found += varint(number << 3 | 2) + varint(len(value)) + value
        else:
            found += varint(number << 3) + varint(value)
    return found


def block(pairs: Pairs, every: int = 16) -> bytes:
    out, last, restarts = b"", b"", []
    for index, (key, value) in enumerate(pairs):
        shared = 0
        if index % every == 0:
            restarts.append(len(out))
        else:
            while shared < min(len(last), len(key)) and last[shared] == key[shared]:
                shared += 1
        out += varint(shared) + varint(len(key) - shared) + varint(len(value)) + key[shared:] + value
        last = key
    return out + b"".join(struct.pack("<I", place) for place in restarts or [0]) + struct.pack("<I", len(restarts) or 1)


def table(pairs: Pairs, per_block: int = 1000, pack: Pack | None = None) -> bytes:
    out = b""

    def append(content: bytes) -> bytes:
        nonlocal out
        stored = content if pack is None else pack(content)
        stored += b"\0" if pack is None else b"\1"
        handle = varint(len(out)) + varint(len(stored) - 1)
        out += stored + struct.pack("<I", masked(crc32c(stored)))
        return handle

    groups = [pairs[first : first + per_block] for first in range(0, len(pairs), per_block)]
    handles = [(group[-1][0], append(block(group))) for group in groups]
    footer = append(block([])) + append(block(handles, 1))
    return out + footer.ljust(40, b"\0") + MAGIC


def shape(*sizes: int) -> bytes:
    return message(*[(2, message((1, size))) for size in sizes])


def entry(kind: int, sizes: Sequence[int], data: bytes, offset: int = 0, *more: tuple[int, int | bytes]) -> bytes:
    checksum = varint(6 << 3 | 5) + struct.pack("<I", masked(crc32c(data)))
    return message((1, kind), (2, shape(*sizes)), (4, offset), (5, len(data)), *more) + checksum


HEADER = message((1, 1), (3, message((1, 1))))


def write(folder: Path, pairs: Pairs, data: bytes = b"", header: bytes = HEADER, **options: Any) -> Path:
    content = table([(b"", header), *sorted(pairs)], **options)
    (folder / "forged.index").write_bytes(content)
    (folder / "forged.data-00000-of-00001").write_bytes(data)
    return folder / "forged"


def text_bytes(texts: Sequence[bytes], order: Any = "little") -> tuple[bytes, int]:
    """Returns text as it is stored, and its masked checksum."""
    fixed = b"".join(len(text).to_bytes(4, order) for text in texts)
    noted = masked(crc32c(fixed)).to_bytes(4, order)
    return b"".join(varint(len(text)) for text in texts) + noted + b"".join(texts), masked(
        crc32c(fixed + noted + b"".join(texts))
    )


def text_entry(sizes: Sequence[int], stored: bytes, checksum: int) -> bytes:
    return message((1, STRING), (2, shape(*sizes)), (5, len(stored))) + varint(6 << 3 | 5) + struct.pack("<I", checksum)


def literal(content: bytes) -> bytes:
    """Compresses with snappy, in the plainest way."""
    out = varint(len(content))
    for first in range(0, len(content), 60):
        part = content[first : first + 60]
        out += bytes([len(part) - 1 << 2]) + part
    return out
