"""The graphics of a report: collapsible trees, and SVG charts.

Charts are plain SVG without scripts, in the page's own DOM. They follow the page's colours, and can be printed.

Drawings stretch with the page, whereas text is HTML outside the SVG and keeps its size at any page width. Line widths
do not scale (``vector-effect``), and dots are zero-length lines with round caps.
"""

from __future__ import annotations

import datetime
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...engine.clock import format_size
from ...engine.inspection import LeafSummary
from ..report import count, duration
from .history import WORDS, Attempt, History, Note, Save
from .markup import Markup, join, tag

WIDTH, HEIGHT = 1000.0, 100.0  # drawing size, in SVG user units
_POINTS = 600  # maximum number of points per line
_BUCKETS = 120  # number of bars in the "waited for saves" lane
_GAP = 0.04  # maximum width of a pause between attempts, as a fraction of the total running time
_BARS = 150  # maximum number of bars in a size chart
_MARKS = 200  # maximum number of event marks, and of pauses, on a timeline


# ---- time


class TimeScale:
    """Maps times to axis positions from 0 to 1, shortening long pauses between attempts."""

    def __init__(self, spans: Iterable[tuple[float, float]]) -> None:
        merged: list[list[float]] = []
        for begin, end in sorted(spans):
            if merged and begin <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([begin, end])
        longest = _GAP * (sum(end - begin for begin, end in merged) or 1.0)
        self.pauses: list[tuple[float, float, float]] = []  # (position, width, duration in seconds)
        self._times: list[float] = []
        self._places: list[float] = []
        position = 0.0
        for begin, end in merged:
            if self._times:
                pause = begin - self._times[-1]
                if pause > longest:
                    self.pauses.append((position, longest, pause))
                position += min(pause, longest)
            self._times += [begin, end]
            self._places += [position, position + (end - begin)]
            position += end - begin
        whole = position or 1.0
        self._places = [position / whole for position in self._places]
        self.pauses = [(position / whole, width / whole, pause) for position, width, pause in self.pauses]

    def place(self, time: float) -> float:
        """Convert a time to an axis position, from 0 to 1."""
        return float(np.interp(time, self._times, self._places))

    def time(self, position: float) -> float:
        """Convert an axis position to a time."""
        return float(np.interp(position, self._places, self._times))


def clock_text(time: float) -> str:
    """Format a time in UTC, or return ``?`` if it is out of range."""
    try:
        moment = datetime.datetime.fromtimestamp(time, datetime.UTC)
    except (OverflowError, ValueError, OSError):
        return "?"
    return moment.strftime("%Y-%m-%d %H:%M:%S")


# ---- the timeline

_SYMBOLS = {
    "finished": "✓",
    "preempted": "■",
    "crash": "✕",
    "hung": "‖",
    "lost": "?",
    "fallback": "↩",
    "inexact": "≠",
    "failed save": "!",
    "mirror failed": "!",
    "fetched": "↓",
}


def timeline(history: History) -> tuple[Markup, bool]:
    """Return the timeline of a run as HTML, and whether any pauses between attempts are shortened."""
    attempts = history.attempts
    scale = TimeScale((attempt.began, attempt.ended) for attempt in attempts)
    is_one_day = clock_text(attempts[0].began)[:10] == clock_text(attempts[-1].ended)[:10]
    shown = slice(11, None) if is_one_day else slice(5, 16)
    pauses = [
        tag(
            "span",
            class_="pause",
            style=f"left:{100 * position:.2f}%;width:{100 * width:.2f}%",
            title=f"nothing ran for {duration(pause)}",
        )
        for position, width, pause in scale.pauses[:_MARKS]
    ]
    ticks = (
        tag("span", clock_text(scale.time(part / 4))[shown], class_=f"tick tick-{part}", style=f"left:{25 * part}%")
        for part in range(5)
    )
    lanes = (
        _lane("program", _drawn(_programs(attempts, scale), "programs")),
        _lane("saves", _drawn(_saves(history.saves, scale), "saves")),
        _lane("waited for saves", *_waiting(history.saves, scale)),
        _lane("events", tag("div", *_marks(history.notes, scale), class_="marks")),
        _lane("", *pauses, *ticks, css_class="lane axis"),
    )
    return tag("div", *lanes, class_="timeline", role="group", aria_label="Timeline of the run"), bool(pauses)


def _lane(name: str, *plot: Markup, css_class: str = "lane") -> Markup:
    return tag("div", tag("div", name, class_="lane-name"), tag("div", *plot, class_="plot"), class_=css_class)


