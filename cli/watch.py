"""``holdfast watch``: follows the checkpoints of a run."""

from __future__ import annotations

import time
from collections.abc import Iterator

from .. import CheckpointSummary, list_checkpoints
from ..engine.clock import format_size
from ..engine.storage import Location
from .inspect import list_steps
from .places import checkpoints_at
from .report import metrics_text
from .status import DONE


def watch_steps(place: str, interval: float) -> int:
    """Print the checkpoints of a run, and then a line for each that comes or goes.

    Args:
        place: The directory of the run: a path or URL.
        interval: How often to look, in seconds.

    Returns:
        The exit status: Ctrl-C is how this ends.
    """
    location = checkpoints_at(place)
    before = _listed(location)
    list_steps(place, as_json=False)
    try:
        while True:
            time.sleep(interval)
            now = _listed(location)
            for line in _changes(before, now):
                print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)
            before = now
    except KeyboardInterrupt:
        return DONE


def _listed(location: Location) -> dict[str, CheckpointSummary]:
    return {item.path: item for item in list_checkpoints(location)} if location.exists() else {}


def _changes(before: dict[str, CheckpointSummary], now: dict[str, CheckpointSummary]) -> Iterator[str]:
    """Generate one line for each difference between two listings."""
    for path in sorted(before.keys() - now.keys(), key=lambda path: before[path].step):
        yield f"deleted {before[path].step}"
    for path, item in sorted(now.items(), key=lambda pair: pair[1].step):
        if item == before.get(path):
            continue
        if item.damage is not None:
            yield f"damaged {item.step}: {item.damage}"
        elif path not in before or before[path].time != item.time:
            facts = (format_size(item.bytes), item.reason, metrics_text(item.metrics))
            yield f"saved {item.step}: {', '.join(fact for fact in facts if fact)}"
        elif before[path].metrics != item.metrics:
            yield f"metrics of {item.step}: {metrics_text(item.metrics)}"
