"""Where several processes stop after one of them has been told to; here they are threads."""

from __future__ import annotations

import threading
import time

import pytest
from tests.processes.threads import memory_coordinators, together, unwrap

from holdfast.engine.distributed import Coordinator, next_rendezvous
from holdfast.integrations.loop import AgreedStop, PreemptionSignal

PACE = 0.002  # seconds a batch


def run(told: int | None, validations: list[int], at: int = 50, total: int = 400) -> list[tuple[int, int] | None]:
    """Has processes train, with a validation after every tenth batch; returns where each leaves."""
    in_step = threading.Barrier(len(validations))  # as gradients are summed up

    def train(coordinator: Coordinator) -> tuple[int, int] | None:
        index, preemption = coordinator.process_index, PreemptionSignal()
        stop = AgreedStop(next_rendezvous(coordinator, "stop"), preemption, lambda: validations[index])
        stop.begin()
        left = batches(index, preemption, stop)
        assert preemption.received == (left is not None or index == told)
        stop.end(orderly=True)
        return left

    def batches(index: int, preemption: PreemptionSignal, stop: AgreedStop) -> tuple[int, int] | None:
        for batch in range(1, total + 1):
            in_step.wait()
            time.sleep(PACE)
            if index == told and batch == at:
                preemption.request()
            if batch % 10 == 0:
                for validated in range(1, validations[index] + 1):
                    time.sleep(PACE)
                    if stop.in_validation():
                        return batch, validated
            if stop.after_batch():
                return batch, 0
        return None

    return unwrap(together(len(validations), train))


@pytest.mark.parametrize("told", [0, 2])
@pytest.mark.parametrize("validation", [0, 20])
def test_all_stop_at_the_same_point(told: int, validation: int) -> None:
    left = run(told, [validation] * 3)
    assert left[0] is not None
    assert left[0][0] >= 50
    assert left == [left[0]] * 3


def test_validations_of_different_lengths_are_not_left() -> None:
    left = run(1, [3, 90])
    assert left[0] is not None
    assert left[0][1] == 0
    assert left[1] == left[0]


def test_no_process_waits_for_those_that_have_ended() -> None:
    for told in (0, 1, None):
        assert run(told, [0, 0], at=50, total=50) == [None, None]


@pytest.mark.parametrize("ended", [True, False])
def test_a_store_that_ends_after_the_run_is_no_news(ended: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The traceback of a crash is not followed by a warning that the processes could not agree."""
    (coordinator,) = memory_coordinators(1)
    asked, answer = threading.Event(), threading.Event()

    def try_get(key: str) -> None:
        asked.set()
        answer.wait(30)
        raise ConnectionError("reset by peer")

    coordinator.try_get = try_get  # type: ignore[method-assign]
    stop = AgreedStop(next_rendezvous(coordinator, "stop"), PreemptionSignal(), lambda: 0)
    stop.begin()
    assert asked.wait(30)
    if ended:
        stop.end(orderly=False)
    answer.set()
    assert stop._thread is not None
    stop._thread.join(30)
    assert ["could not agree" in text for text in caplog.messages] == [True] * (not ended)
