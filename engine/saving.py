"""One save from end to end: snapshot, write, commit; in the caller's thread or partly in the background."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .coordination import Group, Member
from .digests import seal
from .errors import UnknownArgumentError
from .handlers import (
    AsyncCheckpointHandler,
    CheckpointHandler,
    Files,
    PreparedCheckpointHandler,
    PreparedItem,
    finish,
    run_coroutine,
)
from .participation import participation
from .record import CheckpointRecord, ItemRecord
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

    With several processes, each makes one of these for the same items. Process 0 makes the folders, puts together what
    all of them have written, and commits; the others learn of it through the group.

    Args:
        location: The checkpoint's directory.
        items: What to save, by item name.
        overwrite: Whether a checkpoint that is there may be replaced.
        began: When the caller was called, by ``time.perf_counter()``; None is now.
        record: Makes the commit record from the items' records; called right before the commit, on process 0.
        group: The processes that save together, for this save alone; None is this process alone.
        timeout: How long to wait for other processes, in seconds.

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
        group: Group | None = None,
        timeout: float = 600.0,
    ) -> None:
        self._began = time.perf_counter() if began is None else began
        self._kinds = {name: item.handler.kind for name, item in items.items()}
        self._record = record
        self._location = location
        self._member = None if group is None else Member(group.index, group.count)
        self._items: dict[str, PreparedItem] = {}
        self._background = any(item.background for item in items.values())
        self._part = participation(location, items, overwrite=overwrite, group=group, timeout=timeout)
        try:
            for name, item in items.items():
                if self._part.takes_part(item.handler):
                    self._items[name] = self._begin(name, item)
        except BaseException as error:
            self._part.give_up(error)
            raise
        self._blocked = time.perf_counter() - self._began

    def _begin(self, name: str, item: ItemToSave) -> PreparedItem:
        """Does what cannot wait, and returns what writes the rest."""
        try:
            return self._prepared(name, item)
        except UnknownArgumentError as error:
            raise UnknownArgumentError(f"{self._location}: item {name!r} was not saved: {error}") from None

    def _prepared(self, name: str, item: ItemToSave) -> PreparedItem:
        if isinstance(item.handler, PreparedCheckpointHandler):
            member = {"member": self._member} if self._member is not None and item.handler.divides else {}
            return item.handler.prepare(item.value, snapshot=self._background, **member, **item.kwargs)
        folder = self._part.open()[name]
        if item.background and isinstance(item.handler, AsyncCheckpointHandler):
            futures = run_coroutine(item.handler.async_save(folder, item.value, **item.kwargs))
            return _Begun(lambda: finish(futures))
        files = item.handler.save(folder, item.value, **item.kwargs)
        return _Begun(lambda: files)

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
            PeerFailedError: Another process failed; the checkpoint does not exist.
            BarrierTimeoutError: Another process did not answer in time.
        """
        try:
            folders = self._part.open()
            fragments = {name: item.write(folders[name], self._part.member) for name, item in self._items.items()}
            record = self._part.commit(fragments, self._merge)
        except BaseException as error:
            self.give_up(error)
            raise
        total = time.perf_counter() - self._began
        return record, SaveReport(
            step=record.step,
            path=self._location.url,
            reason=record.reason,
            bytes=record.nbytes,
            blocked_seconds=self._blocked if self._background else total,
            total_seconds=total,
        )

    def give_up(self, error: BaseException) -> None:
        """Removes what was written, and tells other processes.

        Args:
            error: Why.
        """
        self._part.give_up(error)

    def _merge(self, fragments: Mapping[str, Sequence[bytes]]) -> CheckpointRecord:
        """Completes every item from what all processes have written, and makes the commit record."""
        items = {}
        for name, folder in self._part.open().items():
            files = self._items.pop(name).merge(folder, fragments[name])
            items[name] = ItemRecord(folder.name, self._kinds[name], files)
        return self._record(items)


class _Begun:
    """An item whose handler has begun to write it by itself."""

    def __init__(self, rest: Callable[[], Files | None]) -> None:
        self._rest = rest
        self._files: Files | None = None

    def write(self, folder: Location, member: Member) -> bytes:
        files = self._rest()
        self._files = files if member.count == 1 else None  # the files of the others are not known here
        return b""

    def merge(self, folder: Location, fragments: Sequence[bytes]) -> Files:
        return seal(folder) if self._files is None else self._files
