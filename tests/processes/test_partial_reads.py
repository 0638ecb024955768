"""Of arrays that are spread over processes, each process reads what its own devices hold, and that once."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.processes.harness import Process, run_processes
from tests.versions import allow_empty_arrays

import holdfast as hf
from holdfast.engine.arrays import TreeReader, load_tree
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
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

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
    some = DeviceMesh("cpu", [0, 2])
    own = torch.zeros(48 if process.index != 1 else 0, 1020)
    template = DTensor.from_local(own, some, [Shard(0)], run_check=False, shape=torch.Size(SHAPE), stride=(1020, 1))
    found, read["w of two"] = read_as(path, "w", template)
    if process.index != 1:
        part = slice(48) if process.index == 0 else slice(48, 96)
        assert torch.equal(found.to_local(), torch.tensor(values()[part]))
    return read


def load_keys(process: Process, path: str) -> int:
    """Typed keys over processes, and an array that is on one device of the last process only."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

    allow_empty_arrays()
    expected = jax.random.split(jax.random.key(5), 12)
    partition: Any = PartitionSpec
    abstract: Any = jax.ShapeDtypeStruct
    spread = NamedSharding(jax.make_mesh((process.count * 2,), ("x",)), partition("x"))
    last = SingleDeviceSharding(jax.devices()[-1])
    like = {
        "keys": abstract((12,), expected.dtype, sharding=spread),
        "w": abstract((3,), np.float32, sharding=last),
    }
    found: Any = hf.load(path, like=like)
    assert found["keys"].sharding == spread
    assert found["w"].sharding == last
    for shard in found["keys"].addressable_shards:
        data = jax.random.key_data(shard.data)
        np.testing.assert_array_equal(data, jax.random.key_data(expected)[shard.index])
    for shard in found["w"].addressable_shards:
        np.testing.assert_array_equal(shard.data, [1, 2, 3])
    return len(found["w"].addressable_shards)


def test_keys_of_jax(tmp_path: Path) -> None:
    jax: Any = pytest.importorskip("jax")
    path = str(tmp_path / "ckpt")
    hf.save(path, {"keys": jax.random.split(jax.random.key(5), 12), "w": np.array([1, 2, 3], np.float32)})
    assert run_processes(load_keys, 2, path, backend="jax", devices_per_process=2) == [0, 1]


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
        half = 0.0 if index == 1 else values().nbytes / 2
        assert half <= read["w of two"] <= 1.1 * half
        assert values().nbytes <= read["w Shard"] <= 1.1 * values().nbytes
        assert values().nbytes <= read["w Replicate"] <= 1.1 * values().nbytes


def network() -> Any:
    """Layers whose sizes four processes cannot share evenly, the same on all of them."""
    import torch

    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.ReLU(), torch.nn.Linear(10, 3))


def load_fsdp(process: Process, path: str) -> int:
    """FSDP2, alone and within a tensor-parallel mesh; parameters on the meta device and on the CPU."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    expected = network().state_dict()
    count = 0
    for meta in (False, True):
        for tensor_parallel in (False, True):
            with torch.device("meta" if meta else "cpu"):
                model = network()
            if tensor_parallel:
                model = parallelize_module(model, square["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
            fully_shard(model, mesh=square["dp"] if tensor_parallel else None)
            template = model.state_dict()
            found = hf.load(path, like=template)
            model.load_state_dict(found, assign=meta)
            for name, value in model.state_dict().items():
                assert value.placements == template[name].placements
                assert torch.equal(value.full_tensor(), expected[name]), name
                count += 1
    return count


def test_models_of_fsdp2(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path = str(tmp_path / "ckpt")
    hf.save(path, dict(network().state_dict()))
    assert run_processes(load_fsdp, 4, path, backend="torch") == [16, 16, 16, 16]
