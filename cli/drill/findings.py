"""The results of a rehearsal: differing checkpoints, the kinds of state affected, and the likely causes."""

from __future__ import annotations

import os
import re
import shlex
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ...engine.errors import shortened, shortened_steps
from ...engine.fingerprints import STATELESS, Fact
from ...engine.sources import LeafDifference
from ..report import count, print_table
from ..streams import say

_SHOWN = 12  # maximum number of leaves in the report
_WIDTH = 100  # report width, in columns
_KINDS = {  # maps each kind of state to words that identify it; the first such word in a leaf's path decides
    "generator": "rng rngs random prng key keys generator generators seed noise",
    "optimizer": "opt optim optimizer optimizers exp_avg exp_avg_sq mu nu momentum adam",
    "scheduler": "lr_schedulers scheduler schedulers schedule",
    "position in the data": "data loader loaders dataloader dataset iterator position sampler batches epoch loops",
    "statistics": "stats running_mean running_var num_batches_tracked ema averages",
    "metrics": "metrics loss",
    "parameters": "params parameters weights weight kernel bias state_dict model embedding",
    "counter": "step steps count iteration",
}
_STATE_OF_OPTIMIZER = re.compile(r"(.*)[/.](?:slots|state[/.]\d+)[/.]")
_WORDS = {word: state for state, words in _KINDS.items() for word in words.split()}


def kind_of_state(leaf: str) -> str:
    """Return the kind of state that a leaf belongs to, judging by its path.

    >>> kind_of_state("state/opt_state/0/mu/kernel"), kind_of_state("extras/rng"), kind_of_state("state/params/key")
    ('optimizer', 'generator', 'parameters')
    """
    for part in re.split(r"[/.]", leaf.lower()):
        for word in (part, *part.split("_")):
            if word in _WORDS:
                return _WORDS[word]
    return "other state"


# ---- the events of an attempt


@dataclass(slots=True)
class Trace:
    """The events that one process reported during one attempt to run the program."""

    steps: list[int] = field(default_factory=list)
    validations: list[int] = field(default_factory=list)
    restored: int | None = None
    interrupted: int | None = None  # step at which the process was interrupted
    stopped: bool = False
    ignored: bool = False
    too_late: bool = False  # whether the drill ended before the processes agreed on a step to stop at
    libraries: list[str] = field(default_factory=list)
    facts: dict[int, dict[str, Fact]] = field(default_factory=dict)  # keyed by step, then by object name

    @staticmethod
    def of_first_process(events: Iterable[Mapping[str, Any]]) -> Trace:
        """Return the trace of process 0. If several processes report index 0, choose the one with the most steps."""
        by_pid: dict[int, list[Mapping[str, Any]]] = {}
        for event in events:
            by_pid.setdefault(event["pid"], []).append(event)
        first = [reported for reported in by_pid.values() if reported[-1]["process"] == 0]  # initially, all report 0
        chosen = max(first, key=lambda reported: sum(event["event"] == "step" for event in reported), default=[])
        trace = Trace()
        facts: dict[str, Fact] = {}
        for event in chosen:
            match event["event"]:
                case "step":
                    trace.steps.append(event["step"])
                    for name, fact in event["facts"].items():
                        facts.pop(name, None)
                        if fact is not None:
                            facts[name] = Fact(*fact)
                    trace.facts[event["step"]] = dict(facts)
                case "validation" if event["step"] in trace.steps:
                    trace.validations.append(event["step"])
                case "libraries":
                    trace.libraries = event["names"]
                case "restored" | "interrupted" as name:
                    setattr(trace, name, event["step"])
                case "stopped" | "ignored" | "too_late" as name:
                    setattr(trace, name, True)
        return trace


@dataclass(frozen=True, slots=True)
class StepDifference:
    """A checkpoint that differs from its counterpart in the undisturbed run."""

    step: int
    directory: str
    leaves: list[LeafDifference]


# ---- causes

