"""Local steps of a Lightning run: it resumes from the newest of them, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.integrations.lightning import program
from tests.integrations.lightning.program import new_directory

import holdfast as hf


@pytest.mark.parametrize(("stop", "first", "saved"), [(5, 4, 1000), (5, 4, 3), (7, 6, 1000), (7, 7, 7)])
def test_a_run_resumes_from_its_local_steps(tmp_path: Path, stop: int, first: int, saved: int) -> None:
    whole = program.run(new_directory(), checkpoint={"save_interval_steps": 1000, "save_at_end": False})
    directory = new_directory()
    local = hf.Local(tmp_path / "memory", every=2, copies=0)
    checkpoint = {"save_interval_steps": saved, "save_at_end": False, "local": local}
    program.interrupt(directory, stop, checkpoint=checkpoint)
    resumed = program.run(directory, seed=2, checkpoint=checkpoint)
    assert resumed.recorder.first_step == first
    assert resumed.final == whole.final


def test_local_steps_of_another_run_do_not_count(tmp_path: Path) -> None:
    checkpoint = {"save_at_end": False, "local": hf.Local(tmp_path / "memory", every=2, copies=0)}
    program.interrupt(new_directory(), 5, checkpoint=checkpoint)
    assert program.run(new_directory(), checkpoint=checkpoint).recorder.first_step == 0
