from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast as hf
from holdfast.integrations.loop import PreemptionSignal, grace_check


@pytest.fixture(autouse=True)
def _default_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def test_the_signal_sets_the_flag_of_all_that_watch_it_and_nothing_else() -> None:
    """To install twice, or to take off twice, is to do it once."""
    outer = PreemptionSignal()
    assert outer.install()
    assert outer.install()
    with PreemptionSignal() as inner:
        assert not inner.received
        os.kill(os.getpid(), signal.SIGTERM)
        assert outer.received
        assert inner.received
        assert inner.reached()
    outer.restore()
    outer.restore()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    requested = PreemptionSignal()
    assert not requested.reached()
    requested.request()
    assert (requested.received, requested.reached()) == (True, True)


def test_handlers_from_before_and_on_top_are_called_and_stay() -> None:
    seen: list[str] = []

    def earlier(number: int, frame: object) -> None:
        seen.append(f"earlier {signal.Signals(number).name}")

    signal.signal(signal.SIGTERM, earlier)
    with PreemptionSignal() as preemption:
        os.kill(os.getpid(), signal.SIGTERM)
        assert preemption.received
    assert signal.getsignal(signal.SIGTERM) is earlier
    later = PreemptionSignal()
    later.install()
    below = signal.getsignal(signal.SIGTERM)
    assert callable(below)

    def on_top(number: int, frame: object) -> None:
        seen.append("top")
        below(number, None)

    signal.signal(signal.SIGTERM, on_top)
    later.restore()
    assert signal.getsignal(signal.SIGTERM) is on_top
    os.kill(os.getpid(), signal.SIGTERM)
    assert seen == ["earlier SIGTERM", "top", "earlier SIGTERM"]
    assert not later.received


def test_away_from_the_main_thread_nothing_is_installed(caplog: pytest.LogCaptureFixture) -> None:
    installed: list[bool] = []
    preemption = PreemptionSignal()
    thread = threading.Thread(target=lambda: installed.extend([preemption.install(), preemption.install()]))
    thread.start()
    thread.join()
    assert installed == [False, False]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    (message,) = caplog.messages
    assert message.startswith("SIGTERM is not handled: signal handlers can only be installed from the main thread")


def mine(number: int, frame: object) -> None:
    """A handler of the program, which may call the one that it has replaced."""


LATER: dict[str, tuple[Any, list[tuple[int, str]]]] = {
    "none": (lambda: None, []),
    "the default": (
        lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL),
        [(logging.WARNING, "SIGTERM goes to SIG_DFL")],
    ),
    "ignored": (lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN), [(logging.WARNING, "SIGTERM goes to SIG_IGN")]),
    "a function": (lambda: signal.signal(signal.SIGTERM, mine), [(logging.INFO, "SIGTERM goes to mine")]),
    "another callback": (lambda: PreemptionSignal().install(), []),
}


@pytest.mark.parametrize("name", LATER)
def test_a_handler_that_replaces_that_of_a_callback_is_told_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    replace, told = LATER[name]
    caplog.set_level(logging.INFO, "holdfast")
    with PreemptionSignal() as preemption:
        replace()
        assert (preemption.reached(), preemption.reached()) == (False, False)
    said = [(record.levelno, record.getMessage().partition(",")[0]) for record in caplog.records]
    assert said == told


@pytest.mark.usefixtures("default_sigint")
def test_ctrl_c_may_ask_for_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one saves the step; to ask again, a moment later, interrupts the program."""
    with hf.CheckpointCallback(tmp_path, signals="SIGINT") as checkpoint:
        state, _ = checkpoint.restore_or_initialize({"w": 0})
        for _ in range(2):  # one of the terminal, one of a launcher
            os.kill(os.getpid(), signal.SIGINT)
        assert checkpoint.on_step(1, state).should_stop
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + 2)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert checkpoint.exit_status == 130, "nothing starts the program again"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert hf.load(tmp_path, item="state") == {"w": 0}


_WORKERS = """
import logging, multiprocessing, os, signal, sys
from multiprocessing.process import BaseProcess
logging.basicConfig(format="%(levelname)s %(message)s")
of_python = BaseProcess.start