_Entry = tuple[str, Fact, Fact]  # an object's name, and its facts in each of two runs
_CAUSES = ("generator", "position", "optimizer", "value")  # kinds of facts that explain a difference, strongest first


@dataclass(frozen=True, slots=True)
class Finding:
    # One of: generator, loader, position, optimizer, value, unseeded, nondeterministic, not_saved_right, unknown,
    # not_resumed, new_directory, ignores_signal.
    cause: str
    text: str
    advice: str = ""
    names: tuple[str, ...] = ()  # names of the program objects involved

    @staticmethod
    def not_resumed(newest: int) -> Finding:
        return Finding(
            "not_resumed",
            f"the program started from the beginning again, although step {newest} was saved",
            "restore before the loop: state, start = checkpoint.restore_or_initialize(state, ...), and start there",
        )

    @staticmethod
    def new_directory(url: str, expected: Sequence[str]) -> Finding:
        return Finding(
            "new_directory",
            f"the program writes to another directory when it is restarted: {url}, but in the reference run to "
            f"{shortened(expected)}; a restarted run would begin from the beginning",
            "give the run a directory whose name does not change, without a date or a process number",
        )

    @staticmethod
    def ignores_signal(name: str, step: int) -> Finding:
        return Finding(
            "ignores_signal",
            f"the program continued after {name} at step {step}; a cluster kills it, and later steps are lost",
            "leave the loop when on_step(...).should_stop is true, and catch the signal: signals= of the callback",
        )


