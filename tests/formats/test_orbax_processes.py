"""Checkpoints that orbax-checkpoint wrote from several processes, each into a database of its own, in one of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.processes.harness import Process, run_processes

import holdfast as hf

jax: Any = pytest.importorskip("jax")
pytest.importorskip("orbax.checkpoint")

ROWS = np.random.default_rng(0).random((16, 600)).astype(np.float32)


def save_with_orbax(_: Process, directory: str) -> None:
    """Saves an array that is spread over all processes, one that each has, and one that is cut along both axes."""
    import jax
    import orbax.checkpoint as ocp  # type: ignore[import-untyped]  # it comes without type information
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
    spec: Any = PartitionSpec

    def place(array: Any, *axes: Any) -> Any:
        sharding = NamedSharding(mesh, spec(*axes))
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    tree = {
        "rows": place(ROWS, ("x", "y")),
        "blocks": place(ROWS, "x", "y"),
        "everywhere": place(ROWS),
        "key": jax.jit(lambda: jax.random.key(4), out_shardings=NamedSharding(mesh, spec()))(),
        "step": 5,
        "text": "hello",
    }
    for name, arguments in (("zarr2", {}), ("zarr3", {"use_zarr3": True}), ("plain", {"use_ocdbt": False})):
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**arguments)) as checkpointer:
            checkpointer.save(f"{directory}/{name}", args=ocp.args.PyTreeSave(tree))
    with ocp.CheckpointManager(f"{directory}/run") as manager:
        manager.save(5, args=ocp.args.StandardSave({"rows": tree["rows"], "step": 5}))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("processes")
    run_processes(save_with_orbax, 2, str(root), backend="jax", devices_per_process=2)
    return root


@pytest.mark.parametrize("layout", ["zarr2", "zarr3", "plain"])
def test_arrays_of_two_processes(saved: Path, layout: str) -> None:
    if layout != "plain":
        assert (saved / layout / "ocdbt.process_1").is_dir()
    found = hf.load(saved / layout)
    for name in ("rows", "blocks", "everywhere"):
        np.testing.assert_array_equal(found[name], ROWS)
    assert (found["step"], found["text"]) == (5, "hello")
    sharding = jax.sharding.NamedSharding(
        jax.sharding.Mesh(np.array(jax.devices()[:3]), ("z",)), jax.sharding.PartitionSpec(None, "z")
    )
    like = {"rows": jax.ShapeDtypeStruct(ROWS.shape, np.float32, sharding=sharding), "key": jax.random.key(0)}
    placed = hf.load(saved / layout, like=like, select=["rows", "key"])
    assert placed["rows"].sharding == sharding
    np.testing.assert_array_equal(placed["rows"], ROWS)
    assert placed["key"] == jax.random.key(4)
    assert hf.verify(saved / layout).ok


def test_the_run_of_two_processes(saved: Path) -> None:
    assert [one.step for one in hf.list_checkpoints(saved / "run")] == [5]
    np.testing.assert_array_equal(hf.load(saved / "run")["rows"], ROWS)


def test_the_data_of_one_process_is_missing(saved: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(saved / "zarr3", tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "ocdbt.process_1" / "d")
    with pytest.raises(hf.DamagedCheckpointError, match=r"rows: ocdbt\.process_1/d/\w+: it is missing"):
        hf.load(tmp_path / "copy")
    problems = hf.verify(tmp_path / "copy").checkpoints[0].problems
    assert {"rows", "blocks"} <= {problem.leaf for problem in problems}
    assert all(problem.file.startswith("ocdbt.process_1/d/") for problem in problems)
