"""The page of a report: HTML with inline styles, scripts and data, which loads no other resources."""

from __future__ import annotations

import importlib.resources
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import Template

from ...engine.clock import format_size
from ...engine.errors import shortened
from ...engine.listing import CheckpointSummary
from ...engine.manager import DAY
from ...engine.sources import LeafStatistics
from ..report import age, count, duration, metrics_text
from .charts import clock_text, draw_tree, line_chart, number_text, percent, size_chart, sparkline, timeline
from .facts import Choice, RunFacts, Statistics, basis, choices
from .history import PROOFS, WORDS, Attempt, Note
from .markup import Markup, join, tag

GENERATOR = '<meta name="generator" content="holdfast report">'
_STEPS = 500  # maximum number of rows in a table of steps or attempts
_NOTES = 300  # maximum number of lines in the list of events
_METRICS = 16  # maximum number of metric charts
_GROUPS = 6  # maximum number of norm charts

_BAD = ("crashed", "hung", "failed")


def draw_page(runs: Sequence[RunFacts], *, now: float, version: str, left_out: int = 0) -> str:
    """Render the page. ``now`` is in seconds since 1970-01-01 UTC, and ``left_out`` is the number of omitted runs."""
    only = len(runs) == 1
    sections = [_run(run, number, now, only=only) for number, run in enumerate(runs)]
    files = importlib.resources.files(__package__)
    frame, style, script = ((files / f"page.{name}").read_text("utf-8") for name in ("html", "css", "js"))
    return Template(frame).substitute(
        title=join(runs[0].name if only else count(len(runs), "run")),
        style=style,
        content=join(*([] if only else _overview(runs, now, left_out)), *sections),
        version=join(version),
        time=clock_text(now),
        script=script,
    )


# ---- sections of a run


def _run(run: RunFacts, number: int, now: float, *, only: bool) -> Markup:
    path = tag("p", tag("code", run.path), class_="place")
    parts = [
        tag("header", tag("h1" if only else "h2", run.name, " ", _state(run)), path),
        _alarms(run, now),
        _figures(run, now),
        _timeline(run),
        _metrics(run),
        _saves(run),
        _intervals(run),
        _steps(run),
        _statistics(run),
        _tree(run),
        _starts(run),
        _facts(run),
    ]
    return join(tag("section", *parts, class_="run", id=f"run-{number}"), "\n")


def _state(run: RunFacts) -> Markup:
    """Return a coloured label for a run's state."""
    attempts = run.history.attempts
    if not attempts:
        word, tone = "no events" if run.checkpoints else "no checkpoints", "plain"
    else:
        how = attempts[-1].how or "lost"
        tones = {"finished": "good", "preempted": "warn", "lost": "warn"}
        word, tone = WORDS[how], tones.get(how, "bad" if how in _BAD else "info")
    return tag("span", word, class_=f"pill {tone}")


def _alarms(run: RunFacts, now: float) -> Markup:
    damaged, history = [step for step in run.checkpoints if step.damage is not None], run.history
    alarms = [("bad", f"Step {step.step} is damaged: {step.damage}") for step in damaged[:10]]
    if len(damaged) > 10:
        alarms.append(("bad", f"{len(damaged) - 10} more steps are damaged; holdfast verify lists them"))
    alarms += [("bad", note) for note in run.notes]
    last = history.attempts[-1] if history.attempts else None
    if last is not None and last.how in (*_BAD, "lost"):
        at = f" after step {last.last_step}" if last.last_step is not None else ""
        why = f": {last.why}" if last.why else ""
        whole = [step.step for step in run.checkpoints if step.damage is None]
        saved = f" The newest whole step is {whole[-1]}; the same command again resumes from it." if whole else ""
        tone = "bad" if last.how in _BAD else "warn"
        alarms.append((tone, f"The last start {WORDS[last.how or 'lost']}{at}{why}.{saved}"))
    if last is not None and last.how == "open":
        text = f"The last start runs on {last.host}, or was lost there; its last event was {age(now - last.ended)} ago"
        alarms.append(("plain", text))
    if (statistics := run.statistics) is not None and statistics.damaged:
        more = statistics.damaged - len(statistics.examples)
        names = f"{', '.join(statistics.examples)}{f' and {more} more' if more else ''}"
        alarms.append(("bad", f"NaN or Inf in step {statistics.step}: {names}"))
    if history.failures:
        alarms.append(("warn", f"{count(history.failures, 'save')} failed"))
    if history.fallbacks:
        often = "once" if history.fallbacks == 1 else f"{history.fallbacks} times"
        alarms.append(("warn", f"The run fell back to an older step {often}, because newer ones were damaged"))
    if inexact := [attempt for attempt in history.attempts if attempt.proof == "inexact"]:
        number, last = count(len(inexact), "resume was", "resumes were"), inexact[-1]
        alarms.append(("bad", f"{number} not exact, the last one from step {last.restored}: {last.differs} differ"))
    if not run.has_events and run.format == "holdfast" and run.checkpoints:
        places = "next to runs on file systems, but not in object stores, copies or single checkpoints"
        alarms.append(("plain", f"No events: they are kept {places}"))
    return tag("ul", *(tag("li", text, class_=tone) for tone, text in alarms), class_="alarms") if alarms else Markup()


