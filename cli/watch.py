"""``holdfast watch``: follows the checkpoints of a run."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Annotated

import typer

from ..engine.clock import format_size, seconds
from ..engine.exit_status import DONE
from ..engine.inspection import CheckpointSummary, list_checkpoints
from ..engine.manager import finite
from ..engine.storage import Location
from .arguments import Run
from .inspect import ls, shown
from .places import checkpoints_at
from .report import metrics_text
from .streams import say


def watch(
    directory: Run,
    interval: Annotated[str, typer.Option("--interval", help="How often to look, such as 10s.")] = "2s",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a line of JSON for each change, for programs.")
    ] = False,
) -> int:
    """Follow a run: print its checkpoints as they come and go, until Ctrl-C."""
    pause = max(0.1, seconds(interval, name="--interval"))
    location = checkpoints_at(directory)
    before: dict[str, CheckpointSummary] = {}
    if not as_json:
        before = _listed(location)
        ls(directory)
    try:
        while True:
            now = _listed(location)
            for what, item, text in _changes(before, now):
                line = f"{time.strftime('%H:%M:%S')} {what} {text}"
                say(json.dumps(finite({"change": what, **shown(item)})) if as_json else line, flush=True)
            before = now
            time.sleep(pause)
    except KeyboardInterrupt:
        return DONE


def _listed(location: Location) -> dict[str, CheckpointSummary]:
    return {item.path: item for item in list_checkpoints(location)} if location.exists() else {}


def _changes(
    before: dict[str, CheckpointSummary], now: dict[str, CheckpointSummary]
) -> Iterator[tuple[str, CheckpointSummary, str]]:
    """Generate each difference between two listings: the change, its checkpoint, and the rest of a line."""
    for path in sorted(before.keys() - now.keys(), key=lambda path: before[path].step):
        yield "deleted", before[path], f"{before[path].step}"
    for path, item in sorted(now.items(), key=lambda pair: pair[1].step):
        if item == before.get(path):
            continue
        if item.damage is not None:
            yield "damaged", item, f"{item.step}: {item.damage}"
        elif path not in before or before[path].time != item.time:
            facts = (format_size(item.bytes), item.reason, metrics_text(item.metrics))
            yield "saved", item, f"{item.step}: {', '.join(fact for fact in facts if fact)}"
        elif before[path].metrics != item.metrics:
            yield "metrics", item, f"of {item.step}: {metrics_text(item.metrics)}"