class Causes:
    """Finds the likely causes of a difference. ``run`` is the trace of the first attempt with a difference."""

    def __init__(self, reference: Trace, run: Trace, pair: tuple[Trace, Trace]) -> None:
        self._reference = reference
        self._run = run
        self._pair = pair

    def of(self, report: Report, nondeterministic: Sequence[StepDifference]) -> list[Finding]:
        """Return the causes, most likely first. ``nondeterministic`` lists differences between two undisturbed runs."""
        unstable = {(step.directory, leaf.name) for step in nondeterministic for leaf in step.leaves}
        first, restart = report.differences[0], self._of_the_restart(report)
        if unstable:
            findings = [self._nondeterminism(nondeterministic)]
            pairs = [(step.directory, leaf.name) for step in report.differences for leaf in step.leaves]
            if stable := [leaf for directory, leaf in pairs if (directory, leaf) not in unstable]:
                text = f"leaves that two undisturbed runs agree on differ as well: {shortened(stable)}"
                findings += [*restart, Finding("unknown", text)]
            return findings
        if self._run.restored is not None and first.step <= self._run.restored:
            return [
                Finding(
                    "not_saved_right",
                    f"the checkpoint of step {first.step}, which was saved when the run was interrupted, has "
                    "different values from that of the undisturbed run",
                    "pass on_step the state after the update, and change nothing before the next call",
                ),
                *restart,
            ]
        return restart or [
            Finding(
                "unknown",
                "no generator, iterator or number that the drill can see differs from the undisturbed run",
                "look for a shuffled DataLoader that was not handed over (hf.resumable), state dicts that were not "
                "loaded, changes after on_step; and for what the drill cannot see: state in C++ or other processes, "
                "files that the program keeps reading, the time, and the environment",
            )
        ]

    def _nondeterminism(self, differences: Sequence[StepDifference]) -> Finding:
        first = differences[0]
        step = first.step
        facts, others = (trace.facts for trace in self._pair)
        for at in self._pair[0].steps:
            if at > step or at not in others:
                break
            if names := [name for name in unseeded(facts[at], others[at]) if in_use(name, facts)]:
                listed = "; ".join(_described(name, facts[at][name]) for name in names[:4])
                return Finding(
                    "unseeded",
                    f"two undisturbed runs differ from step {step} on: a generator is neither seeded nor saved: "
                    f"{listed}",
                    "seed it with a fixed number, and pass it to restore_or_initialize and on_step as an extra",
                    tuple(names),
                )
        if names := [name for name, fact in facts.get(step, {}).items() if fact.digest == STATELESS]:
            listed = "; ".join(_described(name, facts[step][name]) for name in names[:4])
            return Finding(
                "unseeded",
                f"two undisturbed runs differ from step {step} on, and the program holds a generator that draws from "
                f"the operating system: {listed}. It has no state, so a drill cannot tell whether the program has "
                "drawn from it, and no resume can repeat its numbers",
                "draw from random.Random(seed), and pass it to restore_or_initialize and on_step as an extra; if the "
                "steps do not draw from it, the computation itself is not deterministic: "
                + _flags(self._reference.libraries),
                tuple(names),
            )
        leaves = shortened([leaf.name for leaf in first.leaves])
        return Finding(
            "nondeterministic",
            f"two undisturbed runs differ from step {step} on ({leaves}), with the same generators and the same place "
            "in the data: the computation itself is not deterministic",
            _flags(self._reference.libraries),
        )

    def _of_the_restart(self, report: Report) -> list[Finding]:
        """Return findings about the first step at which any fact differs from the undisturbed run."""
        reference, run = self._reference.facts, self._run.facts
        undisturbed, again = (trace.facts for trace in self._pair)
        limit = max(report.differences[0].step, min(run, default=0))
        # A difference in the saved state of an optimizer is a consequence, not a cause.
        parts = [
            _STATE_OF_OPTIMIZER.match(leaf.name) for difference in report.differences for leaf in difference.leaves
        ]
        saved = {part[1] for part in parts if part is not None}
        findings: list[Finding] = []
        for step in self._run.steps:
            if step > limit or step not in reference:
                break
            noisy = {name for name, _, _ in _differing(undisturbed.get(step, {}), again.get(step, {}))}
            differing = [entry for entry in _differing(reference[step], run[step]) if entry[0] not in noisy]
            here = [entry for entry in differing if in_use(entry[0], reference)]
            by_cause = {cause: [entry for entry in here if entry[1].kind == cause] for cause in _CAUSES}
            in_lightning = not {"lightning", "pytorch_lightning"}.isdisjoint(self._reference.libraries)
            by_cause["value"] = _likeliest(by_cause["value"])
            if len(saved) >= len(by_cause["optimizer"]):
                by_cause["optimizer"] = []
            loaders = [(name, fact, fact) for name, fact in reference[step].items() if fact.kind == "loader"]
            is_global = any(fact.kind == "generator" and not fact.where for _, fact, _ in differing)
            if loaders and is_global and not in_lightning:
                by_cause = {"loader": loaders}  # blame the loaders, which draw the epoch order from a global generator
            findings = [
                _not_restored(cause, entries, step, self._run.restored, in_lightning=in_lightning)
                for cause, entries in by_cause.items()
                if entries
            ]
            if findings:
                break
        return [finding for finding in findings if finding.cause != "value"] or findings


def unseeded(facts: Mapping[str, Fact], others: Mapping[str, Fact]) -> list[str]:
    """Return the names of generators whose states differ between two runs at the same step."""
    return [name for name, fact, _ in _differing(facts, others) if fact.kind == "generator"]


def _differing(facts: Mapping[str, Fact], others: Mapping[str, Fact]) -> Iterator[_Entry]:
    for name, fact in facts.items():
        if (other := others.get(name)) is not None and other.digest != fact.digest:
            yield name, fact, other


def in_use(name: str, facts: Mapping[int, Mapping[str, Fact]]) -> bool:
    """Return whether an object changes between steps, which indicates that the program uses the object."""
    return len({of_step[name].digest for of_step in facts.values() if name in of_step}) > 1


def _described(name: str, fact: Fact) -> str:
    return name if not fact.where else f"`{name}` ({fact.type}; {fact.where})"


# Words in names of values that rarely affect the next step, because they are only reported or are times.
_REPORTED = frozenset(["best", "history", "log", "logs", "loss", "losses", "metric", "metrics", "score", "accuracy"])
_TIMES = frozenset(["time", "times", "elapsed", "duration", "seconds", "secs", "timestamp", "clock", "eta", "wall"])


