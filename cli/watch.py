"""``holdfast watch``: follows the checkpoints of a run."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

from ..engine.clock import format_size
from ..engine.exit_status import DONE
from ..engine.inspection import CheckpointSummary, list_checkpoints
from ..engine.manager import finite
from ..engine.storage import Location
from .inspect import list_steps, shown
from .places import checkpoints_at
from .report import metrics_text
from .streams import say


def watch_steps(place: str, interval: float, *, as_json: bool) -> int:
    """Print the checkpoints of a run, and then a line for each that comes or goes.

    Args:
        place: The directory of the run: a path or URL.
        interval: How often to look, in seconds.
        as_json: Print JSON, an object a line: for each checkpoint that is there, comes, changes or goes.

    Returns:
        The exit status: Ctrl-C is how this ends.
    """
    location = checkpoints_at(place)
    before: dict[str, CheckpointSummary] = {}
    if not as_json:
        before = _listed(location)
        list_steps(place, as_json=False)
    try:
        while True:
            now = _listed(location)
            for what, item, text in _changes(before, now):
                line = f"{time.strftime('%H:%M:%S')} {what} {text}"
                say(json.dumps(finite({"change": what, **shown(item)})) if as_json else line, flush=True)
            before = now
            time.sleep(interval)
    except KeyboardInterrupt:
        return DONE


def _listed(location: Location) -> dict[str, CheckpointSummary]:
    return {item.path: item for item in list_checkpoints(location)} if location.exists() else {}


def _changes(
    before: dict[str, CheckpointSummary], now: dict[str, CheckpointSummary]
) -> Iterator[tuple[str, CheckpointSummary, str]]:
    """Generate each difference between two listings: what has happened, to which checkpoint, and the rest of a line."""
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
