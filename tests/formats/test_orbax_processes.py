"""Checkpoints that orbax-checkpoint wrote from several processes: in one directory, or each on the disk of its host."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.formats.orbax_files import copied
from tests.processes.harness import Process, run_processes

import holdfast as hf

jax: Any = pytest.importorskip("jax")
pytest.importorskip("orbax.checkpoint")

ROWS = np.random.default_rng(0).random((16, 600)).astype(np.float32)


def placed(array: Any, mesh: Any, *axes: Any) -> Any:
    """Spreads an array over a mesh of all processes."""
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def save_in_one_directory(_: Process, directory: str) -> None:
    """Saves an array that is spread over all processes, one that each has, and one that is cut along both axes."""
    import orbax.checkpoint as ocp  # type: ignore[import-untyped]  # it comes without type information

    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    tree = {
        "rows": placed(ROWS, mesh, ("x", "y")),
        "blocks": placed(ROWS, mesh, "x", "y"),
        "everywhere": placed(ROWS, mesh),
        "key": jax.jit(lambda: jax.random.key(4), out_shardings=replicated)(),
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
    run_processes(save_in_one_directory, 2, str(root), backend="jax", devices_per_process=2)
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
    assert [one.step for one in hf.list_checkpoints(saved / "run")] == [5]
    np.testing.assert_array_equal(hf.load(saved / "run")["rows"], ROWS)


def test_the_data_of_one_process_is_missing(saved: Path, tmp_path: Path) -> None:
    copy = copied(saved / "zarr3", tmp_path)
    shutil.rmtree(copy / "ocdbt.process_1" / "d")
    with pytest.raises(hf.DamagedCheckpointError, match=r"rows: ocdbt\.process_1/d/\w+: it is missing"):
        hf.load(copy)
    problems = hf.verify(copy).checkpoints[0].problems
    assert {"rows", "blocks"} <= {problem.leaf for problem in problems}
    assert all(problem.file.startswith("ocdbt.process_1/d/") for problem in problems)


# ---- each process on the disk of its host, by the emergency and replicator managers of Orbax


on_hosts = pytest.mark.needs("orbax-checkpoint", "0.12")
NAMES = ("rows", "columns", "everywhere")


def save_on_each_host(process: Process, directory: str) -> None:
    """Saves in two slices of two processes, where each slice has everything, and each process half of a slice."""
    import orbax.checkpoint as ocp
    from etils import epath  # type: ignore[import-untyped]
    from orbax.checkpoint._src.multihost import multihost  # type: ignore[import-untyped]
    from orbax.checkpoint.experimental.emergency import (  # type: ignore[import-untyped]
        checkpoint_manager as emergency,
    )
    from orbax.checkpoint.experimental.emergency import (
        replicator_checkpoint_manager as replicator,
    )

    multihost.initialize_runtime_to_distributed_ids()
    multihost.initialize_distributed_to_device_ids()
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("slice", "data"))

    def state(step: int) -> Any:
        cuts = zip(NAMES, [("data",), (None, "data"), ()], strict=True)
        arrays = {name: placed(ROWS, mesh, *axes) for name, axes in cuts}
        return {**arrays, "step": placed(np.array(step, np.int32), mesh)}

    def run(manager: Any) -> None:
        with manager:
            for step in (1, 2):
                manager.save(step, args=ocp.args.Composite(state=ocp.args.PyTreeSave(state(step))))
                manager.wait_until_finished()

    for name in ("emergency", "replicator"):
        for folder in (f"host_{process.index}", "persistent"):
            Path(directory, name, folder).mkdir(parents=True, exist_ok=True)
    local = epath.Path(directory) / "emergency" / f"host_{process.index}"
    options = emergency.CheckpointManagerOptions(
        local=emergency.LocalCheckpointOptions(save_interval_steps=1, max_to_keep=2),
        persistent=emergency.PersistentCheckpointOptions(save_interval_steps=2),
    )
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state(0))
    run(emergency.CheckpointManager(local, local.parent / "persistent", mesh, abstract, options=options))
    local = epath.Path(directory) / "replicator" / f"host_{process.index}"
    run(replicator.ReplicatorCheckpointManager(local, global_mesh=mesh))


@pytest.fixture(scope="module")
def hosts_saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("saved")
    run_processes(save_on_each_host, 4, str(root), backend="jax")
    return root


def gathered(saved: Path, tmp_path: Path, *hosts: str) -> Path:
    """Copies what hosts have into one folder, as rsync does."""
    for host in hosts:
        shutil.copytree(saved / host, tmp_path / "gathered", dirs_exist_ok=True)
    return tmp_path / "gathered"


def check(tree: Any, step: int) -> None:
    assert all(np.array_equal(tree[name], ROWS) for name in NAMES)
    assert tree["step"] == step


@on_hosts
@pytest.mark.parametrize(
    "hosts",
    [
        ("emergency/persistent",),
        ("emergency/host_2", "emergency/host_3"),
        ("replicator/host_0", "replicator/host_1"),
        ("replicator/host_2", "replicator/host_1"),
        ("replicator/host_3", "replicator/host_0", "replicator/host_2", "replicator/host_1"),
    ],
    ids=lambda hosts: "+".join(host.partition("/")[2] for host in hosts),
)
def test_hosts_that_have_everything_together(hosts_saved: Path, tmp_path: Path, hosts: tuple[str, ...]) -> None:
    path = gathered(hosts_saved, tmp_path, *hosts)
    check(hf.load(path), 2)
    if hosts != ("emergency/persistent",):  # where every second step is
        check(hf.load(path / "1"), 1)
    with hf.open(path) as tree:
        assert np.array_equal(tree["columns"][3:5, 290:310], ROWS[3:5, 290:310])
    assert hf.verify(path).ok
    hf.import_checkpoint(path, tmp_path / "imported")
    check(hf.load(tmp_path / "imported"), 2)
    assert sorted(leaf.path for leaf in hf.describe(path)) == sorted([*NAMES, "step"])


@on_hosts
@pytest.mark.parametrize("hosts", [("emergency/host_3",), ("replicator/host_0", "replicator/host_2")], ids=str)
def test_a_part_is_refused_with_the_way_on(hosts_saved: Path, tmp_path: Path, hosts: tuple[str, ...]) -> None:
    path = gathered(hosts_saved, tmp_path, *hosts)
    known = rf"{path}/2/state has the parts that {len(hosts)} of 4 processes saved"
    way_on = rf"rsync -a HOST:DIRECTORY/2 {path}\).*\n  columns: .*\n  rows: "
    with pytest.raises(hf.DamagedCheckpointError, match=f"{known}.*{way_on}"):
        hf.load(path)
    assert np.array_equal(hf.load(path, select="everywhere")["everywhere"], ROWS)
    steps = hf.verify(path).checkpoints
    assert [{problem.leaf for problem in step.problems} for step in steps] == [{"rows", "columns"}] * 2


@on_hosts
def test_lost_files(hosts_saved: Path, tmp_path: Path) -> None:
    path = gathered(hosts_saved, tmp_path, *(f"replicator/host_{index}" for index in range(4))) / "2"
    database = path / "state" / "ocdbt.process_1"
    (database / "d").rename(path / "lost")
    with pytest.raises(hf.DamagedCheckpointError, match=r"ocdbt.process_1 is damaged: .*No such file"):
        hf.load(path)
    (path / "lost").rename(database / "d")
    (database / "manifest.ocdbt").unlink()
    with pytest.raises(hf.DamagedCheckpointError, match=r"ocdbt.process_1"):
        hf.load(path)
    (path / "process_metadata" / "global_process_metadata.json").write_text(json.dumps({}))
    with pytest.raises(hf.DamagedCheckpointError, match=r"global_process_metadata.json is damaged: expected a list"):
        hf.load(path)
