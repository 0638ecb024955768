"""Write assignments: one holder of each chunk writes it, exactly once, and all processes write about the same."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.engine.arrays.assignment import WriteAssignment, replica_groups
from holdfast.engine.arrays.plan import Catalog, chunk_shape, common_cuts
from holdfast.engine.pytree import ArrayLeaf, Part

KIB = 1 << 10
LAYOUT = hf.Layout(chunk_bytes=64 * KIB)


def leaf(shape: tuple[int, ...], parts: tuple[Part, ...] | None = None, dtype: str = "float32") -> ArrayLeaf:
    return ArrayLeaf(np.dtype(dtype), shape, [], False, {"kind": "numpy"}, parts)


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
    assignment = WriteAssignment(catalog, count)
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
    "no holder": ((Part((0,), (10,), ()),), r"held by the processes \[\], expected some of 0 to 1"),
    "unknown process": ((Part((0,), (10,), (0, 2)),), r"held by the processes \[0, 2\], expected some of 0 to 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_invalid_parts(name: str) -> None:
    parts, message = WRONG[name]
    catalog = Catalog(["layers.w"], [leaf((10,), parts)], LAYOUT)
    with pytest.raises(hf.errors.UnsupportedLeafError, match=f"the leaf layers/w cannot be saved: .*{message}"):
        WriteAssignment(catalog, 2)


def test_parts_that_would_make_millions_of_chunks() -> None:
    size = 3 << 20
    parts = (Part((0,), (1,), (0,)), Part((1,), (size - 1,), (1,)))
    with pytest.raises(
        hf.errors.UnsupportedLeafError, match=r"leaf w .* cut into 3145728 chunks of 4 bytes; divide it more"
    ):
        Catalog(["w"], [leaf((size,), parts)], LAYOUT)
    assert math.prod(chunk_shape((size,), 4, LAYOUT.chunk_bytes)) == 16 * KIB
