"""Decoders of chunks: checks before bytes are used, the chunks of a box, runs that are read in one piece."""

from __future__ import annotations

import re
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.equality import assert_same
from tests.format.memory import at_most

import holdfast as hf
from holdfast.engine.arrays.assemble import Assembly, ChunkDecoder
from holdfast.engine.arrays.extents import ChunkTable, plan_extents
from holdfast.engine.format import ArrayMetadata, compress_chunks, crc32c
from holdfast.engine.pytree import Box

KIB, MIB = 1 << 10, 1 << 20


def decoder(size: int, compression: int | None) -> ChunkDecoder:
    return ChunkDecoder(ArrayMetadata((size,), "uint8", (size,), compression))


def with_checksum(content: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(content + crc32c(content).to_bytes(4, "little"), np.uint8)


def frame(content: bytes) -> bytes:
    [stored] = compress_chunks([np.frombuffer(content, np.uint8)], 3)
    return stored[:-4]


def fresh(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.empty(nbytes, np.uint8)


CHUNK = bytes(range(256)) * 4


@pytest.mark.parametrize(
    ("compression", "stored", "problem"),
    [
        (None, with_checksum(CHUNK), ""),
        (None, with_checksum(CHUNK[1:]), "has 1027 bytes, expected 1028"),
        (None, with_checksum(CHUNK)[:-1], "has 1027 bytes, expected 1028"),
        (None, np.frombuffer(CHUNK + bytes(4), np.uint8), "has crc32c [0-9a-f]{8}, expected 00000000"),
        (3, with_checksum(frame(CHUNK)), ""),
        (3, np.frombuffer(frame(CHUNK) + bytes(4), np.uint8), "has crc32c"),
        (3, with_checksum(CHUNK), "cannot be decompressed"),
        (3, with_checksum(frame(CHUNK)[:-1]), "cannot be decompressed"),
        (3, with_checksum(frame(CHUNK[1:])), "holds 1023 bytes, expected 1024"),
        (3, with_checksum(frame(CHUNK + b"x")), "cannot be decompressed"),
        (3, with_checksum(bytes.fromhex("28b52ffd0058190000") + b"abc"), "holds 3 bytes, expected 1024"),  # of no size
        (3, with_checksum(CHUNK * 3), "has 3076 bytes, expected at most"),
        (3, np.zeros(4, np.uint8), "has 4 bytes, expected at most"),
    ],
)
def test_chunks_are_checked(compression: int | None, stored: Any, problem: str) -> None:
    found, what = decoder(1024, compression).content(stored, fresh)
    assert re.search(problem, what) if problem else (what, found.tobytes()) == ("", CHUNK)


def test_a_small_frame_never_takes_a_terabyte(little_memory: int) -> None:
    huge = decoder(1 << 40, 3)
    assert "holds 4194304 bytes, expected 1099511627776" in huge.content(with_checksum(frame(bytes(4 * MIB))), fresh)[1]
    silent = bytes.fromhex("28b52ffd0040 03 0000 01 000080".replace(" ", ""))  # a frame that does not state its size
    assert "cannot hold the expected 1099511627776" in huge.content(with_checksum(silent), fresh)[1]


def rows(*bounds: int) -> list[Box]:
    return [Box((low, 0), (high, 1024)) for low, high in pairwise(bounds)]


@pytest.mark.parametrize(
    ("boxes", "adopted"),
    [
        pytest.param(rows(0, 96, 192), [True, True], id="each a chunk"),
        pytest.param(rows(0, 24, 48, 72, 96), [True] * 4, id="runs of one chunk"),
        pytest.param(rows(0, 96, 144, 192), [True] * 3, id="a chunk, and halves of one"),
        pytest.param(rows(0, 90), [True], id="nearly all of a chunk"),
        pytest.param(rows(0, 48), [False], id="half of a chunk, which would keep the other half"),
        pytest.param(rows(0, 48, 144, 192), [False, False, False], id="one that lies in both chunks"),
        pytest.param([*rows(0, 96), *rows(0, 96)], [True, False], id="the same elements twice"),
        pytest.param([*rows(0, 60), *rows(30, 96)], [False, False], id="boxes that overlap"),
        pytest.param([Box((0, 0), (96, 512)), Box((0, 512), (96, 1024))], [False, False], id="columns"),
        pytest.param([Box((row, 0), (row + 1, 1024)) for row in range(96)], [True] * 96, id="single rows"),
    ],
)
def test_boxes_that_become_views_of_what_was_read(boxes: list[Box], adopted: list[bool]) -> None:
    """The memory of a chunk is kept where nearly all of it is needed in runs; no two boxes share an element."""
    whole = np.arange(192 * 1024, dtype=np.float32).reshape(192, 1024)
    assembly = Assembly([ArrayMetadata((192, 1024), "float32", (96, 1024))], [boxes], keep=True)
    read = []
    for number in assembly.wanted_chunks(0):
        content = whole[number * 96 : (number + 1) * 96]
        read.append(np.frombuffer(bytearray(with_checksum(content.tobytes()).tobytes()), np.uint8))
        assert assembly.accept(0, number, read[-1], kept=assembly.keeps(0, number)) == ""
    found = assembly.finish()
    assert [any(np.shares_memory(array, data) for data in read) for array in found] == adopted
    for (start, stop), array in zip(boxes, found, strict=True):
        assert array is not None
        np.testing.assert_array_equal(array, whole[start[0] : stop[0], start[1] : stop[1]], strict=True)
        assert array.flags.writeable
    assert not any(np.shares_memory(one, other) for one, other in combinations(found, 2))


def table(*rows: tuple[int, int, int, bool]) -> ChunkTable:
    columns = np.array([row[:3] for row in rows], np.int64).reshape(-1, 3).T
    numbers = np.arange(len(rows))
    kept = np.array([row[3] for row in rows], bool)
    return ChunkTable(["a", "b"], columns[0], columns[1], columns[2], numbers, numbers, kept, np.full(len(rows), -1))


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], []),
        ([(0, 0, 100, False), (0, 128, 100, False)], [("a", 0, 228, False)]),
        ([(0, 0, 100, False), (1, 128, 100, False)], [("a", 0, 100, False), ("b", 128, 100, False)]),
        ([(0, 0, 100, False), (0, 9000, 100, False)], [("a", 0, 100, False), ("a", 9000, 100, False)]),
        ([(0, 0, 5 * MIB, False), (0, 5 * MIB, 64, False)], [("a", 0, 5 * MIB, False), ("a", 5 * MIB, 64, False)]),
        ([(0, i * MIB, MIB, False) for i in range(6)], [("a", 0, 4 * MIB, False), ("a", 4 * MIB, 2 * MIB, False)]),
        ([(0, i * MIB, MIB, True) for i in range(20)], [("a", 0, 16 * MIB, True), ("a", 16 * MIB, 4 * MIB, True)]),
        ([(0, 0, 64, False), (0, 64, MIB, True), (0, 64 + MIB, 64, False)], [("a", 0, MIB + 128, True)]),
        ([(0, 0, MIB, False), (0, MIB, MIB, True)], [("a", 0, MIB, False), ("a", MIB, MIB, True)]),
    ],
)
def test_runs_that_are_read_in_one_piece(
    rows: list[tuple[int, int, int, bool]], expected: list[tuple[str, int, int, bool]]
) -> None:
    extents = list(plan_extents(table(*rows), 4 * KIB))
    assert [(extent.file, extent.offset, extent.length, extent.kept) for extent in extents] == expected
    assert [row for extent in extents for row in range(extent.first, extent.stop)] == list(range(len(rows)))


