"""Which process reads which chunks, when processes share their reads, and what they do where that does not work."""

from __future__ import annotations

import itertools
import json
import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from tests.equality import assert_same
from tests.processes.threads import together

import holdfast as hf
from holdfast.engine.arrays import ReadPlan, SharedReads, WantedArray, load_tree
from holdfast.engine.arrays.shared_reads import agreed_lengths
from holdfast.engine.distributed import Coordinator, Teams, next_rendezvous
from holdfast.engine.pytree import Part
from holdfast.engine.sources import open_at
from holdfast.engine.storage import as_location

COUNT = 5
MIB = 1 << 20


class ThreadTransport:
    """All-gathers between threads, until process 1 meets an error of the network."""

    def __init__(self, unreachable: str | None = None, breaks: str | None = None) -> None:
        self._barrier = threading.Barrier(COUNT)
        self._sent: dict[int, Any] = {}
        self._unreachable, self._breaks = unreachable, breaks
        self.gathers = 0

    def connect(self, name: str, teams: Teams, index: int, nbytes: int, timeout: float) -> Callable[[Any], Any]:
        team = next(team for team in teams if index in team)
        if index == 1 and self._unreachable:
            raise OSError(self._unreachable)

        def all_gather(mine: Any) -> Any:
            assert mine.nbytes == nbytes
            if self._breaks:
                raise RuntimeError(self._breaks)
            self._sent[index] = mine
            self._barrier.wait(timeout)
            found = np.stack([self._sent[process] for process in team])
            if self._barrier.wait(timeout) == 0:
                self.gathers += 1
            return found

        return all_gather

    def close(self) -> None:
        pass


def opened(path: Any, coordinator: Coordinator, transport: ThreadTransport, *, always: bool = True) -> tuple[Any, Any]:
    """A reader of a tree, and the reads that this process shares with the others."""
    checkpoint = open_at(as_location(path))
    shared = SharedReads(next_rendezvous(coordinator, "restore"), transport, 5.0, always=always)
    return checkpoint.tree(checkpoint.only_tree(how="")), shared


def loads(path: Any, transport: ThreadTransport, *, always: bool = True) -> list[Any]:
    """Returns what each process loads and how many bytes it reads, or its error."""

    def load(coordinator: Coordinator) -> tuple[Any, int]:
        reader, shared = opened(path, coordinator, transport, always=always)
        before = reader.bytes_read
        return load_tree(reader, shared=shared), reader.bytes_read - before

    return together(COUNT, load)


