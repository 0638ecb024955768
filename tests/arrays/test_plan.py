"""Plans: every chunk of every array is written once, by a process that holds it, in a place of its own."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.engine.arrays.assignment import replica_groups, write_assignment
from holdfast.engine.arrays.digests import CHECKSUM_BYTES, CHUNK_ALIGNMENT
from holdfast.engine.arrays.grid import ArraySpec
from holdfast.engine.arrays.plan import Catalog, PlannedFile, chunk_shape, chunk_table, common_cuts, plan_files
from holdfast.engine.pytree import ArrayLeaf, Part
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


KIB = 1 << 10
LAYOUT = hf.Layout(chunk_bytes=64 * KIB)


def leaf(
    shape: tuple[int, ...], parts: tuple[Part, ...] | None = None, dtype: str = "float32", kind: str = "numpy"
) -> ArrayLeaf:
    return ArrayLeaf(np.dtype(dtype), shape, [], False, {"kind": kind}, parts)


def split(shape: tuple[int, ...], axis: int, holders: list[tuple[int, ...]]) -> tuple[Part, ...]:
    """Parts along one axis, as even as jax and torch make them: the last may be smaller, or empty."""
    size = -(-shape[axis] // len(holders))
    parts = []
    for number, group in enumerate(holders):
        start = min(number * size, shape[axis])
        extent = min(size, shape[axis] - start)
        box = tuple(extent if i == axis else n for i, n in enumerate(shape))
        parts.append(Part(tuple(start if i == axis else 0 for i in range(len(shape))), box, group))
    return tuple(parts)


def sharded(shape: tuple[int, ...], count: int, axis: int = 0) -> ArrayLeaf:
    return leaf(shape, split(shape, axis, [(process,) for process in range(count)]))


def mesh_rows(shape: tuple[int, ...], rows: int, columns: int) -> ArrayLeaf:
    """Sharded over the rows of a mesh of processes, replicated over its columns."""
    return leaf(shape, split(shape, 0, [tuple(range(r * columns, (r + 1) * columns)) for r in range(rows)]))


def mesh_columns(shape: tuple[int, ...], rows: int, columns: int) -> ArrayLeaf:
    return leaf(shape, split(shape, 0, [tuple(range(c, rows * columns, columns)) for c in range(columns)]))


def assigned(leaves: dict[str, ArrayLeaf], count: int) -> tuple[Catalog, list[Any]]:
    catalog = Catalog(list(leaves), list(leaves.values()), LAYOUT)
    assignment = write_assignment(catalog, count)
    return catalog, [assignment.chunks_of(process) for process in range(count)]


def written(catalog: Catalog, share: Any) -> int:
    return sum(catalog.encodings[array].spec.chunk_nbytes for array in share[0].tolist())


def check(leaves: dict[str, ArrayLeaf], count: int) -> list[int]:
    """Every chunk is written once, by a process that holds it; returns the bytes that each process writes."""
    catalog, found = assigned(leaves, count)
    chunks = np.concatenate([catalog.starts[arrays] + numbers for arrays, numbers in found])
    assert sorted(chunks.tolist()) == list(range(int(catalog.starts[-1])))
    for process, (arrays, numbers) in enumerate(found):
        for array, number in zip(arrays.tolist(), numbers.tolist(), strict=True):
            spec, parts = catalog.encodings[array].spec, catalog.encodings[array].parts
            start, end = map(np.array, spec.chunk_box(number))
            if parts is None:
                continue
            inside = [
                part for part in parts if (start >= part.start).all() and (end <= np.add(part.start, part.shape)).all()
            ]
            assert len(inside) == 1, "a chunk lies in one part"
            assert process in inside[0].holders
    return [written(catalog, share) for share in found]


def many(count: int) -> dict[str, ArrayLeaf]:
    """A model and its optimizer, replicated: a few large arrays, and many small ones."""
    large = {f"layers.{i}.kernel": leaf((256, 300 + 20 * i)) for i in range(4)}
    small = {f"layers.{i}.bias": leaf((16 + i % 7,)) for i in range(150 * count)}
    return large | small | {f"count.{i}": leaf((), dtype="int64") for i in range(40)}


def uneven(count: int) -> dict[str, ArrayLeaf]:
    """One process holds a quarter of an even share more than the others; replicated arrays make up for it."""
    alone = {f"own.{i}": leaf((4096,), (Part((0,), (4096,), (count - 1,)),)) for i in range(12)}
    return alone | {f"all.{i}": leaf((4096,)) for i in range(12 * 3 * count)}


SPREADS: dict[str, tuple[Any, float]] = {
    "replicated": (lambda n: {"w": leaf((1024 * n, 128))}, 1.01),
    "replicated_and_small": (many, 1.2),
    "only_small": (lambda n: {f"b.{i}": leaf((i % 50,)) for i in range(100 * n)}, 1.2),
    "sharded": (lambda n: {f"w.{i}": sharded((64 * n, 300), n, 0) for i in range(5)}, 1.0),
    "sharded_by_columns": (lambda n: {f"w.{i}": sharded((300, 64 * n), n, 1) for i in range(5)}, 1.0),
    "sharded_and_replicated": (
        lambda n: {f"w.{i}": sharded((64 * n, 300), n) for i in range(5)} | many(n),
        1.2,
    ),
    "uneven": (uneven, 1.2),
}


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", SPREADS)
def test_even_shares(name: str, count: int) -> None:
    make, most = SPREADS[name]
    loads = check(make(count), count)
    assert max(loads) <= most * sum(loads) / count


MESHES: dict[str, tuple[int, Any, float]] = {
    "groups": (8, lambda: {f"w.{i}": mesh_rows((64, 300), 4, 2) for i in range(9)}, 1.2),
    "rows_and_columns": (
        6,
        lambda: (
            {f"r.{i}": mesh_rows((60, 300), 2, 3) for i in range(9)}
            | {f"c.{i}": mesh_columns((60, 300), 2, 3) for i in range(9)}
        ),
        1.2,
    ),
    "groups_and_all": (4, lambda: {"r": mesh_rows((60, 900), 2, 2), **many(4)}, 1.2),
    "groups_of_which_one_is_busy": (
        4,
        lambda: (
            {f"r.{i}": mesh_rows((64, 256), 2, 2) for i in range(12)}
            | {f"own.{i}": leaf((4096,), (Part((0,), (4096,), (0,)),)) for i in range(20)}
        ),
        1.3,  # the first two processes hold that much more than half
    ),
}


@pytest.mark.parametrize("name", MESHES)
def test_groups_of_holders(name: str) -> None:
    count, make, most = MESHES[name]
    loads = check(make(), count)
    assert max(loads) <= most * sum(loads) / count


def test_a_process_that_holds_more_alone_writes_nothing_else() -> None:
    leaves = {"own": leaf((64 * KIB,), (Part((0,), (64 * KIB,), (1,)),)), "all": leaf((8, 4096))}
    assert check(leaves, 3) == [64 * KIB, 256 * KIB, 64 * KIB]


@pytest.mark.parametrize(("most", "alone"), [(600, 2), (40_000, 4), (100_000, 5)])
def test_process_0_writes_the_smallest_plain_tensors(most: int, alone: int) -> None:
    """Such as buffers, which may differ between processes: those of one process must not be saved with others'."""
    sizes = {"mean": 64, "variance": 64, "bias": 4096, "weight": 4096, "large": 8192}
    leaves = {name: leaf((size,), kind="torch") for name, size in sizes.items()}
    leaves |= {"array": leaf((32,)), "part": sharded((64, 2), 2)}
    catalog = Catalog(list(leaves), list(leaves.values()), LAYOUT)
    arrays, _ = write_assignment(catalog, 2, by_process_0=most).chunks_of(0)
    assert {*list(sizes)[:alone]} <= {catalog.names[number] for number in arrays.tolist()}


