"""The ownership of a directory, which allows a run to write to it, and the identity of a run.

A second run is refused, but within one process, a newer manager takes over from an older one. On a file system, the
owner holds a :class:`~holdfast.engine.storage.FileLock`. Without locks (object stores, some network file systems), a
new owner writes its token, and the previous owner detects this before it commits.

The identity of a run is stored in ``options.json``, together with the retention rules, and is the same in the run's
directory and its mirror. If a directory has no identity, the run that acquires the directory assigns one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ..clock import Clock
from ..distributed import current_coordinator
from ..errors import (
    DamagedCheckpointError,
    FormatVersionError,
    HoldfastError,
    ObjectNotFoundError,
    OwnershipError,
    StorageConflictError,
    StorageUnavailableError,
    shortened_steps,
)
from ..format import OWNER, PADDED, RECORD, VERSION, CheckpointRecord, decode_document, encode_document
from ..storage import FileLock, Location
from .options import CheckpointManagerOptions, options_document, options_from_document

_logger = logging.getLogger("holdfast")

_LIMIT = 16 << 20  # size limit in bytes for files read by this module
_LOOKS = 5  # maximum number of times to read an owner file that seems to belong to another manager
_PAUSE = 0.1  # seconds between two reads of the owner file
_CONNECTED = (
    ". If it is a process of this program, connect the processes first (init_process_group), then make the manager"
)


class Ownership:
    """The right to write to a directory."""

    def __init__(self, directory: Location, clock: Clock, drain: Callable[[], None] | None = None) -> None:
        self._directory = directory
        self._clock = clock
        # Called before a newer owner in this process takes over, to wait until this owner has stopped writing.
        self._drain = None if drain is None else weakref.WeakMethod(drain)
        self._token = os.urandom(16).hex()
        self._lock = FileLock(directory / OWNER)
        self._process: int | None = None  # PID of the owner; recorded because a forked child does not own the directory
        self._lost = False
        # In an object store, use the location as the key: a folder's URL can vary, but its locations compare equal.
        self._key = os.path.realpath(directory.path) if directory.is_local else directory

    @property
    def held(self) -> bool:
        return self._process == os.getpid() and not self._lost

    def check_usable(self) -> None:
        """Raise OwnershipError if something other than a regular file blocks the path of one of the run's files."""
        if not self._directory.is_local:
            return
        owner, options = self._directory / OWNER, self._directory / OPTIONS
        is_strange = owner.is_link() or (owner.is_there() and not owner.is_file())
        if is_strange or options.is_directory():
            path = os.fspath(owner if is_strange else options)
            raise OwnershipError(
                f"{path} is not a file of a run, which holdfast could replace, so nothing could be saved here. Move it "
                f"away: mv {shlex.quote(path)} {shlex.quote(f'{path}.moved')}"
            )

    def take(self) -> None:
        self.check_not_lost()
        while True:
            with FileLock.handover:
                if self._process is not None:  # another thread may have taken ownership first
                    return
                earlier = _owners.get(self._key)
                if earlier is None or not earlier.held:
                    self._take()
                    return
            earlier._give_up()  # without the lock, which a listener needs if it closes the earlier manager

    def _take(self) -> None:
        self._directory.make_directory()
        try:
            if self._directory.is_local:
                self._lock_file()
            self._lock.write(self._document(), sync=False)
            _owners[self._key] = self
            self._process = os.getpid()
        except BaseException:
            self._release()  # otherwise, this lock would block the next attempt
            raise

    def check(self, *, at_once: bool = False) -> None:
        """Raise OwnershipError unless this run still owns the directory; ``at_once`` avoids requests to a store."""
        self.check_not_lost()
        asks_nothing = at_once and (self._process is None or not self._directory.is_local)
        if asks_nothing or self._lock.is_own(self._token):
            return
        if not (self._directory / OWNER).is_there():
            gone = f"its {OWNER}" if self._directory.exists() else "the directory"
            raise OwnershipError(
                f"{self._directory}: {gone} was moved or deleted while this run was writing here, so another run could "
                "take the directory unnoticed; nothing was written. Move it back, and this run continues; or start the "
                "run again in the directory where it is to continue"
            )
        is_replaced = self._lock.descriptor is not None and self._lock.obstacle is None
        if is_replaced or self._is_taken_over():
            self._lost = True
            self.check_not_lost()

    def _is_taken_over(self) -> bool:
        """Return whether another manager owns the file. Two reads must agree, because the network may corrupt one."""
        earlier = None
        for look in range(_LOOKS):
            time.sleep(_PAUSE if look else 0.0)
            token = self._stored_token()
            if token is not None and token in (self._token, earlier):
                return token != self._token
            earlier = token
        raise StorageUnavailableError(
            f"{self._directory / OWNER}: this file was damaged, or another one, each time that it was read; nothing "
            "was written, and the next save reads it again. If it stays so, start the run again, which replaces it"
        )

    def _stored_token(self) -> str | None:
        file = self._directory / OWNER
        try:
            content = file.read_own(limit=_LIMIT)
            document = json.loads(content)
            if "digest" in document:  # absent in files written by version 0.1
                decode_document(content, "owner", source=str(file))
            return str(document["token"])
        except (ObjectNotFoundError, DamagedCheckpointError, FormatVersionError, LookupError, TypeError, ValueError):
            return None

    def check_not_lost(self) -> None:
        """Raise OwnershipError if a newer manager has taken over, or if this process is a fork of the owner."""
        if self._lost or self._process not in (None, os.getpid()):
            raise OwnershipError(
                f"{self._directory}: another manager has taken over this directory; this one may not write to it. "
                f"Now held by {self._describe()}"
            )

    def release(self) -> None:
        with FileLock.handover:
            if _owners.get(self._key) is self:
                del _owners[self._key]
            self._release()

    def _give_up(self) -> None:
        drain = None if self._drain is None else self._drain()
        if drain is not None:
            drain()
        self._lost = True
        self._release()

    def _release(self) -> None:
        self._process = None
        self._lock.release()

    def _lock_file(self) -> None:
        try:
            self._lock.acquire(os.O_RDWR | os.O_CREAT)
        except StorageConflictError:
            raise OwnershipError(
                f"{self._directory}: another run is writing to this directory ({self._describe()}). Stop it, wait for "
                f"it to end, or use another directory{_CONNECTED if current_coordinator().process_count > 1 else ''}"
            ) from None
        if self._lock.obstacle is not None:  # without a lock, only the token protects the directory
            path, obstacle = self._directory / OWNER, self._lock.obstacle
            self._lock.release()
            _logger.warning(
                "%s: no file locks here (%s); a second run is noticed only at the next save", path, obstacle
            )

    def _document(self) -> bytes:
        facts = {"token": self._token, "host": os.uname().nodename, "pid": os.getpid(), "since": self._clock.now()}
        return encode_document("owner", facts)

    def _describe(self) -> str:
        owner: Mapping[str, Any] = {}
        with contextlib.suppress(HoldfastError):
            owner = self._lock.content()
        return f"process {owner.get('pid', '?')} on {owner.get('host', '?')}"


