"""Going back to an older step and training on, while later steps of the branch that was left are still there."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.manager.runs import commit, opened, reading, saved
from tests.processes.threads import MemoryCoordinator, together

import holdfast as hf
from holdfast.engine.distributed import Coordinator


def trained(place: object, *steps: int) -> None:
    saved(place, *steps, items=lambda step: {"branch": "old"})


def branches(manager: hf.CheckpointManager) -> dict[int, str]:
    manager.wait_until_finished()
    return {step: manager.restore(step)["branch"] for step in manager.all_steps()}


def test_steps_that_were_left_are_replaced_and_told_of_once(place: str, caplog: pytest.LogCaptureFixture) -> None:
    trained(place, 1, 2, 3, 4)
    with hf.CheckpointManager(place) as manager:
        manager.restore(1)
        assert not manager.should_save(1)
        assert manager.should_save(2), "what is there is of the other branch"
        with pytest.raises(hf.errors.UnsupportedLeafError):
            manager.save(2, {"branch": object()})
        for step in range(2, 6):
            assert manager.save(step, {"branch": "new"})
            assert not manager.should_save(step)
        [warning] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert "went back to step 1, and later steps are there (3, 4)" in warning
        assert "delete_after(1)" in warning
        assert branches(manager) == {1: "old", 2: "new", 3: "new", 4: "new", 5: "new"}


def test_what_is_saved_after_going_back_is_not_deleted_at_once(place: str) -> None:
    trained(place, 10, 20, 30)
    with opened(place, max_to_keep=2) as manager:
        manager.restore(10)
        commit(manager, 11, {"branch": "new"})
        assert manager.all_steps() == [11, 20, 30]
        assert manager.why_kept(11) == ("saved last",)
        commit(manager, 12, {"branch": "new"})
        assert manager.all_steps() == [12, 20, 30]


def test_delete_after(place: str, caplog: pytest.LogCaptureFixture) -> None:
    trained(place, 1, 2, 3, 4)
    with hf.CheckpointManager(place) as manager:
        manager.pin(3)
        (hf.storage.as_location(place) / "4" / "checkpoint.json").write_bytes(b"{")
        manager.reload()
        manager.restore(2)
        assert manager.delete_after(2) == [3, 4]
        assert manager.delete_after(2) == []
        assert manager.latest_step() == 2
        manager.save(3, {"branch": "new"})
        assert branches(manager) == {1: "old", 2: "old", 3: "new"}
        manager.save(4, {"branch": "new"})
        assert manager.delete_after(3) == [4], "the save that is under way counts"
        assert "later steps" not in caplog.text
        with pytest.raises(hf.errors.OptionError, match="must not be negative"):
            manager.delete_after(-1)
    with pytest.raises(hf.errors.StateError, match="read_only"):
        reading(place).delete_after(1)


def test_delete_after_waits_for_processes_that_still_restore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path, 1, 2)
    first_is_there = threading.Event()
    all_of = MemoryCoordinator.try_get_all

    def noting(self: MemoryCoordinator, keys: Sequence[str]) -> list[bytes] | None:
        if self.process_index == 0 and "delete%20after" in keys[0]:
            first_is_there.set()
        return all_of(self, keys)

    monkeypatch.setattr(MemoryCoordinator, "try_get_all", noting)

    def run(coordinator: Coordinator) -> list[str]:
        first = coordinator.process_index == 0
        manager = hf.CheckpointManager(tmp_path, coordinator=coordinator)
        manager.acquire()
        if not first:
            assert first_is_there.wait(20)
        found = manager.restore(2)["branch"]
        manager.delete_after(1)
        first_is_there.set()
        manager.close()
        return [found, *map(str, manager.all_steps())]

    assert together(2, run) == [["old", "1"]] * 2


def test_looking_at_an_older_step_is_no_going_back(place: str, caplog: pytest.LogCaptureFixture) -> None:
    with hf.CheckpointManager(place) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"branch": "old"})
        manager.restore(1)
        manager.save(4, {"branch": "old"})
        assert not manager.save(3, {"branch": "new"})
        assert branches(manager) == dict.fromkeys(range(1, 5), "old")
    assert "later steps" not in caplog.text


def test_a_run_that_restores_nothing_is_told(place: str, caplog: pytest.LogCaptureFixture) -> None:
    trained(place, *range(10, 20))
    caplog.clear()
    with hf.CheckpointManager(place) as manager:
        for step in (1, 2):
            manager.save(step, {"branch": "new"})
        assert not manager.save(10, {"branch": "new"}), "no argument asked to replace it"
    [warning, _] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "this run has not restored the later steps that are there (10, 11, 12, 13, ..., 17, 18, 19)" in warning


@pytest.mark.parametrize("after", [True, False])
def test_what_was_deleted_is_saved_again_and_the_interval_counts_from_what_is_left(after: bool, tmp_path: Path) -> None:
    with opened(tmp_path, save_interval_steps=10) as run:
        for step in (10, 20, 30):
            assert commit(run, step, {"w": 1.0})
        if after:
            run.delete_after(20)
        else:
            run.delete(30)
        assert run.should_save(31)
        assert commit(run, 30, {"w": 2.0})
        assert not run.should_save(31)
        assert run.restore(30) == {"w": 2.0}
        run.delete(10)
        assert not run.should_save(39)
        run.delete_after(0)
        assert run.should_save(31)