def test_assignments_do_not_depend_on_the_order_of_the_leaves() -> None:
    leaves = many(3) | {"w": sharded((63, 5), 3)}
    backwards = dict(reversed(leaves.items()))
    (catalog, one), (other_catalog, other) = assigned(leaves, 3), assigned(backwards, 3)
    assert catalog.names == other_catalog.names
    for (arrays, numbers), (others, other_numbers) in zip(one, other, strict=True):
        assert set(zip(arrays.tolist(), numbers.tolist(), strict=True)) == set(
            zip(others.tolist(), other_numbers.tolist(), strict=True)
        )


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_tree(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 5))
    leaves: dict[str, ArrayLeaf] = {}
    for number in range(data.draw(st.integers(1, 8))):
        shape = tuple(data.draw(st.lists(st.integers(0, 40), max_size=3)))
        parts: tuple[Part, ...] | None = None
        divided: bool = data.draw(st.booleans())
        if shape and divided:
            groups = st.lists(st.integers(0, count - 1), min_size=1, unique=True).map(sorted).map(tuple)
            parts = split(
                shape, data.draw(st.integers(0, len(shape) - 1)), data.draw(st.lists(groups, min_size=1, max_size=5))
            )
        leaves[f"leaf{number}"] = leaf(shape, parts, data.draw(st.sampled_from(["float32", "U2", "int8"])))
    check(leaves, count)


