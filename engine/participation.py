"""One process's part in committing a checkpoint: alone, leading the others, or following process 0."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol
from urllib.parse import quote

from .commit import PendingCheckpoint
from .coordination import Group, Member
from .errors import BarrierTimeoutError, DamagedCheckpointError, HoldfastError, PeerFailedError, StateError
from .handlers import CheckpointHandler
from .record import CheckpointRecord
from .storage import Location

_logger = logging.getLogger("holdfast")

Merge = Callable[[Mapping[str, Sequence[bytes]]], CheckpointRecord]
"""Completes all items from the fragments of every process, by item, and makes the commit record."""

_LAST_WORD = 10.0  # seconds that others get to stop writing before the leader removes what they wrote


class Participation(Protocol):
    """How one process takes part in one save."""

    @property
    def member(self) -> Member:
        """Returns this process's place; known once :meth:`open` has been called."""
        ...

    def takes_part(self, handler: CheckpointHandler) -> bool:
        """Tells whether this process calls a handler at all."""
        ...

    def open(self) -> Mapping[str, Location]:
        """Returns the folder of every item, made ready; may wait for process 0."""
        ...

    def commit(self, fragments: Mapping[str, bytes], merge: Merge) -> CheckpointRecord:
        """Makes the checkpoint exist once every process has written its share.

        Args:
            fragments: What this process has to tell of its share, by item.
            merge: Completes the items; called on one process.

        Returns:
            The commit record.
        """
        ...

    def give_up(self, error: BaseException) -> None:
        """Undoes what can be undone, and tells the others."""
        ...


def participation(
    location: Location, items: Iterable[str], *, overwrite: bool, group: Group | None, timeout: float
) -> Participation:
    """Begins a save.

    Args:
        location: The checkpoint's directory.
        items: Names of its items.
        overwrite: Whether a checkpoint that is there may be replaced.
        group: The processes that save together, for this save alone; None is this process alone.
        timeout: How long to wait for others, in seconds.

    Raises:
        CheckpointExistsError: A checkpoint is there and must not be replaced.
    """
    if group is not None and group.index:
        return Follower(location, group, timeout)
    try:
        pending = PendingCheckpoint(location, items, overwrite=overwrite)
    except BaseException as error:
        if group is not None:
            group.fail(error)
        raise
    return Single(pending) if group is None else Leader(pending, group, timeout)


class Single:
    """The only process there is.

    Args:
        pending: The checkpoint.
    """

    def __init__(self, pending: PendingCheckpoint) -> None:
        self._pending = pending
        self.member = Member(token=pending.token)

    def takes_part(self, handler: CheckpointHandler) -> bool:
        """Tells whether this process calls a handler: any of them."""
        return True

    def open(self) -> Mapping[str, Location]:
        """Makes the folders."""
        self._pending.begin()
        return self._pending.folders

    def commit(self, fragments: Mapping[str, bytes], merge: Merge) -> CheckpointRecord:
        """Commits."""
        record = merge({name: [fragment] for name, fragment in fragments.items()})
        self._pending.commit(record)
        return record

    def give_up(self, error: BaseException) -> None:
        """Removes what was written."""
        self._pending.abort(error)


