"""Of arrays that are spread over processes, each process reads what its own devices hold, and that once."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.processes.harness import Process, run_processes

import holdfast as hf
from holdfast.engine.item import TreeReader, load_tree
from holdfast.engine.storage import as_location

SHAPE = (96, 1020)  # 383 KiB of float32
LAYOUT = hf.Layout(chunk_bytes=4096, segment_bytes=65536, data_file_bytes=65536)


UNEVEN = (7, 1020)


def values(shape: tuple[int, ...] = SHAPE) -> np.ndarray[Any, Any]:
    return np.arange(math.prod(shape), dtype=np.float32).reshape(shape)


@pytest.fixture
def saved(tmp_path: Path) -> str:
    """Two arrays in chunks of one row, in several data files."""
    path = str(tmp_path / "ckpt")
    hf.Checkpointer(hf.PyTreeCheckpointHandler(layout=LAYOUT)).save(path, {"w": values(), "uneven": values(UNEVEN)})
    return path


def read_as(path: str, name: str, template: Any) -> tuple[Any, int]:
    reader = TreeReader(as_location(path) / "state")
    opened = reader.bytes_read
    return load_tree(reader, like={name: template}, select=name)[name], reader.bytes_read - opened


def load_jax(process: Process, path: str) -> dict[str, int]:
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    partition: Any = PartitionSpec  # unannotated in jax, both of them
    abstract: Any = jax.ShapeDtypeStruct
    mesh = jax.make_mesh((process.count, 2), ("process", "device"))
    expected = values()
    read = {}
    for name, spec in {
        "rows": ("process",),
        "rows of devices": (("process", "device"),),
        "columns": (None, "process"),
        "device": ("device",),
        "replicated": (),
    }.items():
        sharding = NamedSharding(mesh, partition(*spec))
        found, read[name] = read_as(path, "w", abstract(SHAPE, np.float32, sharding=sharding))
        assert found.sharding == sharding
        assert found.shape == SHAPE
        for shard in found.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), expected[shard.index])
    return read


def load_torch(process: Process, path: str) -> dict[str, int]:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (process.count,))
    read = {}
    found: Any
    for name, shape, placement in (
        ("w", SHAPE, Shard(1)),
        ("w", SHAPE, Replicate()),
        ("uneven", UNEVEN, Shard(0)),
    ):
        expected: Any = distribute_tensor(torch.tensor(values(shape)), mesh, [placement])
        template: Any = torch.nn.Parameter(distribute_tensor(torch.zeros(shape), mesh, [placement]))
        found, read[f"{name} {type(placement).__name__}"] = read_as(path, name, template)
        assert type(found) is type(template)
        assert found.placements == (placement,)
        assert tuple(found.shape) == shape
        assert torch.equal(found.to_local(), expected.to_local())
    return read


@pytest.mark.parametrize("count", [2, 3])
def test_jax(count: int, saved: str) -> None:
    pytest.importorskip("jax")
    whole = values().nbytes
    shares = {"rows": 1 / count, "rows of devices": 1 / count, "columns": 1, "device": 1, "replicated": 1}
    for read in run_processes(load_jax, count, saved, backend="jax", devices_per_process=2):
        for name, share in shares.items():
            assert share * whole <= read[name] <= 1.1 * share * whole, name


def test_torch(saved: str) -> None:
    """Three processes share seven rows as torch.chunk does it: the last one has a single one."""
    pytest.importorskip("torch")
    for index, read in enumerate(run_processes(load_torch, 3, saved, backend="torch")):
        own = (1 if index == 2 else 3) / UNEVEN[0] * values(UNEVEN).nbytes
        assert own <= read["uneven Shard"] <= 1.1 * own
        assert values().nbytes <= read["w Shard"] <= 1.1 * values().nbytes
        assert values().nbytes <= read["w Replicate"] <= 1.1 * values().nbytes