def _figures(run: RunFacts, now: float) -> Markup:
    history, newest = run.history, run.newest
    shown: list[tuple[str, str, str]] = []
    if newest is not None:
        shown.append(("Newest step", f"{newest.step}", "" if newest.time is None else f"{age(now - newest.time)} ago"))
    if run.best is not None and run.best_metric is not None:
        values = history.metrics.get(run.best_metric, {})
        value = f"{run.best_metric} {number_text(values[run.best])}" if run.best in values else run.best_metric
        shown.append(("Best step", str(run.best), value))
    if history.attempts:
        ends = [
            (history.ended("failed", "crashed"), "crashed"),
            (history.ended("hung"), "hung"),
            (history.ended("preempted"), "preempted"),
            (history.ended("lost"), "without a record"),
        ]
        shown.append(("Starts", str(len(history.attempts)), _numbered(ends) or "no interruption"))
        ran = sum(attempt.ended - attempt.began for attempt in history.attempts)
        shown.append(("Ran", duration(ran), ""))
        share = f"{percent(history.blocked / ran)} of the time" if ran else ""
        shown.append(("Waited for saves", duration(history.blocked), share))
        if len(history.attempts) > 1:
            least = "at least " if history.hides_steps else ""
            lost = f"{least}{duration(history.redone_seconds)} lost" if history.redone_seconds else ""
            text = lost or ("a killed start hides its last steps" if least else "nothing lost")
            steps = count(history.redone_steps, "step") if history.redone_steps or not least else "unknown steps"
            shown.append(("Trained again", f"{least if history.redone_steps else ''}{steps}", text))
        if proofs := [attempt.proof or "" for attempt in history.attempts if attempt.restored is not None]:
            verdicts = [(proofs.count(proof), PROOFS.get(proof, "not compared")) for proof in (*PROOFS, "")]
            shown.append(("Resumes", str(len(proofs)), _numbered(verdicts)))
    if run.checkpoints:
        shared = sum(step.bytes for step in run.checkpoints) - run.disk_bytes
        text = f"{format_size(run.disk_bytes)} on disk{f', {format_size(shared)} shared' if shared else ''}"
        shown.append(("Kept", count(len(run.checkpoints), "step"), text))
    cards = (tag("div", tag("dt", name), tag("dd", tag("b", value), tag("span", text))) for name, value, text in shown)
    return tag("dl", *cards, class_="figures") if shown else Markup()


def _numbered(numbers: Sequence[tuple[int, str]]) -> str:
    return ", ".join(f"{number} {text}" for number, text in numbers if number)


def _timeline(run: RunFacts) -> Markup:
    if not run.history.attempts:
        return Markup()
    ends = {attempt.how for attempt in run.history.attempts}
    keys = [_key(f"how-{how}", WORDS[how]) for how in WORDS if how in ends]
    drawn, has_pauses = timeline(run.history)
    keys += [_key("writing", "being written"), *([_key("cut", "pause, cut short")] if has_pauses else [])]
    notes = run.history.notes
    shown = notes[-_NOTES:]
    story = tag(
        "details",
        tag("summary", "What happened"),
        _left_out(len(notes) - len(shown), "earlier lines are left out."),
        tag("ol", *map(_note, shown), class_="notes"),
        open=True if len(shown) <= 40 else None,
        class_="story",
    )
    return join(tag("h3", "Timeline"), tag("p", *keys, class_="keys"), drawn, story)


