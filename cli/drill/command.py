"""``holdfast drill`` rehearses preemptions, and compares the checkpoints of interrupted and undisturbed runs.

A reference run is followed by a run that is interrupted repeatedly. If their checkpoints differ, a second reference
run shows whether the program is deterministic. In every attempt, ``rehearsal.py`` follows a :class:`DrillPlan`, and
triggers saves, stops and interruptions from inside the process.
"""

from __future__ import annotations

import bisect
import contextlib
import fnmatch
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import click

from ...engine.clock import format_size
from ...engine.errors import BAD_USAGE, DONE, FAILED, PREEMPTED, HoldfastError, OptionError, shortened, shortened_steps
from ...engine.manager import read_events
from ...engine.observer import DRILL, STRAYS
from ...engine.sources import LeafDifference, compare_checkpoints, open_at, total_bytes
from ...engine.steps import list_steps
from ...engine.storage import as_location
from .. import arguments
from ..program import Program, Signals, shell_status
from ..report import count, print_json
from ..streams import configure_logging, say
from .findings import Causes, Finding, Report, StepDifference, Trace, in_use, print_report, unseeded
from .interruptions import KINDS, DrillOptions, Interruption, choose, named_kinds, places_to_save, preemption_signal
from .plan import CLAIMS, RUNS, DrillPlan, read_claims

_DENSE = 2 << 30  # save every step if all checkpoints together take up less than this many bytes
_TAIL = 15  # number of lines of program output to include in an error
_FRESH = "from the beginning"


class DrillError(HoldfastError):
    """Raised if the rehearsal cannot be carried out."""


@dataclass(slots=True)
class Start:
    name: str
    interruption: Interruption | None
    returncode: int = 0
    state: str | None = None  # the run's final event: preempted, finished or failed
    trace: Trace = field(default_factory=Trace)
    killed: bool = False  # whether the drill killed the program after the grace period


class _StoppedError(Exception):
    """Raised if a signal stops the drill itself."""

    def __init__(self, number: int) -> None:
        self.number = number


