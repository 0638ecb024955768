"""The charts of a report: SVG without scripts, so that they print, follow the colours of the page, and have a DOM.

The drawings stretch with the page, and text stands beside them as HTML: at 400 pixels it is as large as at 1600. Lines
do not scale (``vector-effect``), and dots are lines without length and round ends.
"""

from __future__ import annotations

import bisect
import datetime
import html
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...engine.clock import format_size
from .history import WORDS, Attempt, History, Note, Save, duration

WIDTH, HEIGHT = 1000.0, 100.0  # of the drawings, in their own units
_POINTS = 600  # points that a line has at most
_BUCKETS = 120  # columns of the lane that shows how long the loop waited
_GAP = 0.04  # width of a pause between two starts that is longer than that, as a share of the whole
_BARS = 150

escape = html.escape


@dataclass(frozen=True, slots=True)
class Reading:
    """The numbers of a chart, for the pointer and the arrow keys."""

    chart: str  # the id of its element
    x: Sequence[float]
    y: Sequence[float]
    label: str
    at: Sequence[float]  # where the points are, as shares of the width


# ---- time


class TimeScale:
    """Maps times to shares of the width; long pauses between two starts are cut short."""

    def __init__(self, spans: Iterable[tuple[float, float]]) -> None:
        merged: list[list[float]] = []
        for begin, end in sorted(spans):
            if merged and begin <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([begin, end])
        active = sum(end - begin for begin, end in merged) or 1.0
        short = _GAP * active
        self.pauses: list[tuple[float, float, float]] = []  # where, how wide, how long
        self._times, self._places, place = [merged[0][0]], [0.0], 0.0
        for number, (begin, end) in enumerate(merged):
            if number:
                pause = begin - merged[number - 1][1]
                width = min(pause, short)
                if pause > short:
                    self.pauses.append((place, width, pause))
                place += width
                self._add(begin, place)
            place += end - begin
            self._add(end, place)
        whole = place or 1.0
        self._places = [one / whole for one in self._places]
        self.pauses = [(where / whole, width / whole, pause) for where, width, pause in self.pauses]

    def _add(self, time: float, place: float) -> None:
        self._times.append(time)
        self._places.append(place)

    def place(self, time: float) -> float:
        """Return where a time is, from 0 to 1."""
        return _between(time, self._times, self._places)

    def time(self, place: float) -> float:
        """Return which time is at a place."""
        return _between(place, self._places, self._times)


def _between(value: float, given: Sequence[float], wanted: Sequence[float]) -> float:
    right = bisect.bisect_left(given, value)
    if right <= 0:
        return wanted[0]
    if right >= len(given):
        return wanted[-1]
    low, high = given[right - 1], given[right]
    share = (value - low) / (high - low) if high > low else 0.0
    return wanted[right - 1] + share * (wanted[right] - wanted[right - 1])


def clock_text(time: float, *, with_date: bool = True) -> str:
    """Return a time in UTC."""
    try:
        moment = datetime.datetime.fromtimestamp(time, datetime.UTC)
    except (OverflowError, ValueError, OSError):
        return "?"
    return moment.strftime("%Y-%m-%d %H:%M:%S" if with_date else "%H:%M:%S")


# ---- the timeline

_SYMBOLS = {
    "finished": "✓",
    "preempted": "■",
    "crash": "✕",
    "hung": "‖",
    "lost": "?",
    "fallback": "↩",
    "failed save": "!",
    "mirror failed": "!",
    "fetched": "↓",
}


