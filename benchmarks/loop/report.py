"""The table, and what must be reached: holdfast is the lowest in each column."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from ..goals import Goal
from ..table import MISSING, aligned, goal_rows, markdown
from . import HOLDFAST, NO_SAVING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..results import Measurements, Results

TITLES = {"lightning": "a Lightning trainer", "jax": "a loop with jax"}

# Each metric is divided by the one that the program without saving had in the same round.
COLUMNS = (
    ("worst step", "worst_seconds", "mean_seconds"),
    ("mean step", "mean_seconds", "mean_seconds"),
    ("total", "total_seconds", "total_seconds"),
    ("CPU", "cpu_seconds", "cpu_seconds"),
)
COMPARED = COLUMNS[:3]
LEGEND = """\
Relative to the same program without saving in the same round; its mean step is the unit of the worst step.
total: until everything is durable. CPU: seconds of all cores."""


def relative(measurements: Measurements, contender: str, metric: str, unit: str) -> float | None:
    """Return the median over the rounds of a metric, relative to the program without saving in the same round."""
    values = measurements.values.get(contender, {}).get(metric, [])
    units = measurements.values.get(NO_SAVING, {}).get(unit, [])
    ratios = [value / one for value, one in zip(values, units, strict=False)]
    return median(ratios) if ratios else None


def goals(results: Results) -> list[Goal]:
    """Return the comparison of holdfast with each peer, in each column."""
    found = []
    for framework, measurements in results.workloads.items():
        peers = [name for name in measurements.values if name not in (NO_SAVING, HOLDFAST)]
        for title, metric, unit in COMPARED:
            ours = relative(measurements, HOLDFAST, metric, unit)
            for peer in peers:
                theirs = relative(measurements, peer, metric, unit)
                value = None if ours is None or theirs is None else ours / theirs
                found.append(Goal(name=f"{framework}, {title}, {HOLDFAST} / {peer}", value=value, limit=1.0))
    return found


def report(results: Results, found: Sequence[Goal], *, as_markdown: bool) -> str:
    """Return the whole report: a table for each framework, a legend, the goals."""
    lay_out = markdown if as_markdown else aligned
    heading = "**{}**" if as_markdown else "{}"
    parts = []
    for measurements in results.workloads.values():
        step = measurements.median(NO_SAVING, "mean_seconds")
        title = f"{measurements.title}, a step of {1000 * (step or 0):.0f} ms".capitalize()
        lines = [["", *(title for title, _, _ in COLUMNS)]]
        for contender in measurements.values:
            values = (relative(measurements, contender, metric, unit) for _, metric, unit in COLUMNS)
            lines.append([contender, *(MISSING if value is None else f"{value:.2f}" for value in values)])
        parts.append(f"{heading.format(title)}\n\n{lay_out(lines)}")
    machine = ", ".join(f"{key} {value}" for key, value in results.machine.items())
    parts.append(f"{LEGEND}\nMedians of {results.rounds}.\n{machine}")
    parts.append(f"{heading.format('What must be reached')}\n\n{lay_out(goal_rows(found))}")
    return "\n\n".join(parts)
