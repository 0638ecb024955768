"""The directory of a run, in which a single writer stores metadata and options, and changes or deletes steps."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..checkpoint import (
    CopiedFiles,
    Transfer,
    copied_step,
    copy_left,
    delete_checkpoint,
    is_swept,
    remove_temporary,
    sweep,
    sweep_stray,
    write_record,
)
from ..clock import Clock, SystemClock
from ..errors import (
    CheckpointNotFoundError,
    DamagedCheckpointError,
    OptionError,
    OwnershipError,
    StorageConflictError,
    StorageError,
    StorageFullError,
    StoragePermissionError,
    StorageUnavailableError,
    shortened_steps,
)
from ..forks import Lock
from ..format import OWNER, PARTIAL, RECORD, CheckpointRecord, encode_document
from ..steps import (
    StepEntry,
    has_record,
    read_record,
    series_of,
    step_folder,
    step_folders,
    store_metadata,
    stray_folders,
    with_late,
    write_late,
)
from ..storage import (
    Location,
    Place,
    SaveLock,
    as_location,
    is_strange,
    is_unreadable,
    max_concurrency,
    parallel_map,
)
from .index import OLD_INDEX, StepIndex
from .metrics import metric_name, plain_metrics, shown_metric
from .options import CheckpointManagerOptions, options_document, retention_rules
from .ownership import (
    NO_LOCAL_STEPS,
    LocalBranch,
    Ownership,
    RunIdentity,
    Tombstone,
    Tombstones,
    store_identity,
    stored_identity,
)
from .places import StepPlace
from .retention import KeepAll, StepInfo, reasons

_logger = logging.getLogger("holdfast")

LEFT_ALONE = (
    "%s: the folder of step %s holds files and no %s, such as after an interrupted copy: it is left alone, and no such "
    "step is saved. Move it away, or delete it with `holdfast rm %s %s`"
)


def check_json(option: str, data: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return a copy of JSON-serializable data; raise OptionError if it cannot be serialized."""
    if data is None:
        return None
    if not isinstance(data, Mapping):
        way = f"; pass vars({option})" if hasattr(data, "__dict__") else ""
        raise OptionError(f"{option}= must be a dictionary, not {type(data).__name__}{way}")
    try:
        encoded = encode_document("json", {"data": dict(data)})
    except (TypeError, ValueError) as error:
        raise OptionError(f"{option}= cannot be stored as JSON: {error}") from error
    decoded: dict[str, Any] = json.loads(encoded)["data"]
    return decoded


def record_metrics(
    directory: Place,
    step: int,
    metrics: Any,
    *,
    step_prefix: str | None = None,
    clock: Clock | None = None,
) -> None:
    """Add metrics to a step from outside its run, for example from a separate evaluation program.

    This call changes none of the run's files, so the run need not stop. The run reads the new metrics before it deletes
    further steps, and ``best_step``, ``metrics`` and ``holdfast ls`` include them immediately.

    Args:
        directory: The path or URL of the run's directory.
        step: A committed step.
        metrics: Numbers, as for a manager's ``save``. They replace the step's existing metrics of the same name.
        step_prefix: The ``step_prefix`` option of the run, if it has one.
        clock: The clock that timestamps the metrics; later metrics replace earlier ones of the same name.

    Raises:
        CheckpointNotFoundError: The step does not exist, or the metrics are discarded because the run deleted or
            replaced the step during the call.
        DamagedCheckpointError: The step is damaged.
        OptionError: The metrics are not numbers.

    >>> import tempfile
    >>> from holdfast import CheckpointManager
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     with CheckpointManager(directory) as run:
    ...         _ = run.save(5, {"w": 1.0})
    ...         run.wait_until_finished()
    ...         record_metrics(directory, 5, {"return": 3.5})
    ...         run.metrics(5)
    {'return': 3.5}
    """
    location, values = as_location(directory, writes=True), plain_metrics(metrics)
    series = series_of(step_prefix)
    folders = (folder.location for folder in step_folders(location, series) if folder.step == step)
    folder = next(folders, location / step_folder(series, step))
    record = read_record(folder)
    write_late(location, folder.name, record, values, (clock or SystemClock()).now())
    with contextlib.suppress(CheckpointNotFoundError):
        if read_record(folder).identity == record.identity:
            return
    raise CheckpointNotFoundError(
        f"{folder}: the run has deleted or replaced this checkpoint while metrics were recorded for it; they belong to "
        "nothing, and are not kept"
    )


# ---- the directory and its single writer


