"""The conformance suite of coordinators and of the rendezvous on them: alone, in threads, with jax and with torch.

The checks are run by all processes of a program at once; one launch runs all of them.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.processes.harness import Process, run_processes
from tests.processes.threads import memory_coordinators

from holdfast.engine.distributed import Alone, Coordinator, current_coordinator, next_rendezvous
from holdfast.engine.errors import BarrierTimeoutError, PeerFailedError

PATIENCE = 30.0
BIG = bytes(range(256)) * 9000  # 2.3 MB: several parts

Check = Callable[[Coordinator], None]


def values_are_seen_by_all(coordinator: Coordinator) -> None:
    index, count = coordinator.process_index, coordinator.process_count
    for name, value in {"empty": b"", "zeros": b"\0x\0", "large": b"\xff" * 512 * 1024}.items():
        coordinator.put(f"seen/{name}/{index}", value)
        for other in range(count):
            assert coordinator.get(f"seen/{name}/{other}", PATIENCE) == value
            assert coordinator.try_get(f"seen/{name}/{other}") == value


def what_is_not_there_is_not_found(coordinator: Coordinator) -> None:
    assert coordinator.try_get("nowhere/at all") is None
    coordinator.delete("nowhere/at all")
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match="nowhere/at all"):
        coordinator.get("nowhere/at all", 0.05)
    assert time.monotonic() - begin < PATIENCE


def several_values_come_together_or_not_at_all(coordinator: Coordinator) -> None:
    index = coordinator.process_index
    keys = [f"many/{index} %2F/{number}" for number in range(300)]
    assert coordinator.try_get_all(keys) is None
    for number, key in enumerate(keys[1:], 1):
        coordinator.put(key, b"%d of %d" % (number, index))
    assert coordinator.try_get_all(keys) is None
    assert coordinator.try_get_all(keys[:1]) is None
    coordinator.put(keys[0], b"")
    assert coordinator.try_get_all(keys) == [b"", *(b"%d of %d" % (number, index) for number in range(1, 300))]
    assert coordinator.try_get_all(keys[2:0:-1]) == [b"2 of %d" % index, b"1 of %d" % index]


def deleted_values_are_gone(coordinator: Coordinator) -> None:
    key = f"deleted/é %2F/{coordinator.process_index}"
    coordinator.put(key, b"1")
    coordinator.put(f"{key}0", b"2")
    coordinator.delete(key)
    assert coordinator.try_get(key) is None
    assert coordinator.try_get(f"{key}0") == b"2"


def a_wait_does_not_block_other_threads(coordinator: Coordinator) -> None:
    if coordinator.process_count == 1:
        return  # no other process to wait for
    key = f"later/{coordinator.process_index}"
    with ThreadPoolExecutor(4) as threads:
        waiting = [threads.submit(coordinator.get, key, PATIENCE) for _ in range(4)]
        coordinator.put(f"{key}/other", b"")
        assert coordinator.get(f"{key}/other", PATIENCE) == b""
        coordinator.delete(f"{key}/other")
        assert not any(future.done() for future in waiting)
        coordinator.put(key, b"now")
        assert [future.result() for future in waiting] == [b"now"] * 4


def a_wait_that_is_given_up_leaves_nothing(coordinator: Coordinator) -> None:
    key = f"given up/{coordinator.process_index}"
    with pytest.raises(TimeoutError):
        coordinator.get(key, 0.05)
    coordinator.give_up(key)
    assert coordinator.try_get(key) is None
    coordinator.put(key, b"now")
    assert coordinator.get(key, PATIENCE) == b"now"
    coordinator.give_up(key)
    assert coordinator.try_get(key) == b"now"


def rendezvous_exchange_values(coordinator: Coordinator) -> None:
    rendezvous = next_rendezvous(coordinator, "runs/x y")
    index, count = rendezvous.index, rendezvous.count
    make: dict[str, Callable[[int], bytes]] = {
        "number": lambda process: b"%d" % process,
        "nothing": lambda process: b"",
        "large/one": lambda process: BIG + b"%d" % process,
    }
    for topic, made in make.items():
        value, everything = made(index), [made(process) for process in range(count)]
        assert rendezvous.gather(topic, value, PATIENCE) == (None if index else everything)
        assert rendezvous.summarize(topic, value, PATIENCE, b"|".join) == b"|".join(everything)
        assert rendezvous.broadcast(topic, None if index else value, PATIENCE) == everything[0]
        rendezvous.barrier(f"end of {topic}", PATIENCE)
    rendezvous.close()


def no_process_passes_a_barrier_alone(coordinator: Coordinator) -> None:
    rendezvous = next_rendezvous(coordinator, "barrier")
    if rendezvous.index == rendezvous.count - 1:
        time.sleep(0.2)
        coordinator.put("arrived", b"last")
    rendezvous.barrier("here", PATIENCE)
    assert coordinator.try_get("arrived") == b"last"
    rendezvous.close()


def the_missing_are_named(coordinator: Coordinator) -> None:
    rendezvous = next_rendezvous(coordinator, "missing")
    last = rendezvous.count - 1
    rendezvous.barrier("about to wait", PATIENCE)
    if rendezvous.index < last:
        with pytest.raises(BarrierTimeoutError, match=f"process {last} of .* 'all here' within 1 s") as error:
            rendezvous.barrier("all here", 1.0)
        assert error.value.missing == (last,)
    elif last:
        with pytest.raises(BarrierTimeoutError, match="process 0 of") as error:
            rendezvous.broadcast("a decision", None, 0.3)
        assert error.value.missing == (0,)
    rendezvous.close()


def all_the_missing_are_named_to_process_0(coordinator: Coordinator) -> None:
    rendezvous = next_rendezvous(coordinator, "gathering")
    if rendezvous.index == 0 and rendezvous.count > 1:
        if rendezvous.count > 2:
            coordinator.get("shared", PATIENCE)
        with pytest.raises(BarrierTimeoutError) as error:
            rendezvous.gather("shares", b"", 0.2)
        missing = tuple(process for process in range(1, rendezvous.count) if process != 2)
        assert error.value.missing == missing
        assert all(str(process) in str(error.value) for process in missing)
    elif rendezvous.index == 2:
        rendezvous.gather("shares", b"", PATIENCE)
        coordinator.put("shared", b"")
    rendezvous.close()


def a_failure_reaches_every_process(coordinator: Coordinator) -> None:
    rendezvous = next_rendezvous(coordinator, "failing")
    last = rendezvous.count - 1
    if rendezvous.count == 1:
        return
    if rendezvous.index == last:
        rendezvous.fail(OSError("the disk is full"))
    else:
        begin = time.monotonic()
        with pytest.raises(PeerFailedError, match=f"process {last} failed: OSError: the disk is full") as error:
            rendezvous.barrier("written", 20 * PATIENCE)
        assert error.value.process == last
        assert time.monotonic() - begin < PATIENCE
        for wait in (
            rendezvous.check,
            lambda: rendezvous.broadcast("x", b"", PATIENCE),
            lambda: rendezvous.gather("x", b"", PATIENCE),
        ):
            with pytest.raises(PeerFailedError, match="the disk is full"):
                wait()
    rendezvous.close()


def a_topic_serves_once(coordinator: Coordinator) -> None:
    rendezvous = next_rendezvous(coordinator, "topics")
    rendezvous.gather("a", b"1", PATIENCE)
    with pytest.raises(ValueError, match="gather of 'a' was already done"):
        rendezvous.gather("a", b"2", PATIENCE)
    rendezvous.close()


CHECKS: list[Check] = [
    values_are_seen_by_all,
    what_is_not_there_is_not_found,
    several_values_come_together_or_not_at_all,
    deleted_values_are_gone,
    a_wait_does_not_block_other_threads,
    a_wait_that_is_given_up_leaves_nothing,
    rendezvous_exchange_values,
    no_process_passes_a_barrier_alone,
    the_missing_are_named,
    all_the_missing_are_named_to_process_0,
    a_failure_reaches_every_process,
    a_topic_serves_once,
]
Report = dict[str, str | None]


def check_all(coordinator: Coordinator) -> Report:
    """Runs all checks; returns the traceback of each that failed."""
    report: Report = {}
    for check in CHECKS:
        begin = time.monotonic()
        try:
            check(coordinator)
            report[check.__name__] = None
        except Exception:
            report[check.__name__] = traceback.format_exc()
        print(f"{check.__name__}: {time.monotonic() - begin:.2f} s")
    return report


def in_process(process: Process) -> Report:
    return check_all(current_coordinator())


def alone() -> list[Report]:
    return [check_all(Alone())]


def threads(count: int) -> list[Report]:
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(check_all, memory_coordinators(count)))


def processes(backend: Any, count: int, store: Any = "tcp") -> list[Report]:
    return run_processes(in_process, count, backend=backend, store=store)


PROGRAMS: dict[str, Callable[[], list[Report]]] = {
    "alone": alone,
    "4 threads": lambda: threads(4),
    "2 jax processes": lambda: processes("jax", 2),
    "4 jax processes": lambda: processes("jax", 4),
    "2 torch processes": lambda: processes("torch", 2),
    "4 torch processes": lambda: processes("torch", 4),
    "3 torch processes with a file": lambda: processes("torch", 3, "file"),
}


SWEPT = ("2 jax processes", "2 torch processes")


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.sweep] if name in SWEPT else []) for name in PROGRAMS],
)
def reports(request: pytest.FixtureRequest) -> list[Report]:
    return PROGRAMS[request.param]()


@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_conformance(check: str, reports: list[Report]) -> None:
    failures = [f"process {index}:\n{report[check]}" for index, report in enumerate(reports) if report[check]]
    assert not failures, "\n".join(failures)
