"""The files with what the steps after a save have given: they go where their step goes, and nothing depends on them."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.object_stores.conftest import Store, wait_for_mirror

import holdfast as hf
from holdfast.cli.main import main
from holdfast.engine.format import WITNESS, WITNESS_LIMIT
from holdfast.engine.storage import Location, as_location


def train(place: object, steps: int, **options: Any) -> hf.CheckpointCallback:
    """Trains up to a step, with a save after every fourth; returns the callback, which is closed."""
    options = {"save_interval_steps": 4, "max_to_keep": 2, "save_at_end": False, **options}
    with hf.CheckpointCallback(str(place), **options) as checkpoint:
        state, start = checkpoint.restore_or_initialize({"w": np.arange(4.0)})
        for step in range(start + 1, steps + 1):
            state = {"w": 0.9 * state["w"] + step}
            if checkpoint.on_step(step, state, metrics={"loss": float(state["w"].sum())}).should_stop:
                break
    return checkpoint


def witness(place: object, step: int) -> bytes | None:
    """Returns what is recorded of the steps after a save; None without a file."""
    found = as_location(str(place)) / str(step) / WITNESS
    return found.read_bytes() if found.is_there() else None


def ks(content: bytes | None) -> list[int]:
    """Returns the numbers of the reports that a file has records of; its first line is none of them."""
    assert content is not None
    return [int(line.partition('"k":')[2].partition(",")[0]) for line in content.decode().splitlines()[1:]]


def names(place: object, step: int) -> list[str]:
    return [entry.name for entry in (as_location(str(place)) / str(step)).entries()]


@pytest.fixture(params=["disk", "memory", "s3"])
def run(request: pytest.FixtureRequest, tmp_path: Path, place: str) -> Iterator[str]:
    """The directory of a run, of which nothing is there yet."""
    if request.param == "s3":
        store: Store = request.getfixturevalue("s3")
        yield f"{store.url}/run"
    else:
        yield f"{tmp_path}/run" if request.param == "disk" else place


def test_a_step_is_deleted_with_its_file_and_loses_it_when_it_is_saved_anew(run: str) -> None:
    train(run, 14)
    assert [one.step for one in hf.list_checkpoints(run)] == [8, 12]
    assert (ks(witness(run, 8)), ks(witness(run, 12))) == ([0, 1, 2, 4], [0, 1, 2])
    assert names(run, 4) == []
    assert hf.verify(run).ok
    with hf.CheckpointManager(run, options=hf.CheckpointManagerOptions(max_to_keep=2)) as manager:
        manager.save(12, {"w": np.zeros(4)}, force=True)
    assert WITNESS not in names(run, 12)
    assert ks(witness(run, 8)) == [0, 1, 2, 4]
    assert main(["rm", run, "8", "--yes"]) == 0
    assert names(run, 8) == []
    assert hf.verify(run).ok


def test_a_file_without_a_step_is_no_step_and_prevents_none(run: str) -> None:
    """A resume adds to the records that it was compared with."""
    train(run, 6)
    before = witness(run, 4)
    assert train(run, 9).proof.exact
    after = witness(run, 4)
    assert after is not None
    assert after.startswith(before or b"?")
    assert (ks(before), ks(after)) == ([0, 1, 2], [0, 1, 2, 4])
    stray = as_location(run) / "12"
    stray.make_directory()
    (stray / WITNESS).write_bytes(b"of a step that was deleted while this was written\n")
    assert [one.step for one in hf.list_checkpoints(run)] == [4, 8]
    assert train(run, 13).proof.exact
    assert [one.step for one in hf.list_checkpoints(run)] == [8, 12]
    assert ks(witness(run, 12)) == [0, 1]
    train(run, 13, witness=False)
    assert hf.verify(run).ok


def test_what_is_recorded_late_does_not_bring_a_deleted_step_back(run: str) -> None:
    with hf.CheckpointCallback(run, save_interval_steps=4) as checkpoint:
        state, _ = checkpoint.restore_or_initialize({"w": np.zeros(2)})
        for step in range(1, 9):
            checkpoint.on_step(step, state)
            if step == 5:
                checkpoint.manager.wait_until_finished()
                (as_location(run) / "4").remove_tree()
    assert names(run, 4) == []


# ---- copies and mirrors


def test_copies_have_the_files(run: str, tmp_path: Path) -> None:
    train(run, 9)
    for name in ("witness-3.jsonl", "witness-x.jsonl"):  # that of process 3, and another file
        (as_location(run) / "8" / name).write_bytes(b"{}\n")
    copies = [f"{tmp_path}/copy", f"{run}-copy"]
    for copy in copies:
        hf.copy_checkpoint(run, copy)
        assert [witness(copy, step) for step in (4, 8)] == [witness(run, step) for step in (4, 8)]
        assert [name for name in names(copy, 8) if "-" in name] == ["witness-3.jsonl"]
    train(run, 11)
    for copy in copies:  # the same call again brings what was recorded since
        hf.copy_checkpoint(run, copy)
        assert ks(witness(copy, 8)) == [0, 1, 2]
    assert all(hf.verify(copy).ok for copy in copies)
    hf.copy_checkpoint(f"{run}/8", f"{tmp_path}/one")
    assert train(copies[0], 10).proof.steps == (9, 10)


def test_a_mirror_has_the_files_and_gets_each_twice_at_most(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    write = Location.write_bytes

    def noted(self: Location, data: bytes, **options: Any) -> None:
        if self.name == WITNESS and "-mirror" in self.url:
            sent.append(self.parent.name)
        write(self, data, **options)

    monkeypatch.setattr(Location, "write_bytes", noted)
    mirror = f"{run}-mirror"
    train(run, 14, mirror=mirror, max_to_keep=None)
    kept = [one.step for one in hf.list_checkpoints(mirror)]
    assert kept[-1] == 12
    assert [witness(mirror, step) for step in kept] == [witness(run, step) for step in kept]
    assert all(sent.count(step) <= 2 for step in sent)
    count = len(sent)
    train(run, 14, mirror=mirror, max_to_keep=None)  # nothing is new
    assert len(sent) == count
    as_location(run).remove_tree()
    checkpoint = train(run, 14, mirror=mirror)
    assert (checkpoint.proof.exact, checkpoint.proof.steps) == (True, (13, 14))


def test_a_step_in_the_mirror_gets_what_was_recorded_since(tmp_path: Path, place: str) -> None:
    with hf.CheckpointCallback(tmp_path / "run", save_interval_steps=4, mirror=place) as checkpoint:
        state, _ = checkpoint.restore_or_initialize({"w": np.zeros(2)})
        for step in range(1, 11):
            checkpoint.on_step(step, state)
            if step % 4 == 0:
                checkpoint.manager.wait_until_finished()
                wait_for_mirror(checkpoint.manager, step)
                assert ks(witness(place, step)) == [0]
    assert [ks(witness(place, step)) for step in (4, 8)] == [[0, 1, 2, 4], [0, 1, 2]]


@pytest.mark.usefixtures("default_sigterm")
def test_the_steps_after_a_preemption_arrive_in_the_mirror(tmp_path: Path, place: str) -> None:
    with hf.CheckpointCallback(tmp_path / "run", save_interval_steps=100, mirror=place, grace_secs=60) as checkpoint:
        state, _ = checkpoint.restore_or_initialize({"w": np.zeros(2)})
        for step in range(1, 50):
            if step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            if checkpoint.on_step(step, state).should_stop:
                break
    assert step == 7
    assert ks(witness(place, 3)) == ks(witness(tmp_path / "run", 3)) == [0, 1, 2, 4]


# ---- files that are none


def of_another_checkpoint(file: Path) -> None:
    shutil.copy(file.parents[1] / "4" / WITNESS, file)


KINDS: dict[str, Callable[[Path], object]] = {
    "missing": lambda file: None,
    "empty": lambda file: file.touch(),
    "garbage": lambda file: file.write_bytes(b"\xff{\n[[[\n" + b"0" * 1000),
    "too large": lambda file: file.write_bytes(b"{}\n" * WITNESS_LIMIT),
    "of another checkpoint": of_another_checkpoint,
    "directory": lambda file: (file / "x").mkdir(parents=True),
    "link": lambda file: file.symlink_to(file.with_name("good")),
    "broken link": lambda file: file.symlink_to("nowhere"),
    "pipe": os.mkfifo,
    "unreadable": lambda file: file.touch(mode=0),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_none_is_no_error(tmp_path: Path, kind: str) -> None:
    run, mirror = tmp_path / "run", tmp_path / "mirror"
    train(run, 9)
    file = run / "8" / WITNESS
    good = file.rename(file.with_name("good")).read_bytes()
    KINDS[kind](file)
    assert hf.verify(run).ok
    hf.copy_checkpoint(run, tmp_path / "copy")
    is_copied = kind in ("empty", "garbage", "of another checkpoint")
    if kind != "unreadable" or os.geteuid() != 0:  # root reads everything
        assert (WITNESS in names(tmp_path / "copy", 8)) == is_copied
    checkpoint = train(run, 13, mirror=str(mirror))
    assert (checkpoint.proof.exact, checkpoint.proof.steps) == (None, ())
    assert (run / "8" / "good").read_bytes() == good
    assert [one.step for one in hf.list_checkpoints(mirror)][-1] == 12
    with hf.CheckpointManager(run) as manager:
        manager.save(8, {"w": np.zeros(2)}, force=True)
    assert not os.path.lexists(file) or kind == "directory"
    assert "checkpoint.partial" not in names(run, 8)
    assert main(["rm", str(run), "8", "--yes"]) == 0
    assert not (run / "8").exists()