_owners: weakref.WeakValueDictionary[str | Location, Ownership] = weakref.WeakValueDictionary()


# ---- the identity of a run

OPTIONS = "options.json"  # file with the retention options and the identity of the last run


class Tombstone(NamedTuple):
    """Marks a step, or all steps after it, as deleted. Storage tiers may restore only versions saved since then."""

    step: int
    later: bool = False  # whether all steps after ``step``, rather than ``step`` itself, were deleted
    time: float | None = None  # covers only records saved up to this time (seconds since the epoch); None covers all
    fingerprint: str | None = None  # fingerprint of the step's record when the step was deleted

    def covers(self, step: int, record: CheckpointRecord | None) -> bool:
        if step <= self.step if self.later else step != self.step:
            return False
        if record is None or self.time is None or record.time < self.time:
            return True
        return record.time == self.time and self.fingerprint in (None, record.fingerprint)


class Tombstones(frozenset[Tombstone]):
    def cover(self, step: int, record: CheckpointRecord | None) -> bool:
        """Return whether a step was deleted; ``record`` is its record in the mirror, or None if that is damaged."""
        return any(tombstone.covers(step, record) for tombstone in self)

    def __str__(self) -> str:
        steps, after = self.numbers()
        listed = [f"step {shortened_steps(steps)}"] if steps else []
        return " and ".join(listed + ([] if after is None else [f"all steps after {after}"]))

    def numbers(self) -> tuple[list[int], int | None]:
        """Return the individually deleted steps, and the step after which all steps were deleted, if any."""
        steps = sorted({tombstone.step for tombstone in self if not tombstone.later})
        return steps, min((tombstone.step for tombstone in self if tombstone.later), default=None)


class LocalBranch(NamedTuple):
    """A branch of a run's history: the local saves that one attempt of the program has made after a step."""

    attempt: str  # random text that identifies the attempt
    sequence: int  # the sequence number of the last local save before the branch
    after: int  # the step from which the program continues; -1 if there is none


