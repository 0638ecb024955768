"""The encodings of TensorFlow's checkpoints: blocks, snappy, byte orders, slices."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.equality import assert_same
from tests.formats.tensorflow_writer import (
    FLOAT,
    INT32,
    Pack,
    entry,
    literal,
    message,
    text_bytes,
    text_entry,
    varint,
    write,
)

import holdfast as hf
from holdfast.integrations.formats.tensorflow.index import (
    fields,
    ordered,
    read_table,
    slice_key,
    uncompress,
)


@pytest.mark.parametrize("per_block", [1, 7, 1000])
@pytest.mark.parametrize("pack", [None, literal], ids=["raw", "snappy"])
def test_blocks(tmp_path: Path, per_block: int, pack: Pack | None) -> None:
    arrays = {f"{number:04d}": np.full(2, number, np.float32) for number in range(100)}
    data = b"".join(array.tobytes() for array in arrays.values())
    pairs = [
        (f"layer/{name}/w".encode(), entry(FLOAT, [2], array.tobytes(), 8 * int(name)))
        for name, array in arrays.items()
    ]
    found = hf.load(write(tmp_path, pairs, data, per_block=per_block, pack=pack))
    assert_same(found, {"layer": {name: {"w": array} for name, array in arrays.items()}})


SNAPPY: dict[bytes, bytes | None] = {
    b"\0": b"",
    b"\x03\x08abc": b"abc",
    b"\x09\x00a\x1e\x01\x00": b"aaaaaaaaa",
    b"\x08\x0cabcd\x01\x04": b"abcdabcd",
    b"\x06\x08abc\x0b\x03\x00\x00\x00": b"abcabc",
    b"\x09\x04ab\x12\x02\x00\x04cd": b"abababacd",
    varint(70) + b"\xf0\x45" + b"x" * 70: b"x" * 70,
    varint(300) + b"\xf4\x2b\x01" + b"y" * 300: b"y" * 300,
    # Damaged ones.
    **dict.fromkeys([b"", b"\x05", b"\x03\x08ab", b"\x04\x00a\x0e\x02\x00", b"\x04\x00a\x0e\x00\x00", b"\x01\x04ab"]),
    **dict.fromkeys([b"\xf0", b"\xff" * 10, b"\xff\xff\xff\xff\x0f\x00a", b"\x02\xfc\xff\xff\xff\xffa"]),
}


@pytest.mark.parametrize(("stream", "expected"), SNAPPY.items())
def test_snappy(stream: bytes, expected: bytes | None) -> None:
    if expected is not None:
        assert uncompress(stream) == expected
        return
    with pytest.raises(hf.DamagedCheckpointError):
        uncompress(stream)


@given(st.binary(max_size=40))
def test_anything_at_all(content: bytes) -> None:
    for read in (uncompress, read_table, lambda data: list(fields(data))):
        with contextlib.suppress(hf.DamagedCheckpointError):
            read(content)


def test_files_of_machines_that_begin_with_the_highest_byte(tmp_path: Path) -> None:
    numbers = np.array([1, -2, 300000], ">i4").tobytes()
    texts, checksum = text_bytes([b"a", b"bcd"], "big")
    pairs = [(b"n", entry(INT32, [3], numbers, len(texts))), (b"t", text_entry([2], texts, checksum))]
    found = hf.load(write(tmp_path, pairs, texts + numbers, message((1, 1), (2, 1))))
    assert_same(found, {"n": np.array([1, -2, 300000], np.int32), "t": np.array([b"a", b"bcd"])})


@pytest.mark.parametrize(
    ("number", "expected"),
    [(0, "80"), (-1, "7f"), (63, "bf"), (64, "c040"), (-0x800, "3800"), (0x424242, "f0424242"), (1 << 62, "ffc0")],
)
def test_numbers_in_the_keys_of_slices(number: int, expected: str) -> None:
    assert ordered(number).hex().startswith(expected)


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=2, max_size=2))
def test_keys_are_in_the_order_of_their_numbers(pair: list[int]) -> None:
    assert (ordered(pair[0]) < ordered(pair[1])) == (pair[0] < pair[1])


def sliced(tmp_path: Path, boxes: Sequence[tuple[tuple[int, int] | None, ...]], stored: int | None = None) -> Path:
    """Writes a matrix of 4 times 2 in slices, of which only the first some are stored."""
    whole = np.arange(8, dtype=np.float32).reshape(4, 2)
    data, pairs, slices = b"", [], []
    for index, box in enumerate(boxes):
        extents = [(0, size) if extent is None else extent for extent, size in zip(box, (4, 2), strict=True)]
        part = whole[tuple(slice(first, first + length) for first, length in extents)].tobytes()
        if stored is None or index < stored:
            key = slice_key(b"w", tuple(box))
            pairs.append((key, entry(FLOAT, [length for _, length in extents], part, len(data))))
        data += part
        extent_messages = [b"" if e is None else message((1, e[0]), (2, e[1])) for e in box]
        slices.append((7, message(*[(1, one) for one in extent_messages])))
    pairs.append((b"w", entry(FLOAT, [4, 2], b"", 0, *slices)))
    return write(tmp_path, pairs, data)


@pytest.mark.parametrize(
    "boxes",
    [
        [((0, 4), (0, 2))],
        [((0, 1), None), ((1, 3), None)],
        [(None, (0, 1)), (None, (1, 1))],
        [((0, 3), None), ((3, 1), (0, 1)), ((3, 1), (1, 1))],
        [((0, 4), None), ((4, 0), None)],
    ],
)
def test_slices(tmp_path: Path, boxes: Any) -> None:
    assert hf.load(sliced(tmp_path, boxes))["w"].ravel().tolist() == list(range(8))


@pytest.mark.parametrize(
    ("boxes", "stored"),
    [
        ([((0, 1), None), ((1, 2), None)], None),  # a row is missing
        ([((0, 3), None), ((1, 3), None)], None),
        ([((0, 2), None), ((1, 2), None)], None),  # as many elements as there are, one row twice
        ([((0, 2), None), ((2, 2), None)], 1),
        ([((0, 4), None), ((2, 9), None)], 1),
        ([((-1, 4), None)], 0),
    ],
)
def test_slices_that_do_not_cover_their_tensor(tmp_path: Path, boxes: Any, stored: int | None) -> None:
    with pytest.raises(hf.DamagedCheckpointError, match="leaf w"):
        hf.load(sliced(tmp_path, boxes, stored))
