"""Plans: every chunk of every array gets its own place, within the sizes of the layout."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.engine.arrays.digests import CHECKSUM_BYTES, CHUNK_ALIGNMENT
from holdfast.engine.arrays.grid import ArraySpec
from holdfast.engine.arrays.plan import (
    PlannedFile,
    chunk_shape,
    chunk_table,
    plan_files,
)
from holdfast.engine.storage import PAGE

MIB = 1 << 20


@pytest.mark.parametrize(
    ("shape", "itemsize", "limit", "expected"),
    [
        ((), 8, 4096, ()),
        ((0,), 8, 4096, (1,)),
        ((3, 0, 2), 8, 4096, (3, 1, 2)),
        ((512,), 8, 4096, (512,)),
        ((513,), 8, 4096, (257,)),
        ((1000, 10), 8, 32_000, (334, 10)),
        ((10, 1000), 4, 4096, (1, 1000)),
        ((10, 1025), 4, 4096, (1, 513)),
        ((4, 10, 1025), 4, 4096, (1, 1, 513)),
        ((4, 10, 100), 4, 4096, (1, 10, 100)),
        ((4, 11, 100), 4, 4096, (1, 6, 100)),
        ((5, 7), 100_000, 4096, (1, 1)),
        ((1 << 40,), 2, 32 * MIB, (16 * MIB,)),
    ],
    ids=str,
)
def test_chunk_shapes(shape: tuple[int, ...], itemsize: int, limit: int, expected: tuple[int, ...]) -> None:
    assert chunk_shape(shape, itemsize, limit) == expected


SHAPES = st.lists(st.integers(0, 40), max_size=4).map(tuple)
ITEMSIZES = st.sampled_from([1, 2, 8, 16, 5000])


@settings(deadline=None)
@given(SHAPES, ITEMSIZES, st.integers(4096, 40_000))
def test_chunks_are_contiguous_even_and_small(shape: tuple[int, ...], itemsize: int, limit: int) -> None:
    chunk = chunk_shape(shape, itemsize, limit)
    sizes = [max(1, size) for size in shape]
    assert len(chunk) == len(shape)
    assert all(1 <= part <= size for part, size in zip(chunk, sizes, strict=True))
    assert math.prod(chunk) * itemsize <= max(limit, itemsize)
    cut = next((axis for axis, part in enumerate(chunk) if part > 1), len(chunk))  # contiguous in C order:
    assert all(part == size for part, size in zip(chunk[cut + 1 :], sizes[cut + 1 :], strict=True))
    if cut < len(chunk):
        count = -(-sizes[cut] // chunk[cut])
        assert count * chunk[cut] - sizes[cut] < count  # less than one row of padding for each chunk


Placed = tuple[int, int, int, int, int]  # a chunk: the numbers of its file, segment, array and its own, and its offset


def one_after_the_other(
    arrays: list[ArraySpec], layout: hf.Layout, groups: list[list[tuple[int, int]]]
) -> list[Placed]:
    """The rule itself: a chunk goes behind the last one, unless its segment or its file would become too large."""
    found: list[Placed] = []
    file = -1
    for group in groups:
        file, segment, start, end = file + 1, 0, 0, 0
        for array, number in group:
            size = arrays[array].chunk_nbytes + CHECKSUM_BYTES
            offset = -(-end // CHUNK_ALIGNMENT) * CHUNK_ALIGNMENT
            if end and (offset + size - start > layout.segment_bytes or offset + size > layout.data_file_bytes):
                segment, start = segment + 1, -(-end // PAGE) * PAGE
                offset = start
                if start + size > layout.data_file_bytes:
                    file, segment, start, offset = file + 1, 0, 0, 0
            found.append((file, segment, array, number, offset))
            end = offset + size
        file -= not group
    return found


def whole_plan(arrays: list[ArraySpec], layout: hf.Layout, divided: int = 0) -> list[PlannedFile]:
    """Plan all chunks of arrays, in two groups where ``divided`` is odd; check the plan."""
    chunks = [(array, number) for array, spec in enumerate(arrays) for number in range(spec.chunks)]
    groups = [chunks[::2], chunks[1::2]] if divided % 2 else [chunks]
    columns = [np.array(group, np.int64).reshape(-1, 2).T for group in groups]
    lengths = np.array([spec.chunk_nbytes + CHECKSUM_BYTES for spec in arrays], np.int64)
    files = plan_files(lengths, layout, *((column[0], column[1]) for column in columns))
    assert [
        (number, position, *chunk)
        for number, file in enumerate(files)
        for position, segment in enumerate(file.segments)
        for chunk in zip(segment.arrays.tolist(), segment.numbers.tolist(), segment.offsets.tolist(), strict=True)
    ] == one_after_the_other(arrays, layout, groups)
    checksums = np.arange(len(chunks), dtype=np.uint32)
    table = chunk_table(files, checksums, 7)
    placed = iter(table.tolist())
    for number, file in enumerate(files, 7):
        assert file.size <= layout.data_file_bytes or sum(len(segment.arrays) for segment in file.segments) == 1
        assert file.segments[0].offset == 0
        for one, other in pairwise(file.segments):
            assert one.offset + one.size <= other.offset
        for segment in file.segments:
            assert segment.offset % PAGE == 0
            assert segment.offsets[0] == segment.offset
            assert (segment.offsets % CHUNK_ALIGNMENT == 0).all()
            ends = segment.offsets + segment.lengths
            assert (ends[:-1] <= segment.offsets[1:]).all()
            assert ends[-1] == segment.offset + segment.size
            assert segment.size <= layout.segment_bytes or len(segment.arrays) == 1
            assert (segment.lengths == lengths[segment.arrays]).all()
            for place, array in enumerate(segment.arrays.tolist()):
                row = (array, segment.numbers[place], number, segment.offsets[place], segment.lengths[place])
                assert next(placed) == [*row, segment.first + place]
        assert file.size == ends[-1]
    assert next(placed, None) is None
    return files


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.lists(st.integers(0, 12), max_size=3).map(tuple), ITEMSIZES), max_size=8),
    st.builds(
        hf.Layout,
        chunk_bytes=st.integers(4096, 20_000),
        segment_bytes=st.integers(4096, 40_000),
        data_file_bytes=st.integers(4096, 200_000),
    ),
    st.integers(0, 1),
)
def test_every_chunk_has_its_place(arrays: list[tuple[tuple[int, ...], int]], layout: hf.Layout, divided: int) -> None:
    specs = [ArraySpec(s, chunk_shape(s, size, layout.chunk_bytes), size) for s, size in arrays]
    whole_plan(specs, layout, divided)


def test_nothing_to_write_needs_no_file() -> None:
    assert whole_plan([], hf.Layout()) == []
    assert whole_plan([ArraySpec((0, 3), (1, 3), 8)], hf.Layout()) == []


def test_many_small_arrays_share_a_segment() -> None:
    (file,) = whole_plan([ArraySpec((256,), (256,), 4)] * 1000, hf.Layout())
    assert len(file.segments) == 1
    assert file.size == 999 * 1088 + 1028


def test_a_large_array_fills_segments_and_files() -> None:
    shape = (300 * MIB,)
    layout = hf.Layout(chunk_bytes=32 * MIB, segment_bytes=16 * MIB, data_file_bytes=128 * MIB)
    files = whole_plan([ArraySpec(shape, chunk_shape(shape, 1, layout.chunk_bytes), 1)], layout)
    assert [len(file.segments) for file in files] == [4, 4, 2]


@pytest.mark.parametrize("size", [4095, 0, -1, 1e6, "1MB", None])
@pytest.mark.parametrize("name", ["chunk_bytes", "segment_bytes", "data_file_bytes"])
def test_invalid_sizes(name: str, size: Any) -> None:
    with pytest.raises(hf.errors.OptionError, match=f"{name}={size!r} must be a whole number of bytes, at least 4096"):
        hf.Layout(**{name: size})
