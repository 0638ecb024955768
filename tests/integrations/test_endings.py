"""Every ending of a loop that loses steps says so: in one line, with what is saved and how to keep the others."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import holdfast as hf

pytestmark = pytest.mark.usefixtures("default_sigterm")

_ENDED = """
import numpy as np
import holdfast as hf

def run(name, last):
    checkpoint = hf.CheckpointCallback(name, save_interval_steps=5)
    state, start = checkpoint.restore_or_initialize({"w": np.zeros(2)})
    for step in range(start + 1, last + 1):
        checkpoint.on_step(step, state)
    checkpoint.manager.wait_until_finished()
    return checkpoint

left = [run("early", 4), run("late", 8), run("saved", 10), run("continued", 7), run("continued", 8)]
left += [run("closed", 7), run("closed", 8)]
left[-1].close()
"""
ADVICE = ". The end of a with statement, or close() of the callback, saves the last step"


@pytest.mark.parametrize(
    ("end", "status", "advice"), [("pass", 0, ADVICE), ("raise KeyError", 1, "")], ids=["end", "error"]
)
def test_callbacks_that_are_never_closed_speak_at_exit(end: str, status: int, advice: str, tmp_path: Path) -> None:
    """No advice that would not help, and nothing of a run that another callback has gone on with."""
    command = [sys.executable, "-c", _ENDED + end]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    begin = "the program ended without closing the callback after step"
    said = [line for line in done.stderr.splitlines() if line.startswith(begin)]
    assert (done.returncode, sorted(said)) == (
        status,
        [
            f"{begin} 4: no step is saved in {tmp_path}/early, steps lost: all{advice}",
            f"{begin} 8: step 5 is saved in {tmp_path}/continued, steps lost: 3{advice}",
            f"{begin} 8: step 5 is saved in {tmp_path}/late, steps lost: 3{advice}",
        ],
    ), done.stderr
    saved = {"early": [], "late": [5], "saved": [5, 10], "continued": [5], "closed": [5, 8]}
    found = {name: [one.step for one in hf.list_checkpoints(tmp_path / name)] for name in saved}
    assert found == saved, "nothing is saved at the exit"


DISKS = {
    "fails": ("raise OSError(errno.ENOSPC, 'No space left on device')", "was not saved"),
    "hangs": ("time.sleep(600)", "is still not saved after 0.2 s"),
}


@pytest.mark.parametrize("disk", DISKS)
def test_a_save_that_is_lost_at_the_exit_is_said_once_beside_the_ending(disk: str, tmp_path: Path) -> None:
    breaks, lost = DISKS[disk]
    code = f"""
import errno, os, time
import numpy as np
import holdfast as hf

def broken(*arguments):
    {breaks}

checkpoint = hf.CheckpointCallback({str(tmp_path)!r}, save_interval_steps=3, save_timeout_secs=0.2)
state, step = checkpoint.restore_or_initialize({{"w": np.zeros(2)}})
os.pwrite = broken
for step in (1, 2, 3, 4):
    checkpoint.on_step(step, state)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    ending = "without closing the callback after step 4: no step is saved"
    said = [done.stderr.count(one) for one in (f"step 3 of {tmp_path} {lost}", ending)]
    assert (done.returncode, said) == (1, [1, 1]), done.stderr


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def fail() -> None:
    raise ZeroDivisionError


ENDINGS: dict[str, tuple[Callable[[], object], int, str]] = {
    "Ctrl-C": (
        interrupt,
        7,
        "KeyboardInterrupt after step 7: step 5 is saved in {}, steps lost: 2. To save the step first at Ctrl-C, set "
        'signals=("SIGTERM", "SIGHUP", "SIGINT")',
    ),
    "sys.exit": (
        lambda: sys.exit(3),
        6,
        "SystemExit after step 6: step 5 is saved in {}, steps lost: 1. To save the step first, leave the loop with",
    ),
    "an error": (
        fail,
        3,
        "ZeroDivisionError after step 3: no step is saved in {}, steps lost: all. To lose fewer steps, save more often",
    ),
    "nothing lost": (fail, 5, "ZeroDivisionError after step 5, which is saved in {}"),
}


@pytest.mark.parametrize("how", ENDINGS)
def test_an_exception_says_what_it_costs(how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    end, last, line = ENDINGS[how]
    caplog.set_level(logging.INFO, "holdfast")
    with (
        contextlib.suppress(KeyboardInterrupt, SystemExit, ZeroDivisionError),
        hf.CheckpointCallback(tmp_path, save_interval_steps=5) as checkpoint,
    ):
        checkpoint.restore_or_initialize({"w": np.zeros(2)})
        for step in range(1, last + 1):
            checkpoint.on_step(step, {"w": np.full(2, step)})
        end()
    said = [record for record in caplog.records if record.getMessage().startswith("the loop ended with ")]
    assert [record.levelno for record in said] == [logging.INFO if how == "nothing lost" else logging.WARNING]
    assert said[0].getMessage().startswith(f"the loop ended with {line.format(tmp_path)}")


def test_after_a_preemption_and_before_the_first_step_nothing_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for steps in (0, 3):
        with contextlib.suppress(SystemExit), hf.CheckpointCallback(tmp_path) as checkpoint:
            checkpoint.restore_or_initialize({"w": np.zeros(2)})
            for step in range(1, steps + 1):
                os.kill(os.getpid(), signal.SIGTERM)
                checkpoint.on_step(step, {"w": np.full(2, step)})
            sys.exit(checkpoint.exit_status)
    assert "ended with" not in caplog.text


_ENDLESS = """
import itertools, sys, time
import holdfast as hf

checkpoint = hf.CheckpointCallback("run", save_interval_steps=5)
state, start = checkpoint.restore_or_initialize({"w": 0})
for step in itertools.count(start + 1):
    print("step", step, flush=True)
    time.sleep(0.005)  # the terminal closes here: a line that is printed just then fails before the signal comes
    if checkpoint.on_step(step, state).should_stop:
        checkpoint.close()
        sys.exit(checkpoint.exit_status)
"""


def test_a_program_outlives_its_terminal_for_a_save(tmp_path: Path) -> None:
    """A closed terminal sends SIGHUP, and the lines that the program prints afterwards do not end it."""
    terminal, other = os.openpty()
    # The first terminal that the leader of a session opens is the one that ends it.
    command = ["sh", "-c", 'exec "$@" <> "$0" >&0 2>&0', os.ttyname(other), sys.executable, "-c", _ENDLESS]
    with subprocess.Popen(command, cwd=tmp_path, start_new_session=True) as running:
        while b"step 3" not in os.read(terminal, 1 << 16):
            pass
        os.close(other)
        os.close(terminal)
        assert running.wait(60) == 75
    last = hf.list_checkpoints(tmp_path / "run")[-1]
    assert last.reason == "preempted"


IGNORED = [("SIGHUP", True), ("SIGINT", True), ("SIGTERM", False)]


@pytest.mark.parametrize(("name", "stays"), IGNORED)
def test_what_nohup_ignores_stays_ignored(
    name: str, stays: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    number = signal.Signals[name]
    before = signal.signal(number, signal.SIG_IGN)
    request.addfinalizer(lambda: signal.signal(number, before))
    with hf.CheckpointCallback(tmp_path, signals=["SIGTERM", "SIGHUP", "SIGINT"]) as checkpoint:
        os.kill(os.getpid(), number)
        assert checkpoint.preempted is not stays
    assert signal.getsignal(number) == signal.SIG_IGN
