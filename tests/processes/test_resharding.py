"""What some processes save, any other number of processes loads: jax to jax, torch to torch, and across."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.processes.harness import Backend, Process, run_processes
from tests.processes.meshes import distribute, spread, torch_mesh
from tests.versions import enable_x64

import holdfast as hf

COUNTS, LIBRARIES = (1, 2, 3, 4), ("jax", "torch")
DEVICES = 2  # of each jax process
SPREAD = 1.2  # times its even share, at most, is what a process writes


def arrays() -> dict[str, Any]:
    """What is saved, as numpy holds it: sizes that 1, 2, 3 and 4 processes can share, and some that they cannot."""
    numbers = np.random.default_rng(7)
    return {
        "rows": numbers.normal(size=(48, 40)).astype(np.float32),
        "columns": numbers.normal(size=(10, 96)),
        "both": numbers.integers(0, 1000, (24, 8, 3), np.int64),
        "replicated": numbers.normal(size=(300, 400)).astype(np.float32),
        "small": [numbers.normal(size=7).astype(np.float32) for _ in range(20)],
        "uneven": numbers.normal(size=(7, 5)).astype(np.float32),
        "step": np.int32(7),
    }


LAYOUT = hf.Layout(chunk_bytes=4096 * 4, segment_bytes=4096 * 16, data_file_bytes=4096 * 64)
AXES: dict[str, tuple[Any, ...]] = {
    "rows": ("process",),
    "columns": (None, ("process", "device")),
    "both": ("process", "device"),
}


def jax_tree(count: int) -> dict[str, Any]:
    """The arrays on a mesh of all processes' devices."""
    import jax

    mesh = jax.make_mesh((count, DEVICES), ("process", "device"))
    values = arrays()
    small = values.pop("small")
    with enable_x64():
        found = {name: spread(value, mesh, *AXES.get(name, ())) for name, value in values.items()}
        return {**found, "small": [spread(value, mesh) for value in small]}


def torch_tree(count: int) -> dict[str, Any]:
    """The arrays as DTensors, and small ones as plain tensors that are the same everywhere, which process 0 writes."""
    import torch
    from torch.distributed.tensor import Replicate, Shard

    mesh = torch_mesh(count)
    ways: dict[str, Any] = {"rows": Shard(0), "columns": Shard(1), "both": Shard(1), "uneven": Shard(0)}
    ways |= {"replicated": Replicate(), "step": Replicate()}
    values = arrays()
    found: dict[str, Any] = {name: distribute(torch.tensor(values[name]), mesh, way) for name, way in ways.items()}
    return {**found, "small": list(map(torch.tensor, values["small"]))}


def jax_values(tree: Any) -> list[np.ndarray[Any, Any]]:
    import jax

    return [np.asarray(shard.data) for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards]


def torch_values(tree: Any) -> list[np.ndarray[Any, Any]]:
    leaves = [leaf for value in tree.values() for leaf in (value if isinstance(value, list) else [value])]
    return [np.asarray(leaf.to_local() if hasattr(leaf, "to_local") else leaf) for leaf in leaves]


def save(process: Process, path: str, tree: Callable[[int], Any]) -> None:
    checkpointer = hf.Checkpointer(hf.PyTreeCheckpointHandler(layout=LAYOUT))
    checkpointer.save(f"{path}/{process.count}", tree(process.count))


def load_jax(process: Process, *paths: str) -> int:
    import jax

    template = jax_tree(process.count)
    expected = jax_values(template)
    for path in paths:
        with enable_x64():
            found = hf.load(path, like=template)
        assert jax.tree.map(lambda leaf: leaf.sharding, found) == jax.tree.map(lambda leaf: leaf.sharding, template)
        for one, other in zip(jax_values(found), expected, strict=True):
            np.testing.assert_array_equal(one, other)
            assert one.dtype == other.dtype
    return len(paths)


def load_torch(process: Process, *paths: str) -> int:
    import torch

    expected = torch_values(torch_tree(process.count))
    for path in paths:
        template = torch_tree(process.count)
        with torch.no_grad():
            for leaf in torch_values(template):
                leaf[...] = 0
        for one, other in zip(torch_values(hf.load(path, like=template)), expected, strict=True):
            np.testing.assert_array_equal(one, other)
            assert one.dtype == other.dtype
    return len(paths)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What each number of processes has saved with each library."""
    path = tmp_path_factory.mktemp("saved")
    for count in COUNTS:
        run_processes(save, count, str(path / "jax"), jax_tree, backend="jax", devices_per_process=DEVICES)
        run_processes(save, count, str(path / "torch"), torch_tree, backend="torch")
    return path


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_processes_write_evenly_and_once(saved: Path, library: str, count: int) -> None:
    """One process reads it without any framework, each array was written once, and evenly."""
    path = saved / library / str(count)
    found, expected = hf.load(path), arrays()
    for name in ("rows", "columns", "both", "replicated", "uneven", "step"):
        np.testing.assert_array_equal(found[name], expected[name])
    for one, other in zip(found["small"], expected["small"], strict=True):
        np.testing.assert_array_equal(one, other)
    assert hf.verify(path).ok
    sizes = [0] * count
    for file in (path / "state" / "d").iterdir():
        if file.name != "index":
            sizes[int(file.name.split(".")[1])] += file.stat().st_size
    total = sum(leaf.bytes for leaf in hf.describe(path))
    assert total <= sum(sizes) <= 1.05 * total
    assert max(sizes) <= SPREAD * total / count


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(("backend", "load"), [("jax", load_jax), ("torch", load_torch)], ids=LIBRARIES)
def test_any_number_of_processes_loads_it(saved: Path, backend: Backend, load: Any, count: int) -> None:
    paths = [str(saved / library / str(each)) for library in LIBRARIES for each in COUNTS]
    assert run_processes(load, count, *paths, backend=backend, devices_per_process=DEVICES) == [8] * count
