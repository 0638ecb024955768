"""Type checkers know what a restore returns: the type of the template. mypy reads the same program in `make check`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAM = Path(__file__).with_name("typed_restores.py")


@pytest.mark.skipif(shutil.which("pyright") is None, reason="needs pyright")
def test_pyright_agrees(tmp_path: Path) -> None:
    shutil.copy(PROGRAM, tmp_path / "program.py")
    settings = {"include": ["program.py"], "extraPaths": [str(ROOT / "src")]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = ["pyright", "--pythonpath", sys.executable, "--project", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
