"""All-gathers of bytes within teams of processes, using the collective operations of torch or JAX.

These are the only collective operations in this package. A restore runs them in the calling thread, and only after all
processes have agreed to start, so no process starts them alone. Each operation has a deadline.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .coordinators import Coordinator, JaxCoordinator
from .torch_store import TorchCoordinator

Bytes = NDArray[np.uint8]
Teams = tuple[tuple[int, ...], ...]  # equal-sized groups that partition the program's processes
AllGather = Callable[[Bytes], Bytes]  # takes the bytes of this process and returns one row of bytes per team member


class Transport(Protocol):
    """A transport that sends bytes between the processes of a program."""

    def connect(self, name: str, teams: Teams, index: int, nbytes: int, timeout: float) -> AllGather:
        """Return an all-gather function. All processes must make the same number of calls to it and to this method.

        Args:
            name: A string that is the same on all processes and unique to this connection.
            teams: The teams of processes. Each process gathers the bytes of its own team.
            index: The index of this process.
            nbytes: Number of bytes that each process sends per all-gather, a multiple of 8.
            timeout: Time limit, in seconds, for the connection and for each all-gather.
        """

    def close(self) -> None:
        """Close all connections."""


def transport_of(coordinator: Coordinator) -> Transport | None:
    """Return the transport for a coordinator's processes; None if no collective operations are available."""
    if isinstance(coordinator, JaxCoordinator):
        return JaxTransport()
    if isinstance(coordinator, TorchCoordinator) and sys.modules["torch.distributed"].is_gloo_available():
        return TorchTransport(coordinator)
    return None


class TorchTransport:
    """A transport based on Gloo process groups, which use host memory and are separate from the program's groups."""

    # Each process in a group has a socket to every other member, so a team that is too large for one group forms a grid
    # of groups. The team gathers first along the rows of the grid, then along its columns.
    largest_group = 64

    def __init__(self, coordinator: TorchCoordinator) -> None:
        self._coordinator = coordinator
        self._groups: list[Any] = []

    def connect(self, name: str, teams: Teams, index: int, nbytes: int, timeout: float) -> AllGather:
        torch: Any = sys.modules["torch"]
        limit = timedelta(seconds=timeout)
        team = next(team for team in teams if index in team)
        width = max(size for size in range(1, min(len(team), self.largest_group) + 1) if len(team) % size == 0)
        row, column = divmod(team.index(index), width)
        stages = []
        for members in (team[row * width : (row + 1) * width], team[column::width]):
            if len(members) > 1:
                store = self._coordinator.new_store(f"{name}/{members[0]}-{members[-1]}")
                store.set_timeout(limit)
                group = torch.distributed.ProcessGroupGloo(store, members.index(index), len(members), limit)
                self._groups.append(group)
                stages.append((group, torch.empty((len(members), nbytes), dtype=torch.uint8)))
                nbytes *= len(members)

        def all_gather(mine: Bytes) -> Bytes:
            sent = torch.from_numpy(mine)
            for group, received in stages:
                group.allgather([list(received)], [sent]).wait()
                sent = received.view(-1)
            gathered: Bytes = sent.numpy().reshape(len(team), -1)
            return gathered

        return all_gather

    def close(self) -> None:
        self._groups.clear()


class JaxTransport:
    """A transport that runs a jitted identity function to gather bytes within each team, on one device per process."""

    def connect(self, name: str, teams: Teams, index: int, nbytes: int, timeout: float) -> AllGather:
        jax: Any = sys.modules["jax"]
        if jax.process_index() != index:  # the indices may differ until jax has initialized the devices
            raise RuntimeError(f"process {index} has the devices of process {jax.process_index()}")
        devices: dict[int, Any] = {}
        for device in sorted(jax.devices(), key=lambda device: (device.process_index, device.id)):
            devices.setdefault(device.process_index, device)
        grid = np.array([[devices[process] for process in team] for team in teams], object)
        mesh = jax.sharding.Mesh(grid, ("team", "member"))
        divided = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("team", "member"))
        gathered = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("team"))
        shape = (*grid.shape, nbytes // 4)  # sent as unsigned integers, which devices never round, widen or normalize
        argument = jax.ShapeDtypeStruct(shape, np.uint32, sharding=divided)
        identity = jax.jit(lambda array: array, out_shardings=gathered).lower(argument).compile()

        def all_gather(mine: Bytes) -> Bytes:
            shard = jax.device_put(mine.view(np.uint32).reshape(1, 1, -1), devices[index])
            array = identity(jax.make_array_from_single_device_arrays(shape, divided, [shard]))
            received = np.asarray(array.addressable_shards[0].data)
            return received.reshape(grid.shape[1], -1).view(np.uint8)

        return all_gather

    def close(self) -> None:
        """Do nothing, because no connection stays open."""
