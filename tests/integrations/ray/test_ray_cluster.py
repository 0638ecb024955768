"""Runs on a real local cluster of Ray, where it is installed: faults, each resumed to the same bits, stored once."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.documents.examples import Examples
from tests.equality import assert_same

import holdfast as hf

pytestmark = [
    pytest.mark.sweep,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray[train]"),
    pytest.mark.xdist_group("programs"),
]

PROGRAM = Path(__file__).with_name("program.py")
EVERY = [2, 4, 6, 8, 10, 12]


def run(storage: Path, *command: object) -> int:
    """Runs a program of Ray; returns its status. What it says is in ``log``."""
    storage.mkdir(exist_ok=True)
    environment = {**os.environ, "HOME": str(storage), "RAY_USAGE_STATS_ENABLED": "0"}
    given = [sys.executable, *map(str, command)]
    with (storage / "log").open("a") as log:
        return subprocess.run(given, stdout=log, stderr=subprocess.STDOUT, env=environment, timeout=240).returncode


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    storage = tmp_path_factory.mktemp("whole")
    assert run(storage, PROGRAM, storage, "none") == 0, (storage / "log").read_text()
    return storage


@pytest.mark.parametrize(
    ("fault", "starts", "steps"),
    [
        ("kill", [0, 6], EVERY),
        ("given", [0, 6], EVERY),
        ("term", [0, 9], EVERY),  # beside the step that all have agreed on
        ("drain", [0], EVERY),
        ("driver", [0, 6], EVERY),
        ("keep", [0], [10, 12]),  # Ray deletes
        ("own", [0], [10, 12]),  # the callback deletes
    ],
)
def test_a_run_is_resumed(fault: str, starts: list[int], steps: list[int], whole: Path, tmp_path: Path) -> None:
    status = run(tmp_path, PROGRAM, tmp_path, fault)
    if fault == "driver":
        assert status < 0
        status = run(tmp_path, PROGRAM, tmp_path, fault)
    log = (tmp_path / "log").read_text()
    assert status == 0, log
    for rank in range(2):
        lines = (tmp_path / f"starts.{rank}").read_text().splitlines()
        found = [int(line.split()[0]) for line in lines]
        assert found == starts or (fault == "term" and found[:1] == [0] and found[1] in (10, 11))
    where = tmp_path / "run" / "checkpoints"
    saved = [one.step for one in hf.list_checkpoints(where)]
    noticed = {9, 11} if fault in ("term", "drain") else set()
    assert [step for step in saved if step not in noticed] == steps
    assert_same(hf.load(where / "12", item="state"), hf.load(whole / "run" / "checkpoints" / "12", item="state"))
    records = [path for path in (tmp_path / "run").rglob("checkpoint.json") if path.parent.parent != where]
    assert records == [], "stored once"
    shown = (where / "12").relative_to(tmp_path.parent) if fault == "given" else where / "12"
    assert ("RESULT None None" if fault == "own" else f"'step': 12}} {shown}") in log


def test_jax_is_resumed(tmp_path: Path) -> None:
    found = []
    for kind in ("jax", "jax-kill"):
        storage = tmp_path / kind
        assert run(storage, PROGRAM, storage, kind) == 0, (storage / "log").read_text()
        where = storage / "run" / "checkpoints"
        assert [one.step for one in hf.list_checkpoints(where)] == EVERY
        assert f"'step': 12}} {where / '12'}" in (storage / "log").read_text()
        found.append(hf.load(where / "12", item="state"))
        starts, others = [(storage / f"starts.{rank}").read_text().split() for rank in range(2)]
        assert starts == others
        # The save of step 6 may be under way at the kill.
        assert starts in ([["0"]] if kind == "jax" else [["0", "4"], ["0", "6"]])
    assert_same(*found)


@pytest.mark.examples("docs/ray.md")
def test_the_page_runs_and_resumes(examples: Examples, tmp_path: Path) -> None:
    program, script = examples["python 1"].replace("/tmp/ray_runs", str(tmp_path)), tmp_path / "train_ray.py"
    assert examples["console 1"] == "$ python train_ray.py\n"
    for steps in (25, 45):
        script.write_text(program.replace('"steps": 25', f'"steps": {steps}'))
        assert run(tmp_path, script) == 0, (tmp_path / "log").read_text()
        assert f"step {steps} in {tmp_path}/linear/checkpoints/{steps}" in (tmp_path / "log").read_text()
    assert "resumed from step 25" in (tmp_path / "log").read_text()


def test_components_in_actors(tmp_path: Path) -> None:
    assert run(tmp_path, PROGRAM.with_name("remote_components.py"), tmp_path) == 0, (tmp_path / "log").read_text()
