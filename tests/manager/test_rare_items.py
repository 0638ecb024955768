"""A policy that is saved often, and a replay buffer that is saved rarely: what a restart finds, never a mixture."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.manager.runs import commit, opened
from tests.processes.threads import together

import holdfast as hf
from holdfast.engine.distributed import Coordinator
from holdfast.engine.manager.options import options_document, options_from_document


def manager(directory: Path, coordinator: Coordinator | None = None, **options: Any) -> hf.CheckpointManager:
    items = {name: hf.AsyncCheckpointer(hf.PyTreeCheckpointHandler()) for name in ("policy", "replay")}
    options = {"item_intervals": {"replay": 100}, "barrier_timeout_secs": 30, **options}
    return opened(directory, items, coordinator=coordinator, **options)


def state(step: int) -> dict[str, Any]:
    return {"policy": {"w": np.full(3, step)}, "replay": {"seen": np.full(5, step)}}


def steps_with(directory: Path, item: str) -> list[int]:
    return [found.step for found in hf.list_checkpoints(directory) if (Path(found.path) / item).is_dir()]


def train(directory: Path, first: int, last: int, **options: Any) -> None:
    with manager(directory, **options) as run:
        for step in range(first, last, 30):
            run.save(step, state(step))


def test_a_buffer_is_saved_rarely_and_kept(tmp_path: Path) -> None:
    train(tmp_path, 30, 400)
    assert steps_with(tmp_path, "policy") == list(range(30, 400, 30))
    assert steps_with(tmp_path, "replay") == [30, 120, 210, 300]  # the first, and the first past each multiple
    train(tmp_path, 420, 600)  # a restart changes nothing
    assert steps_with(tmp_path, "replay") == [30, 120, 210, 300, 420, 510]
    with manager(tmp_path, max_to_keep=2) as run:
        run.save(600, state(600))
        commit(run, 630, state(630))
        assert run.all_steps() == [600, 630]
        run.save(660, state(660))
        commit(run, 690, state(690))
        assert run.all_steps() == [600, 660, 690]
        assert run.why_kept(600) == ("the newest with replay",)
        assert [run.item_due("replay", step) for step in (660, 699, 700)] == [False, False, True]
        assert run.item_due("policy", 661)
    assert "the newest with replay" in str([found.kept for found in hf.list_checkpoints(tmp_path)])


def test_a_restore_mixes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path, 100, 200)
    with manager(tmp_path) as run:
        for items in (None, {"policy": None, "replay": None}):
            caplog.clear()
            restored = run.restore_latest(items)
            assert restored is not None
            assert restored.step == 190
            assert list(restored.items) == ["policy"]
            assert "step 190 was saved without replay; step 100 has it, of an earlier moment" in caplog.text
        caplog.clear()
        assert run.restore(190, {"policy": None})["policy"]["w"].tolist() == [190] * 3
        having = run.latest_step("replay")
        assert having == 100
        assert run.restore(having, {"replay": None})["replay"]["seen"].tolist() == [100] * 5
        assert run.restore(having)["policy"]["w"].tolist() == [100] * 3
        assert not [one for one in caplog.records if one.levelno >= logging.WARNING]


def test_what_the_caller_says(tmp_path: Path) -> None:
    with manager(tmp_path) as run:
        run.save(10, {"policy": state(10)["policy"]})  # left out, although it would be due
        run.save(20, state(20))
        run.save(30, state(30), force=True)  # the last save before the end has everything
        with pytest.raises(hf.errors.OptionError, match="saves the items policy, replay; given: replay"):
            run.save(40, {"replay": state(40)["replay"]})
    assert steps_with(tmp_path, "replay") == [20, 30]
    for intervals, message in (
        ({"buffer": 5}, "item_intervals names buffer"),
        ({"policy": 5, "replay": 5}, "names every item"),
        ({"replay": 0}, "must be a dictionary of whole numbers"),
    ):
        with pytest.raises(hf.errors.OptionError, match=message):
            manager(tmp_path, item_intervals=intervals)
    options_from_document(options_document(hf.CheckpointManagerOptions(item_intervals={"replay": 5})))


def test_a_run_that_went_back(tmp_path: Path) -> None:
    train(tmp_path, 90, 400)
    with manager(tmp_path) as run:
        run.restore(150)
        run.delete_after(150)
        run.save(205, state(205))
        run.save(206, state(206))
    assert steps_with(tmp_path, "replay") == [90, 120, 205]


def test_processes_leave_out_the_same(tmp_path: Path) -> None:
    def train(coordinator: Coordinator) -> Any:
        with manager(tmp_path, coordinator) as run:
            for step in (50, 90, 130, 170):
                run.save(step, state(step))
            run.wait_until_finished()
            restored = run.restore_latest()
            return run.latest_step("replay"), None if restored is None else sorted(restored.items)

    assert together(2, train) == [(130, ["policy"])] * 2
    assert steps_with(tmp_path, "replay") == [50, 130]
    assert hf.verify(tmp_path).ok
