"""Saves in the background: told once, waited for at the end of a program, never waited for without end."""

from __future__ import annotations

import os
import re
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
def test_the_life_of_a_save() -> None:
    """It learns that it is waited for. An interrupt of the wait does not hide it, and joining keeps its error."""
    save, begun, go, told = BackgroundSave(), threading.Event(), threading.Event(), list[bool]()

    def notes(awaited: threading.Event) -> None:
        told.append(awaited.is_set())
        begun.set()
        told.append(awaited.wait(10))

    for _ in range(2):  # a save that was waited for says nothing of the next one
        begun.clear()
        save.start(notes, what="step 2")
        assert begun.wait(10)
        save.wait()
    assert told == [False, True, False, True]

    def interrupts(awaited: threading.Event) -> None:
        assert awaited.wait(60)
        os.kill(os.getpid(), signal.SIGINT)
        go.wait(60)
        raise OSError("broken")

    save.start(interrupts, what="step 3")
    with pytest.raises(KeyboardInterrupt):
        save.wait()
    assert save.running
    with pytest.raises(hf.errors.StateError, match=r"step 4: step 3 is still being saved"):
        save.start(lambda _: None, what="step 4")
    go.set()
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

def lost(full=full, **options):
    # Step 5 meets a full disk.
    saved(4).close()
    manager = hf.CheckpointManager(directory, options=hf.CheckpointManagerOptions(**options))
    manager.acquire()
    os.pwrite = full
    manager.save(5, tree(5))
    return manager

def not_saved():
    os.pwrite = full
    return hf.save_async(place, tree(5))

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


NO_SPACE, HANGS = "was not saved: .*No space left on device", "is still not saved after 0.2 s"
LOST = {  # with what the program says
    "ends": ("manager = lost()", NO_SPACE),
    "has dropped its manager": ("lost(); time.sleep(0.3); gc.collect()", NO_SPACE),
    "exits": ("manager = lost(); sys.exit(0)", NO_SPACE),
    "closes": ("with lost(): pass", NO_SPACE),
    "has a disk that hangs": ("lost(lambda *arguments: time.sleep(600), save_timeout_secs=0.2)", HANGS),
}


@pytest.mark.parametrize(("program", "said"), LOST.values(), ids=LOST)
def test_program_whose_disk_fails_at_the_end(tmp_path: Path, program: str, said: str) -> None:
    """Only step 4 is there, and the next run removes the rest."""
    finished = run(tmp_path, program)
    assert finished.returncode == 1
    assert re.search(f"step 5 of {tmp_path} {said}", finished.stderr)
    with hf.CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() == [4]
        manager.acquire()
    assert not (tmp_path / "5").exists()


@pytest.mark.parametrize(
    ("program", "status", "said"),
    [
        ("future = not_saved()", 1, "/5 was not saved: "),
        ("not_saved().exception()", 0, ""),
        ("not_saved().result()", 1, "SaveFailedError: "),
        ("manager = lost()\ntry: manager.wait_until_finished()\nexcept hf.SaveFailedError: pass", 0, ""),
    ],
    ids=["nobody asks", "the exception", "the result", "a manager"],
)
def test_a_program_that_was_told_ends_well(tmp_path: Path, program: str, status: int, said: str) -> None:
    finished = run(tmp_path, program)
    assert (finished.returncode, finished.stderr.count("was not saved")) == (status, 1 if said else 0)
    assert said in finished.stderr