def timeline(history: History) -> tuple[str, bool]:
    """Draw the life of a run: its starts, saves, how long the loop waited for them, and what went wrong.

    Returns:
        The HTML, and whether pauses between starts are cut short in it.
    """
    attempts = history.attempts
    scale = TimeScale((attempt.began, attempt.ended) for attempt in attempts)
    days = clock_text(attempts[0].began)[:10] != clock_text(attempts[-1].ended)[:10]
    lanes = [
        _lane("program", _drawn(_programs(attempts, scale), "programs")),
        _lane("saves", _drawn(_saves(history.saves, scale), "saves")),
        _waiting_lane(attempts, scale),
        _lane("events", f'<div class="marks">{"".join(_marks(history.notes, scale))}</div>'),
    ]
    pauses = "".join(
        f'<span class="pause" style="left:{100 * where:.2f}%;width:{100 * width:.2f}%" '
        f'title="nothing ran for {duration(pause)}"></span>'
        for where, width, pause in scale.pauses[:200]
    )
    ticks = "".join(
        f'<span class="tick tick-{part}" style="left:{25 * part}%">{escape(_tick(scale.time(part / 4), days))}</span>'
        for part in range(5)
    )
    drawn = (
        f'<div class="timeline" role="group" aria-label="Timeline of the run">{"".join(lanes)}'
        f'<div class="lane axis"><div class="lane-name"></div><div class="plot">{pauses}{ticks}</div></div></div>'
    )
    return drawn, bool(pauses)


def _tick(time: float, days: bool) -> str:
    text = clock_text(time)
    return text[5:16] if days else text[11:]


def _lane(name: str, plot: str) -> str:
    return f'<div class="lane"><div class="lane-name">{name}</div><div class="plot">{plot}</div></div>'


def _drawn(content: Iterable[str], kind: str) -> str:
    box = f"0 0 {WIDTH:g} {HEIGHT:g}"
    return f'<svg class="{kind}" viewBox="{box}" preserveAspectRatio="none" role="img">{"".join(content)}</svg>'


def _programs(attempts: Sequence[Attempt], scale: TimeScale) -> Iterator[str]:
    for number, attempt in enumerate(attempts):
        left, right = WIDTH * scale.place(attempt.began), WIDTH * scale.place(attempt.ended)
        how = attempt.how or "lost"
        text = f"start {number + 1}: {WORDS[how]}, {duration(attempt.ended - attempt.began)}"
        yield _rectangle(left, max(2.0, right - left - 1.0), 0.0, HEIGHT, f"how-{how}", text)


def _saves(saves: Sequence[Save], scale: TimeScale) -> Iterator[str]:
    """Draw every save: the time until it was durable, and where it was; those at one place once."""
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
        yield f'<path class="saved" d="M{right:.1f} 10V90"><title>{escape(text)}</title></path>'


def _waiting_lane(attempts: Sequence[Attempt], scale: TimeScale) -> str:
    """Draw how large a share of each stretch of time the training loop waited for saves."""
    waited = [0.0] * _BUCKETS
    for save in itertools.chain.from_iterable(attempt.saves for attempt in attempts):
        began = scale.place(save.time - save.total)  # the loop waits first
        waited[min(_BUCKETS - 1, int(began * _BUCKETS))] += save.blocked
    shares = [
        min(1.0, seconds / max(1e-9, scale.time((number + 1) / _BUCKETS) - scale.time(number / _BUCKETS)))
        for number, seconds in enumerate(waited)
    ]
    most = max(shares)
    width = WIDTH / _BUCKETS
    bars = (
        _rectangle(number * width, width * 0.8, HEIGHT * (1 - share / most), HEIGHT * share / most, "waited", "")
        for number, share in enumerate(shares)
        if share
    )
    label = f'<span class="most">{percent(most)} at most</span>' if most else ""
    return _lane("waited for saves", f"{_drawn(bars, 'waiting')}{label}")


def _marks(notes: Sequence[Note], scale: TimeScale) -> Iterator[str]:
    marked = [note for note in notes if note.mark in _SYMBOLS]
    for note in marked[:200]:
        text = f"{clock_text(note.time)} {note.title}{f': {note.text}' if note.text else ''}"
        yield (
            f'<span class="mark {note.tone}" style="left:{100 * scale.place(note.time):.2f}%" tabindex="0" role="img" '
            f'data-mark="{note.mark}" aria-label="{escape(text)}" title="{escape(text)}">{_SYMBOLS[note.mark]}</span>'
        )


