"""Demonstrate that a run that is preempted halfway and resumed ends with the same bits as an uninterrupted run.

``python -m holdfast.cli.demo [DIR]`` keeps its files in DIR; without DIR, the files are removed at the end.
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

RECIPE = ["run", "flax_digits", "train.steps=6000", "checkpoint.save_interval_steps=500", "logging.interval_steps=1000"]
_PROGRESS = re.compile(r"step (\d+) of (\d+)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demonstration with real processes and a real signal, and return the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if len(arguments) > 1:
        say("usage: python -m holdfast.cli.demo [DIR]", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="holdfast-demo-") as temporary:
        directory = arguments[0] if arguments else temporary
        stopped, whole = (os.path.join(directory, name) for name in ("preempted", "uninterrupted"))
        run = [*RECIPE, f"run_dir={stopped}"]
        steps = [  # text, command, expected exit status
            ("A training run. Halfway, the machine is taken away: SIGTERM.", run, PREEMPTED),
            (f"Exit status {PREEMPTED}: preempted and saved, run me again. The same command again:", run, DONE),
            ("For comparison, the same run without an interruption:", [*RECIPE, f"run_dir={whole}"], DONE),
            ("Do both end with the same bits?", ["diff", stopped, whole], DONE),
            ("Is everything on the disk whole? Every byte is read and checked:", ["verify", stopped], DONE),
            ("And what was kept, and why?", ["ls", stopped], DONE),
        ]
        for text, command, expected in steps:
            say(f"\n{text}", flush=True)
            if (status := _holdfast(command, preempt=expected == PREEMPTED)) != expected:
                command_line = shlex.join(["holdfast", *command])
                say(f"demo: {command_line}: expected exit status {expected}, found {status}", file=sys.stderr)
                return FAILED
    return DONE


def _holdfast(arguments: Sequence[str], *, preempt: bool = False) -> int:
    """Run a ``holdfast`` command and echo its output; if ``preempt`` is true, send it SIGTERM halfway."""
    say(f"$ holdfast {shlex.join(arguments)}", flush=True)
    # Use sys.executable, because the ``holdfast`` on the PATH may belong to another installation.
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
            progress = _PROGRESS.search(line)
            if preempt and progress and int(progress[1]) * 2 >= int(progress[2]):
                say(f"  $ kill -TERM {process.pid}", flush=True)
                process.send_signal(signal.SIGTERM)
                preempt = False
    return process.returncode


if __name__ == "__main__":
    sys.exit(main())
