"""The page of a report: HTML with its style, script and data inside, which loads nothing."""

from __future__ import annotations

import html
import importlib.resources
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ...engine.clock import format_size
from ...engine.errors import shortened
from ...engine.inspection import CheckpointSummary
from ...engine.sources import LeafStatistics
from ..report import age, count, metrics_text
from .charts import (
    Reading,
    clock_text,
    line_chart,
    number_text,
    percent,
    readings_json,
    size_chart,
    sparkline,
    timeline,
)
from .facts import RunFacts, Statistics
from .history import WORDS, Attempt, Note, duration
from .tree import draw_tree

GENERATOR = '<meta name="generator" content="holdfast report">'
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; base-uri 'none'"
_STEPS = 500  # rows of a table of steps, and of starts
_NOTES = 300  # things that happened
_METRICS = 16  # charts of metrics
_GROUPS = 6  # charts of norms

escape = html.escape
_BAD = ("crashed", "hung", "failed")


def draw_page(runs: Sequence[RunFacts], *, now: float, version: str, left_out: int = 0) -> str:
    """Return the page of some runs.

    Args:
        runs: What it shows.
        now: When it is made, in seconds since 1970-01-01 UTC.
        version: The version of holdfast.
        left_out: How many runs there are beside these.
    """
    readings: list[Reading] = []
    sections = "".join(_run(run, number, now, readings, len(runs) == 1) for number, run in enumerate(runs))
    title = runs[0].name if len(runs) == 1 else count(len(runs), "run", "runs")
    overview = _overview(runs, now, left_out) if len(runs) > 1 else ""
    files = importlib.resources.files(__package__)
    style, script = ((files / name).read_text("utf-8") for name in ("page.css", "page.js"))
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n{GENERATOR}\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)} - holdfast report</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        f"{overview}{sections}</main>\n"
        f"<footer>Made by holdfast {escape(version)} on {clock_text(now)}. All times are UTC.</footer>\n"
        f'<script type="application/json" id="readings">{embedded_json(readings_json(readings))}</script>\n'
        f"<script>\n{script}</script>\n</body>\n</html>\n"
    )


def embedded_json(value: Any) -> str:
    """Return JSON that cannot end the script element that it stands in, nor open another.

    >>> embedded_json({"name": "</script><!--<script>"})
    '{"name":"\\\\u003c/script>\\\\u003c!--\\\\u003cscript>"}'
    """
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)  # ASCII, so that U+2028 and U+2029 are escaped
    return text.replace("<", "\\u003c")


# ---- the parts of a run


def _run(run: RunFacts, number: int, now: float, readings: list[Reading], only: bool) -> str:
    parts = [
        _head(run, "h1" if only else "h2"),
        _alarms(run, now),
        _figures(run, now),
        _timeline(run),
        _metrics(run, number, readings),
        _saves(run, number, readings),
        _steps(run),
        _statistics(run, number, readings),
        _tree(run),
        _starts(run),
        _facts(run),
    ]
    return f'<section class="run" id="run-{number}">{"".join(parts)}</section>\n'


def _state(run: RunFacts) -> tuple[str, str]:
    """Return the state of a run in a word, and its tone."""
    attempts = run.history.attempts
    if not attempts:
        return ("no events", "plain") if run.checkpoints else ("no checkpoints", "plain")
    how = attempts[-1].how or "lost"
    tone = {"finished": "good", "preempted": "warn", "lost": "warn"}.get(how, "bad" if how in _BAD else "info")
    return WORDS[how], tone


def _head(run: RunFacts, heading: str) -> str:
    word, tone = _state(run)
    return (
        f'<header><{heading}>{escape(run.name)} <span class="pill {tone}">{escape(word)}</span></{heading}>'
        f'<p class="place"><code>{escape(run.place)}</code></p></header>'
    )


