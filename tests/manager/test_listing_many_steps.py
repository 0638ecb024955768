"""Many steps in one directory: what a listing sees, and the index that earlier versions kept beside them."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tests.manager.runs import commit, opened

import holdfast as hf
from holdfast.engine.steps import read_record
from holdfast.engine.storage import as_location

COUNT = 80  # more than are read one after the other


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with many steps, whose records differ."""
    model = tmp_path / "model"
    hf.save(model, {"is": 1})
    record = read_record(as_location(model))
    for step in range(1, COUNT + 1):
        folder = tmp_path / "run" / str(step)
        shutil.copytree(model, folder)
        (folder / "checkpoint.json").write_bytes(replace(record, step=step, metrics={"loss": 1 / step}).encode())
    return tmp_path / "run"


def test_every_record_is_read_and_damage_is_found(run: Path) -> None:
    (run / "7/checkpoint.json").write_bytes(b"{")
    (run / "9/checkpoint.json").unlink()
    listed = hf.list_checkpoints(run)
    assert [one.step for one in listed] == [*range(1, COUNT + 1)]
    assert [one.step for one in listed if one.damage is not None] == [7, 9]
    assert all(one.metrics == {"loss": 1 / one.step} for one in listed if one.step not in (None, 7, 9))
    with hf.CheckpointManager(run) as manager:
        assert manager.all_steps() == [step for step in range(1, COUNT + 1) if step not in (7, 9)]


@pytest.mark.parametrize("content", [b'["holdfast", "steps", 1]\n', b"torn", b""])
def test_the_index_of_an_earlier_version_is_not_read_and_goes_with_the_next_run(run: Path, content: bytes) -> None:
    index = run / "steps.log"
    index.write_bytes(content)
    assert len(hf.list_checkpoints(run)) == COUNT
    with opened(run, read_only=True) as reader:
        assert len(reader.all_steps()) == COUNT
    assert index.exists()
    with hf.CheckpointManager(run) as manager:
        commit(manager, COUNT + 1, {"is": 2})
        assert not index.exists()
        assert manager.restore() == {"is": 2}


def test_what_an_interrupted_save_left_in_a_step_goes_and_whole_steps_stay(run: Path) -> None:
    (run / "3/checkpoint.partial").write_text("{}")
    (run / "5/.holdfast-0123").write_text("{}")
    (run / "6/checkpoint.json").replace(run / "6/checkpoint.deleted")
    with hf.CheckpointManager(run) as manager:
        manager.acquire()
        assert manager.all_steps() == [step for step in range(1, COUNT + 1) if step != 6]
    assert {path.name for step in (3, 4, 5) for path in (run / str(step)).iterdir()} == {"checkpoint.json", "state"}
    assert not (run / "6").exists()
