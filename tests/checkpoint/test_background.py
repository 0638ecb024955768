"""Saves in the background: told once, waited for at the end of a program, never waited for without end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

import holdfast as hf
from holdfast.engine.checkpoint.background import BackgroundSave
from holdfast.engine.storage import Helper


def fail(_: threading.Event) -> None:
    raise OSError("broken")


def test_a_wait_does_not_forget_what_another_thread_has_begun_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    save, go, looked = BackgroundSave(), threading.Event(), threading.Event()
    save.start(lambda _: None, what="step 1")
    real, waits = Helper.join, []

    def join(thread: Helper, timeout: float | None = None) -> None:
        waits.append(thread)
        if len(waits) > 1:
            looked.set()
        real(thread, timeout)
        if len(waits) == 1:
            other = threading.Thread(target=lambda: save.start(lambda _: go.wait(), what="step 2"))
            other.start()
            other.join()

    def wait() -> None:
        save.join()
        looked.set()

    monkeypatch.setattr(Helper, "join", join)
    waiter = threading.Thread(target=wait)
    waiter.start()
    assert looked.wait(10)
    assert save.running, "the second save is under way"
    go.set()
    waiter.join()
    assert len(waits) == 2, "it was waited for, too"


@pytest.mark.usefixtures("default_sigint")
def test_an_interrupted_wait_does_not_hide_the_save() -> None:
    save, go = BackgroundSave(), threading.Event()

    def work(awaited: threading.Event) -> None:
        assert awaited.wait(60)
        os.kill(os.getpid(), signal.SIGINT)
        go.wait(60)

    save.start(work, what="step 3")
    with pytest.raises(KeyboardInterrupt):
        save.wait()
    assert save.running
    with pytest.raises(hf.errors.StateError, match=r"step 4: step 3 is still being saved"):
        save.start(lambda _: None, what="step 4")
    go.set()
    save.wait()
    assert not save.running


def test_the_save_learns_that_it_is_waited_for() -> None:
    begun, told = threading.Event(), []

    def work(awaited: threading.Event) -> None:
        told.append(awaited.is_set())
        begun.set()
        told.append(awaited.wait(10))

    save = BackgroundSave()
    for _ in range(2):  # a save that was waited for says nothing of the next one
        begun.clear()
        save.start(work, what="step 3")
        assert begun.wait(10)
        save.wait()
    assert told == [False, True, False, True]


def test_joining_keeps_the_error() -> None:
    save = BackgroundSave()
    save.start(fail, what="step 3")
    save.join()
    assert not save.running
    save.start(lambda _: None, what="step 4")
    save.join()
    with pytest.raises(hf.SaveFailedError, match="step 3"):
        save.check()


# ---- the end of a program

PROLOGUE = """
import errno, gc, os, sys, threading, time
import numpy as np
import holdfast as hf

def tree(step):
    return {"weights": np.full(100_000, step), "step": step}

real = os.pwrite

def slow(descriptor, data, offset):
    time.sleep(0.2)
    return real(descriptor, data, offset)

def full(descriptor, data, offset):
    time.sleep(0.1)
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

def saved(step, pwrite=real):
    os.pwrite = pwrite
    manager = hf.CheckpointManager(directory)
    manager.save(step, tree(step))
    return manager

def lost():
    # Step 5 meets a full disk.
    manager = saved(4)
    manager.wait_until_finished()
    os.pwrite = full
    manager.save(5, tree(5))
    return manager

