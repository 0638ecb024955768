"""Type checkers know what a restore returns: the type of the template."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# `make check` reads the whole package with the types of all libraries, in a minute. What a program sees of holdfast
# needs none of them but numpy's.
SETTINGS = f"""
[mypy]
strict = True
python_version = 3.11
mypy_path = {ROOT / "src"}
explicit_package_bases = True

[mypy-holdfast.*]
implicit_reexport = True
follow_imports = silent

[mypy-flax.*,jax.*,jaxlib.*,lightning.*,ml_dtypes.*,optax.*,orbax.*,pytorch_lightning.*,tensorstore.*,torch.*]
follow_imports = skip
follow_imports_for_stubs = True
"""

PROGRAM = '''
from dataclasses import dataclass
from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray

import holdfast as hf
from holdfast.integrations.flax import CheckpointCallback

Array = NDArray[np.float32]


@dataclass
class State:
    w: Array
    step: int


class Net:
    """As torch's modules: it can be called with anything, and has a state_dict."""

    def __call__(self, *args: Any) -> Any:
        return args

    def state_dict(self, *, prefix: str = "") -> dict[str, Array]:
        return {}


def make() -> State:
    return State(np.zeros(3, np.float32), 0)


state = State(np.zeros(3, np.float32), 0)
tree = {"a": {"b": 1.0}}
pair = (Net(), len(tree))  # a number of no literal type

assert_type(hf.load("x", like=state), State)
assert_type(hf.load("x", like=tree), dict[str, dict[str, float]])
assert_type(hf.load("x"), Any)
assert_type(hf.load("x", select="a/**"), Any)

with hf.CheckpointManager("x") as manager:
    assert_type(manager.restore(3, state), State)
    assert_type(manager.restore(None, tree), dict[str, dict[str, float]])
    assert_type(manager.restore(3, {"state": state}), dict[str, State])
    assert_type(manager.restore(3, {"config": None}), dict[str, Any])
    assert_type(manager.restore(items=state), State)
    assert_type(manager.restore(), Any)
    assert_type(manager.restore(3), Any)

for kind in (hf.CheckpointCallback, CheckpointCallback):
    with kind("x", save_interval_steps=3, resume="best", best_fn="loss", best_mode="min") as checkpoint:
        assert_type(checkpoint.restore_or_initialize(state), tuple[State, int])
        assert_type(checkpoint.restore_or_initialize(state, data=[1]), tuple[State, int])
        assert_type(checkpoint.restore_or_initialize(make), tuple[State, int])
        assert_type(checkpoint.restore_or_initialize(make, like=state), tuple[State, int])
        assert_type(checkpoint.restore_or_initialize(lambda: tree), tuple[dict[str, dict[str, float]], int])
        assert_type(checkpoint.restore_or_initialize(Net()), tuple[Net, int])
        assert_type(checkpoint.restore_or_initialize(pair), tuple[tuple[Net, int], int])
hf.CheckpointCallback("x", resume=1200, partial="initialize")
'''


def test_a_restore_returns_the_type_of_its_template(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "mypy.ini").write_text(SETTINGS)
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--no-error-summary", "program.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("pyright") is None, reason="needs pyright")
def test_pyright_agrees(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    settings = {"include": ["program.py"], "extraPaths": [str(ROOT / "src")]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = ["pyright", "--pythonpath", sys.executable, "--project", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
