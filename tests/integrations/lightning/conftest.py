"""The program that the Lightning tests run."""

from __future__ import annotations

import importlib.util
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("program.py")

_count = itertools.count()


@pytest.fixture(scope="session")
def program() -> ModuleType:
    """The module ``program.py``."""
    spec = importlib.util.spec_from_file_location("holdfast_lightning_program", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def new_directory() -> Callable[[], str]:
    """Makes names of directories that do not exist yet, in memory, where a save takes milliseconds."""
    return lambda: f"memory://lightning-tests/{next(_count)}"


@pytest.fixture(scope="module")
def run_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., tuple[int, Any, str]]]:
    """Runs the program as a process; returns its status, what it reports at its end, and what it said."""
    said, result = tmp_path_factory.mktemp("processes") / "stderr", tmp_path_factory.mktemp("results") / "result.json"
    command = [sys.executable, str(PROGRAM)]
    with said.open("w") as stderr:
        server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True)

    def run(directory: Path, **options: Any) -> tuple[int, Any, str]:
        assert server.stdin is not None
        assert server.stdout is not None
        result.unlink(missing_ok=True)
        print(json.dumps([str(directory), str(result), options]), file=server.stdin, flush=True)
        status = int(server.stdout.readline())
        return status, json.loads(result.read_text()) if result.exists() else None, said.read_text()

    with server:
        yield run
