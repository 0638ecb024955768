"""Metrics that another program adds to steps, such as an evaluator beside the run that writes them.

Each of its calls adds a file ``metrics/<step>.<token>.json`` to the directory, and changes nothing that the run writes.
The file names the checkpoint that it is about, not only the step: if the run goes back and saves the step again, the
metrics of the old one are void. Readers of the steps of a directory add them to its records.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterable
from typing import Any

from ..errors import HoldfastError, StorageError
from ..format import CheckpointRecord, decode_document, decode_metrics, encode_document, encode_metrics
from ..storage import Location, max_concurrency, parallel_map

LATE = "metrics"  # name of the folder
_LIMIT = 1 << 20  # bytes of a file


# The checkpoint that metrics were added to, when, and the metrics.
Added = tuple[str, float, dict[str, Any]]


def write_late(directory: Location, folder: str, record: CheckpointRecord, metrics: dict[str, Any], now: float) -> None:
    """Add metrics to the checkpoint of a record, in a folder of a directory."""
    document = {"checkpoint": record.identity, "time": now, "metrics": encode_metrics(metrics)}
    (directory / LATE).make_directory()
    place = directory / LATE / f"{folder}.{uuid.uuid4().hex[:16]}.json"
    place.write_bytes(encode_document("metrics", document))


def read_late(directory: Location, folders: Iterable[str]) -> dict[str, list[Added]]:
    """Return what was added to the checkpoint in each folder, in any order."""
    wanted = set(folders)
    names = [entry.name for entry in (directory / LATE).entries() if _folder(entry.name) in wanted]
    found: dict[str, list[Added]] = {}
    contents = parallel_map(lambda name: _read(directory / LATE / name), names, max_concurrency(directory))
    for name, content in zip(names, contents, strict=True):
        if content is not None:
            found.setdefault(_folder(name), []).append(content)
    return found


def with_late(record: CheckpointRecord, added: Iterable[Added]) -> CheckpointRecord:
    """Return a record with what was added to its checkpoint; the latest value wins."""
    for identity, _, metrics in sorted(added, key=lambda one: one[1]):
        if identity == record.identity:
            record = record.with_metrics(metrics)
    return record


def remove_late(directory: Location, folder: str) -> None:
    """Remove what was added to a checkpoint that is gone; what is left takes no effect."""
    with contextlib.suppress(StorageError):
        for entry in (directory / LATE).entries():
            if _folder(entry.name) == folder:
                (directory / LATE / entry.name).remove()


def _folder(name: str) -> str:
    return name.split(".", 1)[0] if name.endswith(".json") else ""


def _read(place: Location) -> Added | None:
    try:
        document = decode_document(place.read_bytes(limit=_LIMIT), "metrics", source=str(place))
        return str(document["checkpoint"]), float(document["time"]), decode_metrics(document["metrics"])
    except (HoldfastError, KeyError, TypeError, ValueError):
        return None
