"""Programs of several real processes, connected by jax.distributed or torch.distributed, for tests.

    def work(process: Process, directory: str) -> int:
        ...

    def test_work(tmp_path: Path) -> None:
        assert run_processes(work, 2, str(tmp_path), backend="jax") == [1, 2]

The processes are forked from a launcher, one for each framework, which has imported that framework but not used it:
four processes are connected in half a second with jax and in a tenth with torch, instead of several. Functions,
arguments and results are pickled, so functions are found by name: no lambdas.
"""

from __future__ import annotations

import atexit
import functools
import json
import logging
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, Literal, Self

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHOWN = 6000  # characters of what a process printed
SPARE = 30.0  # seconds that a launcher gets in addition to its processes

Backend = Literal["jax", "torch", "none"]


@dataclass(frozen=True)
class Process:
    """The process that a function runs in."""

    index: int  # from 0
    count: int
    kill: str | None = None  # the event at which it dies, if at any

    def reached(self, event: str) -> None:
        """Dies here if this is the event; no cleaning up, as after a power cut."""
        if event == self.kill:
            os.kill(os.getpid(), signal.SIGKILL)

    def mark(self, owner: Any, name: str, event: str, *, after: bool = False) -> None:
        """Let a function or method reach an event whenever it is called, before it begins or ``after`` it is done."""
        function = getattr(owner, name)

        def marked(*args: Any, **kwargs: Any) -> Any:
            if not after:
                self.reached(event)
            result = function(*args, **kwargs)
            if after:
                self.reached(event)
            return result

        setattr(owner, name, marked)


class Logged(logging.Handler):
    """The warnings of holdfast in a process."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.warnings: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.warnings.append(record.getMessage())

    def __enter__(self) -> Self:
        logging.getLogger("holdfast").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("holdfast").removeHandler(self)


@dataclass(frozen=True)
class Outcome:
    """How one process ended."""

    status: int  # its exit status; negative for a signal
    output: str  # what it printed, errors included
    value: Any = None  # what the function returned; None if it raised or died
    error: str | None = None  # the exception that it raised, as text


def run_processes(function: Callable[..., Any], count: int, *arguments: Any, **options: Any) -> list[Any]:
    """Return the results of `run_outcomes`, or raise AssertionError with the output of all if a process has failed."""
    outcomes = run_outcomes(function, count, *arguments, **options)
    if any(outcome.status for outcome in outcomes):
        raise AssertionError(told(outcomes))
    return [outcome.value for outcome in outcomes]


def run_outcomes(
    function: Callable[..., Any],
    count: int,
    *arguments: Any,
    backend: Backend = "jax",
    devices_per_process: int = 1,
    timeout: float = 60.0,  # seconds after which they print where they are, and end
    kill: tuple[int, str] | None = None,  # the process that dies at an event (`Process.reached`), to which it must get
    recoverable: bool = True,  # with jax, whether the others survive it; nothing makes them survive process 0
    store: Literal["tcp", "file"] = "tcp",  # with torch, where processes find each other: as with torchrun, or a file
    imports: Sequence[str] = (),  # modules that take long to import, and are imported once for all processes
    launch: Callable[[dict[str, Any]], list[int]] | None = None,  # runs the request instead of the backend's launcher
) -> list[Outcome]:
    """Call a function of a test module with a `Process` and the arguments in several processes; some of them may die.

    Process 0 ends last, as the others need what it runs for them. A backend that is not installed skips the test.
    """
    if backend != "none" and find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    folder = Path(tempfile.mkdtemp(prefix="holdfast-processes-"))
    try:
        (folder / "work").write_bytes(pickle.dumps((function, arguments)))
        request = {
            "folder": str(folder), "count": count, "devices": devices_per_process, "timeout": timeout, "kill": kill,
            "port": free_port(), "recoverable": recoverable, "store": store,
        }  # fmt: skip
        statuses = (launch or launcher(backend, *imports).run)(request)
        outcomes = [_outcome(folder, index, status) for index, status in enumerate(statuses)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if kill is not None and outcomes[kill[0]].status != -signal.SIGKILL:
        raise AssertionError(f"process {kill[0]} was to die at {kill[1]!r}\n{told(outcomes)}")
    return outcomes


def told(outcomes: list[Outcome]) -> str:
    """Return how all processes ended, and what they printed."""
    parts = [
        f"---- process {index} ended with {outcome.status}\n{outcome.output[-SHOWN:]}"
        for index, outcome in enumerate(outcomes)
    ]
    return "\n".join(parts)


def _outcome(folder: Path, index: int, status: int) -> Outcome:
    log = folder / f"{index}.log"
    output = log.read_text(errors="replace") if log.exists() else ""
    result = folder / f"{index}.result"
    value, error = pickle.loads(result.read_bytes()) if result.exists() else (None, None)
    return Outcome(status, output, value, error)


def free_port() -> int:
    """Returns a free port of this machine."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
        return port


class Launcher:
    """The process that others are forked from; see ``launcher.py``."""

    def __init__(self, requests: IO[str], answers: IO[str]) -> None:
        self._requests, self._answers = requests, answers
        atexit.register(self.close)

    def run(self, request: dict[str, Any]) -> Any:
        """Sends a request, and returns the answer: of processes to run, their statuses."""
        print(json.dumps(request), file=self._requests, flush=True)
        answer = self._answers.readline()
        assert answer, "the launcher of processes has ended"
        return json.loads(answer)

    def fork(self, module: str, *arguments: str) -> tuple[IO[str], IO[str]]:
        """Forks a process that calls the function ``serve`` of a module; returns its input and output."""
        with tempfile.TemporaryDirectory(prefix="holdfast-processes-") as folder:
            pipes = Path(folder, "requests"), Path(folder, "answers")
            for pipe in pipes:
                os.mkfifo(pipe)
            self.run({"fork": [module, arguments, folder]})
            return pipes[0].open("w"), pipes[1].open()

    def close(self) -> None:
        with self._answers:
            self._requests.close()
            self._answers.read()  # until it has ended


@functools.cache
def launcher(backend: Backend, *imports: str) -> Launcher:
    """Returns the launcher that has imported a framework and more modules, a fork of the one with fewer imports."""
    if backend != "none":
        return Launcher(*launcher(backend if imports else "none").fork("tests.processes.launcher", backend, *imports))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
        "JAX_PLATFORMS": "cpu",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command, pipe = [sys.executable, "-m", "tests.processes.launcher", backend], subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
    assert process.stdin is not None
    assert process.stdout is not None
    atexit.register(process.wait, SPARE)
    return Launcher(process.stdin, process.stdout)