directory = sys.argv[1]
place = os.path.join(directory, "5")
"""


def run(directory: Path, program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROLOGUE + textwrap.dedent(program), str(directory)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


WITHOUT_CLOSE = {  # with the status of the program
    "manager": ("manager = saved(5, slow)", 0),
    "manager that is dropped": ("saved(5, slow)", 0),
    "checkpointer": (
        "os.pwrite = slow; c = hf.AsyncCheckpointer(hf.PyTreeCheckpointHandler()); c.save(place, tree(5))",
        0,
    ),
    "future that is dropped": ("os.pwrite = slow; hf.save_async(place, tree(5))", 0),
    "error": ("manager = saved(5, slow); raise RuntimeError('a bug in the loop')", 1),
    "exit": ("manager = saved(5, slow); sys.exit(75)", 75),
    "interrupt": ("manager = saved(5, slow); raise KeyboardInterrupt", -2),
}


@pytest.mark.parametrize(("program", "status"), WITHOUT_CLOSE.values(), ids=WITHOUT_CLOSE)
def test_program_that_ends_without_close(tmp_path: Path, program: str, status: int) -> None:
    finished = run(tmp_path, program)
    assert finished.returncode == status, finished.stderr
    assert status or not finished.stderr
    assert hf.load(tmp_path / "5")["step"] == 5


def test_a_process_that_is_forked_right_after_a_save_has_begun_waits_for_nothing(tmp_path: Path) -> None:
    """Its end waits for saves as that of any process does; this one has no thread that saves."""
    program = """
        import signal
        from holdfast.engine.checkpoint.background import BackgroundSave
        save, waits = BackgroundSave(), threading.Event()
        sys.setswitchinterval(60)
        save.start(lambda _: waits.wait(), what="step 5")
        sum(range(1_000_000))  # the thread of the save wakes up, and has no turn yet
        child = os.fork()
        if not child:
            signal.alarm(10)
            save.wait()
            os._exit(0)
        waits.set()
        sys.exit(os.waitpid(child, 0)[1])
        """
    assert run(tmp_path, program).returncode == 0


LOST = {
    "ends": "manager = lost()",
    "has dropped its manager": "lost(); time.sleep(0.3); gc.collect()",
    "exits": "manager = lost(); sys.exit(0)",
    "closes": "with lost(): pass",
}


@pytest.mark.parametrize("program", LOST.values(), ids=LOST)
def test_program_whose_disk_fails_at_the_end(tmp_path: Path, program: str) -> None:
    finished = run(tmp_path, program)
    assert finished.returncode == 1
    assert f"step 5 of {tmp_path} was not saved" in finished.stderr
    assert "No space left on device" in finished.stderr
    check_lost(tmp_path)


def check_lost(run: Path) -> None:
    """Only step 4 is there, and the next run removes the rest."""
    with hf.CheckpointManager(run) as manager:
        assert manager.all_steps() == [4]
        manager.acquire()
    assert not (run / "5").exists()


@pytest.mark.parametrize(
    ("asks", "status", "said"),
    [("", 1, "/5 was not saved: "), ("future.exception()", 0, ""), ("print(future.result())", 1, "SaveFailedError: ")],
)
def test_program_whose_future_has_an_error(tmp_path: Path, asks: str, status: int, said: str) -> None:
    finished = run(tmp_path, f"os.pwrite = full; future = hf.save_async(place, tree(5)); {asks}")
    assert (finished.returncode, finished.stderr.count("was not saved")) == (status, 1 if said else 0)
    assert said in finished.stderr


def test_program_that_was_told_ends_well(tmp_path: Path) -> None:
    program = """
        manager = hf.CheckpointManager(directory)
        manager.acquire()
        os.pwrite = full
        manager.save(5, tree(5))
        try:
            manager.wait_until_finished()
        except hf.SaveFailedError as error:
            print(error.step)
        """
    finished = run(tmp_path, program)
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "5\n", "")


def test_program_whose_disk_hangs_at_the_end(tmp_path: Path) -> None:
    program = """
        saved(4).close()
        manager = hf.CheckpointManager(directory, options=hf.CheckpointManagerOptions(save_timeout_secs=0.2))
        manager.acquire()
        os.pwrite = lambda *arguments: time.sleep(600)
        manager.save(5, tree(5))
        """
    finished = run(tmp_path, program)
    assert finished.returncode == 1
    assert f"step 5 of {tmp_path} is still not saved after 0.2 s" in finished.stderr
    check_lost(tmp_path)
