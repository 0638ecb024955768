"""The errors of the other processes when one of several real ones is killed."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest
from tests.processes.harness import Outcome, Process, run_outcomes, told

from holdfast.engine.distributed import current_coordinator, next_rendezvous
from holdfast.engine.errors import BarrierTimeoutError, PeerFailedError


def meet(process: Process, timeout: float) -> tuple[str, Any]:
    rendezvous = next_rendezvous(current_coordinator(), "meeting")
    try:
        rendezvous.barrier("all are up", 30)
        process.reached("up")
        rendezvous.barrier("all are still here", timeout)
    except BarrierTimeoutError as error:
        return "timeout", error.missing
    except PeerFailedError as error:
        return "failure", error.process
    time.sleep(0.2)
    return "met", None


def outcomes(backend: Any, count: int, victim: int, **options: Any) -> list[Outcome]:
    pytest.importorskip(backend)
    return run_outcomes(meet, count, 1.5, backend=backend, kill=(victim, "up"), **options)


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_the_dead_are_missing_at_the_next_barrier(backend: str) -> None:
    ended = outcomes(backend, 3, 1)
    assert [outcome.value for outcome in ended] == [("timeout", (1,)), None, ("timeout", (1,))], told(ended)


def test_without_recoverability_jax_ends_the_others_later_than_our_timeout() -> None:
    ended = outcomes("jax", 3, 2, recoverable=False)
    assert [outcome.value for outcome in ended[:2]] == [("timeout", (2,))] * 2, told(ended)


def test_torch_tells_at_once_that_process_0_is_gone() -> None:
    ended = outcomes("torch", 3, 0)
    assert [outcome.value for outcome in ended[1:]] == [("failure", 0)] * 2, told(ended)


def test_jax_ends_all_others_when_process_0_is_gone() -> None:
    for outcome in outcomes("jax", 3, 0)[1:]:
        assert outcome.status == -signal.SIGABRT or outcome.value == ("failure", 0), outcome.output


def test_a_store_in_a_file_survives_process_0() -> None:
    ended = outcomes("torch", 2, 0, store="file")
    assert ended[1].value == ("timeout", (0,)), told(ended)
