"""Command output: tables for people, JSON for programs."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..engine.clock import format_size
from .streams import one_line, say, visible

_WRAPPED = 1000  # maximum number of rows to fit to the terminal width; rich takes 0.5 ms per row
_FOLDED = 20  # minimum width of a wrapped cell, in columns
_SPANS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> None:
    """Print a table fitted to the terminal width, or at full width if it has many rows or there is no terminal."""
    rows = [[visible(cell) for cell in row] for row in rows]
    lines: list[Sequence[str]] = [columns]
    for row in rows:
        cells = [cell.expandtabs().split("\n") for cell in row]
        lines.extend(itertools.zip_longest(*cells, fillvalue=""))
    widths = [max(map(_width, column)) for column in zip(*lines, strict=True)]
    on_terminal = sys.stdout.isatty()
    if on_terminal and len(rows) <= _WRAPPED:
        import shutil  # imported lazily, because shutil imports compression modules

        if _table_width(widths) > shutil.get_terminal_size().columns:
            _print_fitted(columns, rows, widths, right)  # imports rich, which takes as long as listing a run
            return
    for line in lines:
        aligned: list[str] = []
        for name, cell, width in zip(columns, line, widths, strict=True):
            space = " " * (width - _width(cell))
            aligned.append(space + cell if name in right else cell + space)
        text = "  ".join(aligned).rstrip()
        if on_terminal and line is columns and os.environ.get("TERM") not in ("dumb", "unknown"):
            text = f"\x1b[1m{text}\x1b[0m"
        print(text)  # `print` instead of `say`, because the cells are already escaped


def _table_width(widths: Sequence[int]) -> int:
    return sum(widths) + 2 * (len(widths) - 1)


def _print_fitted(
    columns: Sequence[str], rows: Sequence[Sequence[str]], widths: Sequence[int], right: Sequence[str]
) -> None:
    """Print a table at terminal width. Wrap long cells or, if there are too many columns, stack each row's cells."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    folded = [width if name in right else min(width, _FOLDED) for name, width in zip(columns, widths, strict=True)]
    if _table_width(folded) > console.width:
        _print_stacked(columns, rows, console.width)
        return
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", no_wrap=name in right, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))  # in a plain string, rich would interpret square brackets as markup
    with console.capture() as capture:
        console.print(table)
    print("\n".join(line.rstrip() for line in capture.get().splitlines()))  # The cells are already escaped.


def _print_stacked(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> None:
    """Print the first cell of each row on its own line, and the other cells below it, labeled with column names."""
    for first, *cells in rows:
        say(first)
        line = ""
        for name, cell in zip(columns[1:], cells, strict=True):
            fact = f"  {name.lower()} {cell}"
            if line and _width(line + fact) > width:
                say(line)
                line = ""
            line += fact if cell else ""
        if line:
            say(line)


def _width(text: str) -> int:
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def print_tree(title: str, leaves: Sequence[tuple[str, int, str]]) -> None:
    """Print leaf paths as a tree: containers with their total sizes, and leaves with their sizes and descriptions."""
    sizes: dict[tuple[str, ...], int] = {}
    paths = [tuple(one_line(path).rstrip("/").split("/")) for path, _, _ in leaves]
    for keys, (_, nbytes, _) in zip(paths, leaves, strict=True):
        for depth in range(1, len(keys)):
            sizes[keys[:depth]] = sizes.get(keys[:depth], 0) + nbytes
    say(title)
    shown: set[tuple[str, ...]] = set()
    for keys, (_, nbytes, text) in zip(paths, leaves, strict=True):
        for depth in range(1, len(keys)):
            if keys[:depth] not in shown:
                shown.add(keys[:depth])
                say(f"{'  ' * depth}{keys[depth - 1]}/  {format_size(sizes[keys[:depth]])}")
        say(f"{'  ' * len(keys)}{keys[-1]}  {format_size(nbytes)}  {text}".rstrip())


def print_json(value: Mapping[str, Any]) -> None:
    """Print strict JSON, with null in place of NaN and infinities."""
    from ..engine.manager import finite  # imported lazily, because tables do not need it

    say(json.dumps(finite(value), indent=2, allow_nan=False))


def age(seconds: float) -> str:
    """Format a duration in one unit, such as ``2 h``."""
    for span, unit in _SPANS:
        if seconds >= span:
            return f"{int(seconds // span)} {unit}"
    return f"{max(0, int(seconds))} s"


def duration(seconds: float) -> str:
    """Format a duration in at most two units, such as ``12.3 s`` or ``1 h 02 min``."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms" if seconds >= 0.0005 else "0 s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02d} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h"


def metrics_text(metrics: Mapping[str, Any] | None) -> str:
    """Format metrics on one line, joining the names of nested metrics with ``/``."""
    return ", ".join(f"{name} {_number(value)}".lstrip() for name, value in _flat(metrics or {}))


def step_names(checkpoints: list[tuple[int | None, str]], step: str = "", other: str = "-") -> list[str]:
    """Return display names for checkpoints: their steps or, if there are several prefixes, their folder names."""
    names = [path.rpartition("/")[2] for _, path in checkpoints]
    if len({name.rstrip("0123456789") for name in names}) > 1:
        return names
    return [other if number is None else f"{step}{number}" for number, _ in checkpoints]


def witness_events(events: Iterable[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    """Return the last ``witness`` event for each step that a run resumed from, keyed by step."""
    events = (event for event in events if event["event"] == "witness")
    return {step: event for event in events if isinstance(step := event.get("saved_step"), int)}


def proof_text(event: Mapping[str, Any]) -> str:
    """Return what a ``witness`` event says about a resume: ``exact``, ``inexact`` or ``rounding``."""
    return "exact" if event.get("exact") is True else "inexact" if event.get("exact") is False else "rounding"


def count(number: int, singular: str, plural: str | None = None) -> str:
    """Format a number with its noun in the singular or plural, such as ``3 leaves``."""
    return f"{number} {singular if number == 1 else plural or f'{singular}s'}"


def _number(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_number, value[:4]))}{', ...' * (len(value) > 4)}]"
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _flat(metrics: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}{name}/")
        else:
            yield one_line(f"{path}{name}"), value
