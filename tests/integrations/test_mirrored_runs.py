"""Runs with a mirror are killed, lose their directory, and end bit for bit where an undisturbed run ends."""

from __future__ import annotations

import functools
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.integrations.mirrored import jax_loop, lightning_fit, wait_for
from tests.integrations.served import Server
from tests.processes.harness import run_outcomes, told

import holdfast as hf
from holdfast import graph
from holdfast.recipes.configuration import load_configuration
from holdfast.recipes.runner import run

PROGRAMS: dict[str, Callable[..., Any]] = {"jax": jax_loop, "lightning": lightning_fit}


@pytest.fixture(scope="module")
def launch(server: Server) -> dict[str, Any]:
    """Options of the processes of each program: a trainer's are forked from one that has imported it."""
    return {"jax": {}, "lightning": {"launch": server.launch}}


@pytest.fixture(scope="module")
def undisturbed(launch: dict[str, Any]) -> Callable[[str], Any]:
    """Returns the end of a run of a program that nothing has killed."""

    @functools.cache
    def final(name: str) -> Any:
        with tempfile.TemporaryDirectory() as place:
            return outcome(PROGRAMS[name], f"{place}/run", f"{place}/mirror", {}, **launch[name])["final"]

    return final


def outcome(program: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    (found,) = run_outcomes(program, 1, *arguments, backend="none", **options)
    assert found.value is not None, told([found])
    return found.value


@pytest.mark.parametrize(
    ("name", "moment"),
    [
        ("jax", "after some steps"),
        ("jax", "in the middle of an upload"),
        pytest.param("lightning", "after some steps", marks=pytest.mark.sweep),
        ("lightning", "in the middle of an upload"),
    ],
)
def test_killed_and_started_on_another_machine(
    tmp_path: Path, launch: dict[str, Any], undisturbed: Callable[[str], Any], name: str, moment: str
) -> None:
    program, directory, mirror = PROGRAMS[name], f"{tmp_path}/run", f"{tmp_path}/mirror"
    run_outcomes(program, 1, directory, mirror, {}, kill=(0, moment), backend="none", **launch[name])
    there = hf.list_checkpoints(mirror)
    assert there
    assert hf.verify(mirror).ok
    shutil.rmtree(directory)

    other = ("it has a step", 2) if name == "lightning" else ()  # what is drawn at the start is another
    found = outcome(program, directory, mirror, {}, *other, **launch[name])

    assert found["start"] == there[-1].step
    assert found["final"] == undisturbed(name)
    assert hf.verify(directory).ok
    assert hf.verify(mirror).ok
    assert hf.list_checkpoints(mirror)[-1].step == hf.list_checkpoints(directory)[-1].step


@pytest.mark.usefixtures("default_sigterm")
@pytest.mark.parametrize(("grace", "fits"), [(60, True), (None, True), (0.001, False)])
def test_a_preempted_run_uploads_its_last_step_if_there_is_time(
    tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture, grace: float | None, fits: bool
) -> None:
    mirror = hf.Mirror(place, save_interval_steps=100)
    with hf.CheckpointCallback(
        tmp_path / "run",
        save_interval_steps=100,
        mirror=mirror,
        grace_secs=grace,
        witness_steps_after_signal=0,
    ) as checkpoint:
        state, _ = checkpoint.restore_or_initialize({"w": np.arange(9.0)})
        checkpoint.on_step(100, state)
        checkpoint.manager.wait_until_finished()
        wait_for(checkpoint.manager, "it has a step")
        os.kill(os.getpid(), signal.SIGTERM)
        assert checkpoint.on_step(101, state).should_stop
        assert [one.step for one in hf.list_checkpoints(place)] == ([100, 101] if fits else [100])
    assert [one.step for one in hf.list_checkpoints(tmp_path / "run")] == [100, 101]
    what = f"step 101 is in {tmp_path}/run/101, and not in the mirror {place}, where the newest is step 100"
    assert (what in caplog.text) != fits


def test_a_step_that_only_the_mirror_has_can_be_named(tmp_path: Path, place: str) -> None:
    for steps in ((1, 2), (3, 4)):
        with hf.CheckpointCallback(tmp_path / "run", save_interval_steps=1, max_to_keep=1, mirror=place) as checkpoint:
            state, _ = checkpoint.restore_or_initialize({"w": np.zeros(3)})
            for step in steps:
                checkpoint.on_step(step, {"w": state["w"] + step})
                checkpoint.manager.wait_until_finished()
                checkpoint.manager.pin(step) if step == 2 else None
    shutil.rmtree(tmp_path / "run")
    with hf.CheckpointCallback(tmp_path / "run", resume=2, mirror=place, save_at_end=False) as checkpoint:
        state, start = checkpoint.restore_or_initialize({"w": np.zeros(3)})
    assert (start, state["w"].tolist()) == (2, [2.0] * 3)


def test_graphs_have_mirrors(tmp_path: Path, place: str) -> None:
    for count in (1, 2):
        counter = graph.Checkpoint(step=0)
        with graph.CheckpointManager(counter, tmp_path / "run", max_to_keep=2, mirror=place) as manager:
            found = manager.restore_or_initialize()
            assert (found is not None) == (count == 2)
            assert counter.step == (10 if count == 2 else 0)
            counter.step += 10
            manager.save()
        shutil.rmtree(tmp_path / "run")
    assert [one.step for one in hf.list_checkpoints(place)] == [1, 2]


def test_a_recipe_goes_on_from_its_mirror(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    monkeypatch.chdir(tmp_path)
    keys = [
        "model.hidden=[4]",
        f"checkpoint.mirror={{url: {place}, max_to_keep: 1}}",
        "checkpoint.save_interval_steps=5",
    ]
    first = run(load_configuration("flax_digits", [*keys, "train.steps=10"]))
    shutil.rmtree(tmp_path / "runs")
    with pytest.raises(hf.errors.OptionError, match="configuration differs"):
        run(load_configuration("flax_digits", [*keys, "train.steps=15", "seed=5"]))
    shutil.rmtree(tmp_path / "runs")
    second = run(load_configuration("flax_digits", [*keys, "train.steps=15"]))
    assert (first.start, first.step) == (0, 10)
    assert (second.start, second.step) == (10, 15)
    assert [one.step for one in hf.list_checkpoints(place)] == [15]
    shutil.rmtree(tmp_path / "runs")
    with pytest.raises(hf.CheckpointExistsError):
        run(load_configuration("flax_digits", [*keys, "checkpoint.resume=never"]))