def _likeliest(values: list[_Entry]) -> list[_Entry]:
    """Put report-only values last, and drop times unless every value is a time."""
    words = {name: frozenset(re.split(r"[^a-z]+", name.lower())) for name, _, _ in values}
    lasting = [entry for entry in values if not words[entry[0]] & _TIMES] or values
    return sorted(lasting, key=lambda entry: bool(words[entry[0]] & _REPORTED))


def _not_restored(
    cause: str, entries: Sequence[_Entry], step: int, restored: int | None, *, in_lightning: bool
) -> Finding:
    from ...integrations.loop import IN_TRAINERS  # Imported lazily, because only findings need it.

    parents = [(f"{name}.", f"{name}[") for name, _, _ in entries]
    entries = [entry for entry in entries if not any(entry[0].startswith(beginnings) for beginnings in parents)]
    names = tuple(name for name, _, _ in entries)
    after = f"after step {step}" + ("" if restored is None else f", in a run that resumed from step {restored}")
    listed = "; ".join(_described(name, fact) for name, fact, _ in entries[:4])
    more = f" and {len(entries) - 4} more" if len(entries) > 4 else ""
    plain = re.sub(r"\W.*", "", names[0]) or "rng"
    state = {"generator": "a generator", "position": "the place in the data"}.get(cause, "an optimizer")
    text = f"{state} is not saved, or not restored: {listed}{more} differs from the undisturbed run {after}"
    if cause == "generator":
        if in_lightning:
            advice = IN_TRAINERS.generator
        elif all(fact.where for _, fact, _ in entries):
            advice = f"pass it to restore_or_initialize and on_step as an extra, such as {plain}={names[0]}"
        else:
            advice = (
                "leave global_generators=True, and draw what the program needs once before restore_or_initialize; or "
                "draw from a separate generator (numpy.random.default_rng, torch.Generator, a jax key), and pass it "
                "to restore_or_initialize and on_step as an extra, such as rng=generator"
            )
    elif cause == "position" and in_lightning:
        advice = IN_TRAINERS.data
    elif cause == "position":
        advice = (
            "pass the iterator or loader to restore_or_initialize and on_step as an extra, such as "
            f"{plain}={plain}; it needs get_state and set_state, or state_dict and load_state_dict; hf.skip_to(loader) "
            "gives them to a loader that yields the same batches each time"
        )
    elif cause == "loader":
        advice = (
            f"wrap it, {plain} = hf.resumable({plain}), and pass it to restore_or_initialize and on_step as an extra, "
            f"such as data={plain}"
        )
        text = (
            f"a shuffled DataLoader is not handed over: {listed}{more} started an epoch in a different order, at its "
            f"first batch, {after}"
        )
    elif cause == "optimizer":
        advice = f'put it into the state, such as {{"model": model, "optimizer": {plain}}}'
    else:
        advice = "save it with the state, or as an extra of the callback, if the next steps depend on it"
        values = "; ".join(
            f"{_described(name, fact)} is {other.digest} instead of {fact.digest}" for name, fact, other in entries[:4]
        )
        text = f"values of the program are not saved, or not restored: {values}{more}, {after}"
    return Finding(cause, text, advice, names)


def _flags(libraries: Sequence[str]) -> str:
    """Return advice on how to make the program's computation deterministic."""
    flags = []
    if "jax" in libraries:
        flags.append("XLA_FLAGS=--xla_gpu_deterministic_ops=true")
    if "torch" in libraries:
        flags.append(
            "torch.use_deterministic_algorithms(True) with CUBLAS_WORKSPACE_CONFIG=:4096:8, and "
            "torch.backends.cudnn.benchmark = False"
        )
    if {"lightning", "pytorch_lightning"} & set(libraries):
        flags.append("Trainer(deterministic=True)")
    if not os.environ.get("PYTHONHASHSEED", "").isdecimal():
        flags.append("PYTHONHASHSEED=0 where the order of a set matters")
    flags.append("no sums whose order depends on threads or processes")
    return "set " + "; ".join(flags) + "; then repeat the drill"


