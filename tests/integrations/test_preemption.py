from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from holdfast.integrations.loop import PreemptionSignal


@pytest.fixture(autouse=True)
def _default_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def test_the_signal_sets_the_flag_and_nothing_else() -> None:
    with PreemptionSignal() as preemption:
        assert not preemption.received
        os.kill(os.getpid(), signal.SIGTERM)
        assert preemption.received
        assert preemption.reached(3)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_request_stands_in_for_the_signal() -> None:
    preemption = PreemptionSignal()
    assert not preemption.reached(1)
    preemption.request()
    assert preemption.received
    assert preemption.reached(2)


def test_the_handler_that_was_there_is_called_and_comes_back() -> None:
    seen: list[int] = []

    def earlier(number: int, frame: object) -> None:
        seen.append(number)

    signal.signal(signal.SIGTERM, earlier)
    with PreemptionSignal() as preemption:
        os.kill(os.getpid(), signal.SIGTERM)
        assert preemption.received
    assert seen == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is earlier


def test_installing_twice_does_not_chain_to_itself() -> None:
    preemption = PreemptionSignal()
    assert preemption.install()
    assert preemption.install()
    os.kill(os.getpid(), signal.SIGTERM)
    assert preemption.received
    preemption.restore()
    preemption.restore()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_two_at_once_both_learn_of_it() -> None:
    with PreemptionSignal() as outer, PreemptionSignal() as inner:
        os.kill(os.getpid(), signal.SIGTERM)
        assert outer.received
        assert inner.received
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_handler_installed_on_top_stays_and_still_reaches_the_earlier_one() -> None:
    seen: list[str] = []
    signal.signal(signal.SIGTERM, lambda number, frame: seen.append("earlier"))
    preemption = PreemptionSignal()
    preemption.install()
    below = signal.getsignal(signal.SIGTERM)
    assert callable(below)

    def on_top(number: int, frame: object) -> None:
        seen.append("top")
        below(number, None)

    signal.signal(signal.SIGTERM, on_top)
    preemption.restore()
    assert signal.getsignal(signal.SIGTERM) is on_top
    os.kill(os.getpid(), signal.SIGTERM)
    assert seen == ["top", "earlier"]
    assert not preemption.received


def test_away_from_the_main_thread_nothing_is_installed(caplog: pytest.LogCaptureFixture) -> None:
    installed: list[bool] = []
    thread = threading.Thread(target=lambda: installed.append(PreemptionSignal().install()))
    thread.start()
    thread.join()
    assert installed == [False]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert "main thread" in caplog.text


def test_other_signals_can_be_watched() -> None:
    with PreemptionSignal([signal.SIGUSR1]) as preemption:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert preemption.received
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


_FORKED_WORKER = """
import os, signal
from holdfast.integrations.loop import PreemptionSignal

with PreemptionSignal() as preemption:
    ready, tell = os.pipe()
    worker = os.fork()
    if worker == 0:
        os.write(tell, b".")
        signal.pause()
        os._exit(0)
    os.read(ready, 1)
    os.kill(worker, signal.SIGTERM)
    _, status = os.waitpid(worker, 0)
    assert os.WTERMSIG(status) == signal.SIGTERM, status
    assert not preemption.received
print("ended")
"""


@pytest.mark.skipif(multiprocessing.get_start_method() == "spawn", reason="needs os.fork")
def test_forked_workers_still_end_at_the_signal() -> None:
    done = subprocess.run([sys.executable, "-c", _FORKED_WORKER], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended\n", "")


def test_jax_distributed_keeps_its_own_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    jax = pytest.importorskip("jax")
    from jax.experimental import multihost_utils

    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", lambda step: step == 5)
    preemption = PreemptionSignal()
    assert not preemption.install()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert [preemption.reached(step) for step in range(3, 8)] == [False, False, True, True, True]
