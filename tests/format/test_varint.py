from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.engine.format.codecs import decode_varints, encode_varint, encode_varints, varint_sizes

EDGES = [0, 1, 127, 128, 16383, 16384, 2**32 - 1, 2**32, 2**56, 2**63 - 1, 2**63, 2**64 - 1]
numbers = st.one_of(st.sampled_from(EDGES), st.integers(0, 2**64 - 1), st.integers(0, 300))


@pytest.mark.parametrize(
    ("value", "encoded"),
    [(0, "00"), (127, "7f"), (128, "8001"), (300, "ac02"), (2**64 - 1, "ffffffffffffffffff01")],
)
def test_known_encodings(value: int, encoded: str) -> None:
    assert encode_varint(value).hex() == encoded
    assert encode_varints(np.array([value], np.uint64)).hex() == encoded


@settings(deadline=None, max_examples=60)
@given(st.lists(numbers, max_size=40), st.binary(max_size=12))
def test_columns_round_trip(values: list[int], rest: bytes) -> None:
    column = np.array(values, np.uint64)
    encoded = encode_varints(column)
    assert encoded == b"".join(map(encode_varint, values))
    assert varint_sizes(column).tolist() == [len(encode_varint(value)) for value in values]
    decoded, size = decode_varints(np.frombuffer(encoded + rest, np.uint8), len(values))
    assert decoded.tolist() == values
    assert size == len(encoded)


@pytest.mark.parametrize(
    ("data", "count"),
    [
        (b"", 1),
        (b"\x01", 2),
        (b"\x80", 1),
        (b"\x01\x80\x80", 2),
        (b"\xff" * 9 + b"\x02", 1),
        (b"\x80" * 10 + b"\x00", 1),
        (b"\x80" * 50, 1),
        (b"\x80" * 10 + b"\x00\x01", 2),
        (b"\x01", 2**62),
    ],
    ids=[
        "empty",
        "too-few",
        "unfinished",
        "second-unfinished",
        "65-bits",
        "eleven-bytes",
        "endless",
        "eleven-bytes-first",
        "huge-count",
    ],
)
def test_bad_columns_are_refused(data: bytes, count: int) -> None:
    with pytest.raises(ValueError, match=r"number|cannot lie"):
        decode_varints(np.frombuffer(data, np.uint8), count)


@pytest.mark.parametrize("value", [-1, 2**64])
def test_numbers_out_of_range_are_refused(value: int) -> None:
    with pytest.raises(ValueError, match="varint"):
        encode_varint(value)