def work(pipe):
    while pipe.poll(None):
        pipe.send(2 * pipe.recv())


def start(context, daemon):
    ours, theirs = context.Pipe()
    worker = context.Process(target=work, args=(theirs,), daemon=daemon)
    worker.start()
    return worker, ours


def ask(pipe):
    pipe.send(21)
    return pipe.recv()


def receivers(pid, number):
    threads = [open(f"/proc/{pid}/task/{one}/status").read() for one in os.listdir(f"/proc/{pid}/task")]
    blocked = [int(facts.split("SigBlk:", 1)[1].split()[0], 16) for facts in threads]
    return sum(not mask >> (number - 1) & 1 for mask in blocked)


if __name__ == "__main__":
    from holdfast.integrations.loop import PreemptionSignal

    assert BaseProcess.start is of_python, "changed by the import"
    context = multiprocessing.get_context(sys.argv[1])
    before, held = start(context, True)
    with PreemptionSignal([signal.SIGTERM, signal.SIGUSR1]) as preemption, PreemptionSignal():
        assert BaseProcess.start is not of_python
        workers = [start(context, daemon) for daemon in (True, False, True)]
        for worker, pipe in workers:
            assert ask(pipe) == 42
            os.kill(worker.pid, signal.SIGTERM)
            os.kill(worker.pid, signal.SIGUSR1)
            os.kill(worker.pid, signal.SIGTERM)
            assert ask(pipe) == 42, "it survives"
            assert receivers(worker.pid, signal.SIGTERM) == 1, "another thread would not wake the main one"
        for worker, _ in workers[:2]:
            worker.terminate()
            worker.join()
            assert worker.exitcode == -signal.SIGTERM, worker.exitcode
        assert not preemption.received
    assert BaseProcess.start is of_python, "changed after the last callback"
    after, pipe = start(context, True)
    assert ask(pipe) == 42
    for worker in (before, after):
        os.kill(worker.pid, signal.SIGTERM)
        worker.join()
        assert worker.exitcode == -signal.SIGTERM, worker.exitcode
    print("done")  # a worker is left, which multiprocessing terminates
"""

_LEFT_ALONE = """
import multiprocessing, os, signal
from holdfast.integrations.loop import PreemptionSignal


def work(pipe):
    pipe.send(os.getpid())
    signal.pause()  # for as long as nothing but a signal comes
    signal.pause()


