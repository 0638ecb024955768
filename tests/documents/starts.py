"""Starts programs of the documentation, each time in a process of its own, forked from one that has their imports.

That one is shared by all tests of the group ``programs``, which run on one worker: its imports take seconds.
A program can be sent a signal in the middle of an update of Adam, which is counted over all jobs of a multirun.
"""

from __future__ import annotations

import atexit
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODULES = ("flax", "hydra", "lightning.pytorch.cli", "optax", "torch._dynamo")
STARTS = """
import json, os, runpy, signal, sys

sys.path.append(os.getcwd())  # for tests and benchmarks
from tests.endings import run_to_end
from tests.processes.launcher import warm_up

warm_up(sys.argv[1:])

def interrupt(name, at):
    import torch

    step, updates = torch.optim.Adam.step, 0

    def interrupting(*args, **kwargs):
        nonlocal updates
        updates += 1
        if updates == at:
            os.kill(os.getpid(), getattr(signal, name))
        return step(*args, **kwargs)

    torch.optim.Adam.step = interrupting

def run(directory, arguments, name, at):
    output = os.open(f"{directory}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(directory)
    if name:
        interrupt(name, at)
    sys.argv = ["train.py", *arguments]
    sys.path[0] = directory
    runpy.run_path("train.py", run_name="__main__")

for line in sys.stdin:
    directory, arguments, name, at = json.loads(line)
    process = os.fork()
    if process == 0:
        os.close(0)
        os.open(os.devnull, os.O_RDONLY)
        signal.alarm(240)
        run_to_end(run, directory, arguments, name, at)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""
# In which directory a program starts with which arguments, the signal that it gets and in which update, its status.
Start = tuple[Path, list[str], str, int, int]


def start(*starts: Start) -> None:
    """Runs programs, one after the other; what they say is in a file beside the directory of each."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    for directory, arguments, name, at, expected in starts:
        server.stdin.write(json.dumps([str(directory), arguments, name, at]) + "\n")
        server.stdin.flush()
        found = server.stdout.readline()
        assert found, f"the process that starts programs ended with {server.wait(30)}"
        assert int(found) == expected, f"status {found}, expected {expected}: {Path(f'{directory}.log').read_text()}"


@cache
def _server() -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", "-c", STARTS, *MODULES]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    atexit.register(_end, server)
    return server


def _end(server: subprocess.Popen[str]) -> None:
    with server:
        pass  # its input ends, and so does it
