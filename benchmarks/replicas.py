"""A restore of replicas, simulated: each reads its share of the arrays from an object store, and hands it on.

The code is that of a restore. The processes are threads in simulated time (`virtual_time`), and memory is their
network.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import holdfast as hf
from holdfast.engine.arrays import SharedReads, load_tree
from holdfast.engine.distributed import next_rendezvous
from holdfast.engine.sources import open_at
from holdfast.engine.storage import Location

from .protocol import LINK, NETWORK, Hub, SimulatedCoordinator, SimulatedProcess, SimulatedStore
from .virtual_time import Timeline

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from holdfast.engine.distributed import Teams

MOST = 64
"""Replicas at most: each of them has all arrays in memory."""

CHUNK = 256 * 1024
"""Bytes of a chunk; there is one for each replica."""

_TIMEOUT = 600.0


@dataclass(frozen=True, slots=True)
class Restored:
    """What a simulated restore took.

    Attributes:
        replicas: How many processes restored all arrays.
        restore_store_ratio: Bytes that all of them read from the store, divided by the bytes of the checkpoint.
        restore_seconds: Until the last had its arrays, without the time of computations.
    """

    replicas: int
    restore_store_ratio: float
    restore_seconds: float


class Network:
    """All-gathers between simulated processes."""

    def __init__(self) -> None:
        self._sent: dict[tuple[int, ...], list[tuple[SimulatedProcess, NDArray[np.uint8]]]] = {}
        self._received: dict[int, NDArray[np.uint8]] = {}

    def all_gather(self, process: SimulatedProcess, team: tuple[int, ...], mine: NDArray[np.uint8]) -> Any:
        """Send bytes to a team, and return those of all its processes, a row for each."""
        sent = self._sent.setdefault(team, [])
        sent.append((process, mine.copy()))
        if len(sent) < len(team):
            process.actor.wait()
        else:
            del self._sent[team]
            rows = np.stack([data for _, data in sorted(sent, key=lambda one: one[0].index)])
            arrives = process.actor.now + NETWORK + rows.nbytes / LINK
            for other, _ in sent:
                self._received[other.index] = rows
                if other is not process:
                    other.actor.wake(arrives)
            process.actor.elapse(arrives - process.actor.now)
        return self._received.pop(process.index)


class SimulatedTransport:
    """How one process sends bytes to the others.

    Args:
        network: Of all processes.
        process: The process.
    """

    def __init__(self, network: Network, process: SimulatedProcess) -> None:
        self._network = network
        self._process = process

    def connect(self, name: str, teams: Teams, index: int, nbytes: int, timeout: float) -> Callable[[Any], Any]:
        team = next(team for team in teams if index in team)
        return partial(self._network.all_gather, self._process, team)

    def close(self) -> None:
        pass


def restore(replicas: int, *, latency: float = 0.03) -> Restored:
    """Save a tree, and restore it in a number of processes, each of which wants all of it.

    Args:
        replicas: How many.
        latency: Of the object store, in seconds.
    """
    timeline, hub, network = Timeline(measured=False), Hub(), Network()
    store = SimulatedStore(timeline, latency)
    place = Location(store, "run/1")
    tree = {"w": np.random.default_rng(1).integers(0, 256, (replicas, CHUNK), np.uint8)}
    hf.save(place, tree, layout=hf.Layout(chunk_bytes=CHUNK))
    store.bytes_read = 0

    def load(process: SimulatedProcess) -> None:
        coordinator = SimulatedCoordinator(hub, process, replicas, _TIMEOUT)
        transport = SimulatedTransport(network, process)
        # By themselves, processes share what spares them 64 MiB; a simulation has less memory than they have.
        shared = SharedReads(next_rendezvous(coordinator, "restore"), transport, _TIMEOUT, always=True)
        found = open_at(place)
        loaded = load_tree(found.tree(found.only_tree(how="")), shared=shared)
        assert np.array_equal(loaded["w"], tree["w"])
        process.ended_at = process.actor.now

    processes = [SimulatedProcess(index) for index in range(replicas)]
    for one in processes:
        one.actor = timeline.start(partial(load, one), one)
    timeline.run()
    nbytes = sum(map(len, store.objects.values()))
    return Restored(replicas, store.bytes_read / nbytes, max(one.ended_at for one in processes))
