"""A checkpoint loaded into another structure by several processes: what is renamed is read in parts."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.processes.harness import Process, run_processes

import holdfast as hf
from holdfast import Transform
from holdfast.engine.arrays import TreeReader
from holdfast.engine.arrays.transform import load_transformed_tree
from holdfast.engine.storage import as_location

SHAPE = (96, 1024)
SIZE = 96 * 1024 * 4
LAYOUT = hf.Layout(chunk_bytes=4096, segment_bytes=65536, data_file_bytes=65536)
RENAMED = {"renamed": Transform(original_key="old")}
MADE = {
    "again.*": Transform(original_key="old"),
    "value": Transform(original_key="old", value_fn=lambda value: value * 2),
    "tree": Transform(multi_value_fn=lambda tree: tree["old"] + 1),
}


def values() -> np.ndarray[Any, Any]:
    return np.arange(SIZE // 4, dtype=np.float32).reshape(SHAPE)


def expected() -> dict[str, np.ndarray[Any, Any]]:
    return {"again1": values(), "again2": values(), "value": values() * 2, "tree": values() + 1}


def load_jax(process: Process, path: str) -> int:
    jax: Any = importlib.import_module("jax")
    mesh = jax.make_mesh((process.count, 2), ("process", "device"))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("process", "device"))
    like = jax.ShapeDtypeStruct(SHAPE, np.float32, sharding=sharding)
    reader = TreeReader(as_location(path) / "state")
    before = reader.bytes_read
    found = load_transformed_tree(reader, RENAMED, {"renamed": like, "kept": 1})
    read = reader.bytes_read - before
    made = hf.load_transformed(path, MADE, dict.fromkeys(expected(), like))
    for name, wanted in {"renamed": values(), **expected()}.items():
        array = found[name] if name == "renamed" else made[name]
        assert array.sharding == like.sharding
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), wanted[shard.index])
    return int(read)


def load_torch(process: Process, path: str) -> int:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (process.count,))
    like = distribute_tensor(torch.zeros(SHAPE), mesh, [Shard(0)])
    found = hf.load_transformed(path, RENAMED | MADE, dict.fromkeys(["renamed", *expected()], like))
    rows = SHAPE[0] // process.count
    mine = slice(process.index * rows, (process.index + 1) * rows)
    for name, wanted in {"renamed": values(), **expected()}.items():
        assert found[name].placements == like.placements
        np.testing.assert_array_equal(found[name].to_local().numpy(), wanted[mine])
    return len(found)


@pytest.fixture
def saved(tmp_path: Path) -> str:
    """An array in chunks of one row, in several data files, and one that no template asks for."""
    path = str(tmp_path / "ckpt")
    tree = {"old": values(), "other": values()}
    hf.Checkpointer(hf.PyTreeCheckpointHandler(layout=LAYOUT)).save(path, tree)
    return path


def test_jax(saved: str) -> None:
    pytest.importorskip("jax")
    for read in run_processes(load_jax, 2, saved, backend="jax", devices_per_process=2):
        assert 0.5 * SIZE <= read < 0.6 * SIZE


def test_torch(saved: str) -> None:
    pytest.importorskip("torch")
    assert run_processes(load_torch, 2, saved, backend="torch") == [5, 5]
