"""Arrays and tensors on meshes of several processes, for the functions that they run."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from holdfast.engine.pytree import ArrayLeaf, describe


def sharding(mesh: Any, *spec: Any) -> Any:
    """Return the sharding of jax in which each axis of an array is divided along axes of a mesh."""
    import jax

    named: Any = jax.sharding.NamedSharding
    partition: Any = jax.sharding.PartitionSpec
    return named(mesh, partition(*spec))


def spread(array: Any, mesh: Any, *spec: Any) -> Any:
    """Return an array of jax of which each process has its parts."""
    import jax

    make: Any = jax.make_array_from_callback
    return make(np.shape(array), sharding(mesh, *spec), lambda index: array[index], dtype=array.dtype)


def abstract(array: Any, mesh: Any, *spec: Any) -> Any:
    """Return the template of an array of jax on a mesh."""
    import jax

    struct: Any = jax.ShapeDtypeStruct
    return struct(array.shape, array.dtype, sharding=sharding(mesh, *spec))


def distribute(array: Any, mesh: Any, *placements: Any) -> Any:
    """Return a DTensor of which each process has its part; none is sent the values."""
    import torch
    from torch.distributed.tensor import distribute_tensor

    tensor = array if isinstance(array, torch.Tensor) else torch.from_numpy(array)
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def torch_mesh(*shape: int, names: tuple[str, ...] | None = None) -> Any:
    """Return a mesh of processes on the CPU."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def box(start: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(low, low + size) for low, size in zip(start, shape, strict=True))


def pieces_of(value: Any) -> list[tuple[tuple[slice, ...], np.ndarray[Any, Any]]]:
    """Return what this process holds of an array or tensor, with the places."""
    [leaf] = describe(["x"], [value])
    assert isinstance(leaf, ArrayLeaf)
    return [(box(piece.start, piece.array.shape), piece.array) for piece in leaf.pieces]


def layers(*sizes: int) -> Any:
    """Return a network of torch that has the same parameters on all processes."""
    import torch

    torch.manual_seed(3)
    linear = [torch.nn.Linear(before, after) for before, after in itertools.pairwise(sizes)]
    return torch.nn.Sequential(linear[0], *(one for layer in linear[1:] for one in (torch.nn.ReLU(), layer)))
