"""A program that gets another directory at every start is told where its run is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import holdfast as hf

HYDRA = ("outputs/2026-11-22/20-15-00", "outputs/2026-11-23/08-00-00")


def train(directory: Path, *, until: int | None = None, resume: str = "auto") -> None:
    """Three steps, or a crash before that."""
    with hf.CheckpointCallback(directory, save_interval_steps=1, resume=resume) as checkpoint:  # type: ignore[arg-type]
        state, start = checkpoint.restore_or_initialize({"w": np.zeros(2)})
        for step in range(start + 1, 4):
            checkpoint.on_step(step, state)
            if step == until:
                raise ZeroDivisionError


def interrupted(directory: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        train(directory, until=2)


@pytest.mark.parametrize(
    ("before", "now", "has_finished", "is_named"),
    [
        (*HYDRA, False, True),
        ("multirun/2026-11-22_20-15-00/0", "multirun/2026-11-23_08-00-00/0", False, True),
        ("logs/version_9/checkpoints", "logs/version_10/checkpoints", False, True),
        (*HYDRA, True, False),
        (HYDRA[0], "outputs/mine", False, False),
        (HYDRA[0], f"{HYDRA[1]}/other", False, False),
    ],
)
def test_a_fresh_start_names_the_unfinished_run(
    before: str, now: str, has_finished: bool, is_named: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And not one that has finished, or whose path is another."""
    (train if has_finished else interrupted)(tmp_path / before)
    caplog.set_level("INFO")
    caplog.clear()
    train(tmp_path / now)
    [said] = [line for line in caplog.messages if line.startswith("started")]
    advice = (
        f". {tmp_path / before} holds step 2 of a run that has not finished. If that is this run, give it a directory "
        "that is the same at every start; with Hydra, set hydra.run.dir"
    )
    assert said == f"started fresh: no checkpoint in {tmp_path / now}{advice if is_named else ''}"


def test_a_run_that_must_resume_is_told_too(tmp_path: Path) -> None:
    interrupted(tmp_path / HYDRA[0])

    with pytest.raises(hf.CheckpointNotFoundError, match="20-15-00 holds step 2 of a run that has not finished"):
        train(tmp_path / HYDRA[1], resume="must")
