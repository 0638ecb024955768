"""First loops, as people write them from the tutorials of their libraries: adopted in a few lines, killed, and exact.

``first_loops`` has the programs with holdfast. The plain ones are without the lines that end with ``# +`` and the
indentation of their ``with``, and with those that follow ``# -``. The interrupted ones end with the same bytes.
"""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.starts import backend_of, run

import holdfast as hf

FOLDER = Path(__file__).parent / "first_loops"
PROGRAMS = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.py"))}
NEEDS = {"accelerate": "accelerate", "flax": "flax", "lightning": "lightning", "optax": "optax"}
SAVES = {"flax_linen": 10, "numpy_logistic": 4}  # reports of a run, if they are not those of three epochs of batches
CHANGED_LINES = 8

KILLED = """
import os, runpy, signal, sys
program, name, at = sys.argv[1], sys.argv[2], int(sys.argv[3])
if at:
    if "lightning" in program:
        from holdfast.integrations.lightning import CheckpointCallback as owner
        method = "on_train_batch_end"
    else:
        from holdfast import CheckpointCallback as owner
        method = "on_step"
    inner, calls = getattr(owner, method), []

    def counted(*args, **kwargs):
        calls.append(None)
        if len(calls) == at:
            os.kill(os.getpid(), getattr(signal, name))
        return inner(*args, **kwargs)

    setattr(owner, method, counted)
runpy.run_path("program.py", run_name="__main__")
"""


def plain(program: str) -> str:
    """Returns the program without holdfast."""
    lines: list[str] = []
    block: int | None = None  # the indentation of the added with statement around a line
    for line in program.splitlines():
        indentation = len(line) - len(line.lstrip())
        if line and block is not None and indentation <= block:
            block = None
        if not line.endswith("# +"):
            lines.append(line.replace("# - ", "")[0 if block is None else 4 :])
        elif line.lstrip().startswith("with "):
            block = indentation
    return "\n".join(lines)


def start(program: str, text: str, place: Path, name: str = "SIGKILL", at: int = 0) -> subprocess.CompletedProcess[str]:
    """Runs a program, which gets a signal at one of its reports."""
    place.mkdir(exist_ok=True)
    (place / "program.py").write_text(text, encoding="utf-8")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    return run("-c", KILLED, program, name, at, backend=backend_of(text), cwd=place, env=environment)


def weights(place: Path) -> dict[str, bytes]:
    (file,) = place.glob("model.*")
    if file.suffix == ".npz":
        with np.load(file) as arrays:
            return {name: arrays[name].tobytes() for name in arrays.files}
    torch = pytest.importorskip("torch")
    found: dict[str, Any] = torch.load(file)
    return {name: tensor.numpy().tobytes() for name, tensor in found.items()}


def needs(program: str) -> None:
    needed = NEEDS.get(program.partition("_")[0], "numpy" if program.startswith("numpy") else "torch")
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"needs {needed}")


def check(program: str, tmp_path: Path, places: list[list[tuple[str, int]]]) -> None:
    """Runs the program in several places, where its processes end one after the other: by what, at which report."""
    needs(program)
    text = PROGRAMS[program]
    done = start(program, plain(text), tmp_path / "plain")
    assert done.returncode == 0, done.stderr
    for number, ends in enumerate(places):
        place = tmp_path / str(number)
        for name, at in ends:
            ended = start(program, text, place, name, at)
            stopped = 128 + signal.SIGTERM if program.startswith("lightning") else 75
            assert ended.returncode == (-signal.SIGKILL if name == "SIGKILL" else stopped), ended.stderr
        last = start(program, text, place)
        assert last.returncode == 0, last.stderr
        assert "not exact" not in last.stderr
        assert weights(place) == weights(tmp_path / "plain"), ends
        assert hf.verify(place / "run").ok


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_is_adopted_in_a_few_lines(program: str) -> None:
    lines = PROGRAMS[program].splitlines()
    added, removed = [line for line in lines if line.endswith("# +")], [line for line in lines if "# - " in line]
    assert max(len(added), len(removed)) <= CHANGED_LINES


@pytest.mark.xdist_group("programs")
@pytest.mark.parametrize("program", ["numpy_logistic", "torch_classic"])
def test_a_program_that_is_killed_and_preempted_ends_as_the_plain_one(program: str, tmp_path: Path) -> None:
    draw, last = random.Random(program), SAVES.get(program, 12) // 2
    check(program, tmp_path, [[("SIGKILL", draw.randint(1, last)), ("SIGTERM", draw.randint(1, last))]])


@pytest.mark.sweep
@pytest.mark.xdist_group("programs")
@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_killed_anywhere_end_as_the_plain_ones(program: str, tmp_path: Path) -> None:
    last = SAVES.get(program, 13)
    kills = [[("SIGKILL", at)] for at in (1, last // 2, last - 1)]
    twice = [("SIGTERM", last // 2), ("SIGKILL", last // 3)]
    check(program, tmp_path, [*kills, [("SIGTERM", last - 1)], twice])
