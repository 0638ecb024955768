"""Work on threads, and how it ends when one call fails."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.engine.storage import Helper, parallel_map


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert not [one for one in threading.enumerate() if one.name.startswith("holdfast-") and one not in before]


@pytest.mark.parametrize("max_concurrency", [1, 2, 16])
def test_results_come_in_order(max_concurrency: int) -> None:
    assert parallel_map(lambda number: number * number, range(50), max_concurrency) == [n * n for n in range(50)]
    assert parallel_map(str, [], max_concurrency) == []


@pytest.mark.parametrize("beside", [None, 1])
def test_as_many_as_may_where_no_loop_runs_beside_the_call(beside: int | None) -> None:
    """They are named after the work; one item takes none."""
    barrier = threading.Barrier(4, timeout=10)

    def work(_: int) -> str:
        barrier.wait()
        return threading.current_thread().name

    found = parallel_map(work, range(8), 4, beside=beside, name="holdfast-test")
    assert {*found} == {threading.current_thread().name, *(f"holdfast-test-{number}" for number in (1, 2, 3))}
    assert parallel_map(lambda _: threading.current_thread(), [0], 16) == [threading.current_thread()]


@pytest.mark.usefixtures("default_sigint")
def test_an_interrupt_waits_for_the_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    barrier, join, ended = threading.Barrier(2, timeout=10), Helper.join, []
    waits = before, after = threading.Event(), threading.Event()  # the calling thread waits, and again when interrupted
    begun = iter(waits)

    def joins(helper: Helper, timeout: float | None = None) -> None:
        next(begun).set()
        join(helper, timeout)

    def work(_: int) -> None:
        barrier.wait()
        if threading.current_thread() is threading.main_thread():
            return
        before.wait(10)
        os.kill(os.getpid(), signal.SIGINT)
        assert after.wait(10)
        ended.append(True)

    monkeypatch.setattr(Helper, "join", joins)
    with pytest.raises(KeyboardInterrupt):
        parallel_map(work, range(2), 2)
    assert ended


@pytest.mark.parametrize("error", [KeyError("first"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
@pytest.mark.parametrize("in_helper", [False, True], ids=["caller", "helper"])
def test_the_first_error_ends_the_work(error: BaseException, in_helper: bool) -> None:
    begun: list[int] = []
    failed, caller = threading.Event(), threading.current_thread()

    def work(number: int) -> None:
        begun.append(number)
        if (threading.current_thread() is not caller) is in_helper and not failed.is_set():
            failed.set()
            raise error
        assert failed.wait(10)

    with pytest.raises(type(error)) as caught:
        parallel_map(work, range(1000), 2)
    assert caught.value is error
    assert len(begun) < 10


def test_long_work_can_end_early() -> None:
    stop, barrier = threading.Event(), threading.Barrier(2, timeout=10)

    def work(number: int) -> None:
        barrier.wait()
        if number == 0:
            raise KeyError(number)
        assert stop.wait(10)

    with pytest.raises(KeyError):
        parallel_map(work, range(2), 2, stop=stop)


def test_a_thread_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = threading.Thread.start, iter([True, False])

    def refuse(thread: threading.Thread) -> None:
        if not next(started):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start"):
        parallel_map(str, range(100), 3)


@pytest.mark.parametrize("fails", [False, True], ids=["finished", "failed"])
def test_work_that_has_ended_keeps_nothing_alive(fails: bool) -> None:
    class Thing:
        pass

    def work(thing: Thing) -> None:
        if fails:
            raise KeyError("x")

    things = [Thing(), Thing()]
    watched = weakref.ref(things[0])
    gc.disable()
    try:
        with contextlib.suppress(KeyError):
            parallel_map(work, things, 2)
        things.clear()
        assert watched() is None
    finally:
        gc.enable()


def test_few_helpers_beside_a_loop_and_more_once_it_waits() -> None:
    awaited, both, all_four = threading.Event(), threading.Barrier(2, timeout=10), threading.Barrier(4, timeout=10)
    counted: list[int] = []

    def work(number: int) -> int:
        if number < 2:
            both.wait()
            if number == 0:
                counted.append(sum(thread.name.startswith("holdfast-test-") for thread in threading.enumerate()))
                awaited.set()
            both.wait()
        else:
            all_four.wait()
        return number

    found = parallel_map(work, range(6), 4, beside=2, awaited=awaited, name="holdfast-test")
    assert counted == [1]  # and the calling thread
    assert found == list(range(6))


def test_an_interrupt_at_any_moment_of_a_wait_does_not_hide_that_the_work_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.engine.storage.parallel._LONGEST_WAIT", 0.005)
    before = sys.gettrace()

    def join_traced(helper: Helper, trace: Any) -> None:
        sys.settrace(trace)
        helper.join()

    for moment in range(60):
        go, events = threading.Semaphore(0), iter(range(moment))

        def trace(*_: object, go: threading.Semaphore = go, events: Iterator[int] = events) -> Any:
            if next(events, None) is None:
                sys.settrace(before)
                go.release()
                raise KeyboardInterrupt
            return trace

        helper = Helper(go.acquire, "holdfast-test")
        helper.start()
        with pytest.raises(KeyboardInterrupt):
            join_traced(helper, trace)
        another = threading.Thread(target=helper.join, daemon=True)
        another.start()
        another.join(10)
        assert not another.is_alive()
        assert not helper.is_alive()
