"""``python -m benchmarks.forks``: forks programs whose threads save, load and mirror, as data loaders do.

Each child collects garbage, has no lock of the run, saves and loads, and ends in time. Each program is killed while its
last child is alive, and the next one continues its run.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tests.descriptors import open_files

import holdfast as hf

_PATIENCE = 60  # seconds after which a child counts as hanging
_MANY = 3000  # leaves: while they are loaded, garbage collection pauses


def outcome_in_child(folder: Path) -> int:
    """Return 0, or the number of what a child has inherited."""
    if not gc.isenabled():
        return 1
    if kept := open_files(locked=True):
        print(f"a child has the locks of {kept}", file=sys.stderr)
        return 2
    try:
        place = folder / "children" / f"{os.getpid()}-{time.monotonic_ns()}"  # the system uses numbers again
        hf.save(place, {"w": np.arange(8.0)})
        hf.load(place)
    except Exception as error:  # counted and shown
        print(f"a child fails: {error!r}", file=sys.stderr)
        return 3
    return 0 if gc.isenabled() else 1


OUTCOMES = {0: "right", 1: "garbage collection is off", 2: "a lock is kept", 3: "fails", -signal.SIGALRM: "hangs"}


def work_for_ever(work: Callable[[int], Any]) -> None:
    for number in itertools.count():
        work(number)


def run_program(folder: Path, forks: int, seed: int) -> None:
    """Fork while threads work, print what became of each child, and die while the last one is alive."""
    generator = random.Random(seed)
    many = folder / "many"
    if not many.exists():
        hf.save(many, {str(leaf): np.zeros(2) for leaf in range(_MANY)})
    options = hf.CheckpointManagerOptions(mirror=str(folder / "mirror"), max_to_keep=2)
    run = hf.CheckpointManager(folder / "run", options=options)
    first = (run.latest_step() or 0) + 1
    run.save(first, {"w": np.zeros(1000)}, force=True)  # refused if a child of the program before has the lock
    run.wait_until_finished()
    hf.load(many)  # imports what a load needs: a child would wait for an import of another thread for ever
    hf.save(folder / "single", {"w": np.zeros(1000)}, overwrite=True)
    works: list[Callable[[int], Any]] = [
        lambda number: run.save(first + 1 + number, {"w": np.full(1000, number)}, force=True),
        lambda _: hf.load(many),
        lambda number: hf.save(folder / "single", {"w": np.full(1000, number)}, overwrite=True),
    ]
    for work in works:
        threading.Thread(target=work_for_ever, args=(work,), daemon=True).start()
    for number in range(forks):
        time.sleep(generator.random() * 0.02)
        child = os.fork()
        if child == 0:
            status = 3
            try:
                faulthandler.dump_traceback_later(_PATIENCE / 2)  # shows where it hangs
                signal.alarm(_PATIENCE)
                status = outcome_in_child(folder)
                faulthandler.cancel_dump_traceback_later()
                if number == forks - 1 and status == 0:
                    print(f"last {os.getpid()}", flush=True)
                    signal.pause()  # it outlives the program, until the alarm
            finally:
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(OUTCOMES.get(status, f"ends with {status}"), flush=True)
    os._exit(0)  # only if the last child is not alive


def outcomes_of_program(folder: Path, forks: int, seed: int) -> Counter[str]:
    """Run a program, kill it after its last fork, and count what became of its children."""
    command = [sys.executable, "-m", "benchmarks.forks", "--program", str(folder), "--seed", str(seed)]
    outcomes: Counter[str] = Counter()
    with subprocess.Popen([*command, "--forks", str(forks)], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        for line in program.stdout:
            if line.startswith("last "):
                _children.append(int(line.split()[1]))
                outcomes[OUTCOMES[0]] += 1
                break
            outcomes[line.strip()] += 1
        program.kill()
    if outcomes.total() < forks:
        outcomes["not started, or ended before its forks"] += forks - outcomes.total()
    return outcomes


_children: list[int] = []  # the last child of each program, which outlives it


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.forks", description=__doc__)
    parser.add_argument("--forks", type=int, default=3000, help="how often (default: 3000)")
    parser.add_argument("--each", type=int, default=100, help="forks of one program (default: 100)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--program", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.program is not None:
        run_program(options.program, options.forks, options.seed)
        return 0
    began, outcomes = time.monotonic(), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        try:
            for number, start in enumerate(range(0, options.forks, options.each)):
                count = min(options.each, options.forks - start)
                outcomes += outcomes_of_program(Path(folder), count, options.seed + number)
        finally:
            for child in _children:
                with contextlib.suppress(ProcessLookupError):  # it has ended after its time
                    os.kill(child, signal.SIGKILL)
    for outcome, count in outcomes.most_common():
        print(f"{count:6d}  {outcome}")
    print(f"{outcomes.total()} forks in {time.monotonic() - began:.0f} s")
    return 0 if set(outcomes) == {OUTCOMES[0]} else 1


if __name__ == "__main__":
    raise SystemExit(main())
