"""Checkpoints that Orbax's emergency and replicator managers wrote, each process on the disk of its host."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.processes.harness import Process, run_processes

import holdfast as hf

pytest.importorskip("jax")
pytest.importorskip("orbax.checkpoint")
pytestmark = pytest.mark.needs("orbax-checkpoint", "0.12")

ROWS = np.random.default_rng(0).random((16, 600)).astype(np.float32)
NAMES = ("rows", "columns", "everywhere")


def save_with_orbax(process: Process, directory: str) -> None:
    """Saves in two slices of two processes, where each slice has everything, and each process half of a slice."""
    import jax
    import orbax.checkpoint as ocp  # type: ignore[import-untyped]  # it comes without type information
    from etils import epath  # type: ignore[import-untyped]
    from jax.sharding import NamedSharding, PartitionSpec
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
    spec: Any = PartitionSpec
    struct: Any = jax.ShapeDtypeStruct

    def place(array: Any, *axes: Any) -> Any:
        sharding = NamedSharding(mesh, spec(*axes))
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    def state(step: int) -> Any:
        arrays = {"rows": place(ROWS, "data"), "columns": place(ROWS, None, "data"), "everywhere": place(ROWS)}
        return {**arrays, "step": place(np.array(step, np.int32))}

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
    abstract = jax.tree.map(lambda x: struct(x.shape, x.dtype, sharding=x.sharding), state(0))
    run(emergency.CheckpointManager(local, local.parent / "persistent", mesh, abstract, options=options))
    local = epath.Path(directory) / "replicator" / f"host_{process.index}"
    run(replicator.ReplicatorCheckpointManager(local, global_mesh=mesh))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("saved")
    run_processes(save_with_orbax, 4, str(root), backend="jax")
    return root


def copied(saved: Path, tmp_path: Path, *hosts: str) -> Path:
    """Copy what hosts have into one folder, as rsync does."""
    for host in hosts:
        shutil.copytree(saved / host, tmp_path / "copied", dirs_exist_ok=True)
    return tmp_path / "copied"


def check(tree: Any, step: int) -> None:
    assert all(np.array_equal(tree[name], ROWS) for name in NAMES)
    assert tree["step"] == step


def test_the_persistent_directory_is_a_run(saved: Path) -> None:
    check(hf.load(saved / "emergency" / "persistent"), 2)


@pytest.mark.parametrize(
    "hosts",
    [
        ("emergency/host_2", "emergency/host_3"),
        ("replicator/host_0", "replicator/host_1"),
        ("replicator/host_2", "replicator/host_1"),
        ("replicator/host_3", "replicator/host_0", "replicator/host_2", "replicator/host_1"),
    ],
    ids=lambda hosts: "+".join(host.partition("/")[2] for host in hosts),
)
def test_hosts_that_have_everything_together(saved: Path, tmp_path: Path, hosts: tuple[str, ...]) -> None:
    path = copied(saved, tmp_path, *hosts)

    check(hf.load(path), 2)
    check(hf.load(path / "1"), 1)
    with hf.open(path) as tree:
        assert np.array_equal(tree["columns"][3:5, 290:310], ROWS[3:5, 290:310])
    assert hf.verify(path).ok
    hf.import_checkpoint(path, tmp_path / "imported")
    check(hf.load(tmp_path / "imported"), 2)
    assert sorted(leaf.path for leaf in hf.describe(path)) == sorted([*NAMES, "step"])


@pytest.mark.parametrize("hosts", [("emergency/host_3",), ("replicator/host_0", "replicator/host_2")], ids=str)
def test_a_part_is_refused_with_the_way_on(saved: Path, tmp_path: Path, hosts: tuple[str, ...]) -> None:
    path = copied(saved, tmp_path, *hosts)

    known = rf"{path}/2/state has the parts that {len(hosts)} of 4 processes saved"
    way_on = rf"rsync -a HOST:DIRECTORY/2 {path}\).*\n  columns: .*\n  rows: "
    with pytest.raises(hf.DamagedCheckpointError, match=f"{known}.*{way_on}"):
        hf.load(path)

    assert np.array_equal(hf.load(path, select="everywhere")["everywhere"], ROWS)
    steps = hf.verify(path).checkpoints
    assert [{problem.leaf for problem in step.problems} for step in steps] == [{"rows", "columns"}] * 2


def test_lost_files(saved: Path, tmp_path: Path) -> None:
    path = copied(saved, tmp_path, *(f"replicator/host_{index}" for index in range(4))) / "2"
    data = path / "state" / "ocdbt.process_1" / "d"
    data.rename(path / "lost")

    with pytest.raises(hf.DamagedCheckpointError, match=r"ocdbt.process_1 is damaged: .*No such file"):
        hf.load(path)

    (path / "lost").rename(data)
    (path / "state" / "ocdbt.process_1" / "manifest.ocdbt").unlink()
    with pytest.raises(hf.DamagedCheckpointError, match=r"ocdbt.process_1"):
        hf.load(path)
    (path / "process_metadata" / "global_process_metadata.json").write_text(json.dumps({}))
    with pytest.raises(hf.DamagedCheckpointError, match=r"global_process_metadata.json is damaged: expected a list"):
        hf.load(path)
