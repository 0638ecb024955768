"""Local steps of real processes: killed, resumed without one of their hosts, bit for bit and without the directory."""

from __future__ import annotations

import functools
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.processes.harness import Backend, Process, run_outcomes, run_processes
from tests.processes.states import STATES

import holdfast as hf
from holdfast.engine.manager.peers import Peer
from holdfast.engine.storage import Location

LAST = 12


def counted() -> list[str]:
    """Returns the places of which data is read, from now on."""
    opened: list[str] = []
    original = Location.open_data

    def open_data(self: Location, **arguments: Any) -> Any:
        opened.append(self.url)
        return original(self, **arguments)

    Location.open_data = open_data  # type: ignore[method-assign]
    return opened


def train(
    process: Process, directory: str, backend: Backend, per_host: int, dies: int | None, patience: float = 10.0
) -> tuple[int, list[Any]]:
    """Trains to the end, or to the step at which all processes are killed."""
    state, update, values = STATES[backend](process)
    process.mark(Peer, "write", "copied", after=True)
    host, store, read = f"host{process.index // per_host}", os.path.join(directory, "store"), counted()
    local = hf.Local(os.path.join(directory, host), every=2, host=host)
    options: Any = {"save_interval_steps": 100, "local": local, "barrier_timeout_secs": patience, "save_at_end": False}
    with hf.CheckpointCallback(store, **options) as checkpoint:
        state, start = checkpoint.restore_or_initialize(state)
        assert not [place for place in read if place.startswith(store)]
        for step in range(start + 1, LAST + 1):
            state = update(state)
            checkpoint.on_step(step, state)
            if step == dies:
                checkpoint.manager.wait_until_finished()
                os.kill(os.getpid(), signal.SIGKILL)
    return start, values(state)


Undisturbed = Callable[[Backend, int, int], list[Any]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Returns how each process ends when nothing kills it."""

    @functools.cache
    def run(backend: Backend, count: int, per_host: int) -> list[Any]:
        directory = str(tmp_path_factory.mktemp("undisturbed"))
        return run_processes(train, count, directory, backend, per_host, None, backend=backend)

    return run


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("backend", "count", "per_host"), [("torch", 2, 1), ("torch", 4, 2), ("jax", 2, 1)])
def test_a_run_that_was_killed_continues_without_one_host(
    tmp_path: Path, undisturbed: Undisturbed, backend: Backend, count: int, per_host: int
) -> None:
    whole = undisturbed(backend, count, per_host)
    for lost in range(count // per_host):
        directory = tmp_path / str(lost)
        run_outcomes(train, count, str(directory), backend, per_host, 9, backend=backend)
        shutil.rmtree(directory / f"host{lost}")
        resumed = run_processes(train, count, str(directory), backend, per_host, None, backend=backend)
        starts = {start for start, _ in resumed}
        assert starts <= {6, 8}, "the local save of step 8 may have been under way"
        assert len(starts) == 1
        assert [weights for _, weights in resumed] == [weights for _, weights in whole]


@pytest.mark.parametrize("dies", [0, 1])
def test_a_process_that_dies_while_it_copies(tmp_path: Path, undisturbed: Undisturbed, dies: int) -> None:
    """The step is on no host then; what was local before counts, and the others raise an error that names the one."""
    whole = undisturbed("torch", 2, 1)
    run_outcomes(train, 2, str(tmp_path), "torch", 1, 5, backend="torch")
    # The other one waits for it at several barriers.
    killed = run_outcomes(train, 2, str(tmp_path), "torch", 1, None, 1, backend="torch", kill=(dies, "copied"))
    assert killed[dies].status == -signal.SIGKILL
    resumed = run_processes(train, 2, str(tmp_path), "torch", 1, None, backend="torch")
    assert {start for start, _ in resumed} <= {2, 4}
    assert [weights for _, weights in resumed] == [weights for _, weights in whole]