def _rectangle(x: float, width: float, y: float, height: float, kind: str, text: str) -> str:
    title = f"<title>{escape(text)}</title>" if text else ""
    return (
        f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}">{title}</rect>'
        if title
        else f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>'
    )


# ---- lines over steps


def line_chart(
    chart: str,
    title: str,
    values: Mapping[int, float],
    kept: Iterable[int] = (),
    best: int | None = None,
    unit: str = "",
) -> tuple[str, Reading]:
    """Draw values over steps, with the kept checkpoints as dots and the best one larger.

    Returns:
        The HTML of the chart, and its numbers.
    """
    finite = sorted((step, value) for step, value in values.items() if math.isfinite(value))
    points = _thinned(finite)
    steps = [step for step, _ in points]
    low, high = _range([value for _, value in points])
    first, last = (steps[0], steps[-1]) if steps else (0, 0)

    def x(step: float) -> float:
        return WIDTH * (step - first) / (last - first) if last > first else WIDTH / 2

    def y(value: float) -> float:
        return HEIGHT * (high - value) / (high - low)

    line = "".join(
        f"{'L' if number else 'M'}{x(step):.1f} {y(value):.1f}" for number, (step, value) in enumerate(points)
    )
    drawn = [f'<path class="line" d="{line}"/>'] if len(points) > 1 else []
    if len(points) <= 60 or len(points) == 1:
        drawn.append(f'<path class="dot" d="{"".join(_dot(x(s), y(v)) for s, v in points)}"/>')
    known = dict(finite)
    dots = [step for step in kept if step in known]
    if dots:
        drawn.append(f'<path class="kept" d="{"".join(_dot(x(s), y(known[s])) for s in dots[-_POINTS:])}"/>')
    if best is not None and best in known:
        drawn.append(f'<path class="best" d="{_dot(x(best), y(known[best]))}"/>')
    levels = _levels(low, high)
    grid = "".join(f'<path class="grid" d="M0 {y(level):.1f}H{WIDTH:g}"/>' for level in levels)
    labels = "".join(
        f'<span class="level" style="top:{y(level):.1f}%">{escape(number_text(level, unit))}</span>' for level in levels
    )
    lost = len(values) - len(finite)
    summary = f"{title}: {len(values)} values"
    if finite:
        summary += f" from step {finite[0][0]} to {finite[-1][0]}, last {number_text(finite[-1][1], unit)}"
    if lost:
        summary += f", {lost} of them not finite"
    now = number_text(finite[-1][1], unit) if finite else "-"
    badge = f'<span class="alarm">{lost} not finite</span>' if lost else ""
    markup = (
        f'<figure class="chart" id="{chart}"><figcaption><b>{escape(title)}</b> <span>{escape(now)}</span>{badge}'
        f'</figcaption><div class="plot" tabindex="0" role="img" aria-label="{escape(summary)}">'
        f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" preserveAspectRatio="none" aria-hidden="true">{grid}{"".join(drawn)}'
        f'</svg>{labels}<output class="reading" hidden></output></div>'
        f'<div class="axis"><span>{first}</span><span>step</span><span>{last}</span></div></figure>'
    )
    at = [round(x(step) / WIDTH, 4) for step in steps]
    return markup, Reading(chart, steps, [value for _, value in points], unit, at)


