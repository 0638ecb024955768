"""The program that the Lightning tests run."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("program.py")
ROOT = PROGRAM.parents[3]

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


def _environment() -> dict[str, str]:
    """Returns the environment of programs that import the tests' modules."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}


@pytest.fixture(scope="module")
def run_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., tuple[int, Any, str]]]:
    """Runs the program as a process; returns its status, what it reports at its end, and what it said."""
    said, result = tmp_path_factory.mktemp("processes") / "stderr", tmp_path_factory.mktemp("results") / "result.json"
    command = [sys.executable, str(PROGRAM)]
    with said.open("w") as stderr:
        pipe = subprocess.PIPE
        server = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=stderr, text=True, env=_environment())

    def run(directory: Path, **options: Any) -> tuple[int, Any, str]:
        assert server.stdin is not None
        assert server.stdout is not None
        result.unlink(missing_ok=True)
        print(json.dumps([str(directory), str(result), options]), file=server.stdin, flush=True)
        status = int(server.stdout.readline())
        return status, json.loads(result.read_text()) if result.exists() else None, said.read_text()

    with server:
        yield run


@pytest.fixture(scope="module")
def run_together(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[tuple[int, Any, str]]]]:
    """Runs the program as several processes; returns, of each, its status, what it reports, and what it said."""
    results = tmp_path_factory.mktemp("together")
    command = [sys.executable, "-m", "tests.integrations.lightning.several"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=_environment()) as server:

        def run(directory: Path, count: int = 2, **options: Any) -> list[tuple[int, Any, str]]:
            assert server.stdin is not None
            assert server.stdout is not None
            for file in results.iterdir():
                file.unlink()
            print(json.dumps([str(directory), str(results), count, options]), file=server.stdin, flush=True)
            statuses = json.loads(server.stdout.readline())
            reports = [results / f"{index}.json" for index in range(count)]
            return [
                (
                    status,
                    json.loads(report.read_text()) if report.exists() else None,
                    report.with_suffix(".log").read_text(),
                )
                for status, report in zip(statuses, reports, strict=True)
            ]

        yield run