def _alarms(run: RunFacts, now: float) -> str:
    found: list[tuple[str, str]] = []
    found += [("bad", f"Step {one.step} is damaged: {one.damage}") for one in run.damaged[:10]]
    if len(run.damaged) > 10:
        found.append(("bad", f"{len(run.damaged) - 10} more steps are damaged; holdfast verify lists them"))
    found += [("bad", note) for note in run.notes]
    history = run.history
    if history.attempts and history.attempts[-1].how in (*_BAD, "lost"):
        last = history.attempts[-1]
        at = f" after step {last.last_step}" if last.last_step is not None else ""
        why = f": {last.why}" if last.why else ""
        whole = [one.step for one in run.checkpoints if one.damage is None]
        saved = f" The newest whole step is {whole[-1]}; the same command again goes on from it." if whole else ""
        tone = "bad" if last.how in _BAD else "warn"
        found.append((tone, f"The last start {WORDS[last.how or 'lost']}{at}{why}.{saved}"))
    if history.attempts and history.attempts[-1].how == "open":
        last = history.attempts[-1]
        text = f"The last start runs on {last.host}, or was lost there; its last event came {age(now - last.last)} ago"
        found.append(("plain", text))
    if run.statistics is not None and run.statistics.damaged:
        names = ", ".join(run.statistics.examples)
        more = run.statistics.damaged - len(run.statistics.examples)
        found.append(("bad", f"NaN or Inf in step {run.statistics.step}: {names}{f' and {more} more' * (more > 0)}"))
    if history.failures:
        found.append(("warn", f"{count(history.failures, 'save', 'saves')} failed"))
    if history.fallbacks:
        often = "once" if history.fallbacks == 1 else f"{history.fallbacks} times"
        found.append(("warn", f"The run fell back to an older step {often}, as newer ones were damaged"))
    if not run.has_events and run.format == "holdfast" and run.checkpoints:
        text = (
            "No events: they are kept beside runs on file systems, not in object stores, copies or single checkpoints"
        )
        found.append(("plain", text))
    items = "".join(f'<li class="{tone}">{escape(text)}</li>' for tone, text in found)
    return f'<ul class="alarms">{items}</ul>' if items else ""


def _figures(run: RunFacts, now: float) -> str:
    history, newest = run.history, run.newest
    found: list[tuple[str, str, str]] = []
    if newest is not None:
        found.append(("Newest step", f"{newest.step}", "" if newest.time is None else f"{age(now - newest.time)} ago"))
    if run.best is not None and run.best_metric is not None:
        values = history.metrics.get(run.best_metric, {})
        value = f"{run.best_metric} {number_text(values[run.best])}" if run.best in values else run.best_metric
        found.append(("Best step", str(run.best), value))
    if history.attempts:
        kinds = [
            (history.ended("failed", "crashed"), "crashed"),
            (history.ended("hung"), "hung"),
            (history.ended("preempted"), "preempted"),
            (history.ended("lost"), "without a record"),
        ]
        text = ", ".join(f"{number} {what}" for number, what in kinds if number)
        found.append(("Starts", str(len(history.attempts)), text or "no interruption"))
        ran = sum(attempt.ended - attempt.began for attempt in history.attempts)
        blocked = sum(attempt.blocked for attempt in history.attempts)
        found.append(("Ran", duration(ran), ""))
        found.append(("Waited for saves", duration(blocked), f"{percent(blocked / ran)} of the time" if ran else ""))
        steps, seconds = sum(one.steps for one in history.redone), sum(one.seconds for one in history.redone)
        if len(history.attempts) > 1:
            text = f"{duration(seconds)} lost" if steps else "nothing lost"
            found.append(("Trained again", count(steps, "step", "steps"), text))
    if run.checkpoints:
        shared = sum(one.bytes for one in run.checkpoints) - run.disk_bytes
        text = f"{format_size(run.disk_bytes)} on disk{f', {format_size(shared)} shared' if shared else ''}"
        found.append(("Kept", count(len(run.checkpoints), "step", "steps"), text))
    cards = "".join(
        f"<div><dt>{escape(name)}</dt><dd><b>{escape(value)}</b><span>{escape(text)}</span></dd></div>"
        for name, value, text in found
    )
    return f'<dl class="figures">{cards}</dl>' if cards else ""


def _timeline(run: RunFacts) -> str:
    if not run.history.attempts:
        return ""
    notes = run.history.notes
    shown = notes[-_NOTES:]
    more = (
        f'<p class="left-out">{len(notes) - len(shown)} earlier lines are left out.</p>' if len(notes) > _NOTES else ""
    )
    keys = "".join(
        f'<span class="key how-{how}">{escape(WORDS[how])}</span>'
        for how in WORDS
        if any(attempt.how == how for attempt in run.history.attempts)
    )
    drawn, has_pauses = timeline(run.history)
    pause = '<span class="key cut">pause, cut short</span>' if has_pauses else ""
    items = "".join(map(_note, shown))
    is_open = " open" if len(shown) <= 40 else ""
    return (
        f'<h3>Timeline</h3><p class="keys">{keys}<span class="key writing">being written</span>{pause}</p>'
        f'{drawn}<details{is_open} class="story"><summary>What happened</summary>{more}'
        f'<ol class="notes">{items}</ol></details>'
    )


