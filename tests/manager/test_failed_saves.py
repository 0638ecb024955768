"""A save that failed does not count: the next step is due, with every trigger."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.clocks import FakeClock
from tests.manager.runs import HeldHandler, commit, let_go, opened
from tests.processes.threads import together

import holdfast as hf
from holdfast.engine.distributed.coordinators import Coordinator

Make = Callable[..., hf.CheckpointManager]


@pytest.fixture
def handler() -> HeldHandler:
    return let_go()


@pytest.fixture(params=[hf.Checkpointer, hf.AsyncCheckpointer])
def make(request: pytest.FixtureRequest, place: str, handler: HeldHandler) -> Iterator[Make]:
    """Makes a manager that saves in this thread, or in the background."""
    defaults = {"save_interval_steps": None, "clock": FakeClock()}
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(opened(place, request.param(handler), **{**defaults, **options}))


def fail(manager: hf.CheckpointManager, handler: HeldHandler, step: int, **arguments: Any) -> None:
    def save() -> None:
        commit(manager, step, {"step": step}, **arguments)

    handler.fails = True
    with pytest.raises((hf.SaveFailedError, hf.errors.StorageError), match="the disk is gone"):
        save()
    handler.fails = False
    assert step not in manager.all_steps()


@pytest.mark.parametrize("force", [False, True])
def test_steps(make: Make, handler: HeldHandler, force: bool) -> None:
    manager = make(save_interval_steps=10)
    with pytest.raises(hf.errors.UnsupportedLeafError):
        manager.save(10, {"step": object()}, force=force)
    assert manager.should_save(10)
    for step in (10, 11):
        fail(manager, handler, step, force=force)
        assert manager.should_save(step + 1)
    assert manager.save(10, {"step": 10}, force=force)
    assert [step for step in range(11, 21) if manager.should_save(step)] == [20]
    fail(manager, handler, 20)
    assert manager.save(21, {"step": 21})
    assert [step for step in range(22, 31) if manager.should_save(step)] == [30]


def test_seconds(make: Make, handler: HeldHandler) -> None:
    clock = FakeClock()
    manager = make(clock=clock, save_interval_secs=100)
    manager.save(1, {"step": 1}, force=True)
    clock.sleep(100)
    fail(manager, handler, 2)
    clock.sleep(1)
    assert manager.save(3, {"step": 3})
    clock.sleep(99)
    assert not manager.should_save(4)


def test_the_best(make: Make, handler: HeldHandler) -> None:
    manager = make(save_on_best=True, best_fn="accuracy", best_mode="max")
    assert manager.save(1, {"step": 1}, metrics={"accuracy": 0.5})
    fail(manager, handler, 2, metrics={"accuracy": 0.9})
    assert not manager.should_save(3, metrics={"accuracy": 0.4})
    assert manager.should_save(4, metrics={"accuracy": 0.6}), "the best that is saved is 0.5"


@pytest.mark.parametrize("checkpointer", [hf.Checkpointer, hf.AsyncCheckpointer])
def test_processes_agree_that_a_save_failed(tmp_path: Path, checkpointer: Any) -> None:
    def run(coordinator: Coordinator) -> list[int]:
        handler, saved = let_go(), []
        options = {"save_interval_steps": 10, "barrier_timeout_secs": 10}
        manager = opened(tmp_path, checkpointer(handler), coordinator=coordinator, **options)
        for step in range(41):
            handler.fails = step == 20 and coordinator.process_index == 1
            try:
                saved += [step] if manager.save(step, {"step": step}) else []
                if step == 20:
                    manager.wait_until_finished()
            except hf.HoldfastError:
                saved = [one for one in saved if one != step]
        manager.close()
        assert manager.all_steps() == saved
        return saved

    assert together(2, run) == [[0, 10, 21, 30, 40]] * 2
