"""What earlier versions wrote loads, verifies and resumes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.earlier_versions import programs, runs
from tests.equality import assert_same
from tests.lightning_advice import ADVICE

import holdfast as hf
from holdfast import graph

VERSIONS = sorted(path for path in Path(__file__).parent.glob("v*") if path.is_dir())
RUNS = {"flax": programs.flax_run, "lightning": programs.lightning_run}

# What the warning of a run names that does not go on to the end that it has if nothing stops it: it holds state that
# holdfast no longer looks for, and that the program does not hand over. All other runs have the same end.
OF_A_TRAINER = "saved by an earlier version of holdfast"
OTHER_ENDS = {
    "skip_generators": "dataset.transform.rng (saved), dataset.shift.rng (saved)",
    "skip_generators_end": "dataset.transform.rng (saved), dataset.shift.rng (saved)",
    "skip_attributes": "loader.source.rng (saved), loader.turn (saved), loader.order (saved), loader.held (saved)",
    "skip_attributes_end": "loader.turn (saved), loader.order (saved), loader.held (saved)",
    "torchdata": "dataset.shift.rng, dataset.transform.rng",
    "torchdata_end": "dataset.shift.rng, dataset.transform.rng",
    "torchdata_epoch": "dataset.shift.rng, dataset.transform.rng",
    "trainer_generators": OF_A_TRAINER,
    "trainer_attributes": OF_A_TRAINER,
    "trainer_attributes_end": OF_A_TRAINER,
    "trainer_torchdata": OF_A_TRAINER,
    "trainer_several_plain": OF_A_TRAINER,
    "trainer_validation": OF_A_TRAINER,
    "trainer_validation_end": OF_A_TRAINER,
    "trainer_accumulation": OF_A_TRAINER,
}

pytestmark = [
    *ADVICE,
    pytest.mark.filterwarnings("ignore:Starting from v1.9"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:The loaded checkpoint was produced with Lightning"),  # by a newer one
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata with torch 2.13
]


def holding(name: str) -> pytest.MarkDecorator:
    """Returns a mark that runs a test with each version that a file or folder is kept of."""
    found = [version for version in VERSIONS if (version / name).exists()]
    assert found
    return pytest.mark.parametrize("version", found, ids=lambda path: path.name)


def copied(version: Path, name: str, tmp_path: Path) -> Path:
    """Returns a copy of what was kept, as opening a run may change its directory."""
    shutil.copytree(version / name, tmp_path / name)
    return tmp_path / name


@holding("trees")
def test_trees_and_everything_verifies(version: Path) -> None:
    for name, make in programs.TREES.items():
        expected = make()
        assert_same(hf.load(version / "trees" / name, like=expected), expected)
    assert_same(hf.load(version / "trees" / "numpy"), programs.numpy_tree())
    assert_same(hf.load(version / "trees" / "options"), programs.options_tree())
    places = [path.parent for path in version.rglob("checkpoint.json")]
    assert len(places) > 15
    assert [place for place in places if not hf.verify(place).ok] == []


@holding("torch")
def test_states_of_torch_that_were_saved_by_their_attributes(version: Path, tmp_path: Path) -> None:
    place = copied(version, "torch", tmp_path)
    with hf.CheckpointCallback(place, save_interval_steps=1) as checkpoint:
        objects, start = checkpoint.restore_or_initialize(programs.torch_objects())
        assert start == 1
        assert [float(one.detach().flatten()[0]) for one in objects["model"].parameters()] == [-2.0, -1.0]
        assert float(objects["model"][0].seen) == 7
        momenta = [float(one["momentum_buffer"].flatten()[0]) for one in objects["optimizer"].state.values()]
        assert momenta == [4.0, 4.0]
        objects["model"][0].layer.weight.grad = torch.zeros(2, 2)
        objects["optimizer"].step()
        checkpoint.on_step(2, objects)
    with hf.CheckpointCallback(place, save_interval_steps=1) as checkpoint:
        again, start = checkpoint.restore_or_initialize(programs.torch_objects())
    assert start == 2
    assert_same(again["model"].state_dict(), objects["model"].state_dict())


@holding("manager")
def test_a_manager(version: Path, tmp_path: Path) -> None:
    with programs.open_manager(copied(version, "manager", tmp_path)) as manager:
        assert manager.all_steps() == [1, 3, 4, 6]
        assert (manager.best_step(), manager.latest_step(), manager.metadata()) == (3, 6, {"name": "kept"})
        for step in manager.all_steps():
            assert_same(manager.restore(step), programs.manager_item(step))
        assert manager.save(7, programs.manager_item(7), metrics={"score": 1})
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 3, 7]


@holding("graphs")
def test_a_graph(version: Path) -> None:
    expected, objects = programs.graph_objects(), programs.graph_objects()
    with torch.no_grad():
        objects["net"].weight.zero_()
    objects["step"].assign(0)
    objects["notes"]["a"][:] = [0, 0]
    objects["optimizer"].state.clear()

    graph.Checkpoint(**objects).restore(version / "graphs" / "one-1").assert_consumed()

    assert_same(dict(objects["net"].state_dict()), dict(expected["net"].state_dict()))
    assert_same(objects["optimizer"].state_dict(), expected["optimizer"].state_dict())
    assert (int(objects["step"]), objects["notes"]["a"]) == (4, [1, 2])


@holding("graphs")
def test_a_run_of_graphs(version: Path, tmp_path: Path) -> None:
    objects = programs.graph_objects()
    place = copied(version, "graphs", tmp_path) / "run"
    manager = graph.CheckpointManager(graph.Checkpoint(**objects), place, max_to_keep=2)

    assert manager.restore_or_initialize() == manager.latest_checkpoint
    assert int(objects["step"]) == 3
    assert len(manager.checkpoints) == 2


@holding("components")
def test_components(version: Path) -> None:
    expected, trainer = programs.make_trainer(), programs.make_trainer()
    for _ in range(programs.END):
        expected.train()

    trainer.restore_from_path(version / "components", strict=True)
    for _ in range(programs.END - programs.MIDDLE):
        trainer.train()

    assert_same(programs.component_values(trainer), programs.component_values(expected))


@holding("together")
@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_what_two_processes_saved(version: Path, backend: str) -> None:
    expected = dict.fromkeys(("rows", "whole"), programs.together_values())
    assert_same(hf.load(version / "together" / backend, like=expected), expected)


@holding("flax")
@pytest.mark.parametrize("name", RUNS)
def test_a_run_resumes(version: Path, name: str, tmp_path: Path) -> None:
    ended = RUNS[name](copied(version, name, tmp_path))
    with np.load(version / f"{name}_end.npz") as kept:
        for key, expected in kept.items():
            assert_same(np.asarray(ended[key]), expected, key)
    assert ended.get("start", programs.MIDDLE) == programs.MIDDLE


@holding("ends.json")
@pytest.mark.parametrize("name", runs.RUNS)
def test_a_run_that_was_saved_within(
    version: Path, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ends = json.loads((version / "ends.json").read_text())
    assert ends.keys() == runs.RUNS.keys()
    kept = ends[name]
    shutil.unpack_archive(version / f"{name}.tar.xz", tmp_path, filter="data")
    assert hf.verify(tmp_path).ok

    resumed = runs.RUNS[name].whole(tmp_path)

    assert (resumed["start"], resumed["saved"]) == (kept["start"], kept["saved"])
    same_end = (resumed["seen"], resumed["end"]) == (kept["seen"], kept["end"])
    assert same_end == (name not in OTHER_ENDS)
    told = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    if name.startswith("trainer"):
        told = [text for text in told if OF_A_TRAINER in text]
    assert len(told) == (not same_end)
    assert all(OTHER_ENDS[name] in text for text in told)