def _note(note: Note) -> str:
    text = f"<span>{escape(note.text)}</span>" if note.text else ""
    moment = clock_text(note.time)
    return (
        f'<li class="{note.tone}"><time datetime="{moment.replace(" ", "T")}Z">{moment}</time>'
        f"<div><b>{escape(note.title)}</b> {text}</div></li>"
    )


def _metrics(run: RunFacts, number: int, readings: list[Reading]) -> str:
    metrics = run.history.metrics
    if not metrics:
        return ""
    names = sorted(metrics, key=lambda name: (name != run.best_metric, -len(metrics[name]), name))
    kept = [one.step for one in run.checkpoints]
    charts = []
    for place, name in enumerate(names[:_METRICS]):
        best = run.best if name == run.best_metric else None
        markup, reading = line_chart(f"metric-{number}-{place}", name, metrics[name], kept, best)
        charts.append(markup)
        readings.append(reading)
    left = names[_METRICS:]
    more = f'<p class="left-out">{len(left)} metrics are left out: {escape(shortened(left, 20))}</p>' if left else ""
    key = '<p class="keys"><span class="key kept">kept checkpoint</span>'
    key += '<span class="key best">best</span></p>' if run.best is not None else "</p>"
    return f'<h3>Metrics</h3>{key}<div class="charts">{"".join(charts)}</div>{more}'


def _saves(run: RunFacts, number: int, readings: list[Reading]) -> str:
    saves, charts = run.history.saves, []
    shown = [
        ("waited", "The loop waited", {save.step: save.blocked for save in saves}, "s"),
        ("took", "Until the save was durable", {save.step: save.total for save in saves}, "s"),
    ]
    for name, title, values, unit in shown if len(saves) > 1 else ():
        markup, reading = line_chart(f"{name}-{number}", title, values, unit=unit)
        charts.append(markup)
        readings.append(reading)
    sizes = [(one.step, one.bytes - one.shared_bytes, one.shared_bytes) for one in run.checkpoints if one.bytes]
    if sizes:
        charts.append(size_chart(sizes))
    return f'<h3>Saves</h3><div class="charts">{"".join(charts)}</div>' if charts else ""