def _key(tone: str, text: str) -> Markup:
    return tag("span", text, class_=f"key {tone}")


def _left_out(number: int, text: str) -> Markup:
    """Return a line that states how many entries are omitted, or an empty string if none are."""
    return tag("p", f"{number} {text}", class_="left-out") if number > 0 else Markup()


def _note(note: Note) -> Markup:
    moment = clock_text(note.time)
    when = tag("time", moment, datetime=f"{moment.replace(' ', 'T')}Z")
    text = (tag("span", note.text),) if note.text else ()
    return tag("li", when, tag("div", tag("b", note.title), " ", *text), class_=note.tone)


def _metrics(run: RunFacts) -> Markup:
    metrics = run.history.metrics
    if not metrics:
        return Markup()
    names = sorted(metrics, key=lambda name: (name != run.best_metric, -len(metrics[name]), name))
    kept = [step.step for step in run.checkpoints]
    charts = [
        line_chart(name, metrics[name], kept, run.best if name == run.best_metric else None)
        for name in names[:_METRICS]
    ]
    left = names[_METRICS:]
    keys = [_key("kept", "kept checkpoint"), *([_key("best", "best")] if run.best is not None else [])]
    return join(
        tag("h3", "Metrics"),
        tag("p", *keys, class_="keys"),
        tag("div", *charts, class_="charts"),
        _left_out(len(left), f"metrics are left out: {shortened(left, 20)}"),
    )


def _saves(run: RunFacts) -> Markup:
    saves, charts = run.history.saves, []
    if len(saves) > 1:
        charts.append(line_chart("The loop waited", {save.step: save.blocked for save in saves}, unit="s"))
        charts.append(line_chart("Until the save was durable", {save.step: save.total for save in saves}, unit="s"))
    sizes = [(step.step, step.bytes - step.shared_bytes, step.shared_bytes) for step in run.checkpoints if step.bytes]
    if sizes:
        charts.append(size_chart(sizes))
    return join(tag("h3", "Saves"), tag("div", *charts, class_="charts")) if charts else Markup()


# ---- tables


@dataclass(frozen=True, slots=True)
class Cell:
    """A table cell: its text, its sort key (None to sort by the text), and its CSS class."""

    text: str
    order: float | str | None = None
    tone: str = ""


class Number(Cell):
    """A right-aligned cell in a numeric column."""

    __slots__ = ()


def table(name: str, rows: Sequence[Mapping[str, Cell]]) -> Markup:
    """Build a sortable table from rows that map column headings to cells. Screen readers announce its ``name``."""
    if not rows:
        return Markup()
    heads = (
        tag("th", tag("button", column, type="button"), scope="col", class_="n" if isinstance(cell, Number) else "t")
        for column, cell in rows[0].items()
    )
    body = (tag("tr", *map(_cell, row.values())) for row in rows)
    whole = tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *body), class_="sortable")
    return tag("div", whole, class_="table", tabindex=0, role="region", aria_label=name)


def _cell(cell: Cell) -> Markup:
    classes = " ".join(filter(None, ["n" if isinstance(cell, Number) else "", cell.tone]))
    order = f"{cell.order:.17g}" if isinstance(cell.order, float) else cell.order
    return tag("td", cell.text, class_=classes or None, data_v=order)


def _intervals(run: RunFacts) -> Markup:
    rows = [*map(_interval, choices(run.experience))]
    if not rows:
        return Markup()
    text = f"What saving at each interval is expected to lose in a day. {basis(run.experience)}"
    return join(tag("h3", "Other intervals"), tag("p", text), table("Other intervals", rows))


def _interval(choice: Choice) -> dict[str, Cell]:
    loss, seconds = choice.loss, choice.seconds
    lost = {"Saving": loss.saving, "Failures": loss.failing, "Together": loss.together}
    return {
        "Save every": Number(join(duration(seconds), " ", tag("span", choice.name, class_="badge")), seconds),
        "Saves a day": Number(f"{DAY / seconds:,.0f}", DAY / seconds),
        **{name: Number(duration(seconds), seconds) for name, seconds in lost.items()},
    }


