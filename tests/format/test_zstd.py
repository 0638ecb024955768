"""Decompression of frames that TensorStore wrote, and of damaged frames."""

from __future__ import annotations

import random

import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.engine.errors import DamagedCheckpointError
from holdfast.engine.format import decompress

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
        "metadata": {
            "shape": [len(data)],
            "data_type": "uint8",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [max(len(data), 1)]}},
            "codecs": ["bytes", codec],
        },
        "store_data_equal_to_fill_value": True,
    }
    import numpy as np

    array = ts.open(spec, create=True, context=context).result()
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


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x28\xb5\x2f\xfd",
        b"\x28\xb5\x2f\xfe\0\0\0",
        stored(2, (0, 2, b"ab"))[:-1],
        stored(2, (0, 2, b"ab")) + b"x",
        stored(3, (0, 2, b"ab")),
        stored(1, (0, 2, b"ab")),
        stored(2, (3, 2, b"ab")),
        stored(2, (0, 1 << 18, bytes(1 << 18))),
        stored(2, (2, 5, b"\xff" * 5)),
        b"\x28\xb5\x2f\xfd\x01\x58\0\1\0\0a",
        b"\x28\xb5\x2f\xfd\x08\x58\1\0\0",
        b"\x28\xb5\x2f\xfd\x00\xff\1\0\0",
        b"\x28\xb5\x2f\xfd\xe0\0\0\0",
    ],
    ids=[
        "nothing",
        "only-magic",
        "magic",
        "cut-off",
        "rest",
        "promises-more",
        "promises-less",
        "block-kind",
        "block-size",
        "garbage",
        "dictionary",
        "reserved-bit",
        "window",
        "cut-off-header",
    ],
)
def test_bad_frames_are_refused(frame: bytes) -> None:
    with pytest.raises(DamagedCheckpointError, match="zstd frame"):
        decompress(frame, LIMIT)


def test_every_truncation_is_found() -> None:
    frame = compress(SAMPLES["text"])
    for size in range(len(frame)):
        with pytest.raises(DamagedCheckpointError):
            decompress(frame[:size], LIMIT)