@click.command()
@arguments.program
@click.option(
    "--steps",
    type=click.IntRange(min=2),
    default=20,
    help="How many steps to rehearse; two epochs and a validation reveal most.",
)
@click.option(
    "--at",
    metavar="STEP",
    type=int,
    multiple=True,
    help="Interrupt at this step instead of random ones; may be repeated.",
)
@click.option(
    "--kinds",
    metavar="KIND,...",
    help="What to rehearse, of: first (the first step), kill, save (killed in a save), term, twice (in a row), "
    "validation. Default: all; with --at, kill and term.",
)
@click.option("--seed", default=0, help="Chooses the random steps.")
@click.option(
    "--signal",
    "preemption",
    metavar="NAME",
    default="SIGTERM",
    callback=lambda _context, _parameter, name: preemption_signal(name),
    help="The signal that announces a preemption.",
)
@click.option("--ignore", metavar="PATTERN", multiple=True, help="Do not compare leaves such as 'extras/clock*'.")
@click.option("--keep", metavar="DIR", type=Path, help="Keep the checkpoints and logs in a new directory.")
@arguments.duration(
    "--hang-timeout",
    "Give up if there is no step or other sign of progress for this long.",
    name="hang",
    default="30m",
)
@arguments.duration("--start-timeout", "How long the first step may take.", name="first_step", default="1h")
@arguments.duration("--grace", "The time between the signal and SIGKILL.", default="1m")
@arguments.as_json
def drill(command: Sequence[str], at: Sequence[int], kinds: str | None, as_json: bool, **given: Any) -> int:
    """Rehearse preemptions of a program, and compare its checkpoints bit for bit.

    Write the program after two dashes: holdfast drill -- python train.py. The program first runs undisturbed for some
    steps, and then with interruptions by SIGTERM and SIGKILL. Checkpoints go to separate directories; the checkpoints
    of your runs are neither read nor written. Other files, such as logs, go to their usual locations. Exit status: 0 if
    all is well, 1 if a problem is found (the report names the likely cause), 2 if the drill cannot be carried out.
    """
    chosen = named_kinds(kinds, ["kill", "term"] if at else KINDS)
    options = DrillOptions(at=tuple(sorted(set(at))), kinds=chosen, **given)
    configure_logging("error")
    try:
        with Signals() as signals, _folder(options.keep) as folder:
            report = _Drill(command, options, folder, signals).run()
    except _StoppedError as stopped:
        say(f"holdfast: drill ended by {signal.Signals(stopped.number).name}", file=sys.stderr)
        return 128 + stopped.number
    except (HoldfastError, OSError) as error:  # don't return 1, which means that checkpoints differ
        say(f"holdfast: {error}", file=sys.stderr)
        return BAD_USAGE
    if as_json:
        print_json(report.document())
    else:
        print_report(report)
    return DONE if report.passed else FAILED


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    """Yield the rehearsal folder: the ``--keep`` directory, or a temporary one."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="holdfast-drill-", ignore_cleanup_errors=True) as temporary:
            yield Path(temporary).resolve()
        return
    if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise OptionError(f"--keep {keep}: this already exists; name a new or an empty directory")
    keep.mkdir(parents=True, exist_ok=True)
    yield keep.resolve()


class _Drill:
    def __init__(self, command: Sequence[str], options: DrillOptions, folder: Path, signals: Signals) -> None:
        self._command = command
        self._options = options
        self._folder = folder
        self._signals = signals
        self._began = time.monotonic()
        self._starts: list[Start] = []
        self._origin: int | None = None  # reference step that the interrupted run starts from; None for a fresh start
        self._compared: set[tuple[str, int, str]] = set()
        self._report = Report(command=list(command), seed=options.seed)
        if options.keep is not None:
            self._report.kept = str(folder)

    def run(self) -> Report:
        report, options = self._report, self._options
        self._say(f"reference run: {count(options.steps, 'step')} ...")
        plan = DrillPlan(
            name="reference",
            count=options.steps,
            save=tuple(step + by for step in options.at for by in (-1, 0, 1, 2)),
            save_places=places_to_save(options),
            dense_bytes=_DENSE,
        )
        reference = self._undisturbed(plan)
        steps = reference.trace.steps
        report.steps = steps
        if options.at and (unknown := sorted(set(options.at) - set(steps))):
            raise DrillError(
                f"--at {unknown[0]}: the reference run had the steps {shortened_steps(steps)}; --steps sets how many"
            )
        used, free = total_bytes(as_location(self._folder / "reference")), shutil.disk_usage(self._folder).free
        if free < used * 1.1:
            raise DrillError(
                f"the interrupted run needs {format_size(used)}, but {self._folder} has only {format_size(free)} "
                "left; choose a larger disk with --keep, or fewer --steps"
            )
        saved = sorted({step for steps_of in self._steps_of("reference").values() for step in steps_of})
        interruptions, notes = choose(steps, reference.trace.validations, options)
        self._interrupted(interruptions, saved, reference)
        if report.differences and all(start["began"] == _FRESH for start in report.starts):
            # The initial state may differ between attempts, so retry from a checkpoint of the reference run.
            self._begin_with_first(reference)
            later = steps[bisect.bisect(steps, self._origin or 0) :]
            if len(later) >= 2:
                interruptions, notes = choose(later, reference.trace.validations, options)
                self._interrupted(interruptions, saved, reference)
        report.notes += notes
        if report.differences:
            self._explain(reference, DrillPlan(name="", last=steps[-1], save=tuple(saved)))
        report.seconds = time.monotonic() - self._began
        return report

    # ---- runs

    def _undisturbed(self, plan: DrillPlan) -> Start:
        """Run the program without interruptions, and then move its run directories aside."""
        name, began = plan.name, time.monotonic()
        start = self._start(plan, name, None)
        trace = start.trace
        if not trace.stopped and start.returncode != 0:
            raise DrillError(f"the program failed ({_status(start.returncode)}) without interruption{self._tail(name)}")
        if not trace.steps:
            raise DrillError(
                f"the program ended ({_status(start.returncode)}), but reported no step to a manager or callback of "
                f"holdfast; the drill needs a program that saves with holdfast{self._tail(name)}"
            )
        if len(trace.steps) < 2:
            raise DrillError("the program ended after one step; a drill needs at least two, so let it run longer")
        os.rename(self._folder / RUNS, self._folder / name)
        checkpoints = sum(map(len, self._steps_of(name).values()))
        if not checkpoints:
            raise DrillError(f"the program reported {len(trace.steps)} steps, but saved none{self._tail(name)}")
        self._say(
            f"{name} run: {len(trace.steps)} steps, {count(checkpoints, 'checkpoint')}, "
            f"{format_size(total_bytes(as_location(self._folder / name)))}, {time.monotonic() - began:.1f} s"
        )
        return start

    def _begin_with_first(self, reference: Start) -> None:
        """Discard the interrupted run, and prepare to start it again from the reference run's first checkpoint."""
        report = self._report
        fresh, first = self._starts[0].trace, reference.trace.steps[0]
        names = unseeded(reference.trace.facts.get(first, {}), fresh.facts.get(first, {}))
        names = [name for name in names if in_use(name, reference.trace.facts)] or names
        self._origin = max(min(steps) for steps in self._steps_of("reference").values() if steps)
        report.unseeded = names
        why = f" ({shortened(names)} not seeded)" if names else ""
        report.warnings = [
            f"the program does not start the same way each time{why}: the interrupted run began with the checkpoint "
            f"of step {self._origin} of the undisturbed run, and nothing before that was rehearsed"
        ]
        report.notes = []
        self._say(f"each start of the program differs{why}: beginning with step {self._origin} of the reference run")
        shutil.rmtree(self._folder / "interrupted")
        self._populate()
        self._compared.clear()
        self._starts.clear()
        report.starts, report.differences = [], []
        report.compared.clear()

    def _populate(self) -> None:
        """Copy the starting checkpoint into each run directory, unless the run starts from scratch."""
        if self._origin is None:
            return
        source, origin = self._folder / "reference", self._origin
        (self._folder / RUNS).mkdir()
        shutil.copyfile(source / CLAIMS, self._folder / RUNS / CLAIMS)
        left = set()
        for steps in self._steps_of("reference").values():
            kept = max((step for step in steps if step <= origin), default=None)
            left |= {folder for step, folder in steps.items() if step != kept}
        made_by_runs = shutil.ignore_patterns(".*", "events*", "owner.json")

        def ignored(folder: str, names: list[str]) -> set[str]:
            return made_by_runs(folder, names) | {name for name in names if os.path.join(folder, name) in left}

        for path in source.iterdir():
            if path.is_dir():
                shutil.copytree(path, self._folder / RUNS / path.name, ignore=ignored)

    def _interrupted(self, interruptions: Sequence[Interruption], saved: Sequence[int], reference: Start) -> None:
        """Interrupt the program once per attempt, then let it finish. Stop early if any checkpoint differs."""
        report, last = self._report, reference.trace.steps[-1]
        for number, interruption in enumerate([*interruptions, None]):
            name = f"start-{number + 1}" if self._origin is None else f"start-{number + 1}-from-{self._origin}"
            goal = "to the end" if interruption is None else f"{number + 1} of {len(interruptions)}: {interruption}"
            self._say(f"{goal} ...")
            before = {url: max(steps) for url, steps in self._steps_of(RUNS).items() if steps}
            plan = DrillPlan(name=name, last=last, save=tuple(saved))
            if interruption is not None:
                plan = replace(plan, point=interruption.point, step=interruption.step, signal=int(interruption.signal))
            start = self._start(plan, "interrupted", interruption)
            self._starts.append(start)
            stops = self._judge(start, reference, before)
            report.differences = self._compare(RUNS, "reference")
            if report.differences or stops:
                left = len(interruptions) - number - 1
                if left > 0:
                    report.notes.append(f"{count(left, 'later interruption')} not tried")
                break
            if interruption is not None and start.trace.interrupted is None:
                missed = "; ".join(map(str, interruptions[number:]))
                report.notes.append(f"the run ended before it could be interrupted: {missed}")
                break
        os.rename(self._folder / RUNS, self._folder / "interrupted")
        if not report.differences and not stops:
            report.differences = self._missing("interrupted", "reference")

    def _judge(self, start: Start, reference: Start, before: dict[str, int]) -> bool:
        """Record how one attempt to complete the interrupted run ended; return whether another one makes no sense."""
        report, trace, interruption = self._report, start.trace, start.interruption
        if interruption is not None and trace.interrupted is not None:  # the signal may arrive later than planned
            interruption = replace(interruption, step=trace.interrupted)
        line = "to the end" if trace.interrupted is None else str(interruption)
        newest = max(before.values(), default=None)
        first = reference.trace.steps[0]
        is_fresh = bool(trace.steps) and trace.restored is None and trace.steps[0] <= first
        origin = f"from step {newest if trace.restored is None else trace.restored}"
        began, status = _FRESH if newest is None or is_fresh else origin, shell_status(start.returncode)
        report.starts.append({"start": start.name, "began": began, "ended": line, "status": status})
        if is_fresh and newest is not None and newest > first:
            report.findings.append(Finding.not_resumed(newest))
            return True
        urls, expected_urls = self._claims(RUNS), self._claims("reference")
        if strange := [url for url in urls if url not in expected_urls and self._steps_in(RUNS, urls[url])]:
            report.findings.append(Finding.new_directory(_label(strange[0]), sorted(map(_label, expected_urls))))
            return True
        if interruption is not None:
            if trace.ignored and not any(finding.cause == "ignores_signal" for finding in report.findings):
                report.findings.append(Finding.ignores_signal(interruption.signal.name, interruption.step))
            if trace.too_late:
                report.notes.append(
                    f"{interruption}: the processes had not agreed on the step to stop at when the drill ended at "
                    f"step {trace.steps[-1]}, so this was not rehearsed; use more --steps"
                )
            if start.killed:
                report.warnings.append(
                    f"the program had not ended {self._options.grace:g} s after {interruption}, and was killed, as a "
                    "cluster would do"
                )
        if trace.interrupted is not None and interruption is not None:
            expected = (DONE, PREEMPTED, 128 + interruption.signal, -interruption.signal)
            is_orderly = start.state in ("preempted", "finished") or start.returncode in expected
            if not is_orderly and interruption.signal != signal.SIGKILL and not trace.ignored:
                tail = self._tail("interrupted", 3)
                report.warnings.append(f"{_status(start.returncode)} after {interruption}{tail}")
        elif not trace.stopped and start.returncode != 0:
            after = "" if len(self._starts) < 2 else f" when it was restarted after {self._starts[-2].interruption}"
            raise DrillError(f"the program failed ({_status(start.returncode)}){after}{self._tail('interrupted')}")
        return False

    def _explain(self, reference: Start, plan: DrillPlan) -> None:
        """Find the cause of a difference by repeating the undisturbed run."""
        report, pair = self._report, [reference]
        for name in ("second", "third") if self._origin is not None else ("second",):
            self._say(f"{name} undisturbed run, to find the cause ...")
            self._populate()
            pair.append(self._undisturbed(replace(plan, name=name)))
        first, second = pair[-2:]
        nondeterministic = self._compare(second.name, first.name, all_steps=True)
        report.deterministic = not nondeterministic
        causes = Causes(reference.trace, self._starts[-1].trace, (first.trace, second.trace))
        report.findings += causes.of(report, nondeterministic)

    def _start(self, plan: DrillPlan, log: str, interruption: Interruption | None) -> Start:
        options, folder = self._options, self._folder / "starts" / plan.name
        folder.mkdir(parents=True)
        plan.write(self._folder)
        start, trace, offset = Start(plan.name, interruption), plan.trace(self._folder), 0
        reported: list[dict[str, Any]] = []
        with open(self._folder / f"{log}.log", "ab") as output:
            output.write(f"--- {plan.name}: {interruption or 'no interruption'}\n".encode())
            output.flush()
            program = Program(self._command, folder, self._signals, {DRILL: str(self._folder)}, output)
            signalled: float | None = None
            why: Literal["hangs", "grace"] | None = None

            def look() -> bool:
                nonlocal offset, signalled, why
                events, offset = read_events(trace, offset)
                reported.extend(events)
                if program.forwarded or (self._folder / STRAYS).exists():
                    return True
                now, (sign, step) = time.monotonic(), program.last_sign()
                if signalled is None and any(event["event"] == "interrupted" for event in events):
                    signalled = now
                if signalled is not None and now - signalled > options.grace:
                    why = "grace"
                elif now - sign > (options.first_step if step < 0 else options.hang):
                    why = "hangs"
                return why is not None

            try:
                returncode = program.wait(look)
                if returncode is None and why == "hangs" and not program.forwarded:
                    step = program.last_sign()[1]
                    program.end_after_hang(1.0, 1.0)
                    missing = f"no first step within {options.first_step:g} s"
                    if step >= 0:
                        missing = f"no sign of progress for {options.hang:g} s after step {step}"
                    raise DrillError(f"the program hangs: {missing}{self._tail(log, 60)}")
            finally:
                start.returncode = program.end(0.0)
                program.sweep(0.5)
            if program.forwarded:
                raise _StoppedError(program.forwarded[-1])
            self._check_strays()
        start.killed = why == "grace"
        start.trace = Trace.of_first_process(reported + read_events(trace, offset)[0])
        names = [event["event"] for event in program.new_events()]
        start.state = next((name for name in reversed(names) if name in ("preempted", "finished", "failed")), None)
        return start

    def _check_strays(self) -> None:
        """Raise DrillError if the program has started a subprocess that is not part of the rehearsal."""
        path = self._folder / STRAYS
        if not path.exists():
            return
        strays = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        commands = shortened(" ".join(stray["command"]) for stray in strays)
        raise DrillError(
            f"the program started another one in a separate environment, without {DRILL}, which was refused because "
            f"it would have written to its real directory: {commands}. Pass on the environment (env={{**os.environ, "
            f"...}} in subprocess); set an empty {DRILL} for that program if it is not part of the rehearsal"
        )

    # ---- directories and checkpoints

    def _claims(self, name: str) -> dict[str, str]:
        """Map the URL of each redirected directory to the folder used in its place, as a path relative to ``name``."""
        runs = self._folder / RUNS  # targets keep this prefix even after the folder is renamed to ``name``
        return {claim["url"]: os.path.relpath(claim["target"], runs) for claim in read_claims(self._folder / name)}

    def _steps_in(self, name: str, target: str) -> dict[int, str]:
        """Map each committed step in ``target``, a folder used in place of a run directory, to the path of the step."""
        location = as_location(self._folder / name / target)
        if not location.is_directory():
            return {}
        return {entry.step: str(entry.location) for entry in list_steps(location)}

    def _steps_of(self, name: str) -> dict[str, dict[int, str]]:
        return {url: self._steps_in(name, target) for url, target in self._claims(name).items()}

    def _compare(self, name: str, with_name: str, *, all_steps: bool = False) -> list[StepDifference]:
        """Return the differences at all steps or only at the first differing one. Skip pairs known to be equal."""
        expected = self._steps_of(with_name)
        differences: list[StepDifference] = []
        pairs = [
            (step, url, folder)
            for url, steps in self._steps_of(name).items()
            for step, folder in steps.items()
            if step in expected.get(url, {})
        ]
        for step, url, folder in sorted(pairs):
            if differences and step > differences[0].step and not all_steps:
                break
            if self._signals.received:
                raise _StoppedError(self._signals.received[0])
            status = os.stat(folder)
            key = (f"{folder} {with_name}", step, f"{status.st_ino}/{status.st_ctime_ns}")
            if key in self._compared:
                continue
            pair = (open_at(as_location(path)) for path in (expected[url][step], folder))
            leaves = [leaf for leaf in compare_checkpoints(*pair) if not self._ignores(leaf.name)]
            if leaves:
                differences.append(StepDifference(step, _label(url), leaves))
            else:
                self._compared.add(key)
                if name == RUNS:
                    self._report.compared.add((_label(url), step))
        return differences

    def _missing(self, name: str, with_name: str) -> list[StepDifference]:
        """Return a difference for each directory in which the last checkpoint of the reference run is missing."""
        steps = self._steps_of(name)
        missing = LeafDifference("", "", "missing", "the interrupted run has no checkpoint of this step")
        last = [(url, max(expected)) for url, expected in self._steps_of(with_name).items() if expected]
        return [StepDifference(step, _label(url), [missing]) for url, step in last if step not in steps.get(url, {})]

    def _ignores(self, leaf: str) -> bool:
        return any(fnmatch.fnmatchcase(leaf, pattern) for pattern in self._options.ignore)

    def _tail(self, log: str, lines: int = _TAIL) -> str:
        """Return the last lines of the program's output, formatted for appending to a message."""
        path = self._folder / f"{log}.log"
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        shown = text.rpartition("--- ")[2].splitlines()[1:][-lines:]
        return ". Its last output:\n" + "\n".join(f"  | {line}" for line in shown) if shown else ""

    def _say(self, text: str) -> None:
        say(f"drill: {text}", file=sys.stderr, flush=True)


def _label(url: str) -> str:
    return url.removeprefix(os.path.join(os.getcwd(), ""))


def _status(returncode: int) -> str:
    return f"status {returncode}" if returncode >= 0 else f"ended by {signal.Signals(-returncode).name}"
