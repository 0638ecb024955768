"""Kills of runs of several connected processes: signals at each moment, and what the next start makes of it.

One process that has everything imported forks the processes of a run. One of them, or each, waits at a certain moment
for the signal; then the same run is started again, and has to end with the bits of an uninterrupted one.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import itertools
import os
import random
import select
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from .kills_member import CALLS, LOOP, ON_A_SAVE, PRIMARY_ONLY, RESUMING, STEPS, TRAIN, Member, Order, local_place

Framework = Literal["torch", "jax"]

SIGNALS = ("KILL", "TERM", "STOP")
PREEMPTED = 75
LIFE_SECONDS = 120.0  # until a run that gets no signal counts as hanging
LIMIT = 2.2  # barriers after the signal until a process must have ended; a tenth is for a busy machine
HANG = 4.0  # barriers after the signal until a process counts as hanging
STOPPED_SECONDS = 1.0  # until processes that were all stopped are killed
NOTICE: dict[Framework, float] = {"torch": 0.1, "jax": 0.4}  # seconds a step; jax looks for SIGTERM once a second
NOT_REACHED = "ended before the moment"
IMPORTS: dict[Framework, list[str]] = {
    "torch": ["torch", "torch.distributed", "torch._dynamo"],  # the last is what optimizers import
    "jax": ["jax", "jax.numpy"],
}
_TICK = 0.02


@dataclass(frozen=True, slots=True)
class Case:
    """One kill: which processes get which signal, and when."""

    count: int
    signal: str
    phase: str
    target: int | None  # None is all processes
    turn: int
    resumes: bool

    def __str__(self) -> str:
        who = "all" if self.target is None else f"process {self.target} of {self.count}"
        life = "a resumed run" if self.resumes else "a fresh run"
        return f"{self.signal} to {who} of {life}, {self.phase}, time {self.turn}"


@dataclass(slots=True)
class Life:
    """The output of the processes of one start, and how each ended: its status, and the seconds after the signal."""

    lines: list[list[str]]
    statuses: dict[int, int] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    hung: list[int] = field(default_factory=list)
    committed: Mapping[str, bytes] = field(default_factory=dict)  # the commit records at the signal
    signalled: bool = False
    inside: frozenset[int] = frozenset()  # those that took signals at the signal, and had steps to do

    def said(self, word: str) -> list[list[str]]:
        """Return, for each process, the rest of the lines that begin with a word."""
        return [[line.partition(" ")[2] for line in lines if line.partition(" ")[0] == word] for lines in self.lines]


@dataclass(slots=True)
class Result:
    """How one case ended."""

    case: Case
    wait: float  # seconds from the signal to the end of the last process that did not get it
    outcome: str
    problems: list[str]


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
            order = Order(case.phase, case.turn) if case is not None and index == waits else None
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
        self.life = Life([[] for _ in children])

    def to_the_end(self) -> Life:
        """Follow all processes until they have ended, and return what became of them."""
        life = self.life
        while len(life.statuses) < len(self._children):
            self._hear()
            if self._case is not None and self._told is None and any(life.said("reached")):
                self._signal(self._case)
            for index in self._missing():
                done, status = os.waitpid(self._children[index], os.WNOHANG)
                if done:
                    life.statuses[index] = os.waitstatus_to_exitcode(status)
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
        waiting = missing
        if case is not None and case.signal == "STOP" and self._told is not None:
            waiting = [index for index in missing if case.target not in (None, index)]
        if missing and not waiting:
            self._idle = self._idle or now
            if now > self._idle + STOPPED_SECONDS:
                self._kill(missing)
            return
        limit = LIFE_SECONDS
        if case is not None and self._told is not None and case.signal != "TERM":
            limit = self._told - self._began + HANG * self._barrier
        if waiting and now > self._began + limit:
            self.life.hung = waiting
            for index in waiting:
                os.kill(self._children[index], signal.SIGUSR1)  # it prints the stacks of its threads
            time.sleep(1.0)
            self._kill(missing)

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


def cases(counts: Sequence[int], seed: int) -> Iterator[Case]:
    """Return cases without end: every signal at every moment to process 0, another one and all, in random order."""
    generator = random.Random(seed)
    while True:
        kinds = list(itertools.product(counts, SIGNALS, (*LOOP, *CALLS), ("first", "other", "all")))
        generator.shuffle(kinds)
        for count, name, phase, who in kinds:
            if who == "other" and phase in PRIMARY_ONLY:
                continue
            target = {"first": 0, "other": generator.randrange(1, count), "all": None}[who]
            resumes = phase in RESUMING or generator.random() < 0.4
            turn = 1
            if phase in ON_A_SAVE:
                turn = 1 if resumes else generator.randint(1, 4)
            elif phase == "between saves":
                turn = 1 if resumes else generator.randint(1, STEPS - 1)
            yield Case(count, name, phase, target, turn, resumes)


class Kills:
    """The cases of one framework, one after the other.

    Args:
        framework: The framework.
        barrier: The barrier timeout, in seconds.
        directory: Where the runs are.
        is_local: Whether each process is a host with local steps, which is lost with the process that is killed.
    """

    def __init__(self, framework: Framework, barrier: float, directory: Path, *, is_local: bool = False) -> None:
        self._barrier, self._directory, self._is_local = barrier, directory, is_local
        self._starter = Starter(framework, barrier, directory / "logs", is_local)
        self.resumed_locally = 0
        self._whole: dict[int, list[dict[int, str]]] = {}  # by the number of processes: digests by step, of each

    def prepare(self, count: int) -> None:
        """Train once without interruption, and once to the middle."""
        for name in ("whole", "half"):
            self._remove(self._directory / f"{name}_{count}")
        life = self._starter.start(self._directory / f"whole_{count}", count)
        if set(life.statuses.values()) != {0}:
            raise RuntimeError(f"the uninterrupted run ended with {life.statuses}: {life.said('error')}")
        self._whole[count] = [
            {int(line.split()[0]): line.split()[1] for line in [*started, *steps]}
            for started, steps in zip(life.said("resumed"), life.said("step"), strict=True)
        ]
        half = self._directory / f"half_{count}"
        case = Case(count, "TERM", "between saves", None, 2, False)
        life = self._starter.start(half, count, case)
        if set(life.statuses.values()) != {PREEMPTED}:
            raise RuntimeError(f"the preempted run ended with {life.statuses}: {life.said('error')}")

    def run(self, case: Case) -> Result:
        """Do one case; the directory of one with problems is left."""
        if case.count not in self._whole:
            self.prepare(case.count)
        place = self._directory / f"run_{hashlib.sha256(str(case).encode()).hexdigest()[:8]}"
        self._remove(place)
        if case.resumes:
            half = self._directory / f"half_{case.count}"
            for one in [half, *half.parent.glob(f"{half.name}.*")]:
                shutil.copytree(one, place.with_name(place.name + one.name.removeprefix(half.name)))
        life = self._starter.start(place, case.count, case)
        problems = self._check_end(case, life)
        others = [index for index in life.seconds if index != case.target and case.target is not None]
        wait = max((life.seconds[index] for index in others if case.signal != "TERM"), default=0.0)
        after = records(place)
        problems += _lost(life.committed, after, "at once")
        if case.target is not None and case.signal in ("KILL", "STOP"):
            shutil.rmtree(local_place(place, case.target), ignore_errors=True)  # the host is lost with its memory
        second = self._starter.start(place, case.count)
        problems += self._check_resumed(case, second, after)
        problems += _lost(after, records(place), "after the resume")
        statuses = [life.statuses[index] for index in sorted(life.statuses)]
        if not problems:
            self._remove(place)
        else:
            shutil.copytree(self._directory / "logs", place / "logs", dirs_exist_ok=True)
            (place / "logs" / "lines").write_text("\n\n".join("\n".join(one) for one in [*life.lines, *second.lines]))
        return Result(case, wait, _outcome(case, life, statuses), problems)

    def _remove(self, place: Path) -> None:
        """Remove a run, its mirror and what its hosts have."""
        for one in [place, *place.parent.glob(f"{place.name}.*")]:
            shutil.rmtree(one, ignore_errors=True)

    def _check_end(self, case: Case, life: Life) -> list[str]:
        problems = []
        if not life.signalled and set(life.statuses.values()) != {0}:
            problems.append(f"the moment did not come: {life.statuses} {life.said('error')}")
        if life.hung:
            problems.append(f"processes {life.hung} were there {HANG:g} barriers after the signal")
        for index, seconds in life.seconds.items():
            if case.signal != "TERM" and case.target not in (None, index) and seconds > LIMIT * self._barrier:
                problems.append(f"process {index} ended {seconds / self._barrier:.2f} barriers after the signal")
        victims = range(case.count) if case.target is None else [case.target]
        if case.signal == "TERM" and life.signalled and life.inside.issuperset(victims):
            statuses = set(life.statuses.values())
            done = all(steps and steps[-1].startswith(f"{STEPS} ") for steps in life.said("step"))
            if statuses != {PREEMPTED} and not (done and statuses <= {0, PREEMPTED}):
                problems.append(f"the processes ended with {life.statuses}: {life.said('error')}")
        return problems

    def _check_resumed(self, case: Case, life: Life, committed: Mapping[str, bytes]) -> list[str]:
        problems = []
        if set(life.statuses.values()) != {0}:
            problems.append(f"the next start ended with {life.statuses}: {life.said('error')}")
        newest = max(map(int, committed), default=0)
        for index, (started, steps) in enumerate(zip(life.said("resumed"), life.said("step"), strict=True)):
            expected = self._whole[case.count][index]
            for line in [*started, *steps]:
                step, digest = line.split()
                if expected[int(step)] != digest:
                    problems.append(f"process {index} has other bits than the uninterrupted run at step {step}")
                    break
            resumed = int(started[0].split()[0]) if started else newest
            self.resumed_locally += resumed > newest
            if resumed < newest or (resumed > newest and not self._is_local):
                problems.append(f"process {index} resumed from {resumed}, and step {newest} is committed")
        return problems


def _lost(before: Mapping[str, bytes], after: Mapping[str, bytes], when: str) -> list[str]:
    return [
        f"step {step} was committed, and is gone or changed {when}"
        for step in before
        if before[step] != after.get(step)
    ]


def _outcome(case: Case, life: Life, statuses: list[int]) -> str:
    """Say how the processes that did not get the signal ended."""
    if not life.signalled:
        return NOT_REACHED
    names = {0: "finished", PREEMPTED: "saved and stopped", -signal.SIGABRT: "aborted by jax"}
    names |= {-signal.SIGKILL: "killed", -signal.SIGTERM: "ended by the signal"}
    rest = [index for index in range(case.count) if case.target is not None and index != case.target]
    if case.signal == "TERM" or not rest:
        rest = list(range(case.count))
    said = life.said("error")
    words = {names.get(statuses[index]) or (said[index] or ["status"])[-1].partition(":")[0] for index in rest}
    return ", ".join(sorted(words))


def run_connected(
    framework: Framework,
    counts: Sequence[int],
    kills: int,
    seed: int,
    barrier: float,
    directory: Path,
    *,
    is_local: bool = False,
) -> int:
    """Do a number of kills, print each, and a table of all.

    Args:
        framework: What connects the processes.
        counts: How many processes a run has; each number in turn.
        kills: How many.
        seed: Of the order of the cases.
        barrier: The barrier timeout, in seconds.
        directory: Where the runs are. Those with problems are left there, with what their processes printed.
        is_local: Whether each process is a host that saves every step locally, with a copy on another one, and is lost
            with the process that is killed or frozen; and the run has a mirror.

    Returns:
        1 where a promise was broken, else 0.
    """
    for name in IMPORTS[framework]:
        importlib.import_module(name)
    gc.freeze()  # what has been imported is not looked through by each process
    runner = Kills(framework, barrier, directory, is_local=is_local)
    results: list[Result] = []
    began = time.monotonic()
    for case in cases(counts, seed):
        if sum(result.outcome != NOT_REACHED for result in results) == kills:
            break
        result = runner.run(case)
        results.append(result)
        print(
            f"{time.monotonic() - began:6.0f} s {len(results):4d}: {case}: {result.outcome}, "
            f"{result.wait / barrier:.2f} barriers"
        )
        for problem in result.problems:
            print(f"    PROBLEM {problem}")
        sys.stdout.flush()
    print(f"{framework}, barrier {barrier:g} s, seed {seed}")
    print(table(results, barrier))
    if is_local:
        print(f"{runner.resumed_locally} processes resumed from a local step that is newer than the directory's")
    return int(any(result.problems for result in results))


def table(results: Sequence[Result], barrier: float) -> str:
    """Return the table of all cases: how many of each kind, the longest wait, how the other processes ended."""
    groups: dict[tuple[Any, ...], list[Result]] = defaultdict(list)
    for result in results:
        who = "all" if result.case.target is None else "process 0" if result.case.target == 0 else "another"
        groups[result.case.count, result.case.signal, who].append(result)
    rows = [
        "| processes | signal | to | kills | longest wait, barriers | problems | how the others ended |",
        "| ---: | --- | --- | ---: | ---: | ---: | --- |",
    ]
    for (count, name, who), group in sorted(groups.items()):
        outcomes = Counter(result.outcome for result in group)
        said = "; ".join(f"{number} {outcome}" for outcome, number in outcomes.most_common())
        wait = max(result.wait for result in group) / barrier
        bad = sum(bool(result.problems) for result in group)
        rows.append(f"| {count} | {name} | {who} | {len(group)} | {wait:.2f} | {bad} | {said} |")
    return "\n".join(rows)
