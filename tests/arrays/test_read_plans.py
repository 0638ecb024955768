"""Which process reads which chunks of arrays that several processes restore."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.engine.arrays import ReadPlan, WantedArray
from holdfast.engine.pytree import Part


def parts(shape: tuple[int, ...], cuts: Sequence[int], copies: int) -> list[Part]:
    """Returns the parts of an array that a mesh of ``copies`` x (cuts along each axis) divides; copies vary slowest."""
    count = math.prod(cuts)
    found = []
    for number, place in enumerate(itertools.product(*map(range, cuts))):
        sizes = [-(-size // cut) for size, cut in zip(shape, cuts, strict=True)]
        start = [min(one * size, end) for one, size, end in zip(place, sizes, shape, strict=True)]
        stop = [min(low + size, end) for low, size, end in zip(start, sizes, shape, strict=True)]
        holders = tuple(number + count * copy for copy in range(copies))
        found.append(Part(tuple(start), tuple(high - low for low, high in zip(start, stop, strict=True)), holders))
    return found


def readers(plan: ReadPlan, processes: int) -> Counter[tuple[int, tuple[int, ...]]]:
    """Returns how often each chunk is read, by its array and its first element."""
    return Counter(
        (piece.array, piece.box.start)
        for process in range(processes)
        for teams in plan.teams
        for piece in plan.pieces(process, teams)
    )


def test_64_replicas_read_each_byte_once_and_alike() -> None:
    block = [WantedArray((4096, 4096), (1024, 4096), 4, None) for _ in range(32)]
    small = [WantedArray((4096,), (4096,), 4, None) for _ in range(300)]
    plan = ReadPlan([*block, *small], 64)
    read = [sum(one.nbytes for teams in plan.teams for one in plan.pieces(process, teams)) for process in range(64)]
    total = (32 * 4096 * 4096 + 300 * 4096) * 4
    assert sum(read) == total
    assert max(read) <= 1.05 * total / 64
    assert set(readers(plan, 64).values()) == {1}
    assert plan.spared_bytes == 63 * total


def test_replicas_of_a_part_are_a_team() -> None:
    rows = parts((64, 10), (4, 1), copies=2)
    plan = ReadPlan([WantedArray((64, 10), (16, 10), 4, rows), WantedArray((7,), (7,), 4, None)], 8)
    teams = ((0, 4), (1, 5), (2, 6), (3, 7))
    assert plan.teams == {teams: [0], (tuple(range(8)),): [1]}
    assert [[piece.box.start for piece in plan.pieces(process, teams)] for process in (1, 5)] in (
        [[(16, 0)], []],
        [[], [(16, 0)]],
    )


@pytest.mark.parametrize(
    ("why", "array"),
    [
        ("each part has one owner", WantedArray((64,), (16,), 4, parts((64,), (4,), 1))),
        ("most chunks have one owner", WantedArray((64,), (8,), 4, parts((64,), (4,), 1))),
        ("it has no elements", WantedArray((0, 4), (1, 4), 4, None)),
        ("its elements have no bytes", WantedArray((3,), (3,), 0, None)),
        ("no process needs its end", WantedArray((64,), (16,), 4, [Part((0,), (40,), (0, 1, 2, 3))])),
    ],
)
def test_what_each_process_reads_on_its_own(why: str, array: WantedArray) -> None:
    plan = ReadPlan([array], 4)
    assert plan.teams == {}
    assert plan.spared_bytes == 0


@pytest.mark.parametrize(
    ("why", "array"),
    [
        ("one chunk for all parts", WantedArray((64,), (64,), 4, parts((64,), (4,), 1))),
        (
            "teams of one and of three",
            WantedArray((8,), (4,), 4, [Part((0,), (4,), (0,)), Part((4,), (4,), (1, 2, 3))]),
        ),
        ("one process wants nothing", WantedArray((8,), (8,), 4, [Part((0,), (8,), (0, 1, 3))])),
    ],
)
def test_arrays_without_teams_of_equal_size_are_shared_by_all(why: str, array: WantedArray) -> None:
    plan = ReadPlan([array], 4)
    assert list(plan.teams) == [((0, 1, 2, 3),)]
    assert set(readers(plan, 4).values()) == {1}


@pytest.mark.parametrize(
    ("shape", "chunks", "joined"),
    [
        ((1 << 20, 8), (16, 8), (256, 8)),
        ((1 << 10, 1 << 10), (1, 1), (1, 256)),
        ((1 << 20, 2), (1, 1), (256, 2)),
        ((100, 8), (1, 8), (1, 8)),
        ((0, 3), (1, 1), (1, 1)),
        ((), (), ()),
    ],
)
def test_very_many_chunks_are_joined(shape: tuple[int, ...], chunks: tuple[int, ...], joined: tuple[int, ...]) -> None:
    assert WantedArray.of(shape, chunks, 4, None).chunk_shape == joined


ARRAYS = st.tuples(
    st.lists(st.integers(1, 9), min_size=1, max_size=3),
    st.lists(st.integers(1, 5), min_size=3, max_size=3),
    st.lists(st.sampled_from([1, 2]), min_size=3, max_size=3),
    st.sampled_from([1, 2, 4]),
)


@settings(deadline=None)
@given(st.lists(ARRAYS, max_size=6))
def test_each_chunk_of_a_shared_array_is_read_once_by_a_process_of_the_team_of_all_that_want_it(
    drawn: list[tuple[list[int], list[int], list[int], int]],
) -> None:
    processes = 8
    wanted = []
    for sizes, chunks, cuts, itemsize in drawn:
        shape, some = tuple(sizes), cuts[: len(sizes)]
        copies = processes // math.prod(some)
        wanted.append(WantedArray(shape, tuple(chunks[: len(sizes)]), itemsize, parts(shape, some, copies)))
    plan = ReadPlan(wanted, processes)
    read = readers(plan, processes)
    assert set(read.values()) <= {1}
    for teams, numbers in plan.teams.items():
        assert sorted(itertools.chain(*teams)) == list(range(processes))
        assert len(set(map(len, teams))) == 1
        for number in numbers:
            array = wanted[number]
            assert sum(key[0] == number for key in read) == math.prod(array.grid)
            for part in array.parts or ():
                assert any(set(part.holders) <= set(team) for team in teams)