def _drawn(content: Iterable[Markup], css_class: str) -> Markup:
    box = f"0 0 {WIDTH:g} {HEIGHT:g}"
    return tag("svg", *content, class_=css_class, viewBox=box, preserveAspectRatio="none", role="img")


def _programs(attempts: Sequence[Attempt], scale: TimeScale) -> Iterator[Markup]:
    for number, attempt in enumerate(attempts):
        left, right = WIDTH * scale.place(attempt.began), WIDTH * scale.place(attempt.ended)
        how = attempt.how or "lost"
        text = f"start {number + 1}: {WORDS[how]}, {duration(attempt.ended - attempt.began)}"
        yield _rectangle(left, max(2.0, right - left - 1.0), 0.0, HEIGHT, f"how-{how}", text)


def _saves(saves: Sequence[Save], scale: TimeScale) -> Iterator[Markup]:
    """Draw a bar for each save, and a line where it became durable. Draw only the first save at each position."""
    seen: set[int] = set()
    for save in saves:
        right = WIDTH * scale.place(save.time)
        if round(right) in seen:
            continue
        seen.add(round(right))
        left = WIDTH * scale.place(save.time - save.total)
        text = f"step {save.step}: {format_size(save.bytes)} in {duration(save.total)}, waited {duration(save.blocked)}"
        if right - left > 1.0:
            yield _rectangle(left, right - left, 30.0, 40.0, "writing", text)
        yield tag("path", tag("title", text), class_="saved", d=f"M{right:.1f} 10V90")


def _waiting(saves: Sequence[Save], scale: TimeScale) -> Iterator[Markup]:
    """Draw a histogram of the fraction of time that the training loop spent waiting for saves."""
    waited = [0.0] * _BUCKETS
    for save in saves:
        began = scale.place(save.time - save.total)  # the loop waits at the start of a save
        waited[min(_BUCKETS - 1, int(began * _BUCKETS))] += save.blocked
    shares = [
        min(1.0, seconds / max(1e-9, scale.time((number + 1) / _BUCKETS) - scale.time(number / _BUCKETS)))
        for number, seconds in enumerate(waited)
    ]
    most, width = max(shares), WIDTH / _BUCKETS
    bars = (
        _rectangle(number * width, width * 0.8, HEIGHT * (1 - share / most), HEIGHT * share / most, "waited")
        for number, share in enumerate(shares)
        if share
    )
    yield _drawn(bars, "waiting")
    if most:
        yield tag("span", f"{percent(most)} at most", class_="most")


def _marks(notes: Sequence[Note], scale: TimeScale) -> Iterator[Markup]:
    for note in [note for note in notes if note.mark in _SYMBOLS][:_MARKS]:
        text = f"{clock_text(note.time)} {note.title}{f': {note.text}' if note.text else ''}"
        yield tag(
            "span",
            _SYMBOLS[note.mark],
            class_=f"mark {note.tone}",
            style=f"left:{100 * scale.place(note.time):.2f}%",
            tabindex=0,
            role="img",
            data_mark=note.mark,
            aria_label=text,
            title=text,
        )


def _rectangle(x: float, width: float, y: float, height: float, css_class: str, text: str = "") -> Markup:
    title = (tag("title", text),) if text else ()
    geometry = {"x": x, "y": y, "width": width, "height": height}
    return tag("rect", *title, class_=css_class, **{name: f"{value:.1f}" for name, value in geometry.items()})


# ---- charts over steps


