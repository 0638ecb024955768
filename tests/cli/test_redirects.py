"""Folders of a rehearsal that stand in for the directories of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.cli import child
from holdfast.cli.drill.plan import DrillPlan
from holdfast.cli.drill.rehearsal import Redirects
from holdfast.engine.observer import DRILL, OBSERVER, process_observer
from holdfast.engine.storage import DataFile, Location, as_location


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Lets this process be one that is rehearsed; returns the folder with the directories that stand in."""
    (tmp_path / "drill").mkdir()
    DrillPlan(name="a").write(tmp_path / "drill")
    monkeypatch.setenv(OBSERVER, child.ENTRY)
    monkeypatch.setenv(DRILL, str(tmp_path / "drill"))
    monkeypatch.chdir(tmp_path)
    process_observer.cache_clear()
    yield tmp_path / "drill" / "runs"
    process_observer.cache_clear()


def test_what_is_claimed_is_elsewhere_with_all_below(folder: Path, tmp_path: Path) -> None:
    as_location("weights/a", writes=True)
    for name in ("weights", "weights/ab"):
        assert as_location(name).path == tmp_path / name, "what is not claimed stays where it is"
    claimed = as_location("runs/x", writes=True)
    assert claimed.path.parent == folder
    assert claimed.name.startswith("x.")
    assert as_location(tmp_path / "runs" / "x" / "7") == claimed / "7" == as_location("runs/../runs/x/7")
    assert as_location(claimed, writes=True) == claimed, "never twice"
    assert as_location("runs/y/x", writes=True).path != claimed.path
    assert as_location("runs/x/checkpoints", writes=True) == claimed / "checkpoints"

    again = Redirects(folder)  # the next start of the program
    assert again.target(str(tmp_path / "runs" / "x"), writes=False) == claimed.url
    lines = (folder / "claims.jsonl").read_text().splitlines()
    assert len(lines) == 4, "one line for each directory that is written to"


@pytest.mark.parametrize("url", ["s3://bucket/run", "gs://bucket/a b", "memory://x", "/", "/…/ü"])
def test_any_place_becomes_a_folder(folder: Path, url: str) -> None:
    target = as_location(url, writes=True)
    assert target.is_local
    assert target.path.parent == folder
    assert target.name.isascii()


def test_everything_that_saves_says_so(folder: Path, tmp_path: Path) -> None:
    import numpy as np

    from holdfast import graph

    tree = {"w": np.ones(3)}
    hf.save("one", tree)
    hf.Checkpointer(hf.PyTreeCheckpointHandler()).save("two", tree)
    with contextlib.closing(hf.AsyncCheckpointer(hf.PyTreeCheckpointHandler())) as background:
        background.save("three", tree)
    with hf.CheckpointManager("four") as manager:
        manager.save(1, tree)
    with graph.CheckpointManager(graph.Checkpoint(step=3), "five", max_to_keep=1) as numbered:
        numbered.save()
    graph.Checkpoint(step=3).save("six")
    graph.Checkpoint(step=3).write("seven")
    with hf.CheckpointCallback("eight", save_interval_steps=1) as callback:
        callback.on_step(1, tree)

    assert {path.name for path in tmp_path.iterdir()} == {"drill"}
    assert {line.split('"')[3].rpartition("/")[2] for line in (folder / "claims.jsonl").read_text().splitlines()} == {
        *("one", "two", "three", "four", "five", "six", "seven", "eight")
    }
    assert (hf.load("one")["w"] == 1).all()
    assert hf.list_checkpoints("four")[0].step == 1
    with pytest.raises(hf.CheckpointNotFoundError):
        hf.record_metrics("nine", 1, {"loss": 0.5})
    assert not (tmp_path / "nine").exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda place: place.write_bytes(b"x"),
        lambda place: place.write_data(0, []),
        lambda place: place.write_data_files([DataFile("a", 0, [])]),
        lambda place: place.write_text("x"),
        lambda place: place.open("ab"),
        lambda place: place.make_directory(),
        lambda place: place.mkdir(),
        lambda place: place.rename("other"),
        lambda place: place.remove(),
        lambda place: place.remove_tree(),
        lambda place: as_location("saved").share(place, as_location("saved").identity()),
    ],
)
def test_what_does_not_say_so_changes_nothing(folder: Path, tmp_path: Path, change: Callable[[Location], Any]) -> None:
    (tmp_path / "saved").write_text("mine")
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "kept").write_text("mine")
    with pytest.raises(hf.errors.StateError, match=r"real.*change this place in a rehearsal"):
        change(as_location("real/kept"))
    assert (tmp_path / "real" / "kept").read_text() == "mine"
    assert [path.name for path in (tmp_path / "real").iterdir()] == ["kept"]
