"""A folder with the name of a step that is no checkpoint, as an interrupted rsync leaves one, is left alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.manager.runs import train

import holdfast as hf
from holdfast.cli.main import main

pytestmark = pytest.mark.usefixtures("default_sigterm")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "10" / "state").mkdir(parents=True)
    (tmp_path / "10" / "state" / "d.0").write_bytes(b"half a copy")
    return tmp_path


def contents(run: Path) -> bytes:
    return (run / "10" / "state" / "d.0").read_bytes()


def test_a_run_goes_on_past_it_with_one_warning(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(hf.SaveFailedError, match=f"step 10 is not saved at the end: its folder in {run} is no checkp"):
        train(run, 10, every=5)  # so that the program does not end as one whose last step is saved
    assert caplog.messages == [
        f"{run}: the folder of step 10 holds files and no checkpoint.json, such as after an interrupted copy: it is "
        f"left alone, and no such step is saved. Move it away, or delete it with `holdfast rm {run} 10`",
    ]
    assert train(run, 17, every=5) == [11, 15], "the step after it is saved instead"
    assert contents(run) == b"half a copy"


def test_a_preemption_just_there_saves_the_next_step(run: Path) -> None:
    assert train(run, 20, every=5, told=10) == [5, 11]
    assert contents(run) == b"half a copy"


def test_ls_shows_it_and_only_rm_removes_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(run, 6, every=5)
    assert [(one.step, one.damage is None) for one in hf.list_checkpoints(run)] == [(5, True), (6, True), (10, False)]
    assert main(["ls", str(run)]) == 0
    assert (
        "no checkpoint.json: not a checkpoint, and left alone until `holdfast rm` deletes it" in capsys.readouterr().out
    )
    assert main(["prune", str(run), "--only", "--keep-latest", "1", "--yes"]) == 0
    assert main(["rollback", str(run), "6", "--yes"]) == 0
    assert contents(run) == b"half a copy"
    capsys.readouterr()
    assert main(["verify", str(run)]) == 0
    assert f"{run}/10: not a checkpoint, and left alone" in capsys.readouterr().out
    assert main(["rm", str(run), "10", "--yes"]) == 0
    said = capsys.readouterr()
    assert "delete 10: 1 folder without a checkpoint of" in said.out
    assert "left alone" not in said.out + said.err
    assert not (run / "10").exists()
    assert [one.step for one in hf.list_checkpoints(run)] == [6]
    assert train(run, 11, every=5) == [10]


def test_a_run_that_has_nothing_else_shows_it_and_rm_removes_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert hf.list_checkpoints(run) == [], "a directory of numbered folders is no run"
    assert main(["rm", str(run), "10", "--yes"]) != 0
    with hf.CheckpointCallback(run) as checkpoint:
        checkpoint.restore_or_initialize({"w": np.zeros(2)})
    assert [one.step for one in hf.list_checkpoints(run)] == [10]
    for command in (["prune", "--only", "--keep-latest", "1", "--yes"], ["pin", "10"]):
        assert main([command[0], str(run), *command[1:]]) != 0
    assert contents(run) == b"half a copy"
    assert main(["rm", str(run), "10", "--yes"]) == 0
    assert "deleted 1 folder without a checkpoint" in capsys.readouterr().out
    assert not (run / "10").exists()


@pytest.mark.parametrize("name", ["checkpoint.partial", "checkpoint.deleted", "witness.jsonl"])
def test_what_holdfast_itself_leaves_is_none(name: str, tmp_path: Path) -> None:
    train(tmp_path, 5, every=5)
    (tmp_path / "9").mkdir()
    (tmp_path / "9" / name).write_bytes(b"{}")
    assert [one.step for one in hf.list_checkpoints(tmp_path)] == [5]
