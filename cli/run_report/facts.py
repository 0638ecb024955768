"""Read the facts about a run from its directory, in bounded memory."""

from __future__ import annotations

import contextlib
import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...engine.clock import format_size
from ...engine.errors import HoldfastError
from ...engine.inspection import LeafSummary, describe
from ...engine.listing import CheckpointSummary, list_checkpoints
from ...engine.manager import Experience, Loss, StepInfo, best, read_run_events, stored_options
from ...engine.progress import NULL, Progress
from ...engine.sources import LeafStatistics, find_checkpoint, find_steps, leaf_statistics, open_at
from ...engine.steps import stored_metadata
from ...engine.storage import Location, as_location
from ..arguments import INSIDE_A_RUN, checkpoints_at, is_one_checkpoint, runs_below
from ..listing import describe_one
from ..report import count, duration
from .history import History, add_metrics, read_history

_MOST_RUNS = 50
_STATISTICS = 1500  # maximum number of leaves whose statistics are shown
_WORTH = 60.0  # smallest gain, in seconds per day, that justifies recommending another save interval


@dataclass(frozen=True, slots=True)
class Reading:
    """Options for reading array values."""

    progress: Progress = NULL  # receives the number of bytes read
    statistics: bool = True
    norm_steps: int | None = None  # compare norms at this many steps, including the newest; None to choose a number
    earlier_bytes: float = 8 << 30  # maximum number of bytes to read for norms of earlier steps if `norm_steps` is None


@dataclass(slots=True)
class Statistics:
    """Statistics of the leaves of one step, and their norms at some earlier steps."""

    step: int | None
    leaves: list[LeafStatistics] = field(default_factory=list)  # in tree order
    number: int = 0  # number of leaves with statistics
    damaged: int = 0  # number of leaves that contain NaN or Inf
    examples: list[str] = field(default_factory=list)  # names of a few leaves that contain NaN or Inf
    steps: list[int] = field(default_factory=list)  # steps whose norms are known, in ascending order
    norms: dict[tuple[str, str], list[float | None]] = field(default_factory=dict)  # norms at `steps`, keyed by leaf
    groups: dict[str, list[float]] = field(default_factory=dict)  # norms at `steps`, keyed by top-level container
    notes: list[str] = field(default_factory=list)  # notes about omitted statistics


@dataclass(slots=True)
class RunFacts:
    """The facts about one run or one checkpoint."""

    name: str
    path: str
    checkpoints: list[CheckpointSummary]
    history: History
    experience: Experience = field(default_factory=Experience)  # saves and failures recorded in the events
    format: str = "holdfast"
    best: int | None = None
    best_metric: str | None = None
    metadata: Mapping[str, Any] | None = None
    has_events: bool = False
    newest: CheckpointSummary | None = None
    leaves: list[LeafSummary] = field(default_factory=list)
    statistics: Statistics | None = None
    notes: list[str] = field(default_factory=list)  # notes about data that could not be read

    @property
    def disk_bytes(self) -> int:
        """Total size of all steps, in bytes; shared files are counted once."""
        return sum(step.added_bytes for step in self.checkpoints)


def find_runs(paths: Sequence[str]) -> tuple[list[Location], int]:
    """Expand folders of runs. Return the directories to report on, and the number of directories omitted."""
    directories: list[Location] = []
    for path in paths:
        location = checkpoints_at(path)
        below = [] if is_one_checkpoint(location) else runs_below(location)
        if below and list_checkpoints(location):  # the directory itself contains checkpoints of another library
            below = []
        directories += [checkpoints_at((location / name).url) for name in below] or [location]
    return directories[:_MOST_RUNS], len(directories[_MOST_RUNS:])