# ---- the report


@dataclass(slots=True)
class Report:
    command: list[str]
    seed: int
    steps: list[int] = field(default_factory=list)
    starts: list[dict[str, Any]] = field(default_factory=list)
    compared: set[tuple[str, int]] = field(default_factory=set)
    differences: list[StepDifference] = field(default_factory=list)
    deterministic: bool | None = None
    findings: list[Finding] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unseeded: list[str] = field(default_factory=list)  # generators whose initial state differs between attempts
    kept: str | None = None
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether the program survives preemptions with identical results."""
        return not (self.differences or self.findings)

    def document(self) -> dict[str, Any]:
        document = {"identical": not self.differences, "passed": self.passed, **asdict(self)}
        document["compared"] = [{"directory": directory, "step": step} for directory, step in sorted(self.compared)]
        document["differences"] = [
            {**asdict(step), "leaves": [{**asdict(leaf), "state": kind_of_state(leaf.name)} for leaf in step.leaves]}
            for step in self.differences
        ]
        return {**document, "seconds": round(self.seconds, 3)}


def print_report(report: Report) -> None:
    say(f"drill of {shlex.join(report.command)}: steps {shortened_steps(report.steps)}, seed {report.seed}\n")
    print_table(
        ["START", "BEGAN", "INTERRUPTED BY", "STATUS"],
        [
            [str(number), start["began"], start["ended"], str(start["status"])]
            for number, start in enumerate(report.starts, 1)
        ],
    )
    say()
    if report.differences:
        _print_differences(report)
    elif report.passed:
        directories = len({directory for directory, _ in report.compared})
        of = "" if directories == 1 else f" of {directories} directories"
        interruptions = [start["ended"] for start in report.starts if start["ended"] != "to the end"]
        say(
            f"identical: {count(len(report.compared), 'checkpoint')}{of} of the run with "
            f"{count(len(interruptions), 'interruption')} and of the undisturbed run agree bit for bit"
        )
    else:
        say(f"the checkpoints that were compared ({len(report.compared)}) are identical, but")
    for finding in report.findings:
        say()
        say(_wrapped(f"{'likely cause' if report.differences else 'found'}: {finding.text}"))
        if finding.advice:
            say(_wrapped(f"  what to do: {finding.advice}"))
    for title, lines in (("warning", report.warnings), ("note", report.notes)):
        for line in lines:
            say()
            say(_wrapped(f"{title}: {line}"))
    if report.kept:
        say(f"\nkept in {report.kept}: reference, interrupted, and the output of the program (*.log)")


def _wrapped(text: str) -> str:
    """Wrap the first line of a text. Leave the other lines unchanged, because they are program output."""
    first, *others = text.split("\n")
    lines = textwrap.wrap(first, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return "\n".join([*lines, *others])


def _print_differences(report: Report) -> None:
    first, since = report.differences[0], ""
    if len(report.starts) > 1:
        since = f": after {report.starts[-2]['ended']}, the run began again {report.starts[-1]['began']}"
    say(f"different from step {first.step} on{since}")
    for difference in report.differences:
        leaves = difference.leaves
        kinds = dict.fromkeys(kind_of_state(leaf.name) for leaf in leaves)
        size = f"{count(len(leaves), 'leaf', 'leaves')} ({', '.join(kinds)})"
        say(f"\n{difference.directory}, step {difference.step}: {size}")
        rows = [[leaf.name, kind_of_state(leaf.name), leaf.detail] for leaf in leaves[:_SHOWN]]
        print_table(["LEAF", "STATE", "HOW IT DIFFERS"], rows)
        if len(leaves) > _SHOWN:
            say(f"and {len(leaves) - _SHOWN} more")
    if equal := [step for directory, step in report.compared if directory == first.directory and step < first.step]:
        say(f"\nthe last checkpoint before that, of step {max(equal)}, is identical")
    if report.deterministic:
        say("\ntwo undisturbed runs are identical, so the interruption makes the difference")
