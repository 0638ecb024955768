"""A demonstration: a run is preempted half-way, resumes, and ends where an uninterrupted run ends, bit for bit.

``python -m holdfast.cli.demo [DIR]`` leaves its files in DIR; without it, they are removed.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from ..engine.errors import DONE, FAILED, PREEMPTED
from .streams import say

RECIPE = (
    "run",
    "flax_digits",
    "train.steps=6000",
    "checkpoint.save_interval_steps=500",
    "logging.interval_steps=1000",
)
_PROGRESS = re.compile(r"step (\d+) of (\d+)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Demonstrate the promises with real processes and a real signal, and return the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if len(arguments) > 1:
        say("usage: python -m holdfast.cli.demo [DIR]", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="holdfast-demo-") as temporary:
        return _demonstrate(arguments[0] if arguments else temporary)


def _demonstrate(directory: str) -> int:
    stopped, whole = (os.path.join(directory, name) for name in ("preempted", "uninterrupted"))
    command = [*RECIPE, f"run_dir={stopped}"]

    _say("A training run. Half-way, the machine is taken away: SIGTERM.")
    status = _holdfast(command, preempt=True)
    if status != PREEMPTED:
        return _fail(f"expected exit status {PREEMPTED} (preempted and saved), found {status}")
    _say(f"Exit status {status}: preempted and saved, run me again. The same command again:")
    status = _holdfast(command)
    if status != DONE:
        return _fail(f"expected exit status {DONE}, found {status}")

    _say("For comparison, the same run without an interruption:")
    if _holdfast([*RECIPE, f"run_dir={whole}"]) != DONE:
        return _fail("the run failed")
    _say("Do both end with the same bits?")
    if _holdfast(["diff", stopped, whole]) != DONE:
        return _fail("the two runs differ")

    _say("Is everything on the disk whole? Every byte is read and checked:")
    if _holdfast(["verify", stopped]) != DONE:
        return _fail("a checkpoint is damaged")
    _say("And what was kept, and why?")
    return _holdfast(["ls", stopped])


def _holdfast(arguments: Sequence[str], *, preempt: bool = False) -> int:
    """Run the command, repeat its output, and send SIGTERM half-way if asked to."""
    say(f"$ holdfast {shlex.join(arguments)}", flush=True)
    # sys.executable runs the command of this installation; the search path may have another one.
    process = subprocess.Popen(
        [sys.executable, "-m", "holdfast.cli.main", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    with process, process.stdout as lines:
        for line in lines:
            say(f"  {line}", end="", flush=True)
            found = _PROGRESS.search(line)
            if preempt and found and int(found[1]) * 2 >= int(found[2]):
                say(f"  $ kill -TERM {process.pid}", flush=True)
                process.send_signal(signal.SIGTERM)
                preempt = False
    return process.returncode


def _say(text: str) -> None:
    say(f"\n{text}", flush=True)


def _fail(text: str) -> int:
    say(f"demo: {text}", file=sys.stderr)
    return FAILED


if __name__ == "__main__":
    sys.exit(main())