def line_chart(
    title: str, values: Mapping[int, float], kept: Iterable[int] = (), best: int | None = None, unit: str = ""
) -> Markup:
    """Draw values over steps as a line, with dots for kept checkpoints. ``data-readings`` holds text shown on hover."""
    finite = sorted((step, value) for step, value in values.items() if math.isfinite(value))
    by_step, points, lost = dict(finite), _thinned(finite), len(values) - len(finite)
    low, high = _range([value for _, value in points])
    first, last = (points[0][0], points[-1][0]) if points else (0, 0)

    def x(step: float) -> float:
        return WIDTH * (step - first) / (last - first) if last > first else WIDTH / 2

    def y(value: float) -> float:
        return HEIGHT * (high - value) / (high - low)

    def dots(css_class: str, steps: Iterable[int]) -> Markup:
        return tag("path", class_=css_class, d="".join(f"M{x(step):.1f} {y(by_step[step]):.1f}h0" for step in steps))

    levels = _levels(low, high)
    drawn = [tag("path", class_="grid", d=f"M0 {y(level):.1f}H{WIDTH:g}") for level in levels]
    if len(points) > 1:
        line = (f"{x(step):.1f} {y(value):.1f}" for step, value in points)
        drawn.append(tag("path", class_="line", d="M" + "L".join(line)))
    if len(points) <= 60:
        drawn.append(dots("dot", [step for step, _ in points]))
    if kept := [step for step in kept if step in by_step]:
        drawn.append(dots("kept", kept[-_POINTS:]))
    if best is not None and best in by_step:
        drawn.append(dots("best", [best]))
    now = number_text(finite[-1][1], unit) if finite else "-"
    summary = f"{title}: {len(values)} values"
    if finite:
        summary += f" from step {finite[0][0]} to {finite[-1][0]}, last {now}"
    if lost:
        summary += f", {lost} of them not finite"
    readings = (f"{round(x(step) / WIDTH, 4)}\tstep {step:g}: {number_text(value, unit)}" for step, value in points)
    alarm = (tag("span", f"{lost} not finite", class_="alarm"),) if lost else ()
    plot = tag(
        "div",
        tag("svg", *drawn, viewBox=f"0 0 {WIDTH:g} {HEIGHT:g}", preserveAspectRatio="none", aria_hidden="true"),
        *(tag("span", number_text(level, unit), class_="level", style=f"top:{y(level):.1f}%") for level in levels),
        tag("output", class_="reading", hidden=True),
        class_="plot",
        tabindex=0,
        role="img",
        aria_label=summary,
        data_readings="\n".join(readings),
    )
    return _figure((tag("b", title), " ", tag("span", now), *alarm), plot, first, last)


def _figure(caption: Iterable[str], plot: Markup, first: int, last: int) -> Markup:
    axis = tag("div", tag("span", f"{first}"), tag("span", "step"), tag("span", f"{last}"), class_="axis")
    return tag("figure", tag("figcaption", *caption), plot, axis, class_="chart")


def size_chart(sizes: Sequence[tuple[int, int, int]]) -> Markup:
    """Draw a bar for each (step, unshared bytes, shared bytes). If there are too many, draw the largest per group."""
    group = max(1, math.ceil(len(sizes) / _BARS))
    bars = [max(sizes[i : i + group], key=lambda size: size[1] + size[2]) for i in range(0, len(sizes), group)]
    most = max(unshared + shared for _, unshared, shared in bars) or 1
    width = WIDTH / len(bars)
    fill = min(width * 0.8, 60.0)
    drawn = []
    for number, (step, unshared, shared) in enumerate(bars):
        left = number * width + (width - fill) / 2
        own_height, shared_height = HEIGHT * unshared / most, HEIGHT * shared / most
        text = f"step {step}: {format_size(unshared + shared)}"
        text += f", of which {format_size(shared)} shared" if shared else ""
        drawn.append(_rectangle(left, fill, HEIGHT - own_height, own_height, "own", text))
        if shared:
            drawn.append(_rectangle(left, fill, HEIGHT - own_height - shared_height, shared_height, "shared", text))
    keys = (tag("span", "own", class_="key own"), " ", tag("span", "shared with other steps", class_="key shared"))
    level = tag("span", format_size(most), class_="level", style="top:0%")
    plot = tag("div", _drawn(drawn, "sizes"), level, class_="plot")
    return _figure((tag("b", "Size of the kept steps"), " ", *keys), plot, bars[0][0], bars[-1][0])


def sparkline(values: Sequence[float | None]) -> Markup:
    """Draw a small inline chart of a few values."""
    finite = [(index, value) for index, value in enumerate(values) if value is not None and math.isfinite(value)]
    if len(finite) < 2:
        return Markup()
    low, high = min(value for _, value in finite), max(value for _, value in finite)
    span, last = (high - low) or 1.0, max(1, len(values) - 1)
    points = " ".join(f"{76 * index / last + 2:.1f},{16 - 14 * (value - low) / span:.1f}" for index, value in finite)
    return tag("svg", tag("polyline", points=points), class_="spark", viewBox="0 0 80 18", aria_hidden="true")


def number_text(value: float, unit: str = "") -> str:
    if unit == "s":
        return duration(value) if value >= 0 else f"-{duration(-value)}"
    return f"{value:.0f}" if value.is_integer() and abs(value) < 1e7 else f"{value:.4g}"


