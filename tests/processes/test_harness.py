"""Programs of several processes, as tests run them: results, failures, deaths and processes that hang."""

from __future__ import annotations

import os
import signal
import time

import pytest
from tests.processes.harness import Backend, Process, run_outcomes, run_processes


def place(process: Process, more: int) -> tuple[int, int, int, bool]:
    return process.index, process.count, more, os.getpid() != os.getppid()


def connected(process: Process) -> int:
    from holdfast.engine.distributed import current_coordinator

    coordinator = current_coordinator()
    assert current_coordinator() is coordinator
    assert coordinator.process_index == process.index
    return coordinator.process_count


def devices(process: Process) -> tuple[int, int]:
    import jax

    return jax.local_device_count(), jax.device_count()


def troubled(process: Process) -> None:
    print(f"this is process {process.index}")
    if process.index == 1:
        raise ValueError("no luck")
    if process.index == 2:
        time.sleep(60)


def dying(process: Process) -> str:
    process.mark(time, "perf_counter", "looked", after=True)
    time.perf_counter()
    return "alive"


@pytest.mark.parametrize(("backend", "count"), [("none", 3), ("jax", 2), ("torch", 4)])
def test_results_come_in_order(backend: Backend, count: int) -> None:
    if backend != "none":
        assert run_processes(connected, count, backend=backend) == [count] * count
    assert run_processes(place, count, 7, backend=backend) == [(index, count, 7, True) for index in range(count)]


def test_a_store_may_be_a_file() -> None:
    assert run_processes(connected, 2, backend="torch", store="file") == [2, 2]


def test_jax_has_the_devices_that_were_asked_for() -> None:
    assert run_processes(devices, 2, backend="jax", devices_per_process=3) == [(3, 6)] * 2


def test_failures_and_processes_that_hang_are_shown() -> None:
    with pytest.raises(AssertionError) as caught:
        run_processes(troubled, 3, backend="none", timeout=3)
    message = str(caught.value)
    assert "this is process 0" in message
    assert "ValueError: no luck" in message
    assert 'test_harness.py", line' in message.split("process 2 ended with 1")[1]


def test_a_process_dies_at_an_event() -> None:
    outcomes = run_outcomes(dying, 2, backend="none", kill=(1, "looked"))
    assert [(outcome.status, outcome.value) for outcome in outcomes] == [(0, "alive"), (-signal.SIGKILL, None)]
    with pytest.raises(AssertionError, match="process 0 was to die at 'never'"):
        run_outcomes(dying, 1, backend="none", kill=(0, "never"))
