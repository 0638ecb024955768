"""Metrics that another program adds to steps, such as an evaluator beside the run that writes them.

Each of its calls adds a file ``metrics/<step>.<token>.json`` to the directory, and changes nothing that the run writes.
The file names the checkpoint that it is about, not only the step: if the run goes back and saves the step again, the
metrics of the old one are void. Readers of the steps of a directory add them to its records.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Iterable
from typing import Any

from ..errors import HoldfastError, StorageError
from ..format import CheckpointRecord, decode_document, decode_metrics, encode_document, encode_metrics
from ..storage import Location, max_concurrency, os_errors, parallel_map

LATE = "metrics"  # name of the folder
_LIMIT = 1 << 20  # bytes of a file


# The checkpoint that metrics were added to, when, and the metrics.
Added = tuple[str, float, dict[str, Any]]


def write_late(directory: Location, folder: str, record: CheckpointRecord, metrics: dict[str, Any], now: float) -> None:
    """Add metrics to the checkpoint of a record, in a folder of a directory."""
    document = {"checkpoint": record.identity, "time": now, "metrics": encode_metrics(metrics)}
    (directory / LATE).check_not_link()
    (directory / LATE).make_directory()
    place = directory / LATE / f"{folder}.{uuid.uuid4().hex[:16]}.json"
    place.write_bytes(encode_document("metrics", document))


class LateMetrics:
    """What was added to the steps of one directory; a file never changes, so each is read once."""

    def __init__(self, directory: Location) -> None:
        self._directory = directory
        self._files: dict[str, Added] = {}  # by name
        self._names: dict[str, set[str]] = {}  # of those files, by the folder of the step

    def refresh(self, exists: Callable[[str], bool]) -> set[str]:
        """Read what was added to the steps in existing folders since the last call; return these folders."""
        names = set(_names(self._directory))
        for name in self._files.keys() - names:
            del self._files[name]
            self._names[_folder(name)].discard(name)
        unread = [name for name in names - self._files.keys() if exists(_folder(name))]
        place = self._directory / LATE
        contents = parallel_map(lambda name: _read(place / name), unread, max_concurrency(self._directory))
        for name, content in zip(unread, contents, strict=True):
            if content is not None:  # else it may be readable the next time
                self._files[name] = content
                self._names.setdefault(_folder(name), set()).add(name)
        return {_folder(name) for name in unread}

    def of(self, folder: str) -> list[Added]:
        """Return what was added to the checkpoint in a folder, in any order."""
        names = list(self._names.get(folder, ()))  # another thread may refresh meanwhile
        return [added for name in names if (added := self._files.get(name)) is not None]


def with_late(record: CheckpointRecord, added: Iterable[Added]) -> CheckpointRecord:
    """Return a record with what was added to its checkpoint; the latest value wins."""
    for identity, _, metrics in sorted(added, key=lambda one: one[1]):
        if identity == record.identity:
            record = record.with_metrics(metrics)
    return record


def remove_late(directory: Location, folder: str) -> None:
    """Remove what was added to a checkpoint that is gone; what is left takes no effect."""
    with contextlib.suppress(StorageError):
        (directory / LATE).check_not_link()
        for name in _names(directory):
            if _folder(name) == folder:
                (directory / LATE / name).remove()


def _names(directory: Location) -> list[str]:
    place = directory / LATE
    if not directory.is_local:
        return [entry.name for entry in place.entries()]
    with os_errors(place.url, "list"):  # without the sizes of thousands of files
        try:
            return os.listdir(place)
        except FileNotFoundError:
            return []


def _folder(name: str) -> str:
    return name.split(".", 1)[0] if name.endswith(".json") else ""


def _read(place: Location) -> Added | None:
    try:
        document = decode_document(place.read_bytes(limit=_LIMIT), "metrics", source=str(place))
        return str(document["checkpoint"]), float(document["time"]), decode_metrics(document["metrics"])
    except (HoldfastError, KeyError, TypeError, ValueError):
        return None
