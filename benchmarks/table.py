"""Results as tables, for a terminal and for the page on benchmarks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .goals import Goal
    from .results import Measurements, Results

MISSING = "-"
COLUMNS = (
    ("blocked s", "blocked_seconds", 1.0),
    ("durable s", "save_seconds", 1.0),
    ("load s: numpy", "load_numpy_seconds", 1.0),
    ("load s: own", "load_native_seconds", 1.0),
    ("disk MB", "disk_bytes", 1e6),
    ("save +MiB", "save_memory", 2**20),
    ("async +MiB", "async_memory", 2**20),
    ("load +MiB", "load_memory", 2**20),
)
LEGEND = """\
blocked: how long an asynchronous save, the second one of its process, blocks the loop.
durable: until files and directories are fsynced (the harness fsyncs where orbax, safetensors and torch do not).
load: with a cold page cache, into numpy and into the contender's own array library (jax or torch).
+MiB: peak resident memory above that of the arrays themselves."""

Rows = list[list[str]]


def rows(measurements: Measurements) -> Rows:
    """Return a heading and one line of text for each contender."""
    lines = [["", *(title for title, _, _ in COLUMNS)]]
    for contender in measurements.values:
        cells = [_cell(measurements, contender, metric, unit) for _, metric, unit in COLUMNS]
        lines.append([contender, *cells])
    return lines


def _cell(measurements: Measurements, contender: str, metric: str, unit: float) -> str:
    if metric == "load_memory":
        loads = [measurements.median(contender, f"load_{kind}_memory") for kind in ("numpy", "native")]
        value = max((load for load in loads if load is not None), default=None)
    else:
        value = measurements.median(contender, metric)
    if value is None or (contender.startswith("raw disk") and metric.endswith("_memory")):
        return MISSING
    if metric.endswith("_seconds"):
        return f"{value:.4f}" if value < 0.1 else f"{value:.2f}"
    return f"{max(value, 0.0) / unit:,.0f}"


def goal_rows(goals: Sequence[Goal]) -> Rows:
    """Return a heading and one line of text for each goal."""
    return [["", "must be", "is", ""], *([goal.name, goal.bound, goal.found, goal.verdict] for goal in goals)]


def aligned(lines: Rows) -> str:
    """Lay out lines for a terminal: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))]).rstrip()
        for line in lines
    )


def markdown(lines: Rows) -> str:
    """Lay out lines as a Markdown table."""
    heading, *others = lines
    rule = ["---", *["---:"] * (len(heading) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [heading, rule, *others])


def report(results: Results, goals: Sequence[Goal], *, as_markdown: bool) -> str:
    """Return the whole report: a table for each workload, a legend, the goals."""
    lay_out = markdown if as_markdown else aligned
    heading = "**{}**" if as_markdown else "{}"
    parts = [
        f"{heading.format(_sentence(each.title))}\n\n{lay_out(rows(each))}"
        for each in results.workloads.values()
        if each.nbytes
    ]
    ways = sorted({each.cold for each in results.workloads.values() if each.cold})
    machine = ", ".join(f"{key} {value}" for key, value in results.machine.items())
    parts.append(
        f"{LEGEND}\nMedians of {results.rounds}; cache emptied through {' and '.join(ways) or MISSING}.\n{machine}"
    )
    if goals:
        parts.append(f"{heading.format('What must be reached')}\n\n{lay_out(goal_rows(goals))}")
    return "\n\n".join(parts)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