def _steps(run: RunFacts) -> Markup:
    if not run.checkpoints:
        return Markup()
    shown = _shown_steps(run)
    text = (
        f"of {len(run.checkpoints)} steps are left out here: those that are damaged, best or pinned and the newest "
        "are shown. holdfast ls lists all."
    )
    rows = [_step(run, step) for step in shown]
    left = _left_out(len(run.checkpoints) - len(shown), text)
    return join(tag("h3", "Kept steps"), table("Kept steps", rows), left)


def _shown_steps(run: RunFacts) -> list[CheckpointSummary]:
    """Return the newest steps and all damaged, best or pinned steps, in the order of the run."""
    special = [
        index
        for index, step in enumerate(run.checkpoints)
        if step.damage or step.step == run.best or any("pinned" in reason for reason in step.kept)
    ][-_STEPS // 2 :]
    others = sorted(set(range(len(run.checkpoints))).difference(special))
    return [run.checkpoints[index] for index in sorted([*special, *others[-(_STEPS - len(special)) :]])]


def _step(run: RunFacts, step: CheckpointSummary) -> dict[str, Cell]:
    name, metrics = step.path.rpartition("/")[2], metrics_text(step.metrics)[:300]
    best = [" ", tag("span", "best", class_="badge")] if step.step == run.best and run.best_metric else []
    unshared = step.bytes - step.shared_bytes
    parts = [join(tag("span", part, class_="whole"), " ") for part in metrics.split(", ")]
    return {
        "Step": Number(join(name, *best), step.step),
        "Saved": Cell("-" if step.time is None else clock_text(step.time), step.time or 0.0, "one-line"),
        "Size": Number(format_size(step.bytes), step.bytes),
        "Own": Number(format_size(unshared), unshared),
        "Metrics": Cell(join(*parts), metrics),
        "Saved because": Cell(step.reason),
        "Kept because": Cell(", ".join(step.kept)),
        "State": Cell("whole") if step.damage is None else Cell(f"damaged: {step.damage}", tone="bad"),
    }


def _starts(run: RunFacts) -> Markup:
    attempts = run.history.attempts
    rows = [_start(number, attempt) for number, attempt in enumerate(attempts)][-_STEPS:]
    left = _left_out(len(attempts) - len(rows), "earlier starts are left out.")
    return join(tag("h3", "Starts"), table("Starts of the program", rows), left) if rows else Markup()


def _start(number: int, attempt: Attempt) -> dict[str, Cell]:
    how = attempt.how or "lost"
    why = "; ".join(filter(None, [attempt.why, "" if attempt.status is None else f"status {attempt.status}"]))
    ran = attempt.ended - attempt.began
    written = sum(save.bytes for save in attempt.saves)
    return {
        "Start": Number(str(number + 1), number),
        "Began": Cell(clock_text(attempt.began), attempt.began, "one-line"),
        "Ran": Number(duration(ran), ran),
        "From step": _maybe(attempt.restored, PROOFS.get(attempt.proof or "")),
        "To step": _maybe(attempt.last_step),
        "Saves": Number(str(len(attempt.saves)), len(attempt.saves)),
        "Written": Number(format_size(written), written),
        "Waited": Number(duration(attempt.blocked), attempt.blocked),
        "Ended": Cell(f"{WORDS[how]}{f': {why}' if why else ''}"[:300], tone="bad" if how in _BAD else ""),
        "Where": Cell(f"{attempt.host}, {attempt.pid}" if attempt.host else "", tone="one-line"),
    }


def _maybe(step: int | None, mark: str | None = None) -> Number:
    badge = [" ", tag("span", mark, class_="badge")] if mark else []
    return Number("-", -1) if step is None else Number(join(str(step), *badge), step)


def _statistics(run: RunFacts) -> Markup:
    statistics = run.statistics
    if statistics is None or not (statistics.leaves or statistics.notes):
        return Markup()
    norms = statistics.groups if len(statistics.steps) > 1 else {}
    groups = sorted(norms, key=lambda group: -math.inf if math.isnan(norms[group][-1]) else -norms[group][-1])
    charts = [
        line_chart(f"Norm of {group}", dict(zip(statistics.steps, norms[group], strict=True)))
        for group in groups[:_GROUPS]
    ]
    several = len({leaf.item for leaf in statistics.leaves}) > 1
    step = f" of step {statistics.step}" if statistics.step is not None and statistics.step >= 0 else ""
    leaves = count(statistics.number, "leaf", "leaves")
    search = tag("label", "Filter ", Markup('<input type="search" data-filter="Values by leaf">'))
    return join(
        tag("h3", f"Values{step}"),
        tag("p", f"{leaves} with numbers. NaN and Inf are counted separately; other figures are of finite elements."),
        tag("div", *charts, class_="charts") if charts else "",
        tag("p", search, class_="tools", hidden=True),
        table("Values by leaf", [_leaf(leaf, statistics, several) for leaf in statistics.leaves]),
        *(tag("p", f"{note}.", class_="left-out") for note in statistics.notes),
    )


def _leaf(leaf: LeafStatistics, statistics: Statistics, several: bool) -> dict[str, Cell]:
    name = f"{leaf.item}/{leaf.path}" if several else leaf.path
    numbers = {
        "Min": leaf.minimum,
        "Max": leaf.maximum,
        "Mean": leaf.mean,
        "Deviation": leaf.deviation,
        "Norm": leaf.norm,
    }
    cells = {"Leaf": Cell(tag("code", name), name), "Elements": Number(f"{leaf.size:,}", leaf.size)}
    cells |= {
        name: Number("-" if value is None else number_text(value), -math.inf if value is None else value)
        for name, value in numbers.items()
    }
    for name, number in (("NaN", leaf.nan), ("Inf", leaf.inf)):
        cells[name] = Number(f"{number:,}", number, "bad" if number else "")
    if len(steps := statistics.steps) > 1:
        norms = statistics.norms.get((leaf.item, leaf.path), [])
        read = [norm for norm in norms if norm is not None]
        moved = (read[-1] - read[0]) / read[0] if len(read) > 1 and read[0] else None
        cells["Norm moved"] = Number("-", -math.inf) if moved is None else Number(f"{100 * moved:+.3g} %", abs(moved))
        cells[f"Norm from step {steps[0]} to {steps[-1]}"] = Cell(sparkline(norms), 0.0)
    return cells


def _tree(run: RunFacts) -> Markup:
    if not run.leaves or run.newest is None:
        return Markup()
    drawn, left = draw_tree(run.leaves)
    whole = format_size(sum(leaf.bytes for leaf in run.leaves))
    step = f" of step {run.newest.step}" if run.newest.step >= 0 else ""
    buttons = (
        tag("button", "Unfold all", type="button", data_unfold="true"),
        " ",
        tag("button", "Fold all", type="button", data_unfold="false"),
    )
    return join(
        tag("h3", f"Tree{step}"),
        tag("p", f"{count(len(run.leaves), 'leaf', 'leaves')}, {whole}."),
        tag("p", *buttons, class_="tools", hidden=True),
        tag("div", drawn, class_="tree"),
        _left_out(left, f"of {len(run.leaves)} leaves are left out. holdfast show --tree lists all."),
    )


def _facts(run: RunFacts) -> Markup:
    if not run.metadata:
        return Markup()
    text = json.dumps(run.metadata, indent=2, default=str)
    shown = text if len(text) <= 20_000 else f"{text[:20_000]}\n..."
    return tag("details", tag("summary", "Facts about the run"), tag("pre", shown))


def _overview(runs: Sequence[RunFacts], now: float, left_out: int) -> list[Markup]:
    rows = []
    for number, run in enumerate(runs):
        newest, history = run.newest, run.history
        old = None if newest is None or newest.time is None else now - newest.time
        value = history.metrics.get(run.best_metric or "", {}).get(-1 if run.best is None else run.best)
        interrupted = history.ended("failed", "crashed", "lost", "hung", "preempted")
        rows.append(
            {
                "Run": Cell(tag("a", run.name, href=f"#run-{number}"), run.name),
                "State": Cell(_state(run)),
                "Newest step": _maybe(None if newest is None else newest.step),
                "Age": Number("-" if old is None else age(old), math.inf if old is None else old),
                "Best": Number("-" if value is None else f"{run.best_metric} {number_text(value)}", value),
                "Starts": Number(str(len(history.attempts)), len(history.attempts)),
                "Interrupted": Number(str(interrupted), interrupted),
                "Waited": Number(duration(history.blocked), history.blocked),
                "On disk": Number(format_size(run.disk_bytes), run.disk_bytes),
            }
        )
    more = _left_out(left_out, "more runs are left out; name them to see them.")
    return [tag("h1", count(len(runs), "run")), table("Runs", rows), more]
