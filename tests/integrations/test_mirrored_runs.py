"""Runs with a mirror are killed, lose their directory, and end bit for bit where an undisturbed run ends."""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.integrations.mirrored import jax_loop, lightning_fit
from tests.processes.harness import run_outcomes, told

import holdfast as hf

PROGRAMS = {"jax": jax_loop, "lightning": lightning_fit}


@functools.cache
def undisturbed(name: str) -> Any:
    with tempfile.TemporaryDirectory() as place:
        return outcome(PROGRAMS[name], f"{place}/run", f"{place}/mirror", {})["final"]


def outcome(program: Callable[..., Any], *arguments: Any) -> Any:
    (found,) = run_outcomes(program, 1, *arguments, backend="none")
    assert found.value is not None, told([found])
    return found.value


@pytest.mark.parametrize(
    ("name", "instant"),
    [
        ("jax", "after some steps"),
        ("jax", "in the middle of an upload"),
        pytest.param("lightning", "after some steps", marks=pytest.mark.sweep),
        ("lightning", "in the middle of an upload"),
    ],
)
def test_killed_and_started_on_another_machine(tmp_path: Path, name: str, instant: str) -> None:
    program, directory, mirror = PROGRAMS[name], f"{tmp_path}/run", f"{tmp_path}/mirror"
    run_outcomes(program, 1, directory, mirror, {}, kill=(0, instant), backend="none")
    there = hf.list_checkpoints(mirror)
    assert there
    assert hf.verify(mirror).ok
    shutil.rmtree(directory)

    other = ("it has a step", 2) if name == "lightning" else ()  # what is drawn at the start is another
    found = outcome(program, directory, mirror, {}, *other)

    assert found["start"] == there[-1].step
    assert found["final"] == undisturbed(name)
    assert hf.verify(directory).ok
    assert hf.verify(mirror).ok
    assert hf.list_checkpoints(mirror)[-1].step == hf.list_checkpoints(directory)[-1].step
