"""Starts of runs of several connected processes, one of which, or each, is signalled at a certain moment.

One process that has everything imported forks the processes of a run. One of them waits at the moment for the signal.
``kills_cases.py`` has the moments, starts the run again, and checks what becomes of it.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from .kills_member import TRAIN, Member, Order

Framework = Literal["torch", "jax"]

LIFE_SECONDS = 120.0  # until a run that gets no signal counts as hanging
HANG = 4.0  # barriers after the signal until a process counts as hanging
LONG = 1.5  # barriers after the signal until the processes print what they wait for
STOPPED_SECONDS = 0.2  # until processes that were all stopped are killed
SHUTDOWN_SECONDS = 5.0  # for the framework's own shutdown of processes that have all left the run
NOTICE: dict[Framework, float] = {"torch": 0.1, "jax": 0.4}  # seconds a step; jax looks for SIGTERM once a second
IMPORTS: dict[Framework, list[str]] = {
    "torch": ["torch", "torch.distributed", "torch._dynamo"],  # the last is what optimizers import
    "jax": ["jax", "jax.numpy"],
}
_TICK = 0.02


@dataclass(frozen=True, slots=True)
class Case:
    """One kill: which processes get which signal, and when.

    Attributes:
        count: The number of processes.
        signal: The name of the signal.
        phase: Where a process waits for the signal.
        target: Which process gets the signal; None is all of them.
        step: The first step at which it waits there; 0 is before the first one.
        resumes: Whether the run has been killed before.
        lost: The hosts that are lost with their local steps after the signal.
        lost_before: Those that were lost before the start, of a run that resumes.
    """

    count: int
    signal: str
    phase: str
    target: int | None
    step: int
    resumes: bool
    lost: tuple[int, ...] = ()
    lost_before: tuple[int, ...] = ()

    def __str__(self) -> str:
        who = f"all {self.count}" if self.target is None else f"process {self.target} of {self.count}"
        life = "a resumed run" if self.resumes else "a fresh run"
        before = f" that had lost hosts {self.lost_before}" if self.lost_before else ""
        at = f" at step {self.step}" if self.step else ""
        lost = f", hosts {self.lost} lost" if self.lost else ""
        return f"{self.signal} to {who} of {life}{before}, {self.phase}{at}{lost}"


@dataclass(slots=True)
class Life:
    """The output of the processes of one start, and how each ended: its status, and the seconds after the signal."""

    lines: list[list[str]]
    statuses: dict[int, int] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    hung: list[int] = field(default_factory=list)
    committed: Mapping[str, bytes] = field(default_factory=dict)  # the commit records at the signal
    signalled: bool = False
    shut_down: bool = True  # whether the framework's own shutdown has ended
    inside: frozenset[int] = frozenset()  # those that took signals at the signal, and had steps to do

    def said(self, word: str) -> list[list[str]]:
        """Return, for each process, the rest of the lines that begin with a word."""
        return [[line.partition(" ")[2] for line in lines if line.partition(" ")[0] == word] for lines in self.lines]


class Starter:
    """Forks runs of one framework, and signals their processes.

    Args:
        framework: The framework, imported already.
        barrier: The barrier timeout, in seconds.
        logs: A directory for what the processes print.
        is_local: Whether the runs have local steps and a mirror.
    """

    def __init__(self, framework: Framework, barrier: float, logs: Path, is_local: bool) -> None:
        self._framework, self._barrier, self._logs, self._is_local = framework, barrier, logs, is_local

    def start(self, directory: Path, count: int, case: Case | None = None) -> Life:
        """Run all processes to their end, with the signal of a case."""
        assert threading.active_count() == 1, "a process with threads must not fork"
        logs = self._logs / ("next" if case is None else "signalled")
        shutil.rmtree(logs, ignore_errors=True)
        logs.mkdir(parents=True)
        sources: dict[int, int] = {}
        gates: list[int] = []
        children: list[int] = []
        port = _free_port()
        pause = NOTICE[self._framework] if case is not None and case.signal == "TERM" else 0.0
        waits = None if case is None else (0 if case.target is None else case.target)
        for index in range(count):
            order = Order(case.phase, case.step) if case is not None and index == waits else None
            source, says = os.pipe()
            hears, gate = os.pipe()
            child = os.fork()
            if not child:
                os.close(source)
                member = Member(index, count, directory, port, self._barrier, order, says, hears, pause, self._is_local)
                self._be(logs, member)
            os.close(says)
            os.close(hears)
            sources[source] = index
            gates.append(gate)
            children.append(child)
        try:
            return _Watch(directory, children, sources, gates, case, self._barrier).to_the_end()
        finally:
            for child in children:
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    os.kill(child, signal.SIGKILL)
                    os.waitpid(child, 0)
            for pipe in (*sources, *gates):
                os.close(pipe)

    def _be(self, logs: Path, member: Member) -> None:
        """Be one process. Never returns."""
        status = 1
        try:
            log = os.open(logs / f"{member.index}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            status = member.run(TRAIN[self._framework])
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            # Frameworks would wait at their exit for processes that have died.
            os._exit(status)


class _Watch:
    """The parent's view of the processes of one start: hears what they say, signals them, and sees them end."""

    def __init__(
        self,
        directory: Path,
        children: Sequence[int],
        sources: Mapping[int, int],
        gates: Sequence[int],
        case: Case | None,
        barrier: float,
    ) -> None:
        self._directory, self._children, self._gates = directory, children, gates
        self._case, self._barrier = case, barrier
        self._sources = dict(sources)
        self._texts = [b""] * len(children)
        self._began = time.monotonic()
        self._told: float | None = None  # when they were signalled
        self._idle: float | None = None  # since when only processes that were stopped are left
        self._left: float | None = None  # since when all have left the run, or were stopped
        self._asked = False  # whether they were asked what they wait for
        self.life = Life([[] for _ in children])

    def to_the_end(self) -> Life:
        """Follow all processes until they have ended, and return what became of them."""
        life = self.life
        while len(life.statuses) < len(self._children):
            self._hear()
            is_there = any(life.said("reached")) and all(life.said("started"))
            if self._case is not None and self._told is None and is_there:
                self._signal(self._case)
            for index in self._missing():
                done, status = os.waitpid(self._children[index], os.WNOHANG)
                if done:
                    left = [] if life.shut_down else life.said("left")[index]
                    life.statuses[index] = int(left[0]) if left else os.waitstatus_to_exitcode(status)
                    life.seconds[index] = time.monotonic() - (self._told or self._began)
            self._end_what_hangs()
        return life

    def _missing(self) -> list[int]:
        return [index for index, _ in enumerate(self._children) if index not in self.life.statuses]

    def _hear(self) -> None:
        for source in select.select(list(self._sources), [], [], _TICK)[0]:
            index = self._sources[source]
            part = os.read(source, 1 << 16)
            if not part:
                del self._sources[source]
            *lines, self._texts[index] = (self._texts[index] + part).split(b"\n")
            self.life.lines[index] += [line.decode() for line in lines]

    def _signal(self, case: Case) -> None:
        life = self.life
        entered, leaving = life.said("entered"), life.said("leaving")
        life.inside = frozenset(n for n, _ in enumerate(self._children) if entered[n] and not leaving[n])
        life.committed = records(self._directory)
        life.signalled = True
        for index in self._missing():
            if case.target in (None, index):
                os.kill(self._children[index], getattr(signal, f"SIG{case.signal}"))
        self._told = time.monotonic()
        for gate in self._gates:
            os.write(gate, b"g")

    def _end_what_hangs(self) -> None:
        case, now, missing = self._case, time.monotonic(), self._missing()
        is_term = case is None or case.signal == "TERM"
        waiting = missing
        if case is not None and case.signal == "STOP" and self._told is not None:
            waiting = [index for index in missing if case.target not in (None, index)]
        if missing and not waiting:
            self._idle = self._idle or now
            if now > self._idle + STOPPED_SECONDS:
                self._kill(missing)
            return
        if is_term and all(self.life.said("left")[index] for index in missing):
            self._left = self._left or now
            if missing and now > self._left + SHUTDOWN_SECONDS:
                self.life.shut_down = False
                self._ask(missing)
                self._kill(missing)
            return
        limit = LIFE_SECONDS
        if not is_term and self._told is not None:
            limit = self._told - self._began + HANG * self._barrier
            if now > self._told + LONG * self._barrier:
                self._ask(waiting)
        if waiting and now > self._began + limit:
            self.life.hung = waiting
            self._asked = False
            self._ask(waiting)
            time.sleep(1.0)
            self._kill(missing)

    def _ask(self, indices: Sequence[int]) -> None:
        """Let processes print, once, the stacks of their threads."""
        if not self._asked:
            self._asked = True
            for index in indices:
                os.kill(self._children[index], signal.SIGUSR1)

    def _kill(self, indices: Sequence[int]) -> None:
        for index in indices:
            os.kill(self._children[index], signal.SIGKILL)


def records(directory: Path) -> dict[str, bytes]:
    """Return the commit records of a run, by the name of the step."""
    found = {}
    for path in sorted(directory.glob("*/checkpoint.json")):
        with contextlib.suppress(FileNotFoundError):
            found[path.parent.name] = path.read_bytes()
    return found


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
        return port
