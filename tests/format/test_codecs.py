"""Varints, checksums and zstd: as TensorStore writes and reads them; anything else is refused."""

from __future__ import annotations

import mmap
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.engine.errors import DamagedCheckpointError
from holdfast.engine.format import compress_chunks, crc32c, decompress, extend
from holdfast.engine.format.codecs import decode_varints, encode_varint, encode_varints, varint_sizes

# ---- varints

EDGES = [0, 1, 127, 128, 16383, 16384, 2**32 - 1, 2**32, 2**56, 2**63 - 1, 2**63, 2**64 - 1]
NUMBERS = st.one_of(st.sampled_from(EDGES), st.integers(0, 2**64 - 1), st.integers(0, 300))


@settings(deadline=None, max_examples=60)
@given(st.lists(NUMBERS, max_size=40), st.binary(max_size=12))
def test_columns_round_trip(values: list[int], rest: bytes) -> None:
    column = np.array(values, np.uint64)
    encoded = encode_varints(column)
    assert encoded == b"".join(map(encode_varint, values))
    assert varint_sizes(column).tolist() == [len(encode_varint(value)) for value in values]
    decoded, size = decode_varints(np.frombuffer(encoded + rest, np.uint8), len(values))
    assert decoded.tolist() == values
    assert size == len(encoded)


BAD_COLUMNS: dict[str, tuple[bytes, int]] = {
    "empty": (b"", 1),
    "too few": (b"\x01", 2),
    "unfinished": (b"\x80", 1),
    "second unfinished": (b"\x01\x80\x80", 2),
    "65 bits": (b"\xff" * 9 + b"\x02", 1),
    "eleven bytes": (b"\x80" * 10 + b"\x00", 1),
    "endless": (b"\x80" * 50, 1),
    "eleven bytes first": (b"\x80" * 10 + b"\x00\x01", 2),
    "huge count": (b"\x01", 2**62),
}


@pytest.mark.parametrize(("data", "count"), BAD_COLUMNS.values(), ids=BAD_COLUMNS)
def test_bad_columns_are_refused(data: bytes, count: int) -> None:
    with pytest.raises(ValueError, match=r"number|cannot lie"):
        decode_varints(np.frombuffer(data, np.uint8), count)


@pytest.mark.parametrize("value", [-1, 2**64])
def test_numbers_out_of_range_are_refused(value: int) -> None:
    with pytest.raises(ValueError, match="varint"):
        encode_varint(value)


# ---- checksums

CHECK = b"123456789"


def test_known_checksums() -> None:
    assert crc32c(CHECK) == 0xE3069283
    assert crc32c(b"") == 0
    assert crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, B.4


def mapped(data: bytes) -> np.ndarray[Any, Any]:
    memory = mmap.mmap(-1, max(len(data), 1))
    memory[: len(data)] = data
    return np.frombuffer(memory, np.uint8)[: len(data)]


MEMORY: dict[str, Callable[[bytes], Any]] = {
    "bytes": bytes,
    "bytearray": bytearray,
    "memoryview": memoryview,
    "read-only array": lambda data: np.frombuffer(data, np.uint8),
    "writable array": lambda data: np.frombuffer(bytearray(data), np.uint8),
    "mapped file": mapped,
}


@pytest.mark.parametrize("make", MEMORY.values(), ids=MEMORY)
@pytest.mark.parametrize("data", [b"", CHECK], ids=["empty", "check"])
def test_checksums_of_all_kinds_of_memory(make: Callable[[bytes], Any], data: bytes) -> None:
    memory = make(data)
    flags = str(getattr(memory, "flags", None))
    assert crc32c(memory) == crc32c(data)
    assert extend(crc32c(b"before"), memory) == crc32c(b"before" + data)
    assert str(getattr(memory, "flags", None)) == flags, "an array stays writable"


def test_sliced_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        crc32c(np.zeros(8, np.uint8)[::2])


# ---- compressed chunks

WAVE = (np.arange(25_000) % 251).astype(np.float32).view(np.uint8)


@pytest.mark.parametrize("level", [1, 3, 22])
@pytest.mark.parametrize("nbytes", [1, 1000, 100_000])
def test_compressed_chunks_come_back(nbytes: int, level: int) -> None:
    chunks = [WAVE[:nbytes], WAVE[:nbytes][::-1].copy(), np.zeros(nbytes, np.uint8)]
    for chunk, stored in zip(chunks, compress_chunks(chunks, level), strict=True):
        frame, checksum = stored[:-4], int.from_bytes(stored[-4:], "little")
        assert checksum == crc32c(frame)
        assert nbytes < 1000 or len(frame) < nbytes
        assert decompress(frame, nbytes) == chunk.tobytes()
    assert compress_chunks([], level) == []


def test_several_threads_at_once() -> None:
    chunks = [np.full(5000, number, np.uint8) for number in range(40)]
    stored = compress_chunks(chunks, 1)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda data: decompress(data[:-4], 5000), stored))
    assert found == [chunk.tobytes() for chunk in chunks]


# ---- frames

LIMIT = 1 << 28


def stored(size: int, *parts: tuple[int, int, bytes]) -> bytes:
    """A frame with a content size and blocks of (kind, size, bytes), the simplest ones that RFC 8878 has."""
    blocks = [
        (count << 3 | kind << 1 | (i == len(parts) - 1)).to_bytes(3, "little") + data
        for i, (kind, count, data) in enumerate(parts)
    ]
    return b"\x28\xb5\x2f\xfd" + bytes([0b10100000]) + size.to_bytes(4, "little") + b"".join(blocks)


