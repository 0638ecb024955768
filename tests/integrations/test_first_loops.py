"""First loops, as people write them from the tutorials of their libraries: adopted in a few lines, killed, and exact.

``first_loops/plain`` has the programs without holdfast, and ``first_loops/adopted`` the same with it. The interrupted
programs end with the bytes of the plain ones, or say in their first process what is wrong.
"""

from __future__ import annotations

import difflib
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

FOLDER = Path(__file__).parent / "first_loops"
PROGRAMS = sorted(path.stem for path in (FOLDER / "plain").glob("*.py"))
NEEDS = {"accelerate": "accelerate", "flax": "flax", "keras": "keras", "lightning": "lightning", "optax": "optax"}
TOLD = {
    "torch_state_dicts": "StateError: on_step was given the state dict (model) that restore_or_initialize was given"
}
SAVES = {"flax_linen": 10, "numpy_logistic": 4}  # reports of a run, if they are not those of three epochs of batches
CHANGED_LINES = 8

KILLED = """
import os, runpy, signal, sys
name, at, script = sys.argv[1], int(sys.argv[2]), sys.argv[3]
if at:
    if "lightning" in script:
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
sys.argv = [script]
runpy.run_path(script, run_name="__main__")
"""


def start(
    folder: str, program: str, place: Path, name: str = "SIGKILL", at: int = 0
) -> subprocess.CompletedProcess[str]:
    place.mkdir(exist_ok=True)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    script = FOLDER / folder / f"{program}.py"
    backend = backend_of(script.read_text(encoding="utf-8"))
    return run("-c", KILLED, name, at, script, backend=backend, cwd=place, env=environment)


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


def check(program: str, tmp_path: Path, places: list[tuple[str, int]]) -> None:
    needs(program)
    plain = start("plain", program, tmp_path / "plain")
    assert plain.returncode == 0, plain.stderr
    if program in TOLD:  # at its first report
        told = start("adopted", program, tmp_path / "told")
        assert (told.returncode, TOLD[program] in told.stderr) == (1, True)
        return
    for name, at in places:
        place = tmp_path / f"{name}_{at}"
        first = start("adopted", program, place, name, at)
        stopped = 128 + signal.SIGTERM if program.startswith("lightning") else 75
        assert first.returncode == (-signal.SIGKILL if name == "SIGKILL" else stopped), first.stderr
        second = start("adopted", program, place)
        assert second.returncode == 0, second.stderr
        assert "not exact" not in second.stderr
        assert weights(place) == weights(tmp_path / "plain"), f"{name} at report {at}"


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_is_adopted_in_a_few_lines(program: str) -> None:
    texts = [(FOLDER / folder / f"{program}.py").read_text(encoding="utf-8") for folder in ("plain", "adopted")]
    before, after = ([line.strip() for line in text.splitlines() if line.strip()] for text in texts)
    changed = list(difflib.ndiff(before, after))
    added, removed = (sum(line.startswith(sign) for line in changed) for sign in "+-")
    assert max(added, removed) <= CHANGED_LINES


@pytest.mark.xdist_group("programs")
@pytest.mark.parametrize("program", ["numpy_logistic", "torch_classic"])
def test_a_killed_program_ends_as_the_plain_one(program: str, tmp_path: Path) -> None:
    draw = random.Random(program)
    check(program, tmp_path, [(draw.choice(["SIGKILL", "SIGTERM"]), draw.randint(2, SAVES.get(program, 12)))])


@pytest.mark.sweep
@pytest.mark.xdist_group("programs")
@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_killed_anywhere_end_as_the_plain_ones(program: str, tmp_path: Path) -> None:
    last = SAVES.get(program, 13)
    kills = [("SIGKILL", at) for at in (1, last // 2, last - 1)]
    check(program, tmp_path, [*kills, ("SIGTERM", last // 2), ("SIGTERM", last - 1)])