class Leader:
    """Process 0 of several.

    Args:
        pending: The checkpoint.
        group: All processes.
        timeout: How long to wait for them, in seconds.
    """

    def __init__(self, pending: PendingCheckpoint, group: Group, timeout: float) -> None:
        self._pending = pending
        self._group = group
        self._timeout = timeout
        self._opened = False
        self._committed = False
        self.member = Member(0, group.count, pending.token)

    def takes_part(self, handler: CheckpointHandler) -> bool:
        """Tells whether this process calls a handler: any of them."""
        return True

    def open(self) -> Mapping[str, Location]:
        """Makes the folders and tells the others."""
        self._pending.begin()
        if not self._opened:
            self._opened = True
            folders = {name: folder.name for name, folder in self._pending.folders.items()}
            plan = {"path": self._pending.location.url, "token": self.member.token, "folders": folders}
            self._group.broadcast("plan", json.dumps(plan).encode(), self._timeout)
        return self._pending.folders

    def commit(self, fragments: Mapping[str, bytes], merge: Merge) -> CheckpointRecord:
        """Waits for every process's share, puts them together, commits, and tells the others."""
        written = self._group.gather("written", b"{}", self._timeout) or []
        sizes = [json.loads(one) for one in written]
        gathered: dict[str, list[bytes]] = {name: [own] for name, own in fragments.items()}
        for process in range(1, self._group.count):
            for name, size in sizes[process].items():
                gathered[name].append(_take_fragment(self._pending.folders[name], process, size))
        record = merge(gathered)
        self._pending.commit(record)
        self._committed = True
        try:
            self._group.broadcast("committed", record.encode(), self._timeout)
        except Exception as error:  # it exists, whoever knows
            _logger.warning("%s: saved, but the others could not be told: %s", self._pending.location, error)
        self._group.close()
        return record

    def give_up(self, error: BaseException) -> None:
        """Removes what was written, once nobody writes any more; otherwise that is left to the next run."""
        if not isinstance(error, PeerFailedError):  # the others know of that already
            self._group.fail(error)
        if self._committed:
            return
        if not self._opened or (not isinstance(error, BarrierTimeoutError) and self._all_stopped()):
            self._pending.abort(error)
        else:
            self._pending.leave()
            _logger.warning(
                "%s: not all processes have said that they stopped; what they wrote is removed by the next run",
                self._pending.location,
            )
        self._group.close()

    def _all_stopped(self) -> bool:
        end = time.monotonic() + min(_LAST_WORD, self._timeout)
        try:
            for process in range(1, self._group.count):
                self._group.coordinator.get(_stopped(self._group, process), max(0.01, end - time.monotonic()))
                self._group.coordinator.delete(_stopped(self._group, process))
        except Exception:  # whatever the store says: nobody can be sure that they have stopped
            return False
        return True


class Follower:
    """Any process but process 0.

    Args:
        location: The checkpoint's directory.
        group: All processes.
        timeout: How long to wait for process 0, in seconds.
    """

    def __init__(self, location: Location, group: Group, timeout: float) -> None:
        self._location = location
        self._group = group
        self._timeout = timeout
        self._folders: dict[str, Location] | None = None
        self._token = ""

    @property
    def member(self) -> Member:
        """Returns this process's place."""
        return Member(self._group.index, self._group.count, self._token)

    def takes_part(self, handler: CheckpointHandler) -> bool:
        """Tells whether this process calls a handler: those that need all of them."""
        return handler.collective

    def open(self) -> Mapping[str, Location]:
        """Waits for process 0 to make the folders."""
        if self._folders is None:
            plan = json.loads(self._group.broadcast("plan", None, self._timeout))
            if plan["path"] != self._location.url:
                raise StateError(
                    f"process {self._group.index} saves to {self._location.url}, and process 0 to {plan['path']}; all "
                    "processes have to save to the same path, or each alone, with coordinator=hf.Alone()"
                )
            self._token = plan["token"]
            self._folders = {name: self._location / folder for name, folder in plan["folders"].items()}
        return self._folders

    def commit(self, fragments: Mapping[str, bytes], merge: Merge) -> CheckpointRecord:
        """Leaves the fragments for process 0 and waits for it to commit."""
        folders = self.open()
        for name, fragment in fragments.items():
            (folders[name] / _fragment(self._group.index)).write_bytes(fragment, atomic=False)
        sizes = {name: len(fragment) for name, fragment in fragments.items()}
        self._group.gather("written", json.dumps(sizes).encode(), self._timeout)
        # Process 0 may wait as long for another one: that it gives up, and whom it missed, has to arrive here.
        content = self._group.broadcast("committed", None, 2 * self._timeout)
        self._group.close()
        return CheckpointRecord.decode(content, source=f"{self._location}: what process 0 has committed")

    def give_up(self, error: BaseException) -> None:
        """Tells the others, and that this process writes no more."""
        if not isinstance(error, PeerFailedError):  # the others know of that already
            self._group.fail(error)
        with contextlib.suppress(Exception):  # the store may be what has failed
            self._group.coordinator.put(_stopped(self._group, self._group.index), b"1")
        self._group.close()


def _fragment(process: int) -> str:
    return f"fragment.{process}"


def _stopped(group: Group, process: int) -> str:
    return f"{quote(group.name, safe='')}/stopped/{process}"


def _take_fragment(folder: Location, process: int, size: int) -> bytes:
    """Reads what another process left, and removes it: it is no part of the checkpoint."""
    place = folder / _fragment(process)
    try:
        fragment = place.read_bytes(limit=size)
    except HoldfastError as error:
        raise DamagedCheckpointError(
            f"{place}: what process {process} wrote cannot be read ({error}); do all processes see the same directory?"
        ) from error
    if len(fragment) != size:
        raise DamagedCheckpointError(f"{place}: process {process} wrote {size} bytes, found {len(fragment)}")
    place.remove()
    return fragment