def compress(data: bytes, *, level: int = 3, checksum: bool = False) -> bytes:
    """Compresses with TensorStore, as one chunk of a zarr array; frames of arrays have a content size."""
    context = ts.Context()
    codec = {"name": "zstd", "configuration": {"level": level, "checksum": checksum}}
    spec = {
        "driver": "zarr3",
        "kvstore": "memory://a/",
        "metadata": {"codecs": ["bytes", codec]},
        "store_data_equal_to_fill_value": True,
    }
    options: dict[str, Any] = {
        "dtype": ts.uint8,
        "shape": [len(data)],
        "chunk_layout": ts.ChunkLayout(chunk_shape=[len(data)]),
    }
    array = ts.open(spec, create=True, context=context, **options).result()
    array.write(np.frombuffer(data, np.uint8)).result()
    return bytes(ts.KvStore.open("memory://a/", context=context).result().read("c/0").result().value)


RANDOM = random.Random(0)
SAMPLES = {
    "one-byte": b"x",
    "text": b"some words, and some words again; " * 100,
    "zeros": bytes(1 << 20),
    "random": RANDOM.randbytes(300_000),
    "mixed": b"".join(RANDOM.randbytes(RANDOM.randrange(50)) + bytes(RANDOM.randrange(2000)) for _ in range(1000)),
    "block": RANDOM.randbytes(128 << 10),
    "block-and-one": RANDOM.randbytes((128 << 10) + 1),
    "ratio": bytes(40 << 20),
}


@pytest.mark.parametrize("data", SAMPLES.values(), ids=SAMPLES)
@pytest.mark.parametrize(("level", "checksum"), [(1, False), (3, True), (9, False)], ids=str)
def test_frames_of_tensorstore(data: bytes, level: int, checksum: bool) -> None:
    frame = compress(data, level=level, checksum=checksum)
    assert decompress(frame, LIMIT) == data
    assert decompress(frame, len(data)) == data
    with pytest.raises(DamagedCheckpointError, match=r"limit of \d+"):
        decompress(frame, len(data) - 1)


def test_frames_made_by_hand() -> None:
    assert decompress(stored(0, (0, 0, b"")), LIMIT) == b""
    assert decompress(stored(5, (0, 2, b"ab"), (1, 3, b"c")), LIMIT) == b"abccc"
    smallest_window = b"\x28\xb5\x2f\xfd\0\0"
    assert decompress(smallest_window + stored(2, (0, 2, b"ab"))[9:], LIMIT) == b"ab"


def without_size(frame: bytes) -> bytes:
    """The same frame as a streaming writer would make it: with a window, and no content size."""
    header = {0: 6, 1: 7, 2: 9, 3: 13}[frame[4] >> 6]
    assert frame[4] >> 5 & 1
    return frame[:4] + b"\0\x58" + frame[header:]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.binary(max_size=5), st.integers(1, 3000)), min_size=1, max_size=20))
def test_frames_without_a_content_size(parts: list[tuple[bytes, int]]) -> None:
    data = b"".join(text * count for text, count in parts) or b"-"
    assert decompress(without_size(compress(data)), LIMIT) == data


def test_a_bomb_is_refused_before_it_goes_off() -> None:
    promised = stored(1 << 31, (1, 1 << 17, b"\0"))
    with pytest.raises(DamagedCheckpointError, match="promises 2147483648 bytes"):
        decompress(promised, LIMIT)
    silent = without_size(stored(1 << 30, *[(1, 1 << 17, b"\0")] * 8192))
    with pytest.raises(DamagedCheckpointError, match="more than the limit"):
        decompress(silent, 1 << 20)


BAD_FRAMES = {
    "nothing": b"",
    "zeros": bytes(100),
    "only magic": b"\x28\xb5\x2f\xfd",
    "magic": b"\x28\xb5\x2f\xfe\0\0\0",
    "cut off": stored(2, (0, 2, b"ab"))[:-1],
    "rest": stored(2, (0, 2, b"ab")) + b"x",
    "promises more": stored(3, (0, 2, b"ab")),
    "promises less": stored(1, (0, 2, b"ab")),
    "block kind": stored(2, (3, 2, b"ab")),
    "block size": stored(2, (0, 1 << 18, bytes(1 << 18))),
    "garbage": stored(2, (2, 5, b"\xff" * 5)),
    "dictionary": b"\x28\xb5\x2f\xfd\x01\x58\0\1\0\0a",
    "reserved bit": b"\x28\xb5\x2f\xfd\x08\x58\1\0\0",
    "window": b"\x28\xb5\x2f\xfd\x00\xff\1\0\0",
    "cut off header": b"\x28\xb5\x2f\xfd\xe0\0\0\0",
}


@pytest.mark.parametrize("frame", BAD_FRAMES.values(), ids=BAD_FRAMES)
def test_bad_frames_are_refused(frame: bytes) -> None:
    with pytest.raises(DamagedCheckpointError, match="zstd frame"):
        decompress(frame, LIMIT)


def test_every_truncation_of_a_frame_is_found() -> None:
    frame = compress(SAMPLES["text"])
    for size in range(len(frame)):
        with pytest.raises(DamagedCheckpointError):
            decompress(frame[:size], LIMIT)