@pytest.mark.parametrize(
    ("store", "size", "always", "shares"),
    [
        ("memory", 17 * MIB, False, True),
        ("memory", 1 * MIB, False, False),
        ("memory", 1 * MIB, True, True),
        ("disk", 17 * MIB, False, False),
        ("disk", 1 * MIB, True, True),
    ],
)
def test_reads_are_shared_where_that_is_worth_it(
    tmp_path: Path, place: str, store: str, size: int, always: bool, shares: bool
) -> None:
    path = place if store == "memory" else str(tmp_path / "ckpt")
    tree = {"w": np.arange(size, dtype=np.uint8).reshape(64, -1), "b": np.array(-0.0)}
    hf.save(path, tree, layout=hf.Layout(chunk_bytes=size // 16))
    transport = ThreadTransport()
    found = loads(path, transport, always=always)
    for loaded, _ in found:
        assert_same(loaded, tree)
    times = sum(read for _, read in found) / size
    assert transport.gathers == (1 if shares else 0)
    assert times < 2 if shares else times >= COUNT  # from a store, gaps of up to 1 MiB are read with the chunks


def test_trees_without_chunks(tmp_path: Path) -> None:
    """Other formats are read leaf by leaf. A tree is opened with its aggregated leaves: handing them on spares none."""
    tree = {f"w{number:02}": np.full((10, number), number, np.float32) for number in range(12)}
    safetensors.numpy.save_file(tree, tmp_path / "model.safetensors")
    hf.PyTreeCheckpointer().save(tmp_path / "aggregated", tree, save_args=hf.SaveArgs(aggregate=True))
    for name, gathers in {"model.safetensors": 1, "aggregated": 0}.items():
        transport = ThreadTransport()
        for loaded, _ in loads(tmp_path / name, transport):
            assert_same(loaded, tree)
        assert transport.gathers == gathers


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    hf.save(tmp_path / "ckpt", {"w": np.arange(100)})
    return tmp_path / "ckpt"


WHOLE = list(range(100))


def test_a_network_that_fails(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without connections, each process reads all. One that breaks in the middle is an error."""
    with caplog.at_level(logging.WARNING):
        found = loads(saved, ThreadTransport(unreachable="no route to host"))
    assert [loaded["w"].tolist() for loaded, _ in found] == [WHOLE] * COUNT
    assert "process 1: " in caplog.text
    assert "no route to host" in caplog.text
    for error in loads(saved, ThreadTransport(breaks="connection reset by peer")):
        assert isinstance(error, hf.errors.BarrierTimeoutError)
        assert "connection reset by peer" in str(error)


@pytest.mark.parametrize("garbled", [0, 1])
def test_a_process_that_reads_again_leaves_and_the_others_go_on(saved: Path, garbled: int) -> None:
    transport = ThreadTransport()

    def load(coordinator: Coordinator) -> list[Any]:
        reader, shared = opened(saved, coordinator, transport)
        read_boxes, reads = reader.read_boxes, itertools.count()

        def read(*args: Any) -> Any:
            if next(reads) == garbled and coordinator.process_index == 1:
                raise hf.DamagedCheckpointError("garbled once")
            return read_boxes(*args)

        reader.read_boxes = read
        try:
            found = [load_tree(reader, shared=shared) for _ in range(2)]
        except hf.DamagedCheckpointError:
            shared.leave()
            found = [load_tree(reader, shared=shared) for _ in range(2)]
        shared.leave()
        return [one["w"].tolist() for one in found]

    assert together(COUNT, load) == [[WHOLE] * 2] * COUNT
    assert transport.gathers == garbled  # what was shared before


def test_a_process_that_restores_fewer_trees_leaves_and_the_others_go_on(saved: Path) -> None:
    transport = ThreadTransport()

    def load(coordinator: Coordinator) -> list[Any]:
        reader, shared = opened(saved, coordinator, transport)
        found = [load_tree(reader, shared=shared)["w"].tolist() for _ in range(coordinator.process_index)]
        shared.leave()
        return found

    assert together(COUNT, load) == [[WHOLE] * number for number in range(COUNT)]


FACTS = {"plan": "p", "bytes": [10, 3], "spared": 64 * MIB, "always": False, "store": False, "machine": "one"}


@pytest.mark.parametrize(
    ("why", "second", "both", "lengths"),
    [
        ("two machines", {"machine": "two", "bytes": [7, 4]}, {}, [10, 4]),
        ("one machine and its disk", {}, {}, None),
        ("one machine and an object store", {}, {"store": True}, [10, 3]),
        ("little is spared", {"machine": "two"}, {"spared": MIB}, None),
        ("it is asked for", {}, {"spared": MIB, "always": True}, [10, 3]),
        ("other templates", {"machine": "two", "plan": "q", "bytes": [1]}, {"always": True}, []),
        ("one reads on its own", {"plan": None}, {"always": True}, []),
        ("nothing is wanted twice", {"machine": "two"}, {"bytes": [], "always": True}, None),
    ],
)
def test_the_processes_decide_together(why: str, second: dict[str, Any], both: dict[str, Any], lengths: Any) -> None:
    facts = [{**FACTS, **both}, {**FACTS, **both, **second}]
    assert json.loads(agreed_lengths([json.dumps(one).encode() for one in facts])) == lengths


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
    ("why", "array", "shared"),
    [
        ("each part has one owner", WantedArray((64,), (16,), 4, parts((64,), (4,), 1)), False),
        ("most chunks have one owner", WantedArray((64,), (8,), 4, parts((64,), (4,), 1)), False),
        ("it has no elements", WantedArray((0, 4), (1, 4), 4, None), False),
        ("its elements have no bytes", WantedArray((3,), (3,), 0, None), False),
        ("no process needs its end", WantedArray((64,), (16,), 4, [Part((0,), (40,), (0, 1, 2, 3))]), False),
        ("one chunk for all parts", WantedArray((64,), (64,), 4, parts((64,), (4,), 1)), True),
        (
            "teams of one and of three",
            WantedArray((8,), (4,), 4, [Part((0,), (4,), (0,)), Part((4,), (4,), (1, 2, 3))]),
            True,
        ),
        ("one process wants nothing", WantedArray((8,), (8,), 4, [Part((0,), (8,), (0, 1, 3))]), True),
    ],
)
def test_arrays_without_teams_of_equal_size_are_shared_by_all_or_by_none(
    why: str, array: WantedArray, shared: bool
) -> None:
    plan = ReadPlan([array], 4)
    assert list(plan.teams) == ([((0, 1, 2, 3),)] if shared else [])
    assert set(readers(plan, 4).values()) == ({1} if shared else set())
    assert shared or plan.spared_bytes == 0


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
