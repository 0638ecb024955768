"""What some processes save, any other number of processes loads: jax to jax, torch to torch, and across."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.processes.harness import Backend, Process, run_processes
from tests.processes.meshes import distribute, pieces_of, spread, torch_mesh
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


TREES: dict[Backend, Callable[[int], dict[str, Any]]] = {"jax": jax_tree, "torch": torch_tree}


def leaves(tree: dict[str, Any]) -> list[Any]:
    return [leaf for value in tree.values() for leaf in (value if isinstance(value, list) else [value])]


def save(process: Process, path: str, library: Backend) -> None:
    checkpointer = hf.Checkpointer(hf.PyTreeCheckpointHandler(layout=LAYOUT))
    checkpointer.save(f"{path}/{process.count}", TREES[library](process.count))


def load(process: Process, library: Backend, *paths: str) -> int:
    for path in paths:
        template = TREES[library](process.count)
        if library == "torch":
            for leaf in leaves(template):
                getattr(leaf, "to_local", lambda leaf=leaf: leaf)().zero_()
        with enable_x64() if library == "jax" else contextlib.nullcontext():
            found = leaves(hf.load(path, like=template))
        for one, other in zip(found, leaves(TREES[library](process.count)), strict=True):
            assert getattr(one, "sharding", None) == getattr(other, "sharding", None)
            for (place, part), (expected_place, expected) in zip(pieces_of(one), pieces_of(other), strict=True):
                assert place == expected_place
                np.testing.assert_array_equal(part, expected, strict=True)
    return len(paths)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What each number of processes has saved with each library."""
    path = tmp_path_factory.mktemp("saved")
    for count in COUNTS:
        for library in TREES:
            place = str(path / library)
            run_processes(save, count, place, library, backend=library, devices_per_process=DEVICES)
    return path


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("library", TREES)
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
@pytest.mark.parametrize("library", TREES)
def test_any_number_of_processes_loads_it(saved: Path, library: Backend, count: int) -> None:
    paths = [str(saved / each / str(saved_by)) for each in TREES for saved_by in COUNTS]
    found = run_processes(load, count, library, *paths, backend=library, devices_per_process=DEVICES)
    assert found == [len(paths)] * count