ours, theirs = multiprocessing.get_context("fork").Pipe()
preemption = PreemptionSignal()
worker = multiprocessing.get_context("fork").Process(target=work, args=(theirs,), daemon=True)
worker.start()
os.kill(ours.recv(), signal.SIGTERM)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("method", ["fork", "spawn", pytest.param("forkserver", marks=pytest.mark.sweep)])
def test_workers_survive_the_signal_and_end_when_they_are_told_to(method: str, tmp_path: Path) -> None:
    """One that was started before is reported, and multiprocessing is changed only while a signal is watched."""
    script = tmp_path / "program.py"
    script.write_text(_WORKERS)
    done = subprocess.run([sys.executable, str(script), method], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    early = "WARNING 1 worker processes were started before the checkpoint callback was made: "
    assert [line.startswith(early) for line in done.stderr.splitlines()] == [True] * 2, done.stderr  # by two callbacks


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_worker_ends_with_its_parent() -> None:
    # The worker holds the other end of the pipe, so that its end is the end of the output.
    done = subprocess.run([sys.executable, "-c", _LEFT_ALONE], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL


def test_a_save_that_outlasts_the_grace_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    check = grace_check(30.0)
    for step, seconds in enumerate([29.0, 41.0, 42.0, 3.0, 31.5]):
        check({"event": "saved", "step": step, "total_seconds": seconds})
    assert [message.split(", longer")[0] for message in caplog.messages] == [
        "saving step 1 took 41.0 s",
        "saving step 4 took 31.5 s",
    ]


class JaxService:
    """How jax agrees on a step: one process of several, the other of which is as far as this one.

    A port of ``PreemptionSyncManager`` (openxla/xla, tsl/distributed_runtime/preemption): the first notice settles on
    the largest number passed so far, plus one; a call is the agreed one only if it passes that number.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        jax = pytest.importorskip("jax")
        from jax._src import distributed
        from jax.experimental import multihost_utils

        self._last = 0
        self._agreed: int | None = None
        monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(distributed.global_state, "preemption_sync_manager", self)
        monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", self.reached_sync_point)

    def reached_sync_point(self, number: int) -> bool:
        self._last = number
        return self._agreed == number

    def notice(self) -> None:
        if self._agreed is None:
            self._agreed = self._last + 1


class Sensitive:
    """A state that passes on when it is asked for its values and given them: when a restore or a save is under way."""

    def __init__(self, event: Callable[[str], None]) -> None:
        self._event = event

    def get_state(self) -> dict[str, int]:
        self._event("state taken")
        return {}

    def set_state(self, state: dict[str, int]) -> None:
        self._event("state set")


def resumed_run(directory: Path, event: Callable[[str], None]) -> int:
    """Go on to step 20 from what is there; return how many steps were done in this life. ``event`` says where it is."""
    done = 0
    with hf.CheckpointCallback(directory, save_interval_steps=3, witness_steps_after_signal=0) as checkpoint:
        event("callback made")
        sensitive = Sensitive(event)
        state, start = checkpoint.restore_or_initialize({"w": np.zeros(3)}, sensitive=sensitive)
        event("restored")
        for step in range(start, 20):
            event("batch drawn")
            state = {"w": state["w"] + 1}
            event("computed")
            done += 1
            if checkpoint.on_step(step + 1, state, sensitive=sensitive).should_stop:
                break
    return done


@pytest.fixture(scope="module")
def resumable(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Return a run that has saved step 11, and what happens in its next life."""
    directory, events = tmp_path_factory.mktemp("resumable") / "run", list[str]()
    with hf.CheckpointCallback(directory, save_interval_steps=100) as checkpoint:
        sensitive = Sensitive(lambda _: None)
        checkpoint.restore_or_initialize({"w": np.zeros(3)}, sensitive=sensitive)
        checkpoint.on_step(11, {"w": np.full(3, 11.0)}, sensitive=sensitive)
    resumed_run(shutil.copytree(directory, directory.with_name("copy")), events.append)
    return directory, events


@pytest.mark.parametrize("moment", range(20))
def test_a_resumed_jax_run_stops_at_a_signal_of_any_instant(
    monkeypatch: pytest.MonkeyPatch, resumable: tuple[Path, list[str]], tmp_path: Path, moment: int
) -> None:
    directory, whole = resumable
    service = JaxService(monkeypatch)
    events: list[str] = []

    def event(name: str) -> None:
        events.append(name)
        if len(events) == moment + 1:
            service.notice()

    run = shutil.copytree(directory, tmp_path / "run")
    done = resumed_run(run, event)
    assert len(events) > moment, f"the run has only {whole} moments"
    after = whole[: moment + 1]
    steps = after.count("computed")
    assert done in (steps, steps + 1)  # the one under way is the last, or the next, if it is reported already
    assert done < 9
    assert hf.list_checkpoints(run)[-1].step == 11 + done
    assert resumed_run(run, lambda _: None) == 1  # jax has stopped this process: a run that follows in it ends, too


def test_one_count_for_the_runs_of_a_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two callbacks, as for pretraining and finetuning: the second does not start below the first."""
    service = JaxService(monkeypatch)
    for name, steps, stopped in (("first", 9, None), ("second", 7, 1)):
        with hf.CheckpointCallback(tmp_path / name, save_interval_steps=100) as checkpoint:
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "jax keeps its own handler"
            checkpoint.restore_or_initialize({"w": np.zeros(3)})
            for step in range(1, steps + 1):
                if step == stopped:
                    service.notice()
                if checkpoint.on_step(step, {"w": np.full(3, step)}).should_stop:
                    break
        assert step == (stopped or steps)
