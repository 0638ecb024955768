"""What some processes save, any other number of processes loads: jax to jax, torch to torch, and across."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.processes.harness import Process, run_processes
from tests.versions import enable_x64

import holdfast as hf

COUNTS = (1, 2, 3, 4)
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


def jax_tree(count: int) -> dict[str, Any]:
    """The arrays on a mesh of all processes' devices."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh((count, DEVICES), ("process", "device"))

    def put(array: Any, *spec: Any) -> Any:
        sharding = NamedSharding(mesh, PartitionSpec(*spec))  # type: ignore[no-untyped-call]  # jax leaves it unannotated
        return jax.make_array_from_callback(np.shape(array), sharding, lambda index: array[index])

    values = arrays()
    with enable_x64():
        return {
            "rows": put(values["rows"], "process"),
            "columns": put(values["columns"], None, ("process", "device")),
            "both": put(values["both"], "process", "device"),
            "replicated": put(values["replicated"]),
            "small": [put(value) for value in values["small"]],
            "uneven": put(values["uneven"]),
            "step": put(values["step"]),
        }


def torch_tree(count: int) -> dict[str, Any]:
    """The arrays as DTensors, and as plain tensors that are the same everywhere."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (count,))
    values = arrays()
    return {
        "rows": distribute_tensor(torch.tensor(values["rows"]), mesh, [Shard(0)]),
        "columns": distribute_tensor(torch.tensor(values["columns"]), mesh, [Shard(1)]),
        "both": distribute_tensor(torch.tensor(values["both"]), mesh, [Shard(1)]),
        "replicated": torch.tensor(values["replicated"]),
        "small": [torch.tensor(value) for value in values["small"]],
        "uneven": distribute_tensor(torch.tensor(values["uneven"]), mesh, [Shard(0)]),
        "step": distribute_tensor(torch.tensor(values["step"]), mesh, [Replicate()]),
    }


def jax_values(tree: Any) -> list[np.ndarray[Any, Any]]:
    import jax

    return [np.asarray(shard.data) for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards]


def torch_values(tree: Any) -> list[np.ndarray[Any, Any]]:
    leaves = [leaf for value in tree.values() for leaf in (value if isinstance(value, list) else [value])]
    return [np.asarray(leaf.to_local() if hasattr(leaf, "to_local") else leaf) for leaf in leaves]


def save_jax(process: Process, path: str) -> None:
    checkpointer = hf.Checkpointer(hf.PyTreeCheckpointHandler(layout=LAYOUT))
    checkpointer.save(f"{path}/{process.count}", jax_tree(process.count))


def save_torch(process: Process, path: str) -> None:
    checkpointer = hf.Checkpointer(hf.PyTreeCheckpointHandler(layout=LAYOUT))
    checkpointer.save(f"{path}/{process.count}", torch_tree(process.count))


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
def saved_by_jax(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("jax")
    path = tmp_path_factory.mktemp("jax")
    for count in COUNTS:
        run_processes(save_jax, count, str(path), backend="jax", devices_per_process=DEVICES)
    return path


@pytest.fixture(scope="module")
def saved_by_torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch")
    path = tmp_path_factory.mktemp("torch")
    for count in COUNTS:
        run_processes(save_torch, count, str(path), backend="torch")
    return path


def check(path: Path, count: int) -> None:
    """One process reads it without any framework, each array was written once, and evenly."""
    found, expected = hf.load(path / str(count)), arrays()
    for name in ("rows", "columns", "both", "replicated", "uneven", "step"):
        np.testing.assert_array_equal(found[name], expected[name])
    for one, other in zip(found["small"], expected["small"], strict=True):
        np.testing.assert_array_equal(one, other)
    assert hf.verify(path / str(count)).ok
    sizes = [0] * count
    for file in (path / str(count) / "state" / "d").iterdir():
        if file.name != "index":
            sizes[int(file.name.split(".")[1])] += file.stat().st_size
    total = sum(leaf.bytes for leaf in hf.describe(path / str(count)))
    assert total <= sum(sizes) <= 1.05 * total
    assert max(sizes) <= SPREAD * total / count


@pytest.mark.parametrize("count", COUNTS)
def test_jax_processes_write_evenly_and_once(saved_by_jax: Path, count: int) -> None:
    check(saved_by_jax, count)


@pytest.mark.parametrize("count", COUNTS)
def test_torch_processes_write_evenly_and_once(saved_by_torch: Path, count: int) -> None:
    check(saved_by_torch, count)


@pytest.mark.parametrize("count", COUNTS)
def test_any_number_of_jax_processes_loads_it(saved_by_jax: Path, saved_by_torch: Path, count: int) -> None:
    paths = [str(path / str(each)) for path in (saved_by_jax, saved_by_torch) for each in COUNTS]
    assert run_processes(load_jax, count, *paths, backend="jax", devices_per_process=DEVICES) == [8] * count


@pytest.mark.parametrize("count", COUNTS)
def test_any_number_of_torch_processes_loads_it(saved_by_jax: Path, saved_by_torch: Path, count: int) -> None:
    paths = [str(path / str(each)) for path in (saved_by_jax, saved_by_torch) for each in COUNTS]
    assert run_processes(load_torch, count, *paths, backend="torch") == [8] * count
