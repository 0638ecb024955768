"""Kills of runs of several connected processes: signals at each moment, and what the next start makes of it.

The same run is started again after each kill. It has to resume from the newest step that is whole in the directory or,
over all hosts that are left, in their local folders, and to end with the bits of an uninterrupted run.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.engine.errors import DamagedCheckpointError
from holdfast.engine.format import RECORD, CheckpointRecord

from .kills_connected import HANG, IMPORTS, Case, Framework, Life, Starter, records
from .kills_member import CALLS, LOCAL_ONLY, LOOP, ON_A_SAVE, PRIMARY_ONLY, RESUMING, SAVE_EVERY, STEPS, local_place

SIGNALS = (*3 * ("KILL",), *2 * ("STOP",), "TERM")
PREEMPTED = 75
LIMIT = 2.0  # barriers after the signal until a process must have ended
HALF = SAVE_EVERY + 2  # the step at which a run that is resumed was killed before
NOT_REACHED = "ended before the moment"
LOCAL, COPY, DIRECTORY, NOTHING = "a newer local step", "a neighbour's copy", "the directory", "nothing"


@dataclass(slots=True)
class Result:
    """How one case ended."""

    framework: Framework
    case: Case
    wait: float  # barriers from the signal to the end of the last process that did not get it
    outcome: str
    resumed_from: str
    shut_down: bool  # whether the framework's own shutdown has ended
    problems: list[str]


def cases(counts: Sequence[int], seed: int, *, is_local: bool) -> Iterator[Case]:
    """Return cases without end: every signal at every moment to process 0, another one and all, in random order."""
    generator = random.Random(seed)
    phases = [phase for phase in (*LOOP, *CALLS) if is_local or phase not in LOCAL_ONLY]
    while True:
        kinds = list(itertools.product(counts, SIGNALS, phases, ("first", "other", "all")))
        generator.shuffle(kinds)
        for count, name, phase, who in kinds:
            if who == "other" and phase in PRIMARY_ONLY:
                continue
            target = {"first": 0, "other": generator.randrange(1, count), "all": None}[who]
            trains = phase == "between saves" or phase in ON_A_SAVE
            resumes = phase in RESUMING or generator.random() < (0.3 if trains else 0.8)
            step = 0
            if trains:
                step = generator.randint(HALF + 1 if resumes else 1, STEPS - 1)
            lost: tuple[int, ...] = ()
            if is_local and name != "TERM":
                lost = _lost_hosts(count, generator.randrange(count) if target is None else target, generator)
            lost_before: tuple[int, ...] = ()
            if is_local and resumes and generator.random() < 0.4:
                lost_before = (generator.randrange(count),)
            yield Case(count, name, phase, target, step, resumes, lost, lost_before)


def _lost_hosts(count: int, host: int, generator: random.Random) -> tuple[int, ...]:
    """Return the hosts that are lost: none, one, or one together with that which keeps its copies."""
    chance = generator.random()
    return () if chance < 0.3 else (host,) if chance < 0.8 else (host, (host + 1) % count)


class Kills:
    """The cases of one framework, one after the other.

    Args:
        framework: The framework.
        barrier: The barrier timeout, in seconds.
        directory: Where the runs are.
        is_local: Whether each process is a host with local steps, and hosts are lost.
    """

    def __init__(self, framework: Framework, barrier: float, directory: Path, *, is_local: bool = False) -> None:
        self._framework, self._barrier, self._is_local = framework, barrier, is_local
        # A run keeps its path, because local steps belong to a directory at one path.
        self._directory, self._place = directory, directory / "run"
        self._starter = Starter(framework, barrier, directory / "logs", is_local)
        self._whole: dict[int, list[dict[int, str]]] = {}  # by the number of processes: digests by step, of each

    def prepare(self, count: int) -> None:
        """Train once without interruption, and once until all processes are killed."""
        self._remove(self._place)
        life = self._starter.start(self._place, count)
        if set(life.statuses.values()) != {0}:
            raise RuntimeError(f"the uninterrupted run ended with {life.statuses}: {life.said('error')}")
        self._whole[count] = [
            {int(line.split()[0]): line.split()[1] for line in [*started, *steps]}
            for started, steps in zip(life.said("resumed"), life.said("step"), strict=True)
        ]
        self._remove(self._place)
        life = self._starter.start(self._place, count, Case(count, "KILL", "between saves", None, HALF, False))
        if not life.signalled:
            raise RuntimeError(f"the run that was to be killed ended with {life.statuses}: {life.said('error')}")
        self._copy(self._place, self._half(count))

    def run(self, case: Case) -> Result:
        """Do one case; the directory of one with problems is left."""
        if case.count not in self._whole:
            self.prepare(case.count)
        self._remove(self._place)
        if case.resumes:
            self._copy(self._half(case.count), self._place)
        self._lose(case.lost_before)
        newest = self._newest(case.count)
        life = self._starter.start(self._place, case.count, case)
        problems = self._check_end(case, life)
        problems += self._check_steps(case, life, newest[0])
        others = [index for index in life.seconds if index != case.target and case.target is not None]
        wait = max((life.seconds[index] for index in others if case.signal != "TERM"), default=0.0)
        after = records(self._place)
        problems += _lost(life.committed, after, "at once")
        self._lose(case.lost)
        newest = self._newest(case.count)
        second = self._starter.start(self._place, case.count)
        if set(second.statuses.values()) != {0}:
            problems.append(f"the next start ended with {second.statuses}: {second.said('error')}")
        problems += unfinished(second, records(self._place))
        problems += self._check_steps(case, second, newest[0])
        problems += _lost(after, records(self._place), "after the resume")
        if problems:
            self._keep(case, life, second)
        statuses = [life.statuses[index] for index in sorted(life.statuses)]
        return Result(
            self._framework,
            case,
            wait / self._barrier,
            _outcome(case, life, statuses),
            newest[1],
            life.shut_down and second.shut_down,
            problems,
        )

    # ---- places

    def _half(self, count: int) -> Path:
        return self._directory / f"half_{count}"

    def _all_of(self, place: Path) -> list[Path]:
        """Return a run, its mirror and the local folders of its hosts."""
        return [one for one in [place, *sorted(place.parent.glob(f"{place.name}.*"))] if one.exists()]

    def _copy(self, source: Path, destination: Path) -> None:
        self._remove(destination)
        for one in self._all_of(source):
            shutil.copytree(one, destination.with_name(one.name.replace(source.name, destination.name, 1)))

    def _remove(self, place: Path) -> None:
        for one in self._all_of(place):
            shutil.rmtree(one)

    def _lose(self, hosts: Sequence[int]) -> None:
        for host in hosts:
            shutil.rmtree(local_place(self._place, host), ignore_errors=True)

    def _keep(self, case: Case, *lives: Life) -> None:
        """Leave the run of a case with problems, with what its processes printed."""
        kept = self._directory / f"problem_{time.time_ns()}"
        for one in self._all_of(self._place):
            one.rename(kept.with_name(one.name.replace(self._place.name, kept.name, 1)))
        shutil.copytree(self._directory / "logs", kept / "logs")
        lines = ["\n".join(one) for life in lives for one in life.lines]
        (kept / "logs" / "lines").write_text("\n\n".join([str(case), *lines]))

    # ---- checks

    def _newest(self, count: int) -> tuple[int, str]:
        """Return the newest step that is whole anywhere, and where it is."""
        newest, where = max(map(int, records(self._place)), default=0), DIRECTORY
        for step, needs_copy in whole_local_steps([local_place(self._place, host) for host in range(count)]):
            if step > newest:
                newest, where = step, COPY if needs_copy else LOCAL
        return newest, where if newest else NOTHING

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

    def _check_steps(self, case: Case, life: Life, newest: int) -> list[str]:
        """Compare the step from which each process resumed, and its bits at each step."""
        problems = []
        for index, (started, steps) in enumerate(zip(life.said("resumed"), life.said("step"), strict=True)):
            expected = self._whole[case.count][index]
            for line in [*started, *steps]:
                step, digest = line.split()
                if expected[int(step)] != digest:
                    problems.append(f"process {index} has other bits than the uninterrupted run at step {step}")
                    break
            if started and int(started[0].split()[0]) != newest:
                problems.append(f"process {index} resumed from {started[0].split()[0]}, and step {newest} is whole")
        return problems


def unfinished(life: Life, committed: Mapping[str, bytes]) -> list[str]:
    """Return what is missing of a start that has come to its end: the steps that processes tell, and the last save."""
    problems = [] if str(STEPS) in committed else [f"step {STEPS}, the last one, is not in the directory"]
    for index, (started, steps) in enumerate(zip(life.said("resumed"), life.said("step"), strict=True)):
        done = [int(line.split()[0]) for line in [*started, *steps]]
        if not started or done != list(range(done[0], STEPS + 1)):
            problems.append(f"process {index} has told the steps {done} of the next start, which ends at {STEPS}")
    return problems


def whole_local_steps(places: Sequence[Path]) -> list[tuple[int, bool]]:
    """Return the local steps of which each file is on a host, and whether the only one of some file is a copy."""
    found = []
    for folder in sorted({one.name for place in places for one in place.glob("*/*/*")}):
        own = [one for place in places for one in place.glob(f"*/own/{folder}")]
        every = [*own, *(one for place in places for one in place.glob(f"*/copies/{folder}"))]
        record = next((known for one in every if (known := _record(one / RECORD)) is not None), None)
        if record is None or record.step is None:
            continue
        sizes = {path: known.size for item in record.items.values() for path, known in item.paths.items()}
        if all(any(_size(one / path) == size for one in every) for path, size in sizes.items()):
            in_own = all(any(_size(one / path) == size for one in own) for path, size in sizes.items())
            found.append((record.step, not in_own))
    return found


def _record(path: Path) -> CheckpointRecord | None:
    try:
        return CheckpointRecord.decode(path.read_bytes(), source=str(path))
    except (FileNotFoundError, DamagedCheckpointError):  # or it was being written
        return None


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1


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
    frameworks: Sequence[Framework],
    counts: Sequence[int],
    kills: int,
    seed: int,
    barrier: float,
    directory: Path,
    *,
    is_local: bool = False,
    jobs: int = 1,
) -> int:
    """Do a number of kills, print each, and a table of all.

    Args:
        frameworks: What connects the processes; each does the same share of the kills.
        counts: How many processes a run has; each number in turn.
        kills: How many.
        seed: Of the order of the cases.
        barrier: The barrier timeout, in seconds.
        directory: Where the runs are. Those with problems are left there, with what their processes printed.
        is_local: Whether each process is a host that saves every step locally, with a copy on another one, hosts are
            lost after the kill, and the run has a mirror.
        jobs: How many runs there are at a time.

    Returns:
        1 where a promise was broken, else 0.
    """
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    context = multiprocessing.get_context("fork")
    turns, queue = context.Semaphore(jobs), context.SimpleQueue()
    servers = []
    for place, framework in enumerate(frameworks):
        share = kills // len(frameworks) + (place < kills % len(frameworks))
        left, taken = context.Value("i", share), context.Value("i", 0)
        for number in range(jobs):
            runs = directory / f"{framework}_{number}"
            inputs = (framework, counts, seed, barrier, runs, is_local, turns, left, taken, queue)
            servers.append(context.Process(target=_serve, args=inputs))
    for server in servers:
        server.start()
    results: list[Result] = []
    began = time.monotonic()
    ended, broken = 0, False
    while ended < len(servers):
        result = queue.get()
        if isinstance(result, Result):
            results.append(result)
            print(
                f"{time.monotonic() - began:6.0f} s {len(results):4d}: {result.framework}: {result.case}: "
                f"{result.outcome}, {result.wait:.2f} barriers; resumed from {result.resumed_from}"
            )
            for problem in result.problems:
                print(f"    PROBLEM {problem}")
            sys.stdout.flush()
        else:
            ended += 1
            if result is not None:
                broken = True
                print(result)
    for server in servers:
        server.join()
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"barrier {barrier:g} s, seed {seed}, {time.monotonic() - began:.0f} s, "
        f"{usage.ru_utime + usage.ru_stime:.0f} s of processor time"
    )
    print(table(results))
    print(summary(results))
    return int(broken or any(result.problems for result in results))


def _serve(
    framework: Framework, counts: Sequence[int], seed: int, barrier: float, directory: Path, is_local: bool,
    turns: Any, left: Any, taken: Any, queue: Any,
) -> None:  # fmt: skip
    """Do cases of one framework until no kill is left to do; several processes divide them."""
    try:
        for name in IMPORTS[framework]:
            importlib.import_module(name)
        gc.freeze()  # what has been imported is not looked through by each process
        directory.mkdir(parents=True)
        runner = Kills(framework, barrier, directory, is_local=is_local)
        for number, case in enumerate(cases(counts, seed, is_local=is_local)):
            with turns:
                with left.get_lock():
                    if left.value <= 0:
                        break
                    if number < taken.value:
                        continue
                    taken.value, left.value = number + 1, left.value - 1
                result = runner.run(case)
            queue.put(result)
            if result.outcome == NOT_REACHED:
                with left.get_lock():
                    left.value += 1
        queue.put(None)
    except BaseException:
        queue.put(traceback.format_exc())


def table(results: Sequence[Result]) -> str:
    """Return the table of all cases: how many of each kind, the longest wait, what the next start resumed from."""
    groups: dict[tuple[Any, ...], list[Result]] = defaultdict(list)
    for result in results:
        who = "all" if result.case.target is None else "process 0" if result.case.target == 0 else "another"
        groups[result.framework, result.case.count, result.case.signal, who].append(result)
    sources = (LOCAL, COPY, DIRECTORY, NOTHING)
    names = " | ".join(f"from {one}" for one in sources)
    rows = [
        f"| | processes | signal | to | kills | longest wait, barriers | problems | {names} | how the others ended |",
        "| --- | ---: | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for (framework, count, name, who), group in sorted(groups.items()):
        outcomes = Counter(result.outcome for result in group)
        said = "; ".join(f"{number} {outcome}" for outcome, number in outcomes.most_common())
        wait = max(result.wait for result in group)
        bad = sum(bool(result.problems) for result in group)
        resumed = Counter(result.resumed_from for result in group)
        origins = " | ".join(str(resumed[one]) for one in sources)
        rows.append(
            f"| {framework} | {count} | {name} | {who} | {len(group)} | {wait:.2f} | {bad} | {origins} | {said} |"
        )
    return "\n".join(rows)


def summary(results: Sequence[Result]) -> str:
    """Return in sentences what the next starts resumed from, and what was wrong."""
    resumed = Counter(result.resumed_from for result in results)
    wrong = sum(bool(result.problems) for result in results)
    hung = sum(not result.shut_down for result in results)
    missed = sum(result.outcome == NOT_REACHED for result in results)
    return (
        f"{len(results) - missed} kills ({missed} runs ended before the moment), {wrong} with problems, longest wait "
        f"{max((result.wait for result in results), default=0.0):.2f} barriers. The next starts resumed "
        f"{resumed[LOCAL] + resumed[COPY]} times from local steps newer than the directory's ({resumed[COPY]} of them "
        f"with a neighbour's copy), {resumed[DIRECTORY]} times from the directory, and {resumed[NOTHING]} times had no "
        f"step. {hung} times, the framework's own shutdown did not end after all processes had left the run"
    )