def size_chart(sizes: Sequence[tuple[int, int, int]]) -> str:
    """Draw the sizes of steps: ``(step, own bytes, shared bytes)``; of many, the largest in each of some groups."""
    group = max(1, math.ceil(len(sizes) / _BARS))
    bars = [max(sizes[begin : begin + group], key=lambda one: one[1] + one[2]) for begin in range(0, len(sizes), group)]
    most = max((own + shared for _, own, shared in bars), default=0) or 1
    width = WIDTH / max(1, len(bars))
    fill = min(width * 0.8, 60.0)
    drawn = []
    for number, (step, own, shared) in enumerate(bars):
        left, own_height, shared_height = (
            number * width + (width - fill) / 2,
            HEIGHT * own / most,
            HEIGHT * shared / most,
        )
        text = f"step {step}: {format_size(own + shared)}" + (
            f", of which {format_size(shared)} shared" if shared else ""
        )
        drawn.append(_rectangle(left, fill, HEIGHT - own_height, own_height, "own", text))
        if shared:
            drawn.append(_rectangle(left, fill, HEIGHT - own_height - shared_height, shared_height, "shared", text))
    first, last = (bars[0][0], bars[-1][0]) if bars else (0, 0)
    return (
        '<figure class="chart"><figcaption><b>Size of the kept steps</b> <span class="key own">own</span> '
        '<span class="key shared">shared with other steps</span></figcaption>'
        f'<div class="plot">{_drawn(drawn, "sizes")}<span class="level" style="top:0%">{format_size(most)}</span></div>'
        f'<div class="axis"><span>{first}</span><span>step</span><span>{last}</span></div></figure>'
    )


def sparkline(values: Sequence[float | None]) -> str:
    """Draw a few numbers in a line of text."""
    known = [(number, value) for number, value in enumerate(values) if value is not None and math.isfinite(value)]
    if len(known) < 2:
        return ""
    low, high = min(value for _, value in known), max(value for _, value in known)
    span, last = (high - low) or 1.0, max(1, len(values) - 1)
    points = " ".join(f"{76 * number / last + 2:.1f},{16 - 14 * (value - low) / span:.1f}" for number, value in known)
    return f'<svg class="spark" viewBox="0 0 80 18" aria-hidden="true"><polyline points="{points}"/></svg>'


def number_text(value: float, unit: str = "") -> str:
    """Return a number of a chart as people read it."""
    if unit == "s":
        return duration(value) if value >= 0 else f"-{duration(-value)}"
    return f"{value:.0f}" if value.is_integer() and abs(value) < 1e7 else f"{value:.4g}"


def percent(share: float) -> str:
    """Return a share as people read it.

    >>> percent(1.0), percent(0.0593), percent(0.00012)
    ('100 %', '5.9 %', '0.012 %')
    """
    return f"{100 * share:.0f} %" if share >= 0.0995 else f"{100 * share:.2g} %"


def readings_json(readings: Iterable[Reading]) -> list[dict[str, Any]]:
    """Return the numbers of charts for the script of the page."""
    return [
        {
            "id": one.chart,
            "at": list(one.at),
            "text": [
                f"step {step:g}: {number_text(value, one.label)}" for step, value in zip(one.x, one.y, strict=True)
            ],
        }
        for one in readings
    ]


def _dot(x: float, y: float) -> str:
    return f"M{x:.1f} {y:.1f}h0"


def _thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return points of a line with the same look: the least and the greatest of each of some groups."""
    if len(points) <= _POINTS:
        return list(points)
    group = math.ceil(len(points) / (_POINTS / 2))
    found: list[tuple[int, float]] = [points[0]]
    for begin in range(0, len(points), group):
        part = points[begin : begin + group]
        found += sorted({min(part, key=lambda one: one[1]), max(part, key=lambda one: one[1])})
    return sorted({*found, points[-1]})


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values, default=0.0), max(values, default=1.0)
    margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return (0.0 if low >= 0 and low < 0.3 * high else low - margin), high + margin


def _levels(low: float, high: float) -> list[float]:
    """Return two to five round numbers in a range."""
    span = high - low
    if not math.isfinite(span) or span <= 0:
        return []
    size_ = 10 ** math.floor(math.log10(span))
    unit = next(size_ * one for one in (0.2, 0.25, 0.5, 1.0, 2.0, 2.5, 5.0, 10.0) if span / (size_ * one) <= 5)
    first = math.ceil(low / unit)
    return [number * unit for number in range(first, first + 6) if low <= number * unit <= high]
