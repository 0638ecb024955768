"""What all of these tests need: the process that programs are forked from, and loaders that are collected at once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
from tests.integrations.served import Server, started


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with started(tmp_path_factory.mktemp("served") / "stderr") as found:
        yield found


@pytest.fixture(autouse=True)
def _workers_of_garbage_end_at_once() -> None:
    """Shortens the five seconds that torch waits for each worker of a loader to end, before it sends SIGTERM.

    An iterator in a reference cycle cannot tell its workers to end: the garbage collector closes its queues first.
    """
    utilities: ModuleType | None = sys.modules.get("torch.utils.data._utils")
    if utilities is not None:  # left so: the iterator of one test may be collected in another
        vars(utilities)["MP_STATUS_CHECK_INTERVAL"] = 0.1