_NAMES = ("run", "directory", "mirror", "local")  # the text fields of an identity
NO_LOCAL_STEPS = (LocalBranch("-", 0, -1),)  # history that contains no local steps


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """Identifies the run to which a directory or a mirror belongs."""

    run: str | None = None  # random token; None if the directory is new, or was written by holdfast 0.1
    directory: str | None = None  # URL of the run's directory; set only in its mirror
    mirror: str | None = None  # URL of the mirror; set only in the run's directory
    tombstones: Mapping[str, Tombstones] = field(default_factory=dict)  # maps each series of steps to its tombstones
    local: str | None = None  # path of the local steps on each host; set only in the run's directory
    # For each series, the recent branches that lead to the newest step. Local steps outside these branches are invalid.
    branches: Mapping[str, tuple[LocalBranch, ...]] = field(default_factory=dict)

    def over(self, other: RunIdentity) -> RunIdentity:
        """Return ``other``, overridden by the fields that are set in this identity."""
        return replace(other, **{name: value for name in _NAMES if (value := getattr(self, name)) is not None})

    def with_tombstones(self, series: str, tombstones: Tombstones) -> RunIdentity:
        return replace(self, tombstones={**self.tombstones, series: tombstones})

    def with_branches(self, series: str, branches: tuple[LocalBranch, ...]) -> RunIdentity:
        return replace(self, branches={**self.branches, series: branches})


def stored_options(location: Location) -> CheckpointManagerOptions | None:
    """Return the retention options of the last run in a directory, or None if they are unknown."""
    return stored_rules(location)[0]


def stored_rules(location: Location) -> tuple[CheckpointManagerOptions | None, str | None]:
    """Return the last run's retention options, and the name of the custom function or policy that they use, if any."""
    try:
        document = _read(location)["options"]
        options = options_from_document(document)
        function = document.get("best_function") or document.get("keep_function")
    except (HoldfastError, KeyError, AttributeError):
        return None, None
    return options, function if isinstance(function, str) else None


def stored_identity(location: Location) -> RunIdentity:
    """Return the identity stored in a directory, or an empty identity."""
    try:
        run = _mapping(_read(location).get("run"))
    except (ObjectNotFoundError, DamagedCheckpointError, FormatVersionError):
        return RunIdentity()
    texts = {name: value for name in _NAMES if isinstance(value := run.get(name), str)}
    tombstones = {name: _tombstones(listed) for name, listed in _mapping(run.get("doomed")).items()}
    histories = _mapping(run.get("branches")).items()
    branches = {name: tuple(map(_branch, parts if isinstance(parts, list) else [None])) for name, parts in histories}
    return RunIdentity(**texts, tombstones=tombstones, branches=branches)


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def store_identity(location: Location, options: Mapping[str, Any], identity: RunIdentity) -> None:
    """Store a run's retention options and its identity in one file."""
    document = {
        **{name: getattr(identity, name) for name in _NAMES},
        "branches": {name: [list(branch) for branch in listed] for name, listed in sorted(identity.branches.items())},
        "doomed": {name: _encoded(deleted) for name, deleted in sorted(identity.tombstones.items()) if deleted},
    }
    run = {name: value for name, value in document.items() if value}
    if options.get("step_name_width") and not (location / PADDED / RECORD).is_there():
        (location / PADDED).make_directory()
        (location / PADDED / RECORD).write_bytes(encode_document("checkpoint", {}, version=VERSION + 1))
    (location / OPTIONS).write_bytes(encode_document("options", {"options": dict(options), "run": run}))


def copy_options(source: Location, destination: Location) -> None:
    """Copy a run's retention options to another directory, which keeps its own identity and mirror."""
    options = stored_options(source)
    if options is not None:
        store_identity(destination, options_document(options), stored_identity(destination))


def _read(location: Location) -> dict[str, Any]:
    file = location / OPTIONS
    return decode_document(file.read_own(limit=_LIMIT), "options", source=str(file))


def _branch(value: Any) -> LocalBranch:
    match value:
        case [str(attempt), int(sequence), int(after)]:
            return LocalBranch(attempt, sequence, after)
    return NO_LOCAL_STEPS[0]


def _encoded(tombstones: Tombstones) -> dict[str, Any]:
    steps, after = tombstones.numbers()  # earlier versions read only these two fields
    return {"steps": steps, "after": after, "records": [list(tombstone) for tombstone in sorted(tombstones, key=repr)]}


def _tombstones(value: Any) -> Tombstones:
    match value:
        case {"records": [*records]}:
            return Tombstones(Tombstone(*fields) for fields in records if _is_tombstone(fields))
        case {"steps": [*steps], "after": after}:  # written by an earlier version
            later = [Tombstone(after, later=True)] if isinstance(after, int) else []
            return Tombstones([*(Tombstone(step) for step in steps if isinstance(step, int)), *later])
    return Tombstones()


def _is_tombstone(value: Any) -> bool:
    match value:
        case [int(), bool(), None | float(), None | str()]:
            return True
    return False
