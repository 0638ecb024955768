"""What the Lightning tests share: marks, processes that run their program, and shortcuts through Lightning."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.served import Server
from tests.lightning_advice import ADVICE


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Lets every test here pass over what Lightning says of small programs."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            for mark in ADVICE:
                item.add_marker(mark)


@pytest.fixture(scope="session", autouse=True)
def plugins() -> Iterator[None]:
    """Lets trainers look for callbacks of installed packages once: they read the metadata of all packages for that."""
    found = functools.cache(importlib.metadata.entry_points)
    with pytest.MonkeyPatch.context() as patch:
        for package in ("lightning.fabric", "lightning_fabric"):
            patch.setattr(f"{package}.utilities.registry.entry_points", found)
        yield


@pytest.fixture(scope="session", autouse=True)
def logged_values() -> Iterator[None]:
    """Lets logged values stay on the CPU where they are: each ``log`` moves them, which copies all that describes one.

    That is a fifth of the time that a trainer of the tests takes.
    """
    with pytest.MonkeyPatch.context() as patch:
        for package in ("lightning.pytorch", "pytorch_lightning"):
            kind = f"{package}.trainer.connectors.logger_connector.result._ResultMetric"
            patch.setattr(f"{kind}.to", _moves_elsewhere(pkgutil.resolve_name(kind.replace("._R", ":_R")).to))
        yield


def _moves_elsewhere(move: Callable[..., Any]) -> Callable[..., Any]:
    def to(value: Any, device: Any, *args: Any, **kwargs: Any) -> Any:
        return value if torch.device(device).type == "cpu" else move(value, device, *args, **kwargs)

    return to


@pytest.fixture(autouse=True)
def processes(request: pytest.FixtureRequest) -> None:
    """Lets every ``fit`` stand for a process, except in tests that say when the program starts again."""
    if "start_again" not in request.fixturenames:
        request.getfixturevalue("fits_are_processes")


@pytest.fixture
def start_again() -> Callable[[], None]:
    """Makes the test's calls of ``fit`` those of one program, which this starts again."""
    from holdfast.integrations.lightning.store import FINISHED

    return FINISHED.clear


@pytest.fixture
def run_process(server: Server, tmp_path: Path) -> Callable[..., tuple[int, Any, str]]:
    """Runs the program as a process; returns its status, what it reports at its end, and what it said."""
    result = tmp_path / "result.json"

    def run(directory: Path, **options: Any) -> tuple[int, Any, str]:
        result.unlink(missing_ok=True)
        server.send("program", str(directory), str(result), options)
        status = int(server.receive())
        return status, json.loads(result.read_text()) if result.exists() else None, server.errors.read_text()

    return run


@pytest.fixture(scope="module")
def run_together(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Any]]:
    """Runs the program as several processes, which all end with one status; returns what each reports and ``said``."""
    results = tmp_path_factory.mktemp("together")

    def run(directory: Path, count: int = 2, *, status: int = 0, **options: Any) -> list[Any]:
        for file in results.iterdir():
            file.unlink()
        server.send("several", str(directory), str(results), count, options)
        statuses = json.loads(server.receive())
        found = [{"said": (results / f"{index}.log").read_text()} for index in range(count)]
        assert statuses == [status] * count, "\n".join(one["said"] for one in found)
        for index in range(count):
            if (report := results / f"{index}.json").exists():
                found[index] |= json.loads(report.read_text())
        return found

    return run