def read_run(location: Location, reading: Reading) -> RunFacts:
    """Read everything that the report shows about a run."""
    is_one = is_one_checkpoint(location)
    checkpoints = [describe_one(location)] if is_one else list_checkpoints(location)
    events = [] if is_one else read_run_events(location)
    history = read_history(events)
    for checkpoint in checkpoints:  # other programs may have added metrics to checkpoints
        add_metrics(history, checkpoint.step, checkpoint.metrics)
    name = location.parent.name if location.name == INSIDE_A_RUN else location.name
    facts = RunFacts(name, str(location), checkpoints, history, Experience(events), has_events=bool(events))
    if not is_one:
        facts.format = find_steps(location).format or "holdfast"
        with contextlib.suppress(HoldfastError):
            facts.metadata = stored_metadata(location)
        options = stored_options(location)
        if options is not None and isinstance(options.best_fn, str):
            infos = [
                StepInfo(step=step.step, time=step.time, metrics=step.metrics) for step in checkpoints if step.time
            ]
            facts.best_metric, facts.best = options.best_fn, best(infos, options.best_fn, options.ranking_mode)
    _read_newest(facts, location, reading)
    return facts


def _read_newest(facts: RunFacts, location: Location, reading: Reading) -> None:
    """Read the leaves and the statistics of the newest readable step."""
    if not facts.checkpoints:
        return
    whole = [checkpoint for checkpoint in facts.checkpoints if checkpoint.damage is None]
    try:
        newest, last = str(find_checkpoint(location, None)), whole[-1] if whole else None
        facts.newest = next((checkpoint for checkpoint in whole if checkpoint.path == newest), last)
        if facts.newest is None:
            return
        facts.leaves = describe(facts.newest.path)
    except HoldfastError as error:
        facts.notes.append(f"The newest step cannot be read: {error}")
        return
    if reading.statistics:
        facts.statistics = _read_statistics(facts.newest, facts.leaves, whole, reading)


# ---- statistics


def _read_statistics(
    newest: CheckpointSummary, leaves: Sequence[LeafSummary], whole: Sequence[CheckpointSummary], reading: Reading
) -> Statistics:
    statistics, grouped = Statistics(newest.step), _groups(leaves)
    totals: dict[str, float] = {}

    def importance(numbered: tuple[int, LeafStatistics]) -> tuple[bool, int, int]:
        index, leaf = numbered
        return bool(leaf.nan or leaf.inf), leaf.size, -index

    try:
        numbered = _counted(statistics, _leaves(newest, grouped, totals, reading.progress))
        shown = heapq.nlargest(_STATISTICS, numbered, key=importance)
        statistics.leaves = [leaf for _, leaf in sorted(shown, key=lambda numbered: numbered[0])]
    except HoldfastError as error:
        statistics.notes.append(f"Step {newest.step} could not be read completely: {error}")
        return statistics
    if (left := statistics.number - len(statistics.leaves)) > 0:
        statistics.notes.append(
            f"{left} of {statistics.number} leaves are left out here: those with NaN or Inf and the largest are shown. "
            "holdfast show --stats lists all"
        )
    _read_norms(statistics, newest, whole, reading, grouped, totals)
    return statistics


def _groups(leaves: Sequence[LeafSummary]) -> dict[tuple[str, str], str]:
    """Map each floating-point or complex leaf to its top-level container. Other leaves are omitted."""
    several = len({leaf.item for leaf in leaves}) > 1
    return {
        (leaf.item, leaf.path): "/".join([leaf.item] * several + leaf.path.split("/")[:1])
        for leaf in leaves
        if leaf.dtype is not None and ("float" in leaf.dtype or "complex" in leaf.dtype)
    }


def _leaves(
    checkpoint: CheckpointSummary, grouped: Mapping[tuple[str, str], str], totals: dict[str, float], progress: Progress
) -> Iterator[LeafStatistics]:
    """Yield statistics for the leaves of a step, and accumulate the norms of their containers in ``totals``."""
    for leaf in leaf_statistics(open_at(as_location(checkpoint.path)), progress=progress):
        if (group := grouped.get((leaf.item, leaf.path))) is not None:
            norm = math.nan if leaf.nan or leaf.inf else leaf.norm or 0.0
            totals[group] = math.hypot(totals.get(group, 0.0), norm)
        yield leaf


def _counted(statistics: Statistics, leaves: Iterator[LeafStatistics]) -> Iterator[tuple[int, LeafStatistics]]:
    for index, leaf in enumerate(leaves):
        statistics.number += 1
        if leaf.nan or leaf.inf:
            statistics.damaged += 1
            if len(statistics.examples) < 5:
                statistics.examples.append(f"{leaf.item}/{leaf.path}")
        yield index, leaf