def percent(share: float) -> str:
    """Format a fraction as a percentage.

    >>> percent(1.0), percent(0.0593), percent(0.00012)
    ('100 %', '5.9 %', '0.012 %')
    """
    return f"{100 * share:.0f} %" if share >= 0.0995 else f"{100 * share:.2g} %"


def _thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Downsample a line without changing its appearance: keep the minimum and the maximum of each group of points."""
    if len(points) <= _POINTS:
        return list(points)
    group = math.ceil(len(points) / (_POINTS / 2))
    kept = {points[0], points[-1]}
    for begin in range(0, len(points), group):
        part = points[begin : begin + group]
        kept |= {min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])}
    return sorted(kept)


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values, default=0.0), max(values, default=1.0)
    margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return (0.0 if low >= 0 and low < 0.3 * high else low - margin), high + margin


def _levels(low: float, high: float) -> list[float]:
    """Return two to five round numbers in a range, for grid lines."""
    span = high - low
    if not math.isfinite(span) or span <= 0:
        return []
    power = 10 ** math.floor(math.log10(span))
    units = (power * factor for factor in (0.2, 0.25, 0.5, 1.0, 2.0, 2.5, 5.0, 10.0))
    unit = next(unit for unit in units if span / unit <= 5)
    first = math.ceil(low / unit)
    return [number * unit for number in range(first, first + 6) if low <= number * unit <= high]


# ---- the collapsible tree of a checkpoint

_ROWS = 4000  # maximum number of nodes (containers and leaves) to draw
_CHILDREN = 400  # maximum number of children to draw per container
_OPEN = 40  # trees with at most this many leaves are initially expanded
_DEEP = 60  # maximum nesting depth; the rest of a deeper path becomes one node


@dataclass(slots=True)
class Node:
    """A tree node: a container or a leaf."""

    name: str
    children: dict[str, Node] = field(default_factory=dict)
    leaf: LeafSummary | None = None
    leaves: int = 0  # number of leaves below this node
    bytes: int = 0
    shown: list[Node] = field(default_factory=list)  # the children to draw


def draw_tree(leaves: Sequence[LeafSummary]) -> tuple[Markup, int]:
    """Return a tree as HTML, and the number of omitted leaves. In large trees, the deepest levels are omitted first."""
    root = _tree(leaves)
    drawn = _choose(root)
    is_open = len(root.shown) == 1 or drawn <= _OPEN
    return join(*(_draw(node, is_open=is_open) for node in root.shown)), len(leaves) - drawn


def _tree(leaves: Sequence[LeafSummary]) -> Node:
    root = Node("")
    for leaf in leaves:
        keys = [leaf.item, *(leaf.path.split("/") if leaf.path else ())]
        if len(keys) > _DEEP:
            keys = [*keys[: _DEEP - 1], "/".join(keys[_DEEP - 1 :])]
        node = root
        for key in keys:
            node = node.children.setdefault(key, Node(key))
            node.leaves, node.bytes = node.leaves + 1, node.bytes + leaf.bytes
        node.leaf = leaf
    return root


def _choose(root: Node) -> int:
    """Choose the nodes to draw, breadth first; return the number of leaves among them."""
    waiting, left, leaves = deque([root]), _ROWS, 0
    while waiting:
        node = waiting.popleft()
        node.shown = list(node.children.values())[: min(_CHILDREN, max(0, left))]
        left -= len(node.shown)
        leaves += sum(child.leaf is not None for child in node.shown)
        waiting.extend(child for child in node.shown if child.children)
    return leaves


def _draw(node: Node, *, is_open: bool) -> Markup:
    size = tag("i", format_size(node.bytes))
    if not node.children:
        assert node.leaf is not None
        leaf = node.leaf
        leaf_type = f"{leaf.dtype}{list(leaf.shape)}" if leaf.dtype else leaf.kind
        about = " ".join(filter(None, [leaf_type, leaf.value or "", leaf.sharding]))
        return tag("div", tag("code", node.name), " ", tag("span", about), size, class_="leaf")
    parts = [_draw(child, is_open=False) for child in node.shown]
    if rest := list(node.children.values())[len(node.shown) :]:
        below = count(sum(child.leaves for child in rest), "leaf", "leaves")
        text = f"{len(rest)} more, with {below}, {format_size(sum(child.bytes for child in rest))}"
        parts.append(tag("div", text, class_="leaf left-out"))
    summary = tag("summary", tag("code", node.name), " ", tag("span", count(node.leaves, "leaf", "leaves")), size)
    return tag("details", summary, *parts, open=True if is_open else None)
