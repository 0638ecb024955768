"""All-gathers of bytes within teams of processes, by the collective operations of torch or JAX.

Nothing else in this package is a collective operation. Restores use them in the thread of the program, after all
processes have agreed to begin, so that no process enters one alone. Each has a deadline.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .coordinators import Coordinator, JaxCoordinator, TorchCoordinator

Bytes = NDArray[np.uint8]
Teams = tuple[tuple[int, ...], ...]  # teams of equally many processes, which together are all of a program
AllGather = Callable[[Bytes], Bytes]  # takes the bytes of this process, returns those of its team, a row for each


class Transport(Protocol):
    """How the processes of a program send bytes to each other."""

    def connect(self, teams: Teams, index: int, nbytes: int, timeout: float) -> AllGather:
        """Connect the teams; all processes call this, and then the result, equally often.

        Args:
            teams: The teams.
            index: The index of this process.
            nbytes: Bytes that each process sends at a time, a multiple of 8.
            timeout: The seconds that a connection or an all-gather may take.
        """

    def close(self) -> None:
        """End all connections."""


def transport_of(coordinator: Coordinator) -> Transport | None:
    """Return how the processes of a coordinator send bytes; None if they have no collective operations."""
    if isinstance(coordinator, JaxCoordinator):
        return JaxTransport()
    if isinstance(coordinator, TorchCoordinator) and sys.modules["torch.distributed"].is_gloo_available():
        return TorchTransport()
    return None


class TorchTransport:
    """Groups of gloo, between host memories: what was read lies there, and an error of gloo does not end the program.

    The groups of the program are not used, so their operations and timeouts stay as they are.
    """

    def __init__(self) -> None:
        self._groups: list[Any] = []

    def connect(self, teams: Teams, index: int, nbytes: int, timeout: float) -> AllGather:
        torch: Any = sys.modules["torch"]
        distributed: Any = sys.modules["torch.distributed"]
        team = next(team for team in teams if index in team)
        group = distributed.new_group(
            list(team), timedelta(seconds=timeout), "gloo", use_local_synchronization=len(teams) > 1
        )
        self._groups.append(group)
        received = torch.empty((len(team), nbytes), dtype=torch.uint8)

        def all_gather(mine: Bytes) -> Bytes:
            distributed.all_gather(list(received), torch.from_numpy(mine), group)
            gathered: Bytes = received.numpy()
            return gathered

        return all_gather

    def close(self) -> None:
        distributed: Any = sys.modules["torch.distributed"]
        while self._groups:
            distributed.destroy_process_group(self._groups.pop())


class JaxTransport:
    """A jitted identity whose result is less divided than its argument, over one device of each process.

    The elements are integers without a sign, which no device rounds, widens or normalizes.
    """

    def connect(self, teams: Teams, index: int, nbytes: int, timeout: float) -> AllGather:
        jax: Any = sys.modules["jax"]
        if jax.process_index() != index:  # before its devices are used, a program may count processes differently
            raise RuntimeError(f"process {index} has the devices of process {jax.process_index()}")
        devices: dict[int, Any] = {}
        for device in sorted(jax.devices(), key=lambda one: (one.process_index, one.id)):
            devices.setdefault(device.process_index, device)
        grid = np.array([[devices[process] for process in team] for team in teams], object)
        mesh = jax.sharding.Mesh(grid, ("team", "member"))
        divided = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("team", "member"))
        gathered = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("team"))
        shape = (*grid.shape, nbytes // 4)
        argument = jax.ShapeDtypeStruct(shape, np.uint32, sharding=divided)
        identity = jax.jit(lambda array: array, out_shardings=gathered).lower(argument).compile()

        def all_gather(mine: Bytes) -> Bytes:
            own = jax.device_put(mine.view(np.uint32).reshape(1, 1, -1), devices[index])
            array = identity(jax.make_array_from_single_device_arrays(shape, divided, [own]))
            received = np.asarray(array.addressable_shards[0].data)
            return received.reshape(grid.shape[1], -1).view(np.uint8)

        return all_gather

    def close(self) -> None:
        """Nothing stays open."""