def _read_norms(
    statistics: Statistics,
    newest: CheckpointSummary,
    whole: Sequence[CheckpointSummary],
    reading: Reading,
    grouped: Mapping[tuple[str, str], str],
    totals: dict[str, float],
) -> None:
    """Read the norms at evenly spaced earlier steps whose folder names have the newest step's prefix."""
    keys = [(leaf.item, leaf.path) for leaf in statistics.leaves]
    columns = {newest.step: ({(leaf.item, leaf.path): leaf.norm for leaf in statistics.leaves}, totals)}
    series = newest.path.rstrip("0123456789")
    earlier = [step for step in whole if step.step < newest.step and step.path.rstrip("0123456789") == series]
    chosen = _spread(earlier, (reading.norm_steps or 8) - 1)
    budget = reading.earlier_bytes if reading.norm_steps is None else math.inf
    for checkpoint in reversed(chosen):
        if checkpoint.bytes > budget:
            statistics.notes.append(
                f"Norms were read for {len(columns) - 1} of {len(chosen)} chosen earlier steps, because each has "
                f"{format_size(checkpoint.bytes)}; --norm-steps {len(chosen) + 1} reads all"
            )
            break
        budget -= checkpoint.bytes
        norms: dict[tuple[str, str], float | None] = dict.fromkeys(keys)
        then: dict[str, float] = {}
        try:
            for leaf in _leaves(checkpoint, grouped, then, reading.progress):
                if (leaf.item, leaf.path) in norms:
                    norms[leaf.item, leaf.path] = leaf.norm
        except HoldfastError as error:
            statistics.notes.append(f"The norms of step {checkpoint.step} could not be read: {error}")
            continue
        columns[checkpoint.step] = norms, then
    statistics.steps = steps = sorted(columns)
    statistics.groups = {group: [columns[step][1].get(group, math.nan) for step in steps] for group in totals}
    statistics.norms = {key: [columns[step][0].get(key) for step in steps] for key in keys}


def _spread(checkpoints: Sequence[CheckpointSummary], number: int) -> list[CheckpointSummary]:
    """Return evenly spaced elements of a list, including the first and the last."""
    number = min(number, len(checkpoints))
    return [checkpoints[round(index * (len(checkpoints) - 1) / max(1, number - 1))] for index in range(number)]


# ---- expected losses at other save intervals


@dataclass(frozen=True, slots=True)
class Choice:
    name: str
    seconds: float
    loss: Loss


def choices(experience: Experience) -> list[Choice]:
    """Estimate the time lost at 0.5, 1 and 2 times the run's save interval, and at the best one; [] if unknown."""
    used = experience.interval
    if used is None:
        return []
    intervals = {"half": used / 2, "used": used, "double": 2 * used, "loses least": experience.best()}
    every = [Choice(name, seconds, experience.loss(seconds)) for name, seconds in intervals.items() if seconds > 0]
    return sorted(every, key=lambda choice: choice.seconds)


def advice(experience: Experience) -> str | None:
    """Recommend the best save interval; return None if the gain is too small, or if the run adapts its own interval."""
    by_name = {choice.name: choice for choice in choices(experience)}
    if experience.bounds is not None or not {"used", "loses least"} <= by_name.keys():
        return None
    used, least = by_name["used"], by_name["loses least"]
    if used.loss.together - least.loss.together < _WORTH:
        return None
    return (
        f"saves every {duration(used.seconds)} are expected to lose {duration(used.loss.together)} a day, and every "
        f'{duration(least.seconds)} {duration(least.loss.together)}: save_interval_secs="auto" chooses automatically'
    )


def basis(experience: Experience) -> str:
    """Describe the measurements from which the lost time is estimated."""
    failures = count(experience.failures, "failure") if experience.failures else "no failure"
    bounds = " and ".join(map(duration, experience.bounds or ()))
    learns = f" The run learns its interval, between {bounds}." if bounds else ""
    return (
        f"A save costs {duration(experience.cost or 0.0)} of training and is durable after "
        f"{duration(experience.durable)} (medians of the newest 20). The events show {failures} in "
        f"{duration(experience.ran)}; every run begins with a guess of one a day, so the next one is expected in "
        f"{duration(experience.between_failures)}. Each loses half an interval, the time until a save is durable, "
        f"and {duration(experience.comeback)} to resume.{learns}"
    )
