"""Of arrays that are spread over processes, each process reads what its own devices hold, and that once."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.processes.harness import Backend, Process, run_processes
from tests.processes.meshes import abstract, distribute, layers, torch_mesh
from tests.versions import allow_empty_arrays

import holdfast as hf
from holdfast import Transform
from holdfast.engine.arrays import TreeReader, load_tree
from holdfast.engine.arrays.transform import load_transformed_tree
from holdfast.engine.storage import as_location

SHAPE, UNEVEN = (96, 1020), (7, 1020)
LAYOUT = hf.Layout(chunk_bytes=4096, segment_bytes=65536, data_file_bytes=65536)


def values(shape: tuple[int, ...] = SHAPE) -> np.ndarray[Any, Any]:
    return np.arange(math.prod(shape), dtype=np.float32).reshape(shape)


WHOLE = values().nbytes


@pytest.fixture
def saved(tmp_path: Path) -> str:
    """Arrays in chunks of one row, in several data files."""
    path = str(tmp_path / "ckpt")
    tree = {"w": values(), "uneven": values(UNEVEN)}
    hf.Checkpointer(hf.PyTreeCheckpointHandler(layout=LAYOUT)).save(path, tree)
    return path


def read_as(path: str, name: str, template: Any) -> tuple[Any, int]:
    reader = TreeReader(as_location(path) / "state")
    opened = reader.bytes_read
    return load_tree(reader, like={name: template}, select=name)[name], reader.bytes_read - opened


def assert_shards(found: Any, expected: Any) -> None:
    for shard in found.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), expected[shard.index])


def load_jax(process: Process, path: str) -> dict[str, int]:
    import jax

    mesh = jax.make_mesh((process.count, 2), ("process", "device"))
    read = {}
    for name, spec in {
        "rows": ("process",),
        "rows of devices": (("process", "device"),),
        "columns": (None, "process"),
        "device": ("device",),
        "replicated": (),
    }.items():
        template = abstract(values(), mesh, *spec)
        found, read[name] = read_as(path, "w", template)
        assert (found.sharding, found.shape) == (template.sharding, SHAPE)
        assert_shards(found, values())
    return read


@pytest.mark.parametrize("count", [2, 3])
def test_jax(count: int, saved: str) -> None:
    shares = {"rows": 1 / count, "rows of devices": 1 / count, "columns": 1, "device": 1, "replicated": 1}
    for read in run_processes(load_jax, count, saved, backend="jax", devices_per_process=2):
        for name, share in shares.items():
            assert share * WHOLE <= read[name] <= 1.1 * share * WHOLE, name


def load_torch(process: Process, path: str) -> dict[str, int]:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = torch_mesh(process.count)
    read = {}
    for name, shape, placement in (("w", SHAPE, Shard(1)), ("w", SHAPE, Replicate()), ("uneven", UNEVEN, Shard(0))):
        expected = distribute(values(shape), mesh, placement)
        template: Any = torch.nn.Parameter(distribute(torch.zeros(shape), mesh, placement))
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


def test_torch(saved: str) -> None:
    """Three processes share seven rows as torch.chunk does it: the last one has a single one."""
    for index, read in enumerate(run_processes(load_torch, 3, saved, backend="torch")):
        expected = {
            "uneven Shard": (1 if index == 2 else 3) / UNEVEN[0] * values(UNEVEN).nbytes,
            "w of two": 0.0 if index == 1 else WHOLE / 2,
            "w Shard": WHOLE,
            "w Replicate": WHOLE,
        }
        for name, size in expected.items():
            assert size <= read[name] <= 1.1 * size, name


def load_keys(process: Process, path: str) -> int:
    """Typed keys over processes, and an array that is on one device of the last process only."""
    import jax
    from jax.sharding import SingleDeviceSharding

    allow_empty_arrays()
    expected = jax.random.split(jax.random.key(5), 12)
    struct: Any = jax.ShapeDtypeStruct
    last = SingleDeviceSharding(jax.devices()[-1])
    like = {
        "keys": abstract(expected, jax.make_mesh((process.count * 2,), ("x",)), "x"),
        "w": struct((3,), np.float32, sharding=last),
    }
    found: Any = hf.load(path, like=like)
    assert found["keys"].sharding == like["keys"].sharding
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


def load_fsdp(process: Process, path: str) -> None:
    """FSDP2, alone and within a tensor-parallel mesh, of parameters on the meta device."""
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    square = torch_mesh(2, 2, names=("dp", "tp"))
    expected = layers(6, 10, 3).state_dict()
    for tensor_parallel in (False, True):
        with torch.device("meta"):
            model = layers(6, 10, 3)
        if tensor_parallel:
            model = parallelize_module(model, square["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=square["dp"] if tensor_parallel else None)
        template = model.state_dict()
        model.load_state_dict(hf.load(path, like=template), assign=True)
        assert model.state_dict().keys() == expected.keys()
        for name, value in model.state_dict().items():
            assert value.placements == template[name].placements
            assert torch.equal(value.full_tensor(), expected[name]), name


def test_models_of_fsdp2(tmp_path: Path) -> None:
    """Of layers whose sizes four processes cannot share evenly."""
    pytest.importorskip("torch")
    path = str(tmp_path / "ckpt")
    hf.save(path, dict(layers(6, 10, 3).state_dict()))
    run_processes(load_fsdp, 4, path, backend="torch")


# ---- transformed: what is renamed is read in parts

RENAMED = {"renamed": Transform(original_key="w")}
MADE = {
    "again.*": Transform(original_key="w"),
    "value": Transform(original_key="w", value_fn=lambda value: value * 2),
    "tree": Transform(multi_value_fn=lambda tree: tree["w"] + 1),
}


def made() -> dict[str, np.ndarray[Any, Any]]:
    return {"again1": values(), "again2": values(), "value": values() * 2, "tree": values() + 1}


def transform_jax(process: Process, path: str) -> int:
    import jax

    mesh = jax.make_mesh((process.count, 2), ("process", "device"))
    like = abstract(values(), mesh, "process", "device")
    reader = TreeReader(as_location(path) / "state")
    before = reader.bytes_read
    found = load_transformed_tree(reader, RENAMED, {"renamed": like, "kept": 1})
    read = reader.bytes_read - before
    found |= hf.load_transformed(path, MADE, dict.fromkeys(made(), like))
    for name, wanted in {"renamed": values(), **made()}.items():
        assert found[name].sharding == like.sharding
        assert_shards(found[name], wanted)
    return read


def transform_torch(process: Process, path: str) -> int:
    import torch
    from torch.distributed.tensor import Shard

    like = distribute(torch.zeros(SHAPE), torch_mesh(process.count), Shard(0))
    found = hf.load_transformed(path, RENAMED | MADE, dict.fromkeys(["renamed", *made()], like))
    rows = SHAPE[0] // process.count
    mine = slice(process.index * rows, (process.index + 1) * rows)
    for name, wanted in {"renamed": values(), **made()}.items():
        assert found[name].placements == like.placements
        np.testing.assert_array_equal(found[name].to_local().numpy(), wanted[mine])
    return len(found)


def test_transformed_by_jax(saved: str) -> None:
    for read in run_processes(transform_jax, 2, saved, backend="jax", devices_per_process=2):
        assert 0.5 * WHOLE <= read < 0.6 * WHOLE


def test_transformed_by_torch(saved: str) -> None:
    assert run_processes(transform_torch, 2, saved, backend="torch") == [5, 5]


# ---- processes of one machine that read the same bytes share the page cache; parts, and a process alone, go past it


def modes_of_loads(process: Process, directory: str, local: str | None) -> list[list[bool]]:
    """Whether the data files were opened for direct I/O: in a load of everything, and in one of a part."""
    if local is not None:
        os.environ["LOCAL_WORLD_SIZE"] = local
    opened: list[bool] = []
    real = os.open

    def note(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if str(path).endswith(".0.0"):
            opened.append(bool(flags & os.O_DIRECT))
        return real(path, flags, *rest, **options)

    os.open = note
    found = []
    for select in (None, {"w": np.s_[:1]}):
        opened.clear()
        hf.load(directory, select=select)
        found.append(list(opened))
    return found


@pytest.mark.parametrize(
    ("backend", "count", "local", "whole"),
    [("torch", 2, None, False), ("jax", 2, None, False), ("torch", 2, "1", True), ("none", 1, None, True)],
)
def test_what_goes_through_the_page_cache(
    tmp_path: Path, backend: Backend, count: int, local: str | None, whole: bool
) -> None:
    hf.save(tmp_path / "ckpt", {"w": np.arange(4096.0).reshape(64, 64)}, layout=hf.Layout(chunk_bytes=4096))
    found = run_processes(modes_of_loads, count, str(tmp_path / "ckpt"), local, backend=backend)
    assert found == [[[whole], [True]]] * count
