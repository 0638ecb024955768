"""Trees of components as items of managers and checkpointers, and in the ordinary commands."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.damage import flip
from torch import nn

import holdfast as hf
from holdfast.cli.main import main
from holdfast.components import Checkpointable, ComponentCheckpointHandler, allow
from holdfast.engine.arrays import ArrayDatabase, TreeReader


class Policy(Checkpointable, nn.Module):
    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.l1 = nn.Linear(size, 2)


class Trainer(Checkpointable):
    def __init__(self, names: tuple[str, ...] = ("main", "past"), rate: float = 0.1) -> None:
        self.policies = {name: Policy() for name in names}
        self.rate = rate
        self.mean = np.zeros(2000)
        self.steps = 0


def trained(steps: int = 1) -> Trainer:
    trainer = Trainer()
    for number, policy in enumerate(trainer.policies.values()):
        nn.init.constant_(policy.l1.weight, steps + number)
    trainer.mean += steps
    trainer.steps = steps
    return trainer


def looks(trainer: Trainer) -> tuple[Any, ...]:
    weights = [policy.l1.weight[0, 0].item() for policy in trainer.policies.values()]
    return trainer.steps, trainer.mean[0], *weights


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with hf.CheckpointManager(tmp_path / "run", components()) as manager:
        for step in (1, 2):
            manager.save(step, {"trainer": trained(step), "note": {"step": step}})
    return tmp_path / "run"


def components(**arguments: Any) -> dict[str, hf.Checkpointer]:
    return {
        "trainer": hf.AsyncCheckpointer(ComponentCheckpointHandler(**arguments)),
        "note": hf.Checkpointer(hf.JsonCheckpointHandler()),
    }


# ---- saving and restoring


def test_what_is_saved_is_what_was_when_it_was_saved(tmp_path: Path) -> None:
    trainer = trained(1)
    with hf.CheckpointManager(tmp_path / "run", components()) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"trainer": trainer, "note": {}})
            trainer.mean += 1  # while it is being written
            trainer.steps += 1
            with torch.no_grad():
                trainer.policies["main"].l1.weight.add_(1)
        manager.wait_until_finished()
        for step in (1, 2, 3):
            found = Trainer.from_checkpoint(tmp_path / "run" / str(step) / "trainer")
            assert looks(found) == (step, step, step, 2)
    assert hf.verify(tmp_path / "run").ok


def test_a_running_component_is_restored_in_place(run: Path) -> None:
    trainer = Trainer(rate=0.5)
    mean, weight = trainer.mean, trainer.policies["main"].l1.weight
    with hf.CheckpointManager(run, components()) as manager:
        assert manager.restore(1, {"trainer": trainer})["trainer"] is trainer
        assert looks(trainer) == (1, 1, 1, 2)
        assert trainer.rate == 0.1
        manager.restore(2, {"trainer": trainer}, restore_kwargs={"trainer": {"keep": "rate"}})
    trainer.rate = 0.5
    assert looks(trainer) == (2, 2, 2, 3)
    assert trainer.mean is mean
    assert trainer.policies["main"].l1.weight is weight


def test_components_that_differ_are_errors_unless_that_is_said(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer(("main", "new"))
    with hf.CheckpointManager(run, components()) as manager:
        with pytest.raises(hf.TreeMismatchError, match="policies/new"):
            manager.restore(2, {"trainer": trainer})
        assert trainer.steps == 0
        manager.restore(2, {"trainer": trainer}, restore_kwargs={"trainer": {"strict": False}})
    assert trainer.steps == 2
    assert any("policies/new" in message for message in caplog.messages)


@pytest.mark.parametrize("item", [None, Trainer, Checkpointable], ids=str)
def test_a_new_component_is_made(run: Path, item: Any) -> None:
    handler, path = ComponentCheckpointHandler(), hf.storage.as_location(run) / "2/trainer"
    found = handler.restore(path, item)
    assert type(found) is Trainer
    assert looks(found) == (2, 2, 2, 3)
    assert handler.restore(path, item, overrides={"rate": 7.0}).rate == 7.0
    with pytest.raises(hf.errors.OptionError, match=r"holds a .*Trainer, which is not a .*Policy"):
        handler.restore(path, Policy)
    with pytest.raises(hf.errors.OptionError, match="keep= applies to a running component"):
        handler.restore(path, item, keep="rate")
    with pytest.raises(hf.errors.OptionError, match="apply to a new component, but a running one was given"):
        handler.restore(path, Trainer(), overrides={"rate": 1})
    with pytest.raises(hf.errors.UnknownArgumentError, match="did you mean strict"):
        handler.restore(path, Trainer(), stric=False)


COMPRESSED = hf.Layout(compression=3, chunk_bytes=4096)


@pytest.mark.parametrize("arguments", [{"compression": 3}, {"layout": COMPRESSED}, {"use_msgpack": True}], ids=str)
def test_the_form_that_a_handler_gives_arrays(tmp_path: Path, arguments: dict[str, Any]) -> None:
    checkpointer = hf.Checkpointer(ComponentCheckpointHandler(**arguments))
    checkpointer.save(tmp_path / "x", trained(2))
    assert looks(checkpointer.restore(tmp_path / "x")) == (2, 2, 2, 3)
    state = tmp_path / "x" / "state"
    if "use_msgpack" in arguments:
        assert (state / "policies" / "main" / "state" / "aggregate.msgpack").exists()
    else:
        assert forms(state / "state") == {(3, 1 if "compression" in arguments else 4)}


def test_the_layout_of_a_path(tmp_path: Path) -> None:
    path = Path(trained(2).save_to_path(tmp_path / "x", layout=COMPRESSED))
    assert forms(path / "state") == {(3, 4)}
    assert forms(path / "policies" / "main" / "state") == {(3, 1)}
    assert looks(Trainer.from_checkpoint(path)) == (2, 2, 2, 3)
    both: dict[str, Any] = {"layout": COMPRESSED, "use_msgpack": True}
    for wrong, message in ((both, "msgpack are not compressed"), ({"layout": {"compression": 3}}, "must be a Layout")):
        with pytest.raises(hf.errors.OptionError, match=message):
            trained().save_to_path(tmp_path / "y", **wrong)
    assert not (tmp_path / "y").exists()


def forms(folder: Path) -> set[tuple[int | None, int]]:
    """Returns the compression of every array with axes, and in how many chunks its first axis is."""
    location = hf.storage.as_location(folder)
    arrays = ArrayDatabase(location).metadata([leaf.name for leaf in TreeReader(location).leaves])
    return {
        (one.compression, -(-one.shape[0] // one.chunk_shape[0])) for one in arrays if one is not None and one.shape
    }


# ---- cost


def test_everything_is_synced_about_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(tuple(f"p{number}" for number in range(8)))
    synced: list[int] = []
    real = os.fsync

    def sync(descriptor: int) -> None:
        synced.append(descriptor)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    for save, again in (
        (lambda path: trainer.save_to_path(path), 9),  # the directories that records of parts come into later
        (lambda path: hf.Checkpointer(ComponentCheckpointHandler()).save(path, trainer), 0),
    ):
        path = tmp_path / f"again_{again}"
        synced.clear()
        save(path)
        there = [path, *path.rglob("*")]
        assert len(there) <= len(synced) <= len(there) + again + 8  # marks, and the directory around


# ---- what others see


def test_every_leaf_of_every_component_is_described(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = {(leaf.item, leaf.path): leaf for leaf in hf.describe(run, 1)}
    of_policies = [f"trainer/policies/{name}: l1/{leaf}" for name in ("main", "past") for leaf in ("weight", "bias")]
    of_trainer = [f"trainer: {name}" for name in ("mean", "rate", "steps")]
    assert {": ".join(key) for key in found} == {*of_policies, *of_trainer, "note: data.json"}
    weight = found["trainer/policies/main", "l1/weight"]
    assert (weight.shape, weight.kind) == ((2, 3), "torch")
    with hf.CheckpointManager(run, components()) as manager:
        structure = manager.structure(2)["trainer"]
    assert structure["policies/main"]["l1"]["weight"].shape == (2, 3)
    assert (structure["mean"].dtype, structure["steps"].shape) == ("float64", ())

    assert main(["show", str(run), "2"]) == 0
    shown = [line.split()[:2] for line in capsys.readouterr().out.splitlines() if "policies" in line]
    assert [f"{item}: {leaf}" for item, leaf in shown] == of_policies
    assert main(["show", f"{run}/2/trainer"]) == 0
    assert "policies/main" in capsys.readouterr().out
    assert main(["show", f"{run}/2/trainer/policies/main"]) == 0
    assert "l1/weight" in capsys.readouterr().out


def test_components_are_loaded_and_exported_as_data(run: Path, tmp_path: Path) -> None:
    found = hf.load(run)
    assert found.keys() == {"trainer", "trainer/policies/main", "trainer/policies/past", "note"}
    assert found["trainer"]["steps"] == 2
    assert found["trainer/policies/past"]["l1"]["weight"].tolist() == [[3] * 3] * 2
    name = "trainer/policies/main"
    assert list(hf.load(run, item=name, select="**/bias")["l1"]) == ["bias"]
    like: Any = {"l1": {"weight": ..., "bias": torch.zeros(2)}}
    assert isinstance(hf.load(run, item=name, like=like)["l1"]["bias"], torch.Tensor)
    with pytest.raises(hf.CheckpointNotFoundError, match="trainer/policies/past"):
        hf.load(run, item="trainer/policies/new")
    formats: tuple[Any, ...] = ("safetensors", "torch")
    for to in formats:
        hf.export_checkpoint(run, tmp_path / to, to, item=name, step=2)
        assert hf.load(tmp_path / to)["l1"]["weight"].tolist() == [[2] * 3] * 2


# ---- damage


FLIPPED = (
    "trainer/state/d/*.0.0",
    "trainer/policies/main/state/d/*.0.0",
    "trainer/policies/main/state/component.json",
    "trainer/policies/main/state/tree.json",
    "trainer/checkpoint.json",
    "trainer/policies/main/checkpoint.json",
    "trainer/metadata.json",
)


@pytest.mark.parametrize("pattern", [*FLIPPED, "missing", "of another tree"])
def test_every_flipped_bit_is_found_and_every_other_file(run: Path, pattern: str) -> None:
    (file,) = (run / "2").glob(pattern if pattern in FLIPPED else "trainer/checkpoint.json")
    if pattern in FLIPPED:
        flip(file, 1)
    elif pattern == "missing":
        file.unlink()
    else:
        shutil.copy(f"{trained(9).save_to_path(run.parent / 'other')}/checkpoint.json", file)

    report = hf.verify(run)
    (problem,) = {one.file for checkpoint in report.checkpoints for one in checkpoint.problems}
    assert problem == str(file.relative_to(run / "2"))
    trainer = Trainer()
    with hf.CheckpointManager(run, components()) as manager:
        if pattern in ("trainer/policies/main/checkpoint.json", "trainer/metadata.json"):
            manager.restore(2, {"trainer": trainer})  # which needs neither
            return
        with pytest.raises(hf.DamagedCheckpointError) as error:
            manager.restore(2, {"trainer": trainer})
        assert pattern != "missing" or "missing" in str(error.value)
        assert looks(trainer)[:2] == (0, 0)
        restored = manager.restore_latest({"trainer": trainer})
        assert restored is not None
        assert restored.step == 1


# ---- compatibility


class EarlierHandler(hf.handlers.CheckpointHandler):
    """An earlier handler for components, which digested every file."""

    kind = "components"

    def save(self, directory: hf.storage.Location, item: Trainer, **kwargs: Any) -> None:
        item.save_to_path(directory)

    def restore(self, directory: hf.storage.Location, item: Any = None, **kwargs: Any) -> Any:
        raise AssertionError("it is read by the one of today")


def test_checkpoints_of_an_earlier_handler(tmp_path: Path) -> None:
    hf.Checkpointer(EarlierHandler()).save(tmp_path / "x", trained(4))
    checkpointer = hf.Checkpointer(ComponentCheckpointHandler())
    trainer = Trainer()
    assert looks(checkpointer.restore(tmp_path / "x", trainer)) == (4, 4, 4, 5)
    assert hf.verify(tmp_path / "x").ok
    assert ("state/policies/main", "l1/weight") in {(leaf.item, leaf.path) for leaf in hf.describe(tmp_path / "x")}


class Listing(hf.handlers.CheckpointHandler):
    """The handler of another library, whose kind happens to have the same name."""

    kind = "components"

    def save(self, directory: hf.storage.Location, item: Any, **kwargs: Any) -> None:
        (directory / "list.json").write_bytes(json.dumps(item).encode())

    def restore(self, directory: hf.storage.Location, item: Any = None, **kwargs: Any) -> Any:
        return json.loads((directory / "list.json").read_bytes())


def test_a_handler_of_ones_own_of_the_same_kind(tmp_path: Path) -> None:
    checkpointer = hf.Checkpointer(Listing())
    checkpointer.save(tmp_path / "x", ["bolt", "nut"])
    assert checkpointer.restore(tmp_path / "x") == ["bolt", "nut"]
    assert [leaf.path for leaf in hf.describe(tmp_path / "x")] == ["list.json"]
    assert hf.verify(tmp_path / "x").ok
    with pytest.raises(hf.HoldfastError, match="no checkpoint here"):
        hf.Checkpointer(ComponentCheckpointHandler()).restore(tmp_path / "x", Trainer())


allow(Trainer)
