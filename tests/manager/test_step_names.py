"""Names of steps with leading zeros: new directories have them, all readers take both, earlier versions refuse them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.cli.commands import output_of
from tests.manager.runs import opened, saved

import holdfast as hf
from holdfast.engine import steps as steps_of_a_directory
from holdfast.storage import as_location

EARLIER = re.compile(r"(.*[_-])?(0|[1-9][0-9]*)", re.DOTALL)  # the names that versions without padded ones know


def saves(directory: object, *steps: int, width: int | None = None, **options: Any) -> list[int]:
    given: dict[str, Any] = {"items": lambda step: {"w": np.full(3, step)}, "metrics": lambda step: {"loss": 1 / step}}
    return saved(directory, *steps, step_name_width=width, **given, **options)


def names(directory: object) -> list[str]:
    entries = as_location(str(directory)).entries()
    return sorted(one.name for one in entries if one.is_directory and one.name[-1].isdigit() and one.name[0] != "z")


@pytest.fixture(params=["disk", "store"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "run") if request.param == "disk" else f"memory://{tmp_path.name}/run"


@pytest.mark.parametrize(("prefix", "first"), [(None, "0015"), ("ckpt", "ckpt_0015"), ("ckpt-", "ckpt-0015")])
def test_a_run_keeps_the_names_that_it_began_with(
    prefix: str | None, first: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves(place, 15, width=4, step_prefix=prefix)
    with monkeypatch.context() as earlier:
        earlier.setattr(steps_of_a_directory, "STEP_FOLDER", EARLIER)
        with pytest.raises(hf.errors.CheckpointExistsError, match="zero-padded_0"):
            opened(place, step_prefix=prefix)
        with pytest.raises(hf.errors.FormatVersionError, match="upgrade holdfast to read it"):
            hf.load(place)
    assert saves(place, 160, 12345, step_prefix=prefix, max_to_keep=2) == [160, 12345]
    assert names(place) == sorted([first.replace("0015", "0160"), first.replace("0015", "12345")])
    stored = json.loads((as_location(place) / "options.json").read_bytes())
    assert stored["options"]["step_name_width"] == 4
    np.testing.assert_equal(hf.load(place), {"w": np.full(3, 12345)})


def test_a_directory_that_is_there_keeps_its_names(place: str, caplog: pytest.LogCaptureFixture) -> None:
    saves(place, 1)
    assert saves(place, 2, width=8) == [1, 2]
    assert names(place) == ["1", "2"]
    assert "step_name_width=8 is for new directories" in caplog.text
    assert not (as_location(place) / "zero-padded_0").exists()


def test_both_names_are_read_and_both_of_one_step_are_an_error(tmp_path: Path) -> None:
    saves(tmp_path, 7, 8, 9, width=4)
    (tmp_path / "0008").rename(tmp_path / "8")
    assert saves(tmp_path, 10) == [7, 8, 9, 10]
    with hf.CheckpointManager(tmp_path) as manager:
        np.testing.assert_equal(manager.restore(8), {"w": np.full(3, 8)})
        manager.delete(8)
    assert names(tmp_path) == ["0007", "0009", "0010"]
    shutil.copytree(tmp_path / "0009", tmp_path / "9")
    for call in (hf.CheckpointManager, hf.load):
        with pytest.raises(hf.errors.CheckpointExistsError, match="0009 and 9 beside it are both step 9"):
            call(tmp_path)


def test_metrics_pins_and_deletions_find_the_step(place: str) -> None:
    saves(place, 1, 2, 3, width=3)
    hf.record_metrics(place, 2, {"return": 5.0})
    with hf.CheckpointManager(place) as manager:
        assert manager.metrics(2) == {"loss": 0.5, "return": 5.0}
        manager.pin(1)
        manager.record_metrics(3, {"return": 6.0})
        manager.delete(2)
        assert manager.why_kept(1)[-1] != ""
    assert names(place) == ["001", "003"]


def test_the_mirror_has_such_names_and_gives_the_steps_back(tmp_path: Path) -> None:
    mirror = tmp_path / "mirror"
    saves(tmp_path / "run", 1, 2, width=5, mirror=str(mirror))
    assert names(mirror)[-1] == "00002"
    assert (mirror / "zero-padded_0").is_dir()
    assert saves(tmp_path / "new", 3, mirror=str(mirror))[-2:] == [2, 3]  # of a new machine, without the option
    assert names(mirror)[-1] == "00003"


def test_local_steps_count_in_such_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    local = hf.Local(tmp_path / "memory", every=1, copies=0)
    for start in (0, 3):
        with opened(tmp_path / "run", save_interval_steps=2, step_name_width=6, local=local) as manager:
            restored = manager.restore_latest()
            assert (0 if restored is None else restored.step) == start
            for step in range(start + 1, start + 4):
                manager.save(step, {"w": np.full(3, step)})
    assert names(tmp_path / "run")[:2] == ["000002", "000004"]
    assert "step_name_width" not in caplog.text, "the names are those that it asks for"


def test_commands_show_copy_and_change_such_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, copy = tmp_path / "run", tmp_path / "copy"
    saves(run, 1, 2, 3, width=4)
    listed = json.loads(output_of(capsys, "ls", run, "--json"))
    assert [one["step"] for one in listed["checkpoints"]] == [1, 2, 3]
    assert "3 whole" in output_of(capsys, "verify", run)
    output_of(capsys, "rm", run, 2, "--yes")
    saves(copy, 3)
    output_of(capsys, "cp", run, copy, "--overwrite")
    assert names(copy) == ["0001", "3"]  # A step has one name.
    output_of(capsys, "rollback", run, 1, "--yes")
    assert names(run) == ["0001"]
    shutil.rmtree(copy)
    output_of(capsys, "cp", run, copy)
    assert saves(copy, 4) == [1, 4]
    assert names(copy) == ["0001", "0004"]
