"""Plans: every chunk of every array is written once, by a process that holds it, in a place of its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.engine.arrays.assignment import write_assignment
from holdfast.engine.arrays.digests import CHECKSUM_BYTES, CHUNK_ALIGNMENT
from holdfast.engine.arrays.grid import ArraySpec
from holdfast.engine.arrays.plan import Catalog, PlannedFile, chunk_shape, chunk_table, plan_files
from holdfast.engine.pytree import ArrayLeaf, Part
from holdfast.engine.storage import PAGE

MIB = 1 << 20


@pytest.mark.parametrize(
    ("shape", "itemsize", "limit", "cuts", "expected"),
    [
        ((), 8, 4096, (), ()),
        ((3, 0, 2), 8, 4096, (), (3, 1, 2)),
        ((512,), 8, 4096, (), (512,)),
        ((513,), 8, 4096, (), (257,)),
        ((1000, 10), 8, 32_000, (), (334, 10)),
        ((4, 10, 1025), 4, 4096, (), (1, 1, 513)),
        ((4, 11, 100), 4, 4096, (), (1, 6, 100)),
        ((5, 7), 100_000, 4096, (), (1, 1)),
        ((1 << 40,), 2, 32 * MIB, (), (16 * MIB,)),
        # Parts of processes meet at multiples of the cuts: chunks divide them.
        ((1000, 10), 4, 4096, (250, 0), (50, 10)),
        ((1000, 10), 4, 1 << 20, (250, 0), (250, 10)),
        ((1000, 10), 4, 1 << 20, (250, 5), (250, 5)),
        ((1000, 1000), 4, 500, (0, 250), (1, 125)),
        ((4, 1000, 8), 4, 4096, (1, 500, 0), (1, 125, 8)),
        ((60,), 4, 48, (30,), (10,)),
        ((4 * 10_007,), 4, 4096, (10_007,), (10_007,)),  # a prime: better too large than chunks of one element
    ],
    ids=str,
)
def test_chunk_shapes(
    shape: tuple[int, ...], itemsize: int, limit: int, cuts: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert chunk_shape(shape, itemsize, limit, cuts) == expected


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
        for segment in file.segments:
            ends = segment.offsets + segment.lengths
            assert (segment.offsets[0], ends[-1]) == (segment.offset, segment.offset + segment.size)
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


def test_how_arrays_fill_segments_and_files() -> None:
    assert whole_plan([], hf.Layout()) == []
    assert whole_plan([ArraySpec((0, 3), (1, 3), 8)], hf.Layout()) == []
    (small,) = whole_plan([ArraySpec((256,), (256,), 4)] * 1000, hf.Layout())
    assert (len(small.segments), small.size) == (1, 999 * 1088 + 1028)
    layout = hf.Layout(chunk_bytes=32 * MIB, segment_bytes=16 * MIB, data_file_bytes=128 * MIB)
    shape = (300 * MIB,)
    large = whole_plan([ArraySpec(shape, chunk_shape(shape, 1, layout.chunk_bytes), 1)], layout)
    assert [len(file.segments) for file in large] == [4, 4, 2]


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


def on_a_mesh(shape: tuple[int, ...], rows: int, columns: int, along: str) -> ArrayLeaf:
    """Sharded along the rows or the columns of a mesh of processes, replicated along the others."""
    mesh = np.arange(rows * columns).reshape(rows, columns)
    return leaf(shape, split(shape, 0, [tuple(group) for group in (mesh if along == "rows" else mesh.T).tolist()]))


def held_by(process: int, shape: tuple[int, ...]) -> ArrayLeaf:
    return leaf(shape, (Part((0,) * len(shape), shape, (process,)),))


def check(leaves: dict[str, ArrayLeaf], count: int) -> list[int]:
    """Every chunk is written once, by a process that holds it; returns the bytes that each process writes."""
    catalog = Catalog(list(leaves), list(leaves.values()), LAYOUT)
    assignment = write_assignment(catalog, count)
    found = [assignment.chunks_of(process) for process in range(count)]
    chunks = np.concatenate([catalog.starts[arrays] + numbers for arrays, numbers in found])
    assert sorted(chunks.tolist()) == list(range(int(catalog.starts[-1])))
    for process, (arrays, numbers) in enumerate(found):
        for array, number in zip(arrays.tolist(), numbers.tolist(), strict=True):
            spec, parts = catalog.encodings[array].spec, catalog.encodings[array].parts
            if parts is None:
                continue
            start, end = map(np.array, spec.chunk_box(number))
            inside = [
                part for part in parts if (start >= part.start).all() and (end <= np.add(part.start, part.shape)).all()
            ]
            assert len(inside) == 1, "a chunk lies in one part"
            assert process in inside[0].holders
    return [sum(catalog.encodings[array].spec.chunk_nbytes for array in arrays.tolist()) for arrays, _ in found]


def many(count: int) -> dict[str, ArrayLeaf]:
    """A model and its optimizer, replicated: a few large arrays, and many small ones."""
    large = {f"layers.{i}.kernel": leaf((256, 300 + 20 * i)) for i in range(4)}
    small = {f"layers.{i}.bias": leaf((16 + i % 7,)) for i in range(150 * count)}
    return large | small | {f"count.{i}": leaf((), dtype="int64") for i in range(40)}


def uneven(count: int) -> dict[str, ArrayLeaf]:
    """One process holds a quarter of an even share more than the others; replicated arrays make up for it."""
    alone = {f"own.{i}": held_by(count - 1, (4096,)) for i in range(12)}
    return alone | {f"all.{i}": leaf((4096,)) for i in range(12 * 3 * count)}


def several(make: Callable[[], ArrayLeaf], name: str = "w", count: int = 9) -> dict[str, ArrayLeaf]:
    return {f"{name}.{i}": make() for i in range(count)}


# Numbers of processes, a tree for so many, and how much more than an even share one of them may write.
ANY = (1, 2, 3, 4, 8)
SPREADS: dict[str, tuple[tuple[int, ...], Callable[[int], dict[str, ArrayLeaf]], float]] = {
    "replicated": (ANY, lambda n: {"w": leaf((1024 * n, 128))}, 1.01),
    "replicated_and_small": (ANY, many, 1.2),
    "only_small": (ANY, lambda n: {f"b.{i}": leaf((i % 50,)) for i in range(100 * n)}, 1.2),
    "sharded": (ANY, lambda n: several(lambda: sharded((64 * n, 300), n)), 1.0),
    "sharded_by_columns": (ANY, lambda n: several(lambda: sharded((300, 64 * n), n, 1)), 1.0),
    "sharded_and_replicated": (ANY, lambda n: several(lambda: sharded((64 * n, 300), n)) | many(n), 1.2),
    "uneven": (ANY, uneven, 1.2),
    "groups": ((8,), lambda _: several(lambda: on_a_mesh((64, 300), 4, 2, "rows")), 1.2),
    "rows_and_columns": (
        (6,),
        lambda _: (
            several(lambda: on_a_mesh((60, 300), 2, 3, "rows"), "r")
            | several(lambda: on_a_mesh((60, 300), 2, 3, "columns"), "c")
        ),
        1.2,
    ),
    "groups_and_all": ((4,), lambda _: {"r": on_a_mesh((60, 900), 2, 2, "rows"), **many(4)}, 1.2),
    "groups_of_which_one_is_busy": (
        (4,),
        lambda _: (
            several(lambda: on_a_mesh((64, 256), 2, 2, "rows"), "r", 12)
            | several(lambda: held_by(0, (4096,)), "own", 20)
        ),
        1.3,  # the first two processes hold that much more than half
    ),
}


@pytest.mark.parametrize(
    ("count", "make", "most"),
    [
        pytest.param(count, make, most, id=f"{name}-{count}")
        for name, (counts, make, most) in SPREADS.items()
        for count in counts
    ],
)
def test_even_shares(count: int, make: Callable[[int], dict[str, ArrayLeaf]], most: float) -> None:
    loads = check(make(count), count)
    assert max(loads) <= most * sum(loads) / count


def test_a_process_that_holds_more_alone_writes_nothing_else() -> None:
    leaves = {"own": held_by(1, (64 * KIB,)), "scalar": held_by(1, ()), "all": leaf((8, 4096))}
    assert check(leaves, 3) == [64 * KIB, 256 * KIB + 4, 64 * KIB]


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
    catalog, other = (
        Catalog(list(ordered), list(ordered.values()), LAYOUT) for ordered in (leaves, dict(reversed(leaves.items())))
    )
    assert catalog.names == other.names
    for process in range(3):
        one, two = (write_assignment(each, 3).chunks_of(process) for each in (catalog, other))
        assert sorted(zip(*map(list, one), strict=True)) == sorted(zip(*map(list, two), strict=True))


SIZE = 3 << 20
WRONG: dict[str, tuple[int, tuple[Part, ...], str]] = {
    "hole": (
        10,
        (Part((0,), (4,), (0,)), Part((6,), (4,), (1,))),
        r"its 2 parts do not cover its shape \[10\] exactly once",
    ),
    "overlap": (10, (Part((0,), (6,), (0,)), Part((4,), (6,), (1,))), "exactly once"),
    "overlap_and_hole": (10, (Part((0,), (5,), (0,)), Part((0,), (5,), (1,))), "exactly once"),
    "beyond": (10, (Part((0,), (5,), (0,)), Part((6,), (5,), (1,))), "exactly once"),
    "no holder": (10, (Part((0,), (10,), ()),), r"held by processes \[\], expected only processes 0 to 1"),
    "unknown process": (10, (Part((0,), (10,), (0, 2)),), r"held by processes \[0, 2\], expected only processes 0 to"),
    "millions of chunks": (
        SIZE,
        (Part((0,), (1,), (0,)), Part((1,), (SIZE - 1,), (1,))),
        "cut into 3145728 chunks of 4 bytes; divide it more",
    ),
}


@pytest.mark.parametrize(("size", "parts", "message"), WRONG.values(), ids=WRONG)
def test_invalid_parts(size: int, parts: tuple[Part, ...], message: str) -> None:
    with pytest.raises(hf.errors.UnsupportedLeafError, match=f"leaf layers/w .*{message}"):
        write_assignment(Catalog(["layers.w"], [leaf((size,), parts)], LAYOUT), 2)
