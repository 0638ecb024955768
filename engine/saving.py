"""One save from end to end: snapshot, write, commit; in the caller's thread or partly in the background."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .commit import PendingCheckpoint
from .digests import digest
from .handlers import (
    AsyncCheckpointHandler,
    CheckpointHandler,
    Files,
    PreparedCheckpointHandler,
    finish,
    run_coroutine,
    write_alone,
)
from .record import CheckpointRecord, FileRecord, ItemRecord
from .report import SaveReport
from .storage import Location


@dataclass(frozen=True, slots=True)
class ItemToSave:
    """One item of a checkpoint, on its way to disk.

    Attributes:
        handler: What writes it.
        value: The item.
        background: Whether it may be written after the call has returned.
        kwargs: Further arguments for the handler.
    """

    handler: CheckpointHandler
    value: Any
    background: bool = False
    kwargs: Mapping[str, Any] = field(default_factory=dict)


class Save:
    """A save that has begun: its snapshot is taken, and :meth:`complete` writes and commits it.

    Args:
        location: The checkpoint's directory.
        items: What to save, by item name.
        overwrite: Whether a checkpoint that is there may be replaced.
        began: When the caller was called, by ``time.perf_counter()``; None is now.
        record: Makes the commit record from the items' records; called right before the commit.

    Raises:
        CheckpointExistsError: The directory holds something that must not be replaced.
        UnsupportedLeafError: An item cannot be saved; nothing is left behind.
    """

    def __init__(
        self,
        location: Location,
        items: Mapping[str, ItemToSave],
        *,
        overwrite: bool,
        began: float | None = None,
        record: Callable[[Mapping[str, ItemRecord]], CheckpointRecord],
    ) -> None:
        self._began = time.perf_counter() if began is None else began
        self._kinds = {name: item.handler.kind for name, item in items.items()}
        self._record = record
        self._writers: dict[str, Callable[[Location], Files | None]] = {}
        self._pending = PendingCheckpoint(location, items, overwrite=overwrite)
        self._background = any(item.background for item in items.values())
        try:
            for name, item in items.items():
                self._writers[name] = self._begin(item, self._pending.folders[name])
        except BaseException:
            self._pending.abort()
            raise
        self._blocked = time.perf_counter() - self._began

    def _begin(self, item: ItemToSave, folder: Location) -> Callable[[Location], Files | None]:
        """Does what cannot wait, and returns what writes the rest."""
        if isinstance(item.handler, PreparedCheckpointHandler):
            prepared = item.handler.prepare(item.value, snapshot=self._background, **item.kwargs)
            return lambda folder: write_alone(prepared, folder)
        self._pending.begin()
        if item.background and isinstance(item.handler, AsyncCheckpointHandler):
            futures = run_coroutine(item.handler.async_save(folder, item.value, **item.kwargs))
            return lambda _: finish(futures)
        files = item.handler.save(folder, item.value, **item.kwargs)
        return lambda _: files

    @property
    def in_background(self) -> bool:
        """Tells whether :meth:`complete` may be called after the loop has gone on."""
        return self._background

    def complete(self) -> tuple[CheckpointRecord, SaveReport]:
        """Writes what is left to write and commits.

        Returns:
            The commit record and a report. The checkpoint is durable.

        Raises:
            StorageError: The storage refused; the checkpoint does not exist, and nothing of it is left behind.
        """
        try:
            self._pending.begin()
            items = {}
            for name, folder in self._pending.folders.items():
                files = self._writers.pop(name)(folder)
                items[name] = ItemRecord(folder.name, self._kinds[name], _sealed(folder) if files is None else files)
            record = self._record(items)
            self._pending.commit(record)
        except BaseException:
            self._pending.abort()
            raise
        total = time.perf_counter() - self._began
        return record, SaveReport(
            step=record.step,
            path=self._pending.location.url,
            reason=record.reason,
            bytes=record.nbytes,
            blocked_seconds=self._blocked if self._background else total,
            total_seconds=total,
        )


def _sealed(folder: Location, prefix: str = "") -> Files:
    """Makes files durable that a handler of the user's own has written, and lists them with their digests."""
    found: dict[str, FileRecord] = {}
    for entry in folder.entries():
        place = folder / entry.name
        if entry.is_directory:
            found.update(_sealed(place, f"{prefix}{entry.name}/"))
            continue
        with place.open_data() as file:
            found[f"{prefix}{entry.name}"] = FileRecord(file.size, digest(file))
        if place.is_local:
            with open(place, "rb") as written:
                os.fsync(written.fileno())
    folder.sync_directory()
    return found
