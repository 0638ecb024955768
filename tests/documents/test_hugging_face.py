"""The programs of the page about Accelerate and transformers: interrupted at each of several steps, and resumed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.documents.examples import Examples

import holdfast as hf

STOP = '{indent}if os.environ.get("STOP") == str({step}):\n{indent}    os.kill(os.getpid(), 15)\n'


def run(folder: Path, program: str, stop: int | None = None) -> int:
    """Run a program in a folder, which gets SIGTERM in a step."""
    folder.mkdir(exist_ok=True)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "STOP": str(stop)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode in (0, 75), done.stderr
    return done.returncode


@pytest.mark.xdist_group("programs")
@pytest.mark.examples("docs/hugging_face.md", "python 1")
def test_accelerate(examples: Examples, tmp_path: Path) -> None:
    at = "        if checkpoint.on_step("
    program = "import os\n" + examples["python 1"].replace(at, STOP.format(indent="        ", step="step") + at)
    pytest.importorskip("accelerate")
    assert run(tmp_path / "whole", program) == 0
    expected = hf.load(tmp_path / "whole/runs/accelerated", item="state")
    for stop in (5, 8):  # at the end of an epoch, and within one
        assert run(tmp_path / f"{stop}", program, stop) == 75
        assert run(tmp_path / f"{stop}", program) == 0
        found = hf.load(tmp_path / f"{stop}/runs/accelerated", item="state")
        assert str(found) == str(expected)
        np.testing.assert_array_equal(found["model"]["0"]["weight"], expected["model"]["0"]["weight"])


@pytest.mark.xdist_group("programs")
@pytest.mark.examples("docs/hugging_face.md", "python 2")
def test_the_trainer_of_transformers(examples: Examples, tmp_path: Path) -> None:
    at = "        if self.preempted:\n"
    program = examples["python 2"].replace(at, STOP.format(indent="        ", step="state.global_step") + at)
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    assert run(tmp_path / "whole", program) == 0
    last = "runs/trainer/checkpoint-20"
    for stop in (3, 12):
        assert run(tmp_path / f"{stop}", program, stop) == 75
        torn = tmp_path / f"{stop}/runs/trainer/checkpoint-{stop + 1}"
        torn.mkdir()  # a save that was killed
        assert run(tmp_path / f"{stop}", program) == 0
        for file in ("model.safetensors", "optimizer.pt", "scheduler.pt"):
            assert str(hf.load(tmp_path / f"{stop}" / last / file)) == str(hf.load(tmp_path / "whole" / last / file))