# ---- tables


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a table."""

    text: str
    order: float | str | None = None  # what it is sorted by, if not its text
    markup: str = ""  # HTML instead of the text
    tone: str = ""


def table(name: str, columns: Sequence[str], rows: Iterable[Sequence[Cell]], *, numbers: Sequence[str] = ()) -> str:
    """Return a table that the page's script sorts and filters.

    Args:
        name: What it shows, for people who do not see it.
        columns: The headings.
        rows: The cells.
        numbers: The columns that are aligned to the right.
    """
    right = [column in numbers for column in columns]
    heads = "".join(
        f'<th scope="col" class="{"n" if is_right else "t"}"><button type="button">{escape(column)}</button></th>'
        for column, is_right in zip(columns, right, strict=True)
    )
    body = "".join(
        f"<tr>{''.join(_cell(cell, is_right) for cell, is_right in zip(row, right, strict=True))}</tr>" for row in rows
    )
    return (
        f'<div class="table" tabindex="0" role="region" aria-label="{escape(name)}"><table class="sortable">'
        f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _cell(cell: Cell, is_right: bool) -> str:
    order = "" if cell.order is None else f' data-v="{escape(_order(cell.order))}"'
    kinds = " ".join(filter(None, ["n" if is_right else "", cell.tone]))
    kind = f' class="{kinds}"' if kinds else ""
    return f"<td{kind}{order}>{cell.markup or escape(cell.text)}</td>"


def _order(value: float | str) -> str:
    return f"{value:.17g}" if isinstance(value, float) else str(value)


def _steps(run: RunFacts) -> str:
    if not run.checkpoints:
        return ""
    shown = _shown_steps(run)
    left = len(run.checkpoints) - len(shown)
    more = (
        f'<p class="left-out">{left} of {len(run.checkpoints)} steps are left out here: those that are damaged, best '
        "or pinned and the newest are shown. holdfast ls lists all.</p>"
        if left
        else ""
    )
    columns = ["Step", "Saved", "Size", "Own", "Metrics", "Saved because", "Kept because", "State"]
    rows = [_step(run, one) for one in shown]
    return f"<h3>Kept steps</h3>{table('Kept steps', columns, rows, numbers=['Step', 'Size', 'Own'])}{more}"


def _shown_steps(run: RunFacts) -> list[CheckpointSummary]:
    """Return the newest steps, and those that stand out, in the order of the run."""
    if len(run.checkpoints) <= _STEPS:
        return run.checkpoints
    chosen = {
        place for place, one in enumerate(run.checkpoints) if one.damage or one.step == run.best or _is_pinned(one)
    }
    chosen = set(sorted(chosen)[-_STEPS // 2 :])
    for place in reversed(range(len(run.checkpoints))):
        if len(chosen) >= _STEPS:
            break
        chosen.add(place)
    return [run.checkpoints[place] for place in sorted(chosen)]


def _is_pinned(one: CheckpointSummary) -> bool:
    return any("pinned" in reason for reason in one.kept)


def _step(run: RunFacts, one: CheckpointSummary) -> list[Cell]:
    name, metrics = one.path.rpartition("/")[2], metrics_text(one.metrics)[:300]
    best_mark = ' <span class="badge">best</span>' if one.step == run.best and run.best_metric else ""
    return [
        Cell("", one.step, f"{escape(name)}{best_mark}"),
        Cell("-" if one.time is None else clock_text(one.time), one.time or 0.0, tone="one-line"),
        Cell(format_size(one.bytes), float(one.bytes)),
        Cell(format_size(one.bytes - one.shared_bytes), float(one.bytes - one.shared_bytes)),
        Cell("", metrics, "".join(f'<span class="whole">{escape(part)}</span> ' for part in metrics.split(", "))),
        Cell(one.reason),
        Cell(", ".join(one.kept)),
        Cell("whole" if one.damage is None else f"damaged: {one.damage}", tone="" if one.damage is None else "bad"),
    ]


def _starts(run: RunFacts) -> str:
    attempts = run.history.attempts
    if not attempts:
        return ""
    shown = list(enumerate(attempts))[-_STEPS:]
    left = len(attempts) - len(shown)
    more = f'<p class="left-out">{left} earlier starts are left out.</p>' if left else ""
    columns = ["Start", "Began", "Ran", "From step", "To step", "Saves", "Written", "Waited", "Ended", "Where"]
    rows = [_start(number, attempt) for number, attempt in shown]
    numbers = ["Start", "Ran", "From step", "To step", "Saves", "Written", "Waited"]
    return f"<h3>Starts</h3>{table('Starts of the program', columns, rows, numbers=numbers)}{more}"


def _start(number: int, attempt: Attempt) -> list[Cell]:
    how = attempt.how or "lost"
    why = "; ".join(filter(None, [attempt.why, "" if attempt.status is None else f"status {attempt.status}"]))
    ran = attempt.ended - attempt.began
    written = sum(save.bytes for save in attempt.saves)
    first, last = attempt.restored, attempt.last_step
    return [
        Cell(str(number + 1), float(number)),
        Cell(clock_text(attempt.began), attempt.began, tone="one-line"),
        Cell(duration(ran), ran),
        Cell("-" if first is None else str(first), -1.0 if first is None else float(first)),
        Cell("-" if last is None else str(last), -1.0 if last is None else float(last)),
        Cell(str(len(attempt.saves)), float(len(attempt.saves))),
        Cell(format_size(written), float(written)),
        Cell(duration(attempt.blocked), attempt.blocked),
        Cell(f"{WORDS[how]}{f': {why}' if why else ''}"[:300], tone="bad" if how in _BAD else ""),
        Cell(f"{attempt.host}, {attempt.pid}" if attempt.host else "", tone="one-line"),
    ]


def _statistics(run: RunFacts, number: int, readings: list[Reading]) -> str:
    found = run.statistics
    if found is None or not (found.leaves or found.notes):
        return ""
    notes = "".join(f'<p class="left-out">{escape(note)}.</p>' for note in found.notes)
    charts = []
    known = found.groups if len(found.steps) > 1 else {}
    groups = sorted(known, key=lambda group: -math.inf if math.isnan(known[group][-1]) else -known[group][-1])
    for place, group in enumerate(groups[:_GROUPS]):
        values = dict(zip(found.steps, found.groups[group], strict=True))
        chart, reading = line_chart(f"norm-{number}-{place}", f"Norm of {group}", values)
        charts.append(chart)
        readings.append(reading)
    drawn = f'<div class="charts">{"".join(charts)}</div>' if charts else ""
    columns = ["Leaf", "Elements", "Min", "Max", "Mean", "Deviation", "Norm", "NaN", "Inf"]
    moved = len(found.steps) > 1
    if moved:
        columns += ["Norm moved", f"Norm from step {found.steps[0]} to {found.steps[-1]}"]
    several = len({leaf.item for leaf in found.leaves}) > 1
    rows = [_leaf(leaf, found, several, moved) for leaf in found.leaves]
    step = f" of step {found.step}" if found.step is not None and found.step >= 0 else ""
    about = f"{count(found.number, 'leaf', 'leaves')} with numbers"
    return (
        f"<h3>Values{step}</h3><p>{about}. NaN and Inf are counted apart; the other numbers are of finite elements.</p>"
        f"{drawn}{_filter('Values by leaf')}"
        f"{table('Values by leaf', columns, rows, numbers=columns[1:10])}{notes}"
    )


def _leaf(leaf: LeafStatistics, found: Statistics, several: bool, moved: bool) -> list[Cell]:
    name = f"{leaf.item}/{leaf.path}" if several else leaf.path
    cells = [Cell("", name, f"<code>{escape(name)}</code>"), Cell(f"{leaf.size:,}", float(leaf.size))]
    numbers = (leaf.minimum, leaf.maximum, leaf.mean, leaf.deviation, leaf.norm)
    cells += [Cell("-" if one is None else number_text(one), -math.inf if one is None else one) for one in numbers]
    cells += [Cell(f"{one:,}", float(one), tone="bad" if one else "") for one in (leaf.nan, leaf.inf)]
    if moved:
        norms = found.norms.get((leaf.item, leaf.path), [])
        known = [value for value in norms if value is not None]
        change = (known[-1] - known[0]) / known[0] if len(known) > 1 and known[0] else None
        text = "-" if change is None else f"{100 * change:+.3g} %"
        cells += [Cell(text, -math.inf if change is None else abs(change)), Cell("", 0.0, sparkline(norms))]
    return cells


def _filter(what: str) -> str:
    return f'<p class="tools" hidden><label>Filter <input type="search" data-filter="{escape(what)}"></label></p>'


def _tree(run: RunFacts) -> str:
    if not run.leaves or run.newest is None:
        return ""
    drawn, left = draw_tree(run.leaves)
    whole = sum(leaf.bytes for leaf in run.leaves)
    more = f'<p class="left-out">{left} of {len(run.leaves)} leaves are left out. holdfast show --tree lists all.</p>'
    step = f" of step {run.newest.step}" if run.newest.step >= 0 else ""
    return (
        f"<h3>Tree{step}</h3><p>{count(len(run.leaves), 'leaf', 'leaves')}, {format_size(whole)}.</p>"
        '<p class="tools" hidden><button type="button" data-unfold="true">Unfold all</button> '
        '<button type="button" data-unfold="false">Fold all</button></p>'
        f'<div class="tree">{drawn}</div>{more if left else ""}'
    )


def _facts(run: RunFacts) -> str:
    if not run.metadata:
        return ""
    text = json.dumps(run.metadata, indent=2, default=str)
    shown = text if len(text) <= 20_000 else f"{text[:20_000]}\n..."
    return f"<details><summary>Facts about the run</summary><pre>{escape(shown)}</pre></details>"


def _overview(runs: Sequence[RunFacts], now: float, left_out: int) -> str:
    columns = ["Run", "State", "Newest step", "Age", "Best", "Starts", "Interrupted", "Waited", "On disk"]
    rows = []
    for number, run in enumerate(runs):
        word, tone = _state(run)
        newest, history = run.newest, run.history
        step = -1.0 if newest is None else float(newest.step)
        old = None if newest is None or newest.time is None else now - newest.time
        value = history.metrics.get(run.best_metric or "", {}).get(-1 if run.best is None else run.best)
        blocked = sum(attempt.blocked for attempt in history.attempts)
        interrupted = history.ended("failed", "crashed", "lost", "hung", "preempted")
        rows.append(
            [
                Cell("", run.name, f'<a href="#run-{number}">{escape(run.name)}</a>'),
                Cell("", word, f'<span class="pill {tone}">{escape(word)}</span>'),
                Cell("-" if newest is None else str(newest.step), step),
                Cell("-" if old is None else age(old), math.inf if old is None else old),
                Cell("-" if value is None else f"{run.best_metric} {number_text(value)}", value),
                Cell(str(len(history.attempts)), float(len(history.attempts))),
                Cell(str(interrupted), float(interrupted)),
                Cell(duration(blocked), blocked),
                Cell(format_size(run.disk_bytes), float(run.disk_bytes)),
            ]
        )
    numbers = ["Newest step", "Age", "Best", "Starts", "Interrupted", "Waited", "On disk"]
    more = f'<p class="left-out">{left_out} more runs are left out; name them to see them.</p>' if left_out else ""
    return f"<h1>{count(len(runs), 'run', 'runs')}</h1>{table('Runs', columns, rows, numbers=numbers)}{more}"
