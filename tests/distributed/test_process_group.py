"""Process 0 decides: its result and its errors reach every process, and a timeout names it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.processes.threads import together

import holdfast as hf
from holdfast.engine.distributed import Coordinator, ProcessGroup, run_on_primary

COUNT = 3


def decide(one: Coordinator, work: Callable[[], Any], timeout: float = 10.0) -> Any:
    return ProcessGroup("run", one, timeout).decide("it", work)


def on_primary(one: Coordinator, work: Callable[[], Any], timeout: float = 10.0) -> Any:
    return run_on_primary("it", [1, ["a"]], work, one, timeout)


def test_alone_nothing_is_sent() -> None:
    found = object()  # that JSON could not hold
    assert decide(hf.processes.Alone(), lambda: found) is found
    assert run_on_primary("it", [found], lambda: found, hf.processes.Alone()) is found


@pytest.mark.parametrize("way", [decide, on_primary])
def test_the_result_and_the_error_of_process_0_reach_all_and_its_absence_is_told(way: Any) -> None:
    assert together(COUNT, lambda one: way(one, lambda: {"by": one.process_index})) == [{"by": 0}] * COUNT

    first, *others = together(COUNT, lambda one: way(one, lambda: 1 / 0))
    assert isinstance(first, ZeroDivisionError)
    for other in others:
        assert isinstance(other, hf.errors.PeerFailedError)
        assert "process 0 failed: ZeroDivisionError: division by zero" in str(other)

    for other in together(COUNT, lambda one: way(one, dict, 0.2) if one.process_index else None)[1:]:
        assert isinstance(other, hf.errors.BarrierTimeoutError)
        assert other.missing == (0,)


def test_a_result_that_json_cannot_hold_reaches_all_as_an_error() -> None:
    first, *others = together(COUNT, lambda one: decide(one, object))
    assert isinstance(first, TypeError)
    assert all(isinstance(other, hf.errors.PeerFailedError) for other in others)


def test_process_0_waits_for_none() -> None:
    def work(one: Coordinator) -> Any:
        return "done" if one.process_index else on_primary(one, lambda: "done", 0.2)

    assert together(COUNT, work) == ["done"] * COUNT


def test_processes_that_ask_for_something_else() -> None:
    *others, last = together(COUNT, lambda one: run_on_primary("it", [one.process_index == 2], lambda: "done", one))
    assert others == ["done", "done"]
    assert isinstance(last, hf.errors.StateError)
    assert "process 2 was asked for [True], but process 0 for [False]" in str(last)


def test_long_work_is_waited_for() -> None:
    def slow() -> str:
        time.sleep(1.0)  # longer than process 0 may take to begin
        return "done"

    assert together(COUNT, lambda one: run_on_primary("it", [], slow, one, start_secs=0.6)) == ["done"] * COUNT
