"""Conversions that every process of a program asks for: process 0 does them, once, for all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.processes.harness import Backend, Process, run_processes
from tests.processes.threads import together

import holdfast as hf
from holdfast.engine.distributed.coordinators import Coordinator

ocp: Any = pytest.importorskip("orbax.checkpoint")

COUNT = 3


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with hf.CheckpointManager(tmp_path / "run") as manager:
        for step in (1, 2):
            manager.save(step, {"w": np.full(4, step)}, force=True)
    return tmp_path / "run"


def convert(process: Process, directory: str) -> list[Any]:
    place, run = Path(directory), Path(directory, "run")
    formats: Any = ("safetensors", "torch", "orbax")
    exported = [hf.export_checkpoint(run, place / to, to, step=2) for to in formats]
    in_place = [str(one) for one in hf.add_orbax_metadata(run)]
    hf.export_checkpoint(run, place / "all", "orbax")
    return [exported, in_place, hf.import_checkpoint(place / "all", place / "imported")]


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_an_import_an_export_and_an_export_in_place(run: Path, tmp_path: Path, backend: Backend) -> None:
    first, second = run_processes(convert, 2, str(tmp_path), backend=backend)
    assert first == second
    exported, in_place, imported = first
    assert [done.format for (done,) in exported] == ["safetensors", "torch", "orbax"]
    assert in_place == [str(run / step) for step in ("1", "2")]
    assert [done.step for done in imported] == [1, 2]
    assert hf.verify(tmp_path / "imported").ok
    for name in ("safetensors", "torch", "orbax", "imported"):
        assert hf.load(tmp_path / name)["w"].tolist() == [2] * 4
    with ocp.CheckpointManager(run) as manager:
        args = ocp.args.Composite(state=ocp.args.StandardRestore())
        assert manager.restore(2, args=args).state["w"].tolist() == [2] * 4


def test_a_failure_and_processes_that_ask_for_different_things(run: Path, tmp_path: Path) -> None:
    first, *others = together(
        COUNT, lambda one: hf.import_checkpoint(tmp_path / "nothing", tmp_path / "imported", coordinator=one)
    )
    assert isinstance(first, hf.CheckpointNotFoundError)
    for result in others:
        assert isinstance(result, hf.errors.PeerFailedError)
        assert "process 0 failed: CheckpointNotFoundError" in str(result)

    def export(one: Coordinator) -> Any:
        target = tmp_path / f"{one.process_index == 2}.safetensors"
        return hf.export_checkpoint(run, target, "safetensors", coordinator=one)

    first, second, third = together(COUNT, export)
    assert first == second
    assert isinstance(third, hf.errors.StateError)
    assert "hf.processes.Alone()" in str(third)


def test_one_process_alone(run: Path, tmp_path: Path) -> None:
    targets = [tmp_path / f"{index}.safetensors" for index in range(COUNT)]

    def export(one: Coordinator) -> Any:
        alone = hf.processes.Alone() if one.process_index else one
        return hf.export_checkpoint(run, targets[one.process_index], "safetensors", coordinator=alone)

    assert [done.path for (done,) in together(COUNT, export)] == [str(target) for target in targets]