# ---- the grid


@pytest.mark.parametrize(
    ("shape", "limit", "cuts", "expected"),
    [
        ((1000, 10), 4096, (250, 0), (50, 10)),
        ((1000, 10), 1 << 20, (250, 0), (250, 10)),
        ((1000, 10), 1 << 20, (250, 5), (250, 5)),
        ((1000, 1000), 4096, (0, 250), (4, 250)),
        ((1000, 1000), 500, (0, 250), (1, 125)),
        ((4, 1000, 8), 4096, (1, 500, 0), (1, 125, 8)),
        ((60,), 48, (30,), (10,)),
        ((4 * 10_007,), 4096, (10_007,), (10_007,)),  # a prime: better too large than chunks of one element
        ((12, 4096), 4096, (3, 0), (1, 1024)),
        ((), 4096, (), ()),
    ],
    ids=str,
)
def test_chunks_divide_the_parts(
    shape: tuple[int, ...], limit: int, cuts: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert chunk_shape(shape, 4, limit, cuts) == expected


@pytest.mark.parametrize(
    ("shape", "parts", "expected"),
    [
        ((10, 4), None, (0, 0)),
        ((10, 4), split((10, 4), 0, [(0,), (1,), (2,)]), (4, 0)),
        ((10, 4), split((10, 4), 1, [(0,), (1,)]), (0, 2)),
        ((9,), split((9,), 0, [(0,), (1,), (2,), (3,)]), (3,)),  # the last is empty
        ((10,), (Part((0,), (4,), (0,)), Part((4,), (6,), (1,))), (4,)),
        ((10,), (Part((0,), (4,), (0,)), Part((4,), (2,), (1,)), Part((6,), (4,), (0,))), (2,)),
        ((10,), (Part((0,), (10,), (1,)),), (0,)),
        ((0, 4), split((0, 4), 0, [(0,), (1,)]), (0, 0)),
        ((), (Part((), (), (1,)),), ()),
    ],
    ids=str,
)
def test_where_parts_meet(shape: tuple[int, ...], parts: Any, expected: tuple[int, ...]) -> None:
    assert common_cuts(shape, parts) == expected


def test_holders_of_a_scalar() -> None:
    assert replica_groups((), (), (Part((), (), (1,)),), 2).groups == [(1,)]


WRONG: dict[str, tuple[tuple[Part, ...], str]] = {
    "hole": (
        (Part((0,), (4,), (0,)), Part((6,), (4,), (1,))),
        r"its 2 parts do not cover its shape \[10\] exactly once",
    ),
    "overlap": ((Part((0,), (6,), (0,)), Part((4,), (6,), (1,))), "exactly once"),
    "overlap_and_hole": ((Part((0,), (5,), (0,)), Part((0,), (5,), (1,))), "exactly once"),
    "beyond": ((Part((0,), (5,), (0,)), Part((6,), (5,), (1,))), "exactly once"),
    "no holder": ((Part((0,), (10,), ()),), r"held by processes \[\], expected only processes 0 to 1"),
    "unknown process": ((Part((0,), (10,), (0, 2)),), r"held by processes \[0, 2\], expected only processes 0 to 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_invalid_parts(name: str) -> None:
    parts, message = WRONG[name]
    catalog = Catalog(["layers.w"], [leaf((10,), parts)], LAYOUT)
    with pytest.raises(hf.errors.UnsupportedLeafError, match=f"the leaf layers/w cannot be saved: .*{message}"):
        write_assignment(catalog, 2)


def test_parts_that_would_make_millions_of_chunks() -> None:
    size = 3 << 20
    parts = (Part((0,), (1,), (0,)), Part((1,), (size - 1,), (1,)))
    with pytest.raises(
        hf.errors.UnsupportedLeafError, match=r"leaf w .* cut into 3145728 chunks of 4 bytes; divide it more"
    ):
        Catalog(["w"], [leaf((size,), parts)], LAYOUT)
    assert math.prod(chunk_shape((size,), 4, LAYOUT.chunk_bytes)) == 16 * KIB
