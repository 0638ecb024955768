"""When processes share their reads, and what they do where that does not work; the processes are threads."""

from __future__ import annotations

import itertools
import json
import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from tests.equality import assert_same
from tests.processes.threads import together

import holdfast as hf
from holdfast.engine.arrays import SharedReads, load_tree
from holdfast.engine.arrays.shared_reads import agreed_lengths
from holdfast.engine.distributed import Coordinator, Teams, next_rendezvous
from holdfast.engine.errors import BarrierTimeoutError, DamagedCheckpointError
from holdfast.engine.sources import open_at
from holdfast.engine.storage import as_location

COUNT = 5
MIB = 1 << 20


class ThreadTransport:
    """All-gathers between threads."""

    def __init__(self, count: int) -> None:
        self._barrier = threading.Barrier(count)
        self._sent: dict[int, Any] = {}
        self.gathers = 0

    def connect(self, name: str, teams: Teams, index: int, nbytes: int, timeout: float) -> Callable[[Any], Any]:
        team = next(team for team in teams if index in team)

        def all_gather(mine: Any) -> Any:
            assert mine.nbytes == nbytes
            self._sent[index] = mine
            self._barrier.wait(timeout)
            found = np.stack([self._sent[process] for process in team])
            if self._barrier.wait(timeout) == 0:
                self.gathers += 1
            return found

        return all_gather

    def close(self) -> None:
        pass


class Unreachable(ThreadTransport):
    """A network on which one process is not reached."""

    def connect(self, name: str, teams: Teams, index: int, nbytes: int, timeout: float) -> Callable[[Any], Any]:
        if index == 1:
            raise OSError("no route to host")
        return super().connect(name, teams, index, nbytes, timeout)


class Broken(ThreadTransport):
    """A network that one process leaves after it was connected."""

    def connect(self, name: str, teams: Teams, index: int, nbytes: int, timeout: float) -> Callable[[Any], Any]:
        def all_gather(mine: Any) -> Any:
            raise RuntimeError("connection reset by peer")

        return all_gather


def loads(path: str, transport: ThreadTransport, *, always: bool) -> list[Any]:
    """Returns what each process loads and how many bytes it reads, or its error."""

    def load(coordinator: Coordinator) -> tuple[Any, int]:
        shared = SharedReads(next_rendezvous(coordinator, "restore"), transport, 5.0, always=always)
        checkpoint = open_at(as_location(path))
        reader = checkpoint.tree(checkpoint.only_tree(how=""))
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
    tmp_path: Any, store: str, size: int, always: bool, shares: bool
) -> None:
    path = "memory://shared-reads" if store == "memory" else str(tmp_path / "ckpt")
    tree = {"w": np.arange(size, dtype=np.uint8).reshape(64, -1), "b": np.array(-0.0)}
    hf.save(path, tree, layout=hf.Layout(chunk_bytes=size // 16), overwrite=True)
    transport = ThreadTransport(COUNT)
    found = loads(path, transport, always=always)
    for loaded, _ in found:
        assert loaded["w"].tobytes() == tree["w"].tobytes()
        assert loaded["b"].tobytes() == tree["b"].tobytes()
    times = sum(read for _, read in found) / size
    assert transport.gathers == (1 if shares else 0)
    assert times < 2 if shares else times >= COUNT  # from a store, gaps of up to 1 MiB are read with the chunks


def test_leaves_that_each_process_has_already_are_not_shared(tmp_path: Any) -> None:
    """A tree is opened with its aggregated leaves, so that nothing is spared by handing them on."""
    tree = {"w": np.arange(4.0), "b": np.arange(3.0)}
    hf.PyTreeCheckpointer().save(tmp_path / "ckpt", tree, save_args=hf.SaveArgs(aggregate=True))
    transport = ThreadTransport(COUNT)
    for loaded, _ in loads(str(tmp_path / "ckpt"), transport, always=True):
        assert {name: leaf.tolist() for name, leaf in loaded.items()} == {
            name: leaf.tolist() for name, leaf in tree.items()
        }
    assert transport.gathers == 0


def test_a_format_without_chunks_is_read_leaf_by_leaf(tmp_path: Any) -> None:
    tree = {f"w{number:02}": np.full((10, number), number, np.float32) for number in range(12)}
    safetensors.numpy.save_file(tree, tmp_path / "model.safetensors")
    transport = ThreadTransport(COUNT)
    for loaded, _ in loads(str(tmp_path / "model.safetensors"), transport, always=True):
        assert_same(loaded, tree)
    assert transport.gathers == 1


def test_without_connections_each_process_reads_all(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    hf.save(tmp_path / "ckpt", {"w": np.arange(100)})
    with caplog.at_level(logging.WARNING):
        found = loads(str(tmp_path / "ckpt"), Unreachable(COUNT), always=True)
    assert [loaded["w"].tolist() for loaded, _ in found] == [list(range(100))] * COUNT
    assert "process 1: " in caplog.text
    assert "no route to host" in caplog.text


def test_a_connection_that_breaks_is_an_error(tmp_path: Any) -> None:
    hf.save(tmp_path / "ckpt", {"w": np.arange(100)})
    for error in loads(str(tmp_path / "ckpt"), Broken(COUNT), always=True):
        assert isinstance(error, BarrierTimeoutError)
        assert "connection reset by peer" in str(error)


@pytest.mark.parametrize("garbled", [0, 1])
def test_a_process_that_reads_again_leaves_and_the_others_go_on(tmp_path: Any, garbled: int) -> None:
    hf.save(tmp_path / "ckpt", {"w": np.arange(100)})

    def load(coordinator: Coordinator) -> list[Any]:
        shared = SharedReads(next_rendezvous(coordinator, "restore"), transport, 5.0, always=True)
        checkpoint = open_at(as_location(tmp_path / "ckpt"))
        reader: Any = checkpoint.tree(checkpoint.only_tree(how=""))
        read_boxes, reads = reader.read_boxes, itertools.count()

        def read(*args: Any) -> Any:
            if next(reads) == garbled and coordinator.process_index == 1:
                raise DamagedCheckpointError("garbled once")
            return read_boxes(*args)

        reader.read_boxes = read
        try:
            found = [load_tree(reader, shared=shared) for _ in range(2)]
        except DamagedCheckpointError:
            shared.leave()
            found = [load_tree(reader, shared=shared) for _ in range(2)]
        shared.leave()
        return found

    transport = ThreadTransport(COUNT)
    for found in together(COUNT, load):
        assert [one["w"].tolist() for one in found] == [list(range(100))] * 2
    assert transport.gathers == garbled  # what was shared before


def test_a_process_that_restores_fewer_trees_leaves_and_the_others_go_on(tmp_path: Any) -> None:
    hf.save(tmp_path / "ckpt", {"w": np.arange(100)})

    def load(coordinator: Coordinator) -> list[Any]:
        shared = SharedReads(next_rendezvous(coordinator, "restore"), transport, 5.0, always=True)
        checkpoint = open_at(as_location(tmp_path / "ckpt"))
        reader = checkpoint.tree(checkpoint.only_tree(how=""))
        found = [load_tree(reader, shared=shared)["w"].tolist() for _ in range(coordinator.process_index)]
        shared.leave()
        return found

    transport = ThreadTransport(COUNT)
    assert together(COUNT, load) == [[list(range(100))] * number for number in range(COUNT)]


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
