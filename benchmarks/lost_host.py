"""A run on many hosts that loses one of them with its memory, and is started again on the others and a new one.

The code is that of a run with ``hf.Local``: its hosts are threads with a folder each, which send their files to each
other through sockets. The store of the run is an object store in memory, which notes what is read from it.
"""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tests.processes.threads import together

import holdfast as hf
from holdfast.engine.storage import Location
from holdfast.observer import Observer

from .protocol import SimulatedStore
from .virtual_time import Timeline

if TYPE_CHECKING:
    from collections.abc import Mapping

    from holdfast.engine.distributed import Coordinator

MOST = 64
"""Maximum number of hosts: each has its own threads and connections."""

CHUNK = 16 * 1024
"""Bytes of the tree for each host."""

STORE_EVERY, LOCAL_EVERY, LAST = 4, 2, 7
"""Steps between two saves in the store and between two local saves, and the last step before the loss."""


@dataclass(frozen=True, slots=True)
class LostHost:
    """What came of the loss of one host.

    Attributes:
        hosts: How many hosts the run had.
        lost_host_store_step: The newest step of the store.
        lost_host_local_step: The newest local step before the loss.
        lost_host_resumed: The step from which the run resumed, bit for bit.
        lost_host_store_bytes: Bytes that all processes read from the store, without commit records and options.
        lost_host_peer_bytes: Bytes that all processes read from other hosts.
    """

    hosts: int
    lost_host_store_step: int
    lost_host_local_step: int
    lost_host_resumed: int
    lost_host_store_bytes: int
    lost_host_peer_bytes: int


class _KilledError(Exception):
    """The end of a program that has not come to its end."""


class _Store(SimulatedStore):
    """The store of the run; it counts the bytes of its data files that are read."""

    def __init__(self) -> None:
        super().__init__(Timeline(), latency=0.0)
        self.data_read = 0

    def read_range(self, key: str, byte_range: slice | None) -> bytes:
        found = super().read_range(key, byte_range)
        if not key.endswith(".json") or key.endswith("/tree.json"):
            self.data_read += len(found)
        return found


class _PeerBytes(Observer):
    """Notes how many bytes each process of a restore has read from other hosts."""

    def __init__(self) -> None:
        self.found: list[int] = []

    def event(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "restored":
            self.found.append(event.get("peer_bytes", 0))


def lose_a_host(count: int, lost: int) -> LostHost:
    """Train on a number of hosts, lose one of them, and resume on as many.

    Args:
        count: How many hosts there are.
        lost: The number of the one that is lost.
    """
    store, observer = _Store(), _PeerBytes()

    def tree(step: int) -> dict[str, Any]:
        return {"w": np.random.default_rng(step).integers(0, 256, (count, CHUNK), np.uint8), "step": step}

    def manager(coordinator: Coordinator, folder: str) -> hf.CheckpointManager:
        host = f"host{coordinator.process_index}"
        local = hf.Local(Path(folder) / host, every=LOCAL_EVERY, copies=min(1, count - 1), host=host)
        options = hf.CheckpointManagerOptions(save_interval_steps=STORE_EVERY, local=local)
        return hf.CheckpointManager(Location(store, "run"), None, options, coordinator=coordinator, observer=observer)

    def train(coordinator: Coordinator) -> tuple[int | None, int | None]:
        with contextlib.suppress(_KilledError), manager(coordinator, directory) as run:
            for step in range(1, LAST + 1):
                run.save(step, tree(step))
            run.wait_until_finished()
            status = run.local_status()
            saved = max(run.all_steps()), None if status is None else status.step
            raise _KilledError
        return saved

    def resume(coordinator: Coordinator) -> int:
        with contextlib.suppress(_KilledError), manager(coordinator, directory) as run:
            restored = run.restore_latest()
            run.acquire()  # then the observer gets the events
            assert restored is not None
            assert restored.items["step"] == restored.step
            assert np.array_equal(restored.items["w"], tree(restored.step)["w"])
            resumed = restored.step
            raise _KilledError
        return resumed

    with tempfile.TemporaryDirectory() as directory:
        in_store, on_hosts = _agreed(together(count, train, timeout=600))
        store.data_read = 0
        (Path(directory) / f"host{lost}").rename(Path(directory) / "lost")
        resumed_from = _agreed(together(count, resume, timeout=600))
    return LostHost(count, in_store, on_hosts, resumed_from, store.data_read, sum(observer.found))


def _agreed(found: list[Any]) -> Any:
    """Return what all processes have found; raise the error of one."""
    for one in found:
        if isinstance(one, BaseException):
            raise one
    assert found.count(found[0]) == len(found), found
    return found[0]
