"""Starts programs of the documentation, each time in a process of its own, forked from one that has their imports.

A program can be sent a signal in the middle of an update of Adam, which is counted over all jobs of a multirun.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

STARTS = """
import gc, importlib, json, os, runpy, signal, sys

modules, starts = map(json.loads, sys.argv[1:])
for name in modules:
    importlib.import_module(name)
gc.freeze()

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

for directory, arguments, name, at, expected in starts:
    process = os.fork()
    if process == 0:
        run(directory, arguments, name, at)
        sys.exit()
    found = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if found != expected:
        sys.exit(f"status {found}, expected {expected}: {open(directory + '.log').read()}")
"""
# In which directory a program starts with which arguments, the signal that it gets and in which update, its status.
Start = tuple[Path, list[str], str, int, int]


def start(*starts: Start, modules: Sequence[str]) -> None:
    """Runs programs, one after the other; what they say is in a file beside the directory of each."""
    given = [[str(directory), *others] for directory, *others in starts]
    command = [sys.executable, "-W", "ignore", "-c", STARTS, json.dumps(modules), json.dumps(given)]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