class RunDirectory(StepIndex):
    """The index of one series of steps, with the operations that only the directory's single writer may perform."""

    def __init__(
        self,
        location: Location,
        options: CheckpointManagerOptions,
        clock: Clock,
        drain: Callable[[], None],
        *,
        writes: bool = True,
        places: Sequence[StepPlace] = (),
    ) -> None:
        super().__init__(location, options, places)
        self.ownership = Ownership(location, clock, drain)
        self.last_saved: int | None = None  # the last step that this run saved
        self._clock = clock
        self._rules = retention_rules(options)
        self._writes = writes  # True on process 0; the other processes only update their index
        self._warned = False  # whether a warning about the missing metric of best_fn has been logged
        self._copied: set[int] = set()  # steps that are being copied elsewhere
        self._unswept: set[Location] = set()  # folders not swept because their files belong to another user
        self.partial: set[int] = set()  # steps with an interrupted copy that the next attempt can complete
        self._changing = Lock()  # serializes changes to records and deletions of steps
        self._identity: RunIdentity | None = None  # None until this writer owns the directory
        self._keeps_tombstones = False  # whether deletions leave tombstones, because steps may also be in a mirror

    @property
    def identity(self) -> RunIdentity:
        """The identity of the run, reread from its file on each access until this writer owns the directory."""
        return stored_identity(self.location) if self._identity is None else self._identity

    def acquire(
        self,
        metadata: Mapping[str, Any] | None,
        belongs: RunIdentity,
        *,
        partial: CheckpointRecord | None = None,
    ) -> list[int]:
        """Acquire the directory, remove leftovers of interrupted runs, and return the step numbers of stray folders."""
        self.ownership.take()
        listing = self.location.snapshot()
        content = listing.entries()
        remove_temporary(self.location, [entry.name for entry in content])
        if any(entry.name == OLD_INDEX and not entry.is_directory for entry in content):
            (self.location / OLD_INDEX).remove()
        folders = [folder.location for folder in step_folders(self.location, self._series, content)]
        self.partial = set()
        if partial is not None and partial.step is not None:  # keep a partial copy that can be completed
            interrupted = self.step_location(partial.step)
            if interrupted in folders and copy_left(interrupted) == partial.fingerprint:
                folders.remove(interrupted)
                self.partial = {partial.step}
        parallel_map(lambda folder: self._sweep(folder, listing / folder.name), folders, max_concurrency(self.location))
        if not self.location.is_local:
            self._late.remove_stray(listing)
        self.reload(content)
        for step in self.steps() if self.location.is_remote else ():
            folder, record = self.step_location(step), self.stored_record(step)
            sweep_stray(folder, {entry.name for entry in (listing / folder.name).entries()}, record)
        if self._options.step_name_width not in (None, self._width):
            text = "%s: the names of its steps stay as they are, as step_name_width=%d is for new directories"
            _logger.warning(text, self.location, self._options.step_name_width)
        store_metadata(self.location, metadata)
        stored = stored_identity(self.location)
        identity = belongs.over(stored)
        # holdfast 0.1 did not record whether the steps are also in a mirror, so assume that they are.
        self._keeps_tombstones = identity.mirror is not None or (stored.run is None and bool(self.steps()))
        self._store(identity if identity.run else replace(identity, run=os.urandom(16).hex()))
        entries = [StepEntry(step, self.step_location(step)) for step in self.steps_and_damaged()]
        strays = sorted(entry.step for entry in stray_folders(self.location, self._series, entries))
        self.add_strays(strays)
        if strays:
            listed = shortened_steps(strays)
            _logger.warning(LEFT_ALONE, self.location, listed, RECORD, self.location, " ".join(map(str, strays)))
        return strays

    def _store(self, identity: RunIdentity) -> None:
        width = {"step_name_width": self._width or None}
        store_identity(self.location, options_document(self._options) | width, identity)
        self._identity = identity

    @property
    def tombstones(self) -> Tombstones:
        """The steps that were explicitly deleted from this directory but may still exist in another storage tier."""
        return self.identity.tombstones.get(self._series, Tombstones())

    def settled_tombstones(self) -> Tombstones:
        """Wait for any deletion in progress, and return the tombstones."""
        with self._changing:
            return self.tombstones

    def clear_tombstones(self, done: Tombstones) -> None:
        """Remove the tombstones that all other storage tiers have applied."""
        with self._changing:
            if done and self._identity is not None:
                self.ownership.check()
                self._store(self._identity.with_tombstones(self._series, Tombstones(self.tombstones - done)))

    def _add_tombstone(self, step: int, *, later: bool = False) -> None:
        """Record before a deletion that neither local steps nor deleted steps in the mirror may be restored."""
        identity = self._identity
        if not self._writes or identity is None or not (self._keeps_tombstones or identity.local):
            return
        if self._keeps_tombstones:
            record = self.known_record(step)
            if later:
                now = max([self._clock.now(), *(info.time for info in self.infos())])
                tombstone = Tombstone(step, True, float(now))
            elif record is not None:
                tombstone = Tombstone(step, False, float(record.time), record.fingerprint)
            else:
                tombstone = Tombstone(step)
            identity = identity.with_tombstones(self._series, Tombstones(self.tombstones | {tombstone}))
        self.ownership.check()
        self._store(identity.with_branches(self._series, NO_LOCAL_STEPS) if identity.local else identity)

    @property
    def branches(self) -> tuple[LocalBranch, ...]:
        """The branches whose local steps may be restored; empty if none have been recorded."""
        return self.identity.branches.get(self._series, ())

    def note_branches(self, branches: tuple[LocalBranch, ...]) -> None:
        """Store the branches whose local steps may be restored, if the run has local steps and its branches changed."""
        with self._changing:
            identity = self._identity
            if identity is not None and identity.local and self.branches != branches:
                self.ownership.check()
                self._store(identity.with_branches(self._series, branches))

    def sweep_partial(self, *, besides: int | None = None) -> None:
        """Remove interrupted copies that were not resumed, except the copy of step ``besides``."""
        swept = self.partial - {besides}
        folders = [self.step_location(step) for step in swept]
        parallel_map(functools.partial(self._sweep, raises=True), folders, max_concurrency(self.location))
        self.partial -= swept

    @contextlib.contextmanager
    def holding(self, step: int) -> Iterator[None]:
        """Protect a step from deletion while it is copied elsewhere, then apply the retention rules again."""
        self._copied.add(step)
        try:
            yield
        finally:
            self._copied.discard(step)
            if self.ownership.held and step in self:
                self.collect()

    @contextlib.contextmanager
    def receiving(
        self,
        step: int,
        source: Location,
        record: CheckpointRecord,
        *,
        overwrite: bool = True,
        transfer: Transfer | None = None,
        copied: CopiedFiles | None = None,
    ) -> Iterator[None]:
        """Copy a step from another directory into this one, and commit it when the block ends."""
        self.make_room(step, replaces=overwrite)
        target = self.step_location(step)
        with copied_step(source, target, record, overwrite=overwrite, transfer=transfer, copied=copied) as copy:
            yield
            self.ownership.check()
        self.add(step, copy)

    def _sweep(self, location: Location, listing: Location | None = None, *, raises: bool = False) -> None:
        """Remove leftovers of interrupted saves from a step's folder; ``listing`` is a snapshot of the folder."""
        lock = SaveLock(location / PARTIAL)
        try:
            if location.is_link() or is_swept([entry.name for entry in (listing or location).entries()]):
                return
            try:
                marked = lock.take_over()
            except (StorageConflictError, StoragePermissionError) as error:  # a save without a manager may be running
                _logger.warning("%s: not swept: %s", location, error)
                if isinstance(error, StoragePermissionError):
                    self._unswept.add(location)
                return
            if not sweep(location, lock=lock if marked else None) and location.is_local:
                # Remove an empty folder, which a killed run may leave behind. Keep a folder that is newer than the
                # owner file, because another program may be about to fill it. The file system sets both times.
                with contextlib.suppress(OSError):  # usually raised because the folder is not empty
                    if os.lstat(location).st_mtime_ns <= os.stat(self.location / OWNER).st_mtime_ns:
                        os.rmdir(location)
        except StorageError as error:
            if isinstance(error, StorageUnavailableError) or (raises and isinstance(error, StorageFullError)):
                raise
            moved = ""
            # A running save marks its folder with a regular file, so this folder is not in use.
            if location.is_local and is_strange(error):
                with contextlib.suppress(StorageError):
                    moved = "" if has_record(location) else f", but moved to {self._set_aside(location)}"
            _logger.warning("%s: not swept%s: %s", location, moved, error)
        finally:
            lock.release()

    def change(self, step: int, *, pinned: bool | None = None, metrics: Mapping[str, Any] | None = None) -> None:
        with self._changing:
            record = self.record(step) if self._writes else self.stored_record(step)
            # Merge metrics from other programs first, because they would otherwise take precedence over ``metrics``.
            folder = self.step_location(step).name
            added = self._late.files_of(folder)
            record = with_late(record, self._late.of(folder))
            if metrics is not None:
                record = record.with_metrics(metrics)
            if pinned is not None:
                record = replace(record, pinned=pinned)
            if self._writes:
                self.ownership.check()
                self.step_location(step).check_not_link()
                write_record(self.step_location(step), record)
                self._late.remove_files(added)
            self.add(step, record)

    def delete(self, step: int, everywhere: bool) -> None:
        """Delete an intact or damaged step; ``everywhere`` also leaves a tombstone for the other storage tiers."""
        with self._changing:
            if not (self.is_damaged(step) or self.is_stray(step)):
                self.stored_record(step)  # raises an error if the step does not exist
            if everywhere:
                self._add_tombstone(step)
            self._delete(step)

    def delete_after(self, step: int) -> list[int]:
        """Delete all later steps, whether intact or damaged, starting with the last; return them in ascending order."""
        with self._changing:
            self._add_tombstone(step, later=True)
            later = [number for number in self.steps_and_damaged() if number > step]
            for number in reversed(later):
                self._delete(number)
        return later

    def _delete(self, step: int) -> None:
        if self._writes:
            self.ownership.check()
            location = self.step_location(step)
            try:
                if self.is_stray(step):
                    location.remove_tree()
                else:
                    delete_checkpoint(location, self.known_record(step))
            except StorageError as error:
                is_there = (location / RECORD).is_there()
                if not is_there:  # without a record, the step counts as deleted; the next sweep removes its files
                    self.add(step, None)
                if is_there or not is_strange(error):
                    raise
                _logger.warning("%s: this step is deleted, and some of its files stay: %s", location, error)
                self._unswept.add(location)
            self._late.remove(location.name)
        self.add(step, None)

    def make_room(self, step: int, *, replaces: bool = False) -> None:
        """Move a step's folder aside if it cannot be read or replaced; remove a link that is to be replaced."""
        # Delete neither the folder, which may become readable again, nor a link's target, which is outside the run.
        error, folder = self._indexed(step).error, self.step_location(step)
        # A new record file cannot replace a directory, pipe or link of the same name.
        is_blocked = folder.is_local and isinstance(error, DamagedCheckpointError) and not (folder / RECORD).is_file()
        if not (is_blocked or is_unreadable(error) or folder in self._unswept):
            if replaces and step in self.steps_and_damaged() and folder.is_link():
                self._delete(step)
            return
        if self._writes:
            self.ownership.check()
            try:
                moved = self._set_aside(folder)
            except StorageError as refusal:
                raise StorageError(
                    f"{folder}: this step cannot be read ({error}), so it is not replaced but moved aside before it is "
                    f"saved again, and that failed: {refusal}. Repair the file system or remove the folder by hand, or "
                    "let the run continue in another directory"
                ) from refusal
            self._unswept.discard(folder)
            _logger.warning("%s: cannot be read, and is saved again: what was there is now %s", folder, moved)
        self.add(step, None)

    def _set_aside(self, folder: Location) -> str:
        taken = {entry.name for entry in self.location.entries()}
        names = (f"{folder.name}.unreadable{number or ''}" for number in itertools.count())
        return folder.rename(next(name for name in names if name not in taken)).name

    def why_kept(self, step: int) -> tuple[str, ...]:
        kept = reasons(self.infos(), self._rules).get(step, ())
        return kept or tuple(reason for protected, reason in self._protected() if protected == step)[:1]

    def _protected(self) -> Iterator[tuple[int, str]]:
        """Yield the steps that are protected regardless of the retention rules, each with the reason."""
        if self.last_saved is not None:  # not necessarily the newest step: later steps may belong to another branch
            yield self.last_saved, "saved last"
        yield from ((step, "being copied to the mirror") for step in tuple(self._copied))

    def collect(self) -> None:
        """Delete the steps that no retention rule keeps. Failed deletions are logged and retried by the next call."""
        if self._options.best_fn is not None or self._options.keep_checkpoints_without_metrics:
            self.add_late_metrics()
        if any(isinstance(rule, KeepAll) for rule in self._rules):
            return
        records = {step: self.known_record(step) for step in self.steps()}  # read first, to detect later changes
        infos = self.infos()
        kept = {*reasons(infos, self._rules), *(step for step, _ in self._protected())}
        given_up = {step: record for step, record in records.items() if step not in kept and record is not None}
        if given_up:
            self._warn_without_best(infos)
        for step, record in given_up.items():
            try:
                with self._changing:
                    # Leave a step to the next call if it has since been pinned, deleted or given metrics.
                    if self.known_record(step) is record:
                        self._delete(step)
            except (StorageError, OwnershipError) as error:
                _logger.warning("%s: step %d could not be deleted: %s", self.location, step, error)

    def _warn_without_best(self, infos: Sequence[StepInfo]) -> None:
        """Warn once if no step has the metric of ``best_fn``, probably because its name is misspelled."""
        metric = self._options.best_fn
        if metric is None or self._warned or not infos or any(info.value(metric) is not None for info in infos):
            return
        self._warned = True
        _logger.warning(
            "%s: no checkpoint has %s, by which best_fn finds the best (the newest has %s); the newest "
            "are kept in place of the best",
            self.location,
            shown_metric(metric_name(metric)),
            ", ".join(infos[-1].metrics or ()) or "no metrics",
        )
