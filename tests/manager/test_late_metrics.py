"""A separate program evaluates the steps of a run that is alive: its metrics rank them, and it disturbs nothing."""

from __future__ import annotations

import functools
import importlib
import math
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.clocks import FakeClock
from tests.manager.runs import commit, opened, reading

import holdfast as hf

OPTIONS = {"best_fn": "return", "best_mode": "max", "max_to_keep": 1, "keep_latest": 2}


def trainer(directory: Path | str, **options: Any) -> hf.CheckpointManager:
    return opened(directory, **{**OPTIONS, **options})


def save(run: hf.CheckpointManager, *steps: int, **options: Any) -> None:
    for step in steps:
        commit(run, step, {"w": np.full(3, step)}, **options)


def test_an_evaluator_beside_the_run_decides_which_step_is_best(tmp_path: Path) -> None:
    with trainer(tmp_path) as run:
        save(run, 1, 2, metrics={"loss": 0.5})
        assert run.best_step() is None
        reader = reading(tmp_path)
        hf.record_metrics(tmp_path, 1, {"return": 7.0, "nan": math.nan})
        reader.record_metrics(2, {"return": 5.0})
        assert run.best_step() == 1
        save(run, 3, 4, 5)
        assert run.all_steps() == [1, 4, 5]
        assert run.why_kept(1) == ("best return (7)",)
        run.record_metrics(4, {"loss": 0.1})  # of the run itself
        hf.record_metrics(tmp_path, 4, {"return": 9.0})
        hf.record_metrics(tmp_path, 4, {"return": 8.0, "length": 3})  # evaluated again: the later value counts
        assert run.metrics(4) == {"loss": 0.1, "return": 8.0, "length": 3}
        save(run, 6, 7)
        assert run.all_steps() == [4, 6, 7]
    with trainer(tmp_path) as run:
        assert run.best_step() == 4
        assert run.metrics(4) == {"loss": 0.1, "return": 8.0, "length": 3}
        run.pin(4)  # its record is written again
    listed = {found.step: found.metrics for found in hf.list_checkpoints(tmp_path)}
    assert listed == {4: {"loss": 0.1, "return": 8.0, "length": 3}, 6: None, 7: None}
    assert hf.verify(tmp_path).ok
    assert not list((tmp_path / "metrics").iterdir())  # the record of step 4 has them


def test_the_latest_value_counts_wherever_it_came_from(tmp_path: Path) -> None:
    with trainer(tmp_path) as run:
        save(run, 1, 2)
        for value, of_the_run in ((1.0, False), (2.0, True), (3.0, False), (4.0, True)):
            record = run.record_metrics if of_the_run else functools.partial(hf.record_metrics, tmp_path)
            record(1, {"return": value, f"only {value}": value})
            assert run.metrics(1)["return"] == value
        everything = run.metrics(1)
    assert len(everything) == 5
    assert {found.step: found.metrics for found in hf.list_checkpoints(tmp_path)}[1] == everything


@pytest.mark.parametrize("prefix", ["v1.5", "v1.5-", "a-1", "1", "modell größe", "x.json"])
def test_metrics_belong_to_steps_of_any_name(prefix: str, tmp_path: Path) -> None:
    with trainer(tmp_path, step_prefix=prefix) as run:
        save(run, 1, 2)
        hf.record_metrics(tmp_path, 1, {"return": 7.0}, step_prefix=prefix)
        assert run.metrics(1) == {"return": 7.0}
        save(run, 3, 4, 5)
        assert run.all_steps() == [1, 4, 5]
        run.delete(1)
        assert not list((tmp_path / "metrics").iterdir())


def test_a_run_reads_each_file_of_metrics_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    original = hf.storage.Location.read_bytes

    def noted(self: hf.storage.Location, *arguments: Any, **options: Any) -> bytes:
        if self.parent.name == "metrics":
            read.append(self.name.partition(".")[0])
        return original(self, *arguments, **options)

    monkeypatch.setattr(hf.storage.Location, "read_bytes", noted)
    with trainer(tmp_path, max_to_keep=100) as run:
        for step in range(10):
            save(run, step)
            hf.record_metrics(tmp_path, step, {"return": float(step)})
        assert run.best_step() == 9
        assert read == [str(step) for step in range(10)]
        run.record_metrics(9, {"return": 10.0})  # the latest value counts, in memory as on disk
        save(run, 10)
        assert run.metrics(9) == {"return": 10.0}
        run.delete(9)
        save(run, 9)  # the metrics of the deleted one are void
        assert run.best_step() == 8
        run.reload()
        assert run.best_step() == 8
        assert read == [str(step) for step in range(10)]


@pytest.mark.parametrize("when", ["before", "between", "after"])
def test_a_step_that_is_replaced_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """Metrics belong to a checkpoint, not to the number of its step, in any order of the writes of both programs."""
    with trainer(tmp_path) as run:
        save(run, 1, 2)

        def replace() -> None:
            save(run, 2, force=True)

        if when == "before":
            replace()
        if when == "between":
            directory_module: Any = importlib.import_module("holdfast.engine.manager.directory")
            write = directory_module.write_late

            def write_late(*arguments: Any) -> None:
                replace()
                write(*arguments)

            monkeypatch.setattr(directory_module, "write_late", write_late)
            with pytest.raises(hf.CheckpointNotFoundError, match="deleted or replaced this checkpoint"):
                hf.record_metrics(tmp_path, 2, {"return": 1.0})
        else:
            hf.record_metrics(tmp_path, 2, {"return": 1.0})
        if when == "after":
            replace()
        assert run.best_step() == (2 if when == "before" else None)
        assert (run.metrics(2) or {}).get("return") == (1.0 if when == "before" else None)
        assert run.restore(2)["w"].tolist() == [2, 2, 2]
    assert hf.verify(tmp_path).ok


def test_what_cannot_be_recorded(tmp_path: Path) -> None:
    with trainer(tmp_path, step_prefix="ckpt") as run:
        save(run, 1)
        for arguments, error in (((2, {"a": 1}), hf.CheckpointNotFoundError), ((1, {"a": "b"}), hf.errors.OptionError)):
            with pytest.raises(error):
                hf.record_metrics(tmp_path, *arguments, step_prefix="ckpt")
        with pytest.raises(hf.CheckpointNotFoundError):
            hf.record_metrics(tmp_path, 1, {"a": 1})
        assert not (tmp_path / "metrics").exists()
        hf.record_metrics(tmp_path, 1, {"a": 1}, step_prefix="ckpt", clock=FakeClock())
        assert run.metrics(1) == {"a": 1}
        [file] = (tmp_path / "metrics").iterdir()
        file.write_bytes(file.read_bytes()[:-7])  # damaged: it does not verify, and says nothing
    with trainer(tmp_path, step_prefix="ckpt") as run:
        assert run.metrics(1) is None
        run.delete(1)


def test_metrics_that_a_deletion_in_a_store_has_left_go_with_the_next_run() -> None:
    """A deletion there removes only those that are known, as a list would take a request each time."""
    url = f"memory://late/{uuid.uuid4().hex}"
    with hf.CheckpointManager(url) as run:
        for step in (1, 2):
            run.save(step, {"w": 1.0}, force=True)
        run.wait_until_finished()
        for step in (1, 2):
            hf.record_metrics(url, step, {"loss": 1.0})
        run.delete(1)
    with hf.CheckpointManager(url) as run:
        run.acquire()
    assert [entry.name.split(".")[0] for entry in (hf.storage.as_location(url) / "metrics").entries()] == ["2"]
