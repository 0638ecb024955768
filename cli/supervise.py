"""``holdfast supervise`` restarts a program until its run has finished.

The supervisor relies on the run's own events, which record whether it finished or was preempted, and on its newest
step. The program's exit status is secondary, because torchrun turns every failure into status 1, and some trainers exit
with 0 after SIGTERM.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import shlex
import signal
import stat
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import click

from ..engine.errors import BAD_USAGE, FAILED, INTERRUPTED, NO_PROGRESS, PREEMPTED, HoldfastError
from ..engine.manager import EVENTS, append_after_death, slow_saves
from ..engine.steps import list_steps, newest_step
from ..engine.storage import as_location
from ..engine.streams import silence_lost_streams
from . import arguments
from .program import Program, Signals, shell_status
from .report import proof_text
from .streams import one_line, write_error

_BETWEEN_STACKS = 5.0  # maximum interval between the two stack dumps of a hung program, in seconds
_SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
STALLED = 3  # the supervisor gives up after this many consecutive restarts without a new checkpoint
EARLY = 60.0  # also give up after STALLED consecutive attempts that end within this many seconds, before a run starts

Kind = Literal["finished", "preempted", "interrupted", "crashed", "hung", "misused"]

_PREEMPTED = (PREEMPTED, 128 + signal.SIGTERM, -signal.SIGTERM)
_INTERRUPTED = (INTERRUPTED, -signal.SIGINT)
_ENDS = ("preempted", "finished", "failed")


# ---- pure functions: how an attempt ended, and what to do next


@dataclass(slots=True)
class RunRecord:
    """The last state that each run reported during one attempt, and the newest step in each directory."""

    states: dict[tuple[str, int], str] = field(default_factory=dict)  # keyed by directory and process
    newest: dict[str, int] = field(default_factory=dict)  # newest step at the start, keyed by directory; -1 for none
    runs: dict[str, str] = field(default_factory=dict)  # run token that process 0 last reported, keyed by directory

    def add(self, events: Iterable[Mapping[str, Any]]) -> None:
        for event in events:
            directory, name = str(event.get("directory", "")), event["event"]
            if name == "started":
                newest = event.get("newest")
                self.newest.setdefault(directory, newest if isinstance(newest, int) else -1)
                if event.get("process") == 0 and isinstance(event.get("run"), str):
                    self.runs[directory] = event["run"]
            if name == "started" or name in _ENDS:
                self.states[directory, int(event.get("process", 0))] = name

    @property
    def state(self) -> str | None:
        """``preempted`` if any run is, ``finished`` if all runs are, else ``unfinished``; None if there are no runs."""
        states = set(self.states.values())
        if not states:
            return None
        return "preempted" if "preempted" in states else "finished" if states == {"finished"} else "unfinished"


def kind_of(returncode: int, state: str | None, *, hung: bool, asked: bool) -> Kind:
    """Classify how an attempt ended, given whether it hung, and whether a signal was forwarded to it (``asked``)."""
    if hung and not (state == "finished" and returncode == 0):
        return "hung"
    if returncode in _INTERRUPTED and state != "finished":
        return "interrupted"
    if state in ("preempted", "finished"):
        return "preempted" if state == "preempted" else "finished"
    if returncode in _PREEMPTED or (asked and (returncode == 0 or returncode < 0)):
        return "preempted"
    if returncode == 0:
        return "finished"
    return "misused" if returncode == BAD_USAGE and state is None else "crashed"


@dataclass(frozen=True, slots=True)
class Start:
    """How one attempt to run the program ended."""

    kind: Kind
    returncode: int
    progress: bool | None  # whether the attempt committed a step newer than any before; None if unknown
    asked: bool = False  # whether the supervisor received and forwarded a signal
    early: bool = False  # whether the attempt ended within ``EARLY`` seconds without starting a run


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    max_restarts: int = 10  # maximum number of restarts after crashes and hangs; preemptions do not count
    pause: float = 1.0  # seconds before the first restart; doubles with each crash without progress
    longest_pause: float = 300.0

    def decide(self, starts: Sequence[Start]) -> Verdict:
        """Decide what to do after the most recent attempt."""
        last = starts[-1]
        status = shell_status(last.returncode)
        if last.kind == "finished":
            why = "the run has finished" + (f", and then the program ended with {status}" if status else "")
            return Verdict("end", why, status)
        if last.kind == "interrupted":
            return Verdict("end", "the program was interrupted by Ctrl-C", status)
        if last.asked:
            if last.kind == "preempted":
                return Verdict("end", "preempted", status if last.returncode in _PREEMPTED else PREEMPTED)
            return Verdict("end", f"the program {last.kind} after a signal", status or FAILED)
        if last.kind == "misused":
            return Verdict("end", "status 2: the program was called incorrectly; a restart will not help", status)
        without = itertools.takewhile(lambda start: not start.progress, reversed(starts[1:]))
        stalled = sum(start.progress is False for start in without)
        if stalled >= STALLED:
            return Verdict("end", f"no new checkpoint in {stalled} restarts in a row", NO_PROGRESS)
        early = len(list(itertools.takewhile(lambda start: start.early, reversed(starts))))
        if early >= STALLED:
            why = f"{early} starts in a row ended within {EARLY:g} s, before their run began"
            return Verdict("end", why, NO_PROGRESS)
        crashes = sum(start.kind in ("crashed", "hung") for start in starts)
        if last.kind != "preempted" and crashes > self.max_restarts:
            return Verdict("end", f"reached --max-restarts={self.max_restarts}", status or FAILED)
        row = itertools.takewhile(lambda start: start.kind != "preempted" and not start.progress, reversed(starts))
        pause = min(self.pause * 2 ** min(max(0, len(list(row)) - 1), 40), self.longest_pause)
        used = "" if last.kind == "preempted" else f", {crashes} of {self.max_restarts} restarts used"
        return Verdict("restart", f"{last.kind}{used}", pause=pause)


@dataclass(frozen=True, slots=True)
class Verdict:
    action: Literal["end", "restart"]
    why: str
    status: int = 0  # exit status if the action is "end"
    pause: float = 0.0  # delay before the restart, in seconds


# ---- the supervisor


@dataclass(frozen=True, slots=True)
class Watch:
    """The timeouts for the running program, in seconds."""

    hang: float | None = None  # maximum time between signs of progress, after the first step
    start: float = 3600.0  # maximum time until the first step, including compilation
    grace: float = 30.0  # time between SIGTERM and SIGKILL


class _Log:
    """Logs each event as a line to standard error (text on a terminal, JSON otherwise), and as JSON to a file."""

    def __init__(self, path: Path | None, *, as_json: bool) -> None:
        self._path = path
        self._pipe: int | None = None  # descriptor of a FIFO, kept open because closing it would end the stream
        self._has_failed = False
        self._in_words = not as_json and os.isatty(2)

    def __call__(self, event: str, **facts: Any) -> None:
        now = time.time()
        line = json.dumps({"event": event, "time": round(now, 3), **facts})
        words = f"{time.strftime('%H:%M:%S', time.localtime(now))} {in_words(event, facts)}" if self._in_words else line
        write_error(f"{words}\n")  # a single write is not interleaved with the program's output
        if self._path is None:
            return
        try:
            self._append(self._path, f"{line}\n".encode())
            self._has_failed = False
        except OSError as error:
            if not self._has_failed:
                write_error(f"holdfast: events are missing in {self._path}: {error.strerror}\n")
            self._has_failed = True

    def _append(self, path: Path, line: bytes) -> None:
        descriptor, self._pipe = self._pipe, None
        if descriptor is None:  # with O_NONBLOCK, opening a FIFO without a reader fails instead of blocking
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
            descriptor = os.open(path, flags, 0o666)
        try:
            os.write(descriptor, line)
            if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                self._pipe = descriptor
        finally:
            if self._pipe is None:
                os.close(descriptor)


def in_words(event: str, facts: Mapping[str, Any]) -> str:
    """Describe an event in one line."""
    match event:
        case "started":
            said = f"started {shlex.join(facts['command'])} (process {facts['pid']}, start {facts['start'] + 1})"
        case "forwarded":
            said = f"passed {facts['signal']} on to the program"
        case "witness":
            how = {"exact": "exact", "inexact": "NOT exact"}.get(proof_text(facts), "exact up to rounding")
            said = f"the resume from step {facts['step']} is {how}: {', '.join(facts['layers'])}"
            said += " differ from before the stop" if how == "NOT exact" else ""
        case "slow_save":
            took, grace = facts["total_seconds"], facts["grace_seconds"]
            said = f"the save of step {facts['step']} took {took:.1f} s, longer than --grace ({grace:g} s)"
        case "hangs":
            said = f"the program hangs: {facts['why']}"
        case "output_lost":
            said = f"no process reads {' and '.join(facts['streams'])} any more: what the program prints there is lost"
        case "restarting":
            said = f"starting again in {facts['pause_seconds']:g} s: {facts['why']}"
        case "ended":
            starts = facts["starts"]
            said = f"ended with status {facts['status']} after {starts} start{'s'[: starts > 1]}: {facts['why']}"
        case _:
            said = f"{event}: status {facts['status']} after {facts['seconds']:.1f} s"
            said += "".join(f"; newest step {step} in {directory}" for directory, step in facts["newest"].items())
            if left := facts.get("left_running"):
                said += f"; leftover processes that were ended: {', '.join(map(str, left))}"
    return one_line(said)


@click.command()
@arguments.program
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=10,
    help="Restarts after crashes and hangs; preemptions are free.",
)
@arguments.duration("--pause", "Wait before a restart; doubles with each crash without progress.", default="1s")
@arguments.duration("--longest-pause", "The pause does not grow beyond this.", default="5m")
@arguments.duration("--hang-timeout", "Restart if there is no step within this time, such as 10m.")
@arguments.duration("--start-timeout", "With --hang-timeout: how long the first step may take.", default="1h")
@arguments.duration("--grace", "The time between SIGTERM and SIGKILL; slower saves are reported.", default="30s")
@click.option("--events", metavar="FILE", help="Append the events to a file, as JSON.")
@arguments.as_json
def supervise(
    command: Sequence[str],
    max_restarts: int,
    pause: float,
    longest_pause: float,
    hang_timeout: float | None,
    start_timeout: float,
    grace: float,
    events: str | None,
    as_json: bool,
) -> int:
    """Run a program, and start it again after a preemption, a crash or a hang.

    Write the program after two dashes: holdfast supervise -- python train.py. The run's own events show whether it
    finished or was preempted. SIGTERM and other signals are forwarded to the program. Events are logged as lines on
    standard error: text on a terminal, JSON elsewhere or with --json. The exit status is the program's own, 75 if the
    supervisor itself was preempted, or 93 if it gives up: after 3 consecutive restarts without a new checkpoint, or
    after 3 consecutive starts that end within a minute, before the run begins.
    """
    policy, watch = RestartPolicy(max_restarts, pause, longest_pause), Watch(hang_timeout, start_timeout, grace)
    log = _Log(None if events is None else Path(events), as_json=as_json)
    starts: list[Start] = []
    newest: dict[str, int] = {}
    with Signals() as signals, tempfile.TemporaryDirectory(prefix="holdfast-supervise-") as temporary:
        while True:
            folder = Path(temporary, str(len(starts)))
            folder.mkdir()
            start = _start(command, folder, signals, watch, log, len(starts), newest)
            starts.append(start)
            verdict = policy.decide(starts)
            if verdict.action == "restart":
                log("restarting", why=verdict.why, pause_seconds=verdict.pause, start=len(starts))
                until = time.monotonic() + verdict.pause
                while not signals.received and (left := until - time.monotonic()) > 0:
                    signals.sleep(left)
                if not signals.received:
                    continue
                names = [signal.Signals(number).name for number in signals.received]
                status = PREEMPTED if start.kind == "preempted" else shell_status(start.returncode) or FAILED
                verdict = Verdict("end", f"{' and '.join(names)} before the restart", status)
            log("ended", why=verdict.why, status=verdict.status, starts=len(starts))
            return verdict.status


def _start(
    command: Sequence[str],
    folder: Path,
    signals: Signals,
    watch: Watch,
    log: _Log,
    number: int,
    newest: dict[str, int],
) -> Start:
    if lost := silence_lost_streams():  # otherwise the program would fail at its first line of output
        log("output_lost", streams=lost)
    # By default, torchrun gives its workers 30 seconds to shut down; use the grace period instead.
    program = Program(command, folder, signals, {_SHUTDOWN: os.environ.get(_SHUTDOWN, str(math.ceil(watch.grace)))})
    log("started", command=list(command), pid=program.pid, start=number)
    record, forwarded = RunRecord(), 0
    grace = watch.grace
    note = slow_saves(grace, lambda step, took: log("slow_save", step=step, total_seconds=took, grace_seconds=grace))

    def look() -> bool:
        nonlocal forwarded
        for number in program.forwarded[forwarded:]:
            log("forwarded", signal=signal.Signals(number).name)
        forwarded = len(program.forwarded)
        events = program.new_events()
        record.add(events)
        for event in events:
            note(event)
            if event["event"] == "witness" and event.get("process") == 0:
                layers = [*map(str, layers)] if isinstance(layers := event.get("layers"), list) else []
                facts = {name: event.get(name) for name in ("exact", "directory")}
                log("witness", step=event.get("saved_step"), layers=layers, **facts)
        return watch.hang is not None and _overdue(program, watch) is not None

    returncode = program.wait(look)
    # After a process has failed, waiting for the others is not a hang.
    hung = returncode is None and "failed" not in record.states.values()
    why = None
    if returncode is None:
        why = _overdue(program, watch)
        log("hangs", why=why, step=program.last_sign()[1])
        returncode = program.end_after_hang(watch.grace, min(watch.hang or _BETWEEN_STACKS, _BETWEEN_STACKS))
    look()
    left = program.sweep(min(watch.grace, 5.0))
    newest.update(record.newest | newest)
    progress = _progress(newest)
    asked = bool(program.forwarded)
    kind = kind_of(returncode, record.state, hung=hung, asked=asked)
    steps = {directory: step for directory, step in newest.items() if step >= 0}
    took = time.monotonic() - program.began
    facts = {"status": shell_status(returncode), "seconds": round(took, 3)}
    log(kind, **facts, newest=steps, **({"left_running": left} if left else {}))
    last = program.last_sign()[1]
    _report_end(record, how=kind, **facts, step=None if last < 0 else last, why=why)
    return Start(kind, returncode, progress, asked, early=record.state is None and took < EARLY)


def _report_end(record: RunRecord, **facts: Any) -> None:
    """Append an ``ended`` event to the event logs of the program's runs, because a killed program cannot do so."""
    for directory, run in record.runs.items():
        location = as_location(directory)
        if location.is_local:
            with contextlib.suppress(OSError):
                append_after_death(location.path / EVENTS, {"event": "ended", "time": time.time(), "run": run, **facts})


def _overdue(program: Program, watch: Watch) -> str | None:
    """Return why the program is considered hung, or None if it is not."""
    when, step = program.last_sign()
    silent = time.monotonic() - when
    if step < 0:
        return f"no first step within {watch.start:g} s" if silent > watch.start else None
    assert watch.hang is not None
    return f"no step within {watch.hang:g} s after step {step}" if silent > watch.hang else None


def _progress(newest: dict[str, int]) -> bool | None:
    """Update the newest step of each directory. Return whether any of them has increased; None if this is unknown."""
    grown, is_known = False, bool(newest)
    for directory, before in list(newest.items()):
        try:
            location = as_location(directory)
            entry = newest_step(list_steps(location), whole=True) if location.exists() else None
        except (HoldfastError, OSError):
            is_known = False
            continue
        if entry is not None and entry.step > before:
            newest[directory] = entry.step
            grown = True
    return True if grown else False if is_known else None
