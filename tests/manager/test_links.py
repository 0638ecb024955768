"""Links, pipes and folders in a run directory: what they lead to belongs to something else; nothing waits for it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.manager.damages import DAMAGES, removed
from tests.manager.runs import commit, opened, saved

import holdfast as hf
from holdfast.cli.main import main


def tree(step: int) -> dict[str, np.ndarray]:
    return {"w": np.full(1000, step)}


def make(directory: Path, *steps: int) -> Path:
    saved(directory, *steps, items=tree, metrics=lambda step: {"loss": step})
    return directory


def content(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Another run, of which a step is linked."""
    return make(tmp_path / "other", 3, 4)


@pytest.fixture
def run(tmp_path: Path, other: Path) -> Path:
    """A run with the steps 1, 2 and 4, of which 4 is a link."""
    make(tmp_path / "run", 1, 2)
    (tmp_path / "run" / "4").symlink_to(other / "4")
    return tmp_path / "run"


def test_a_link_is_removed_or_replaced_and_its_step_stays(run: Path, other: Path) -> None:
    before, link = content(other), run / "4"
    with hf.CheckpointManager(run) as manager:
        manager.delete(4)
    assert not link.is_symlink()
    link.symlink_to(other / "4")
    assert main(["rollback", str(run), "2", "--yes"]) == 0
    assert not link.is_symlink()
    link.symlink_to(other / "4")
    with hf.CheckpointManager(run) as manager:
        assert commit(manager, 4, tree(40), force=True)
        np.testing.assert_array_equal(manager.restore(4, tree(0))["w"], tree(40)["w"])
    assert not link.is_symlink()
    removed(link).symlink_to(other / "4")
    with opened(run, max_to_keep=1) as manager:
        assert manager.all_steps() == [1, 2, 4]
        commit(manager, 5, tree(5))
        assert manager.all_steps() == [5]
    assert not link.is_symlink()
    assert content(other) == before


def test_a_linked_step_is_read_and_never_changed(run: Path, other: Path) -> None:
    before, third = content(other), make(run.parent / "third", 4)
    with hf.CheckpointManager(run) as manager:
        changes: tuple[Callable[[], object], ...] = (
            lambda: manager.pin(4),
            lambda: hf.save(run / "4", tree(7), overwrite=True),
            lambda: hf.copy_checkpoint(third, run, overwrite=True),
        )
        for change in changes:
            with pytest.raises(hf.errors.InvalidLocationError, match=r"run/4: this is a symbolic link to .*other/4"):
                change()
        np.testing.assert_array_equal(manager.restore(4, tree(0))["w"], tree(4)["w"])
    # A save of the other run that was interrupted is its own business.
    leftover = shutil.copytree(other / "4", other / "9")
    (leftover / "checkpoint.json").rename(leftover / "checkpoint.partial")
    (run / "9").symlink_to(leftover)
    with hf.CheckpointManager(run) as manager:
        manager.acquire()
    assert (leftover / "checkpoint.partial").exists()
    shutil.rmtree(leftover)
    assert content(other) == before


def test_a_run_behind_a_link_goes_on(tmp_path: Path) -> None:
    real = make(tmp_path / "disk" / "run", 1)
    (tmp_path / "run").symlink_to(real)
    (tmp_path / "below").symlink_to(tmp_path / "disk")
    for step, place in ((2, tmp_path / "run"), (3, tmp_path / "below" / "run")):
        options = hf.CheckpointManagerOptions(max_to_keep=2)
        with hf.CheckpointManager(place, options=options, metadata={"step": step}) as manager:
            commit(manager, step, tree(step), metrics={"loss": 1.0})
            manager.pin(step)
            hf.record_metrics(place, step, {"late": 2.0})
            assert manager.metrics(step) == {"loss": 1.0, "late": 2.0}
    assert [entry.step for entry in hf.list_checkpoints(real)] == [2, 3]
    hf.save(tmp_path / "below" / "one", tree(1))
    (tmp_path / "one").symlink_to(tmp_path / "disk" / "one")
    hf.save(tmp_path / "one", tree(2), overwrite=True)
    np.testing.assert_array_equal(hf.load(tmp_path / "disk" / "one")["w"], tree(2)["w"])


IN_THE_WAY: dict[str, Callable[[Path, Path], object]] = {
    "link to file": lambda place, outside: place.symlink_to(outside / "precious.json"),
    "link to folder": lambda place, outside: place.symlink_to(outside),
    "link to nothing": lambda place, outside: place.symlink_to(outside / "nothing"),
    "link to device": lambda place, outside: place.symlink_to("/dev/zero"),
    "pipe": lambda place, outside: DAMAGES["pipe"](place),
    "folder": lambda place, outside: DAMAGES["folder"](place),
}
OURS = (
    *("owner.json", "events.jsonl", "events.1.jsonl", "options.json", "steps.log", "metadata", "metadata/data.json"),
    *("metrics", "metrics/2.x.json", "3", "3/checkpoint.partial", "2/checkpoint.partial", "2/checkpoint.deleted"),
    *("2/checkpoint.json", "2/state", "2/state/tree.json", "2/state/manifest.ocdbt", "2/state/d", "2/state/d/index"),
)


def life(run: Path, name: str) -> list[Exception]:
    """Lets a run continue, and looks at it in every way; returns what was refused."""
    refused: list[Exception] = []

    def go_on() -> None:
        options = hf.CheckpointManagerOptions(max_to_keep=2)
        with hf.CheckpointManager(run, options=options, metadata={"new": 1}) as manager:
            manager.restore_latest(tree(0))
            commit(manager, 5, tree(5))
            manager.pin(5)

    for work in (go_on, lambda: hf.record_metrics(run, 2, {"late": 1}), lambda: hf.verify(run)):
        try:
            work()
        except hf.HoldfastError as error:
            refused.append(error)
    assert main(["ls", str(run)]) in (0, 1)
    if name.startswith(("events", "metadata", "options")):
        assert main(["report", str(run), "-o", str(run.parent / "page.html")]) in (0, 1)
    return refused


@pytest.mark.parametrize("put", IN_THE_WAY.values(), ids=IN_THE_WAY)
def test_nothing_waits_or_is_written_elsewhere(tmp_path: Path, put: Callable[[Path, Path], object]) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious.json").write_text(json.dumps({"token": "x", "pid": 1}) * 100 + "\n{")
    (outside / "2.x.json").write_text("{}")
    before = content(outside)
    make(tmp_path / "made", 1, 2)
    hf.record_metrics(tmp_path / "made", 2, {"late": 3})
    for number, name in enumerate(OURS):
        run = tmp_path / str(number) / "run"
        shutil.copytree(tmp_path / "made", run)
        place = removed(run / name)
        place.parent.mkdir(exist_ok=True)
        put(place, outside)
        for error in life(run, name):
            assert str(run) in str(error), (name, error)
        assert content(outside) == before, name
        assert sorted(os.listdir(outside)) == sorted(before), name
