"""Perform a save, from the snapshot to the commit and the report, on the caller's thread or in the background."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from ..arrays import WrittenSteps, fsync_and_digest, write_file
from ..clock import format_size
from ..distributed import ProcessInfo, Rendezvous
from ..errors import (
    BarrierTimeoutError,
    DamagedCheckpointError,
    HoldfastError,
    PeerFailedError,
    StateError,
    UnknownArgumentError,
)
from ..format import CheckpointRecord, ItemRecord
from ..handlers import (
    AsyncCheckpointHandler,
    CheckpointHandler,
    Files,
    PreparedCheckpointHandler,
    PreparedItem,
    SaveFuture,
    finish,
    run_coroutine,
    write_archive,
)
from ..storage import REQUESTS, Location, parallel_map
from .commit import LocalCommit, PendingCheckpoint

_logger = logging.getLogger("holdfast")

_SMALL = 16 * 1024  # maximum size, in bytes, of a fragment that is sent to process 0 as a message instead of a file
_LAST_WORD = 10.0  # seconds that process 0 waits for other processes to stop writing before it cleans up


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """The result and the cost of a completed save.

    Attributes:
        step: The step that was saved, or None for a save without a manager.
        path: The checkpoint's directory.
        reason: Why the checkpoint was saved.
        bytes: The number of bytes written.
        shared_bytes: The number of bytes in data files of earlier steps that did not have to be written again, because
            they were shared on a disk or copied by the object store itself.
        blocked_seconds: How long the training loop waited.
        total_seconds: The time from the call until the checkpoint was durable.
    """

    step: int | None
    path: str
    reason: str
    bytes: int
    blocked_seconds: float
    total_seconds: float
    shared_bytes: int = 0

    @property
    def gigabytes_per_second(self) -> float:
        """The number of bytes written divided by the total time, in units of 1e9 bytes per second."""
        return self.bytes / 1e9 / self.total_seconds if self.total_seconds > 0 else 0.0

    def __str__(self) -> str:
        what = self.path if self.step is None else f"step {self.step}"
        why = f" ({self.reason})" if self.reason else ""
        shared = f" (and {format_size(self.shared_bytes)} unchanged since earlier steps)" if self.shared_bytes else ""
        return (
            f"saved {what}{why}: {format_size(self.bytes)}{shared}, blocked {self.blocked_seconds:.3f} s, "
            f"{self.total_seconds:.3f} s in all, {self.gigabytes_per_second:.2f} GB/s"
        )


class ItemToSave(NamedTuple):
    """An item to save, its handler, and whether the item may be written after the call returns."""

    handler: CheckpointHandler
    value: Any
    background: bool = False
    kwargs: Mapping[str, Any] = MappingProxyType({})
    reuse: WrittenSteps | None = None  # the data files of earlier steps that the item may share


class Save:
    """A save whose snapshot has been taken, but which has not been written or committed yet::

        with save.completing() as claimed:
            if claimed:
                items = save.write()
                record, report = save.commit(None if items is None else CheckpointRecord(items=items, time=...))

    With several processes, each creates a Save for the same items. Process 0 creates the folders, merges the shares of
    all processes, commits, and notifies the others through the rendezvous. Unless ``shared`` is set, every host
    has its own directory at ``location``, with only the files written by the processes of that host.
    """

    def __init__(
        self,
        location: Location,
        items: Mapping[str, ItemToSave],
        *,
        overwrite: bool,
        owned: bool = False,
        began: float | None = None,
        rendezvous: Rendezvous | None = None,
        timeout: float = 600.0,
        shared: bool = True,
    ) -> None:
        self._began = time.perf_counter() if began is None else began
        self._kinds = {name: item.handler.kind for name, item in items.items()}
        self._location = location
        self._items: dict[str, PreparedItem] = {}
        self._reuse = [item.reuse for item in items.values() if item.reuse is not None]
        self._claim = threading.Lock()  # acquired by the thread that completes or aborts the save, and never released
        # Whether the save may be completed on another thread while the training loop continues.
        self.in_background = any(item.background for item in items.values())
        self.replaces = False  # whether the save replaces a checkpoint; always False on processes other than 0
        self._role: Primary | Worker
        if rendezvous is not None and rendezvous.index > 0:
            self._role = Worker(location, sorted(items), rendezvous, timeout, shared)
        else:
            try:
                pending = commit_protocol(location)(location, items, overwrite=overwrite, owned=owned)
            except BaseException as error:
                leave_save(rendezvous, error)
                raise
            self.replaces = pending.replaces
            self._role = Primary(pending, rendezvous, timeout, shared)
        try:
            for name, item in items.items():
                if item.handler.collective or isinstance(self._role, Primary):
                    try:
                        self._items[name] = self._prepare(name, item)
                    except UnknownArgumentError as error:
                        raise UnknownArgumentError(f"{location}: item {name!r} was not saved: {error}") from None
        except BaseException as error:
            self._role.give_up(error)
            raise
        self._blocked = time.perf_counter() - self._began

    def _prepare(self, name: str, item: ItemToSave) -> PreparedItem:
        """Prepare an item to be written; take its snapshot if the save continues in the background."""
        if isinstance(item.handler, PreparedCheckpointHandler):
            together = item.handler.divides and self._role.process.count > 1
            added: dict[str, Any] = {"member": self._role.process} if together else {}
            if item.reuse is not None:
                added["reuse"] = item.reuse
            return item.handler.prepare(item.value, snapshot=self.in_background, **added, **item.kwargs)
        folder = self._role.open()[name]
        if item.background and isinstance(item.handler, AsyncCheckpointHandler):
            return _BegunItem(run_coroutine(item.handler.async_save(folder, item.value, **item.kwargs)))
        return _BegunItem((), item.handler.save(folder, item.value, **item.kwargs))

    @contextlib.contextmanager
    def completing(self) -> Iterator[bool]:
        """Claim the save and yield True, or yield False if it was aborted. An error in the block aborts the save."""
        if not self._claim.acquire(blocking=False):
            yield False
            return
        try:
            yield True
        except BaseException as error:
            self._role.give_up(error)
            raise

    def write(self, awaited: threading.Event | None = None) -> Mapping[str, ItemRecord] | None:
        """Write the items, and return their records on process 0; ``awaited`` is set when the training loop waits."""
        archives = self._archives(awaited)
        folders = self._role.open(archives)
        process = replace(self._role.process, awaited=awaited)
        shares = {}
        for name, item in self._items.items():
            shares[name] = item.write(folders[name], process)
        fragments = self._role.gather(shares)
        if fragments is None:
            return None
        sent = parallel_map(lambda name: write_file(folders[name], archives[name]), list(archives), REQUESTS)
        files: dict[str, Files] = {name: {"": file} for name, file in zip(archives, sent, strict=True)}
        for name in fragments:
            files[name] = self._items.pop(name).merge(folders[name], fragments[name])
        return {name: ItemRecord(folder.name, self._kinds[name], files[name]) for name, folder in folders.items()}

    def _archives(self, awaited: threading.Event | None) -> Mapping[str, bytes]:
        """Pack small items into zip files in memory to avoid object store requests; return the files keyed by item."""
        process = replace(self._role.process, awaited=awaited)
        begun = any(isinstance(item, _BegunItem) for item in self._items.values())  # if True, all folders already exist
        if not self._location.is_remote or process.count > 1 or begun:
            return {}
        written = {name: write_archive(item, self._location / name, process) for name, item in self._items.items()}
        archives = {name: content for name, content in written.items() if content is not None}
        self._items = {name: item for name, item in self._items.items() if name not in archives}
        return archives

    def commit(self, record: CheckpointRecord | None) -> tuple[CheckpointRecord, SaveReport]:
        """Commit the checkpoint, or wait for process 0 to commit it; return the record or its summary, and a report."""
        committed, written_bytes, shared_bytes = self._role.commit(record)
        for written in self._reuse:
            written.commit()
        total = time.perf_counter() - self._began
        return committed, SaveReport(
            step=committed.step,
            path=self._location.url,
            reason=committed.reason,
            bytes=written_bytes,
            shared_bytes=shared_bytes,
            blocked_seconds=self._blocked if self.in_background else total,
            total_seconds=total,
        )

    def give_up(self, error: BaseException) -> bool:
        """Abort the save and return True, or return False if a thread is already completing it."""
        if is_claimed := self._claim.acquire(blocking=False):
            self._role.give_up(error)
        return is_claimed


def commit_protocol(location: Location) -> type[PendingCheckpoint]:
    """Return the commit protocol for a location, depending on whether it is in an object store."""
    if not location.is_remote:
        return LocalCommit
    from .store_commit import StoreCommit

    return StoreCommit


@dataclass
class _BegunItem:
    """An item that its handler writes directly into the folder, either at once or through pending futures."""

    futures: Sequence[SaveFuture] | None
    files: Files | None = None

    def write(self, folder: Location, member: ProcessInfo) -> bytes:
        files = finish(self.futures) if self.files is None else self.files
        self.files = files if member.count == 1 else None  # None if other processes also write files
        return b""

    def merge(self, folder: Location, fragments: Sequence[bytes]) -> Files:
        return fsync_and_digest(folder) if self.files is None else self.files


# The committed record, the bytes written, and the bytes shared with earlier steps.
_Committed = tuple[CheckpointRecord, int, int]


@dataclass
class Primary:
    """The role of process 0 (or the only process): it creates the folders, merges the shares, and commits."""

    pending: PendingCheckpoint
    rendezvous: Rendezvous | None
    timeout: float
    shared: bool
    told: Literal["nothing", "the plan", "the commit"] = "nothing"  # what the last broadcast contained

    @property
    def process(self) -> ProcessInfo:
        count = 1 if self.rendezvous is None else self.rendezvous.count
        return ProcessInfo(0, count, self.pending.token, shared=self.shared)

    def open(self, archives: Collection[str] = ()) -> Mapping[str, Location]:
        """Begin the checkpoint, broadcast the plan, and return the item locations; ``archives`` need no folders."""
        self.pending.begin(archives)
        if self.rendezvous is not None and self.told == "nothing":
            self.told = "the plan"
            folders = {name: folder.name for name, folder in self.pending.folders.items()}
            path = self.pending.location.url if self.shared else self.pending.location.name
            plan = {"path": path, "token": self.pending.token, "folders": folders}
            self.rendezvous.broadcast("plan", json.dumps(plan).encode(), self.timeout)
        return self.pending.folders

    def gather(self, shares: Mapping[str, bytes]) -> Mapping[str, list[bytes]]:
        """Wait until all processes have written their shares; return the fragments of each item."""
        gathered = {name: [fragment] for name, fragment in shares.items()}
        contents = [] if self.rendezvous is None else self.rendezvous.gather("written", b"", self.timeout) or []
        sent = [
            (name, process, fragment)
            for process, content in enumerate(contents)
            for name, fragment in _decode_fragments(content, self.shared).items()
        ]
        folders = self.pending.folders
        received = parallel_map(lambda item: _fragment(folders[item[0]], *item[1:]), sent, REQUESTS)
        for (name, *_), fragment in zip(sent, received, strict=True):
            gathered[name].append(fragment)
        return gathered

    def commit(self, record: CheckpointRecord | None) -> _Committed:
        """Commit the checkpoint, and broadcast the summary of its record."""
        assert record is not None, "process 0 makes the record"
        self.pending.commit(record)
        nbytes = record.nbytes - record.shared_bytes, record.shared_bytes
        if self.rendezvous is not None:
            self.told = "the commit"
            # Send a summary without the file list, because the list grows with the number of processes.
            summary = record.summary()
            facts = {"record": summary.to_document(), "summarizes": summary.summarizes, "bytes": nbytes}
            try:
                self.rendezvous.broadcast("committed", json.dumps(facts).encode(), self.timeout)
            except Exception as error:  # not fatal, because the checkpoint has been committed
                _logger.warning(
                    "%s: saved, but the other processes could not be told: %s", self.pending.location, error
                )
            self.rendezvous.close()
        return record, *nbytes

    def give_up(self, error: BaseException) -> None:
        """Remove the files if all processes stop writing in time; otherwise, leave them for the next run to remove."""
        if self.rendezvous is None:
            self.pending.abort(error)
            return
        if not isinstance(error, PeerFailedError):  # otherwise, the other processes already know the error
            self.rendezvous.fail(error)
        if self.told == "the commit":
            return
        is_known = not isinstance(error, BarrierTimeoutError)
        try:
            if self.told == "nothing" or (is_known and self.rendezvous.all_left(min(_LAST_WORD, self.timeout / 4))):
                self.pending.abort(error)
            else:
                self.pending.leave()
                _logger.warning(
                    "%s: not all processes have said that they stopped; the next run removes what they wrote",
                    self.pending.location,
                )
        finally:
            self.rendezvous.close()


@dataclass
class Worker:
    """The role of every process except process 0: write a share and send fragments to process 0 (as files if large)."""

    location: Location
    items: Sequence[str]
    rendezvous: Rendezvous
    timeout: float
    shared: bool
    token: str = ""
    folders: Mapping[str, Location] | None = None

    @property
    def process(self) -> ProcessInfo:
        return ProcessInfo(self.rendezvous.index, self.rendezvous.count, self.token, shared=self.shared)

    def open(self, archives: Collection[str] = ()) -> Mapping[str, Location]:
        if self.folders is None:
            plan = json.loads(self.rendezvous.broadcast("plan", None, self.timeout))
            where = f"process {self.rendezvous.index} saves to {self.location.url}, and process 0 to"
            if self.shared and plan["path"] != self.location.url:
                raise StateError(
                    f"{where} {plan['path']}; all processes must save to the same path, or each alone, with "
                    "coordinator=hf.processes.Alone()"
                )
            if not self.shared and plan["path"] != self.location.name:
                raise StateError(
                    f"{where} a folder {plan['path']}; all processes must save the same steps to their hosts, in the "
                    "same order"
                )
            if sorted(plan["folders"]) != self.items:
                raise StateError(
                    f"process {self.rendezvous.index} saves the items {self.items} of {self.location.url}, and "
                    f"process 0 {sorted(plan['folders'])}; all processes must save the same ones: give each "
                    "the same items, and the same kinds of extras"
                )
            self.token = plan["token"]
            self.folders = {name: self.location / folder for name, folder in plan["folders"].items()}
            for folder in self.folders.values() if not self.shared else ():
                folder.make_directory()
        return self.folders

    def gather(self, shares: Mapping[str, bytes]) -> None:
        folders, limit = self.open(), _largest_sent(self.shared)
        for name, fragment in shares.items():
            if len(fragment) > limit:
                (folders[name] / f"fragment.{self.rendezvous.index}").write_bytes(fragment, atomic=False)
        # The message is a JSON line with the sizes of all fragments, followed by the fragments that are not in files.
        sizes = json.dumps({name: len(fragment) for name, fragment in shares.items()}).encode()
        sent = b"".join(fragment for fragment in shares.values() if len(fragment) <= limit)
        self.rendezvous.gather("written", sizes + b"\n" + sent, self.timeout)

    def commit(self, record: CheckpointRecord | None) -> _Committed:
        """Wait for the summary of the record that process 0 commits."""
        facts = json.loads(self.rendezvous.broadcast("committed", None, self.timeout, gathered=True))
        self.rendezvous.close()
        summary = CheckpointRecord.from_document(
            facts["record"], source=f"{self.location}: what process 0 has committed"
        )
        return replace(summary, summarizes=tuple(facts["summarizes"])), *facts["bytes"]

    def give_up(self, error: BaseException) -> None:
        """Report to the other processes that this process has failed and stopped writing."""
        self.rendezvous.leave(error)


def leave_save(rendezvous: Rendezvous | None, error: BaseException) -> None:
    """Report to the other processes, if there are any, that this process has failed and stopped writing."""
    if rendezvous is not None:
        rendezvous.leave(error)


def _largest_sent(shared: bool) -> int:
    """Return the maximum size of a fragment that is sent to process 0 as a message instead of a file."""
    return _SMALL if shared else sys.maxsize


def _decode_fragments(sent: bytes, shared: bool) -> dict[str, bytes | int]:
    """Decode a process's message; map each item to its fragment, or to the fragment's size if it is in a file."""
    sizes, _, rest = sent.partition(b"\n")
    fragments: dict[str, bytes | int] = {}
    for name, size in json.loads(sizes or b"{}").items():
        fragments[name] = size
        if size <= _largest_sent(shared):
            fragments[name], rest = rest[:size], rest[size:]
    return fragments


def _fragment(folder: Location, process: int, sent: bytes | int) -> bytes:
    """Return another process's fragment; if the fragment is in a file, read and remove the file."""
    if isinstance(sent, bytes):
        return sent
    file = folder / f"fragment.{process}"
    try:
        fragment = file.read_bytes(limit=sent)
    except HoldfastError as error:
        raise DamagedCheckpointError(
            f"{file}: what process {process} wrote cannot be read ({error}); do all processes see the same directory?"
        ) from error
    if len(fragment) != sent:
        raise DamagedCheckpointError(f"{file}: process {process} wrote {sent} bytes, found {len(fragment)}")
    file.remove()  # the file is not part of the checkpoint
    return fragment
