"""Starts programs as Python does, each in a process of its own that is forked from one with their imports.

    done = run("-m", "holdfast.cli.main", "ls", directory)     # a `subprocess.CompletedProcess`
    program = Program("train.py", "--fast", cwd=folder, stdout=pipe)
    program.send_signal(signal.SIGTERM)
    assert program.wait() == 75

The processes that they are forked from are forks of the launchers of ``tests/processes``: of the one with torch, the
one with jax, or the one with neither. All tests that start programs are in the group ``programs``, which runs on one
worker: the imports take seconds. What a fresh interpreter imports, and that it can, is for other tests.

A program can be sent a signal in the middle of an update of Adam, which is counted over all jobs of a multirun.
"""

from __future__ import annotations

import functools
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.endings import run_to_end
from tests.processes.harness import Backend, Launcher, launcher
from tests.processes.launcher import warm_up

SECONDS = 240  # after which a program is ended
APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND
IMPORTS = {
    "none": ["holdfast.cli.app", "holdfast.cli.supervise", "holdfast.cli.drill.command"],
    "jax": ["flax.linen", "flax.nnx", "optax", "sklearn.datasets", "holdfast.recipes.runner"],
    "torch": ["hydra", "lightning.pytorch.cli"],
}

Interrupt = tuple[str, int]  # a signal, and the update in which it comes


def backend_of(program: str) -> Backend:
    """Returns the framework that a program imports."""
    found = re.search(r"^ *(?:import|from) (jax|flax|torch|lightning)\b", program, re.MULTILINE)
    return "none" if found is None else "jax" if found[1] in ("jax", "flax") else "torch"


class Program:
    """A process with a program.

    Args:
        *arguments: Those of Python: ``-W ignore`` or ``-W error``, and a script, ``-m`` a module or ``-c`` a text.
        backend: The framework that has been imported already.
        cwd: Its working directory.
        env: Its environment, that of the test by default.
        stdin: A file, by its path or descriptor.
        stdout: See there; it is appended to.
        stderr: See there.
        interrupt: A signal in the middle of an update of Adam.
    """

    def __init__(
        self,
        *arguments: object,
        backend: Backend = "none",
        cwd: str | Path = ".",
        env: Mapping[str, str] = os.environ,
        stdin: str | int = os.devnull,
        stdout: str | int = os.devnull,
        stderr: str | int = os.devnull,
        interrupt: Interrupt | None = None,
    ) -> None:
        self._server = _server(backend)
        self._status: int | None = None
        files = [
            f"/proc/{os.getpid()}/fd/{file}" if isinstance(file, int) else file for file in (stdin, stdout, stderr)
        ]
        program = [os.path.abspath(cwd), dict(env), list(map(str, arguments)), interrupt]
        self.pid: int = self._server.run({"files": files, "program": program})

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        """Waits until it has ended; returns its status, negative for a signal."""
        if self._status is None:
            self._status = int(self._server.run({"wait": self.pid}))
        return self._status


def run(*arguments: object, merged: bool = False, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end.

    Args:
        *arguments: As those of `Program`.
        merged: Whether standard output and standard error are one file.
        **options: As those of `Program`.
    """
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
        status = Program(*arguments, stdout=out.name, stderr=out.name if merged else err.name, **options).wait()
        return subprocess.CompletedProcess([*map(str, arguments)], status, out.read(), err.read())


@functools.cache
def _server(backend: Backend) -> Launcher:
    return Launcher(*launcher(backend).fork(__name__, backend))


# ---- the process that programs are forked from, and the programs


def serve(backend: str) -> None:
    warm_up(IMPORTS[backend])
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        if "wait" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
        else:
            answer = _fork(**request)
        print(json.dumps(answer), flush=True)


def _fork(files: list[str], program: list[Any]) -> int:
    """Forks a program, whose files are open when this returns its process."""
    opened = [os.open(file, mode) for file, mode in zip(files, (os.O_RDONLY, APPEND, APPEND), strict=True)]
    process = os.fork()
    if process == 0:
        for standard, file in enumerate(opened):
            os.dup2(file, standard)
    for file in opened:
        os.close(file)
    if process == 0:
        signal.alarm(SECONDS)
        run_to_end(_run, *program)
    return process


def _run(directory: str, environment: dict[str, str], arguments: list[str], interrupt: Interrupt | None) -> None:
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # may be that of another environment
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # which a fork has from the others
    if interrupt is not None:
        _interrupt(*interrupt)
    while arguments[0] == "-W":
        warnings.simplefilter(arguments[1])  # type: ignore[arg-type]  # the name of an action
        del arguments[:2]
    kind, *rest = arguments
    sys.path[0] = directory
    if kind == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), module.__dict__)
    else:
        sys.argv = arguments
        sys.path[0] = os.path.dirname(os.path.abspath(kind))
        runpy.run_path(kind, run_name="__main__")


def _interrupt(name: str, at: int) -> None:
    import torch

    step, updates = torch.optim.Adam.step, 0

    def interrupting(*args: Any, **kwargs: Any) -> Any:
        nonlocal updates
        updates += 1
        if updates == at:
            os.kill(os.getpid(), getattr(signal, name))
        return step(*args, **kwargs)

    torch.optim.Adam.step = interrupting  # type: ignore[method-assign]