def test_small_arrays_beside_large_ones_are_verified_without_a_copy_of_these(tmp_path: Path) -> None:
    tree = {str(number): {"weight": np.ones(4 * MIB, np.uint8), "bias": np.ones(KIB)} for number in range(8)}
    hf.save(tmp_path / "model", tree)
    hf.load(tmp_path / "model")
    with at_most(MIB):  # without the large arrays, which are mapped
        hf.load(tmp_path / "model")


def test_small_arrays_of_several_kinds_and_every_rank_in_turns(tmp_path: Path) -> None:
    most_axes = 64 if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else 32
    tree = {
        f"block{number}": {
            "weight": np.full((3, 5), number, np.float32),
            "steps": np.array(number),
            "bias": np.arange(number, number + 7, dtype=np.int16),
            "rest": np.full(number % 11 + 1, number, np.uint8),
        }
        for number in range(200)
    }
    tree |= {f"rank{axes}": {name: np.full((1,) * axes, axes) for name in "ab"} for axes in (0, 1, 31, 32, most_axes)}
    hf.save(tmp_path / "model", tree)
    loaded = hf.load(tmp_path / "model")
    for block, arrays in tree.items():
        for name, array in arrays.items():
            found = loaded[block][name]
            assert_same(found, array)
            assert found.flags.c_contiguous
            assert found.flags.aligned
            found[...] = 0  # no two of them share memory
