"""Mirror a run: a thread copies committed steps to a second directory, from which a new run can fetch them.

The mirror has the same layout and commit protocol as the run's directory, a single writer, and its own retention rules.
The thread runs on process 0. It copies the newest step that is due, and skips earlier steps if it falls behind; the
run does not delete a step that is being copied. While the run saves to a local disk, the thread is throttled to a
minimum, except at the end of the run. The thread logs each type of error once, and retries with exponential backoff.
Training waits for the mirror only for a limited time at the end of the run.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
import weakref
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, NamedTuple

from ..checkpoint import CopiedFiles, Transfer, copy_witness
from ..clock import bytes_per_second, seconds
from ..errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    FormatVersionError,
    OptionError,
    OwnershipError,
    StorageError,
)
from ..forks import Lock
from ..format import CheckpointRecord
from ..steps import store_metadata, stored_metadata
from ..storage import Helper, Location
from .copying import follow
from .decisions import Moment, decide
from .directory import RunDirectory
from .options import KEEP_PERIODS, CheckpointManagerOptions, Mirror, save_triggers
from .ownership import NO_LOCAL_STEPS, RunIdentity, stored_options
from .places import Point, StepPlace
from .run import Run

_logger = logging.getLogger("holdfast")

FIRST_PAUSE = 1.0  # seconds before the first retry after an error; each later pause is twice as long
_LONGEST_PAUSE = 300.0
DELETION_WAIT = 30.0  # maximum time in seconds to wait until the mirror has applied an explicit deletion
_FETCH = 86400.0  # maximum time in seconds that other processes wait while process 0 fetches a step
_NICE = 10
_LOOK = 0.2  # seconds between checks of whether the copy can still finish in time
_MARGIN = 1.2  # safety factor for the copy time predicted from the measured rate


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorStatus:
    """The state and current activity of a mirror.

    Attributes:
        path: The path or URL of the mirror.
        step: The newest intact step in the mirror; None if there is none, or if the mirror has not been reached yet.
        copying: The step that is being copied, or None.
        bytes_left: The number of bytes of the run's newest step that the mirror still lacks.
        bytes_per_second: The rate of the last copy, excluding the time of saves; None before the first copy.
        error: Why the last attempt failed, or None if it succeeded.
    """

    path: str
    step: int | None
    copying: int | None
    bytes_left: int
    bytes_per_second: float | None
    error: str | None


class _Phase(Enum):
    """The phases of mirroring, in order."""

    FOLLOWING = auto()  # steps are copied when they are due
    FINISHING = auto()  # the run is ending, so its newest step is copied even if it is not due
    FINISHED = auto()  # no more steps may be committed, but witness records may still be added
    STOPPED = auto()  # nothing more may be written, for example because another run has taken over


class _Copying(NamedTuple):
    record: CheckpointRecord
    transfer: Transfer


class _Obsolete(Exception):  # noqa: N818 - no error
    """Raised to cancel a copy because mirroring ends, or because the step was deleted, replaced or superseded."""


def _mirror_options(mirror: Mirror, run: CheckpointManagerOptions) -> CheckpointManagerOptions:
    periods = {name: getattr(mirror, name) for name in KEEP_PERIODS}
    is_limited = any(value is not None for value in periods.values())
    kept: dict[str, Any] = {**periods, "keep_steps": (), "keep": None} if is_limited else {"keep": run.policies()[1]}
    return replace(
        run,
        mirror=None,
        save=None,
        save_on_best=False,
        save_interval_steps=mirror.save_interval_steps,
        save_interval_secs=mirror.save_interval_secs,
        **kept,
    )


class RunMirror(StepPlace):
    """The mirror of a run; only process 0 reads and writes it."""

    shown = "the mirror"
    writes_directory = True

    def __init__(self, location: Location, mirror: Mirror, run: Run) -> None:
        self.location = location
        self.identity = RunIdentity(mirror=location.url)
        self._run, self._processes, self._clock, self._events = run.steps, run.processes, run.clock, run.events
        self._acquire_run = run.acquire
        if location.overlaps(self._run.location):
            raise OptionError(f"mirror={location} and the directory {self._run.location} must not contain each other")
        self._limit = seconds(mirror.wait_secs)  # seconds to wait for the mirror at the end of the run
        self._options = _mirror_options(mirror, run.options)
        self._triggers = save_triggers(self._options)
        self._bandwidth = None if mirror.max_bandwidth is None else bytes_per_second(mirror.max_bandwidth)
        self._far: RunDirectory | None = None
        self._writes = False  # whether this run owns or is acquiring the mirror; if so, only the thread may reread it
        self._looking = Lock(reentrant=True)  # prevents another thread's stale listing from undoing a deletion
        self._thread: Helper | None = None
        self._wake = threading.Condition()  # guards the attributes below
        self._saving = False  # whether a save to a local disk is in progress
        self._due = False
        self._phase = _Phase.FOLLOWING
        self._refused: set[str] = set()  # fingerprints of steps that are damaged in the run's directory
        self._warned: set[str] = set()  # error types already logged
        self._error: str | None = None
        self._copying: _Copying | None = None
        self._copied = CopiedFiles()
        self._rate: float | None = None  # rate of the last copy, in bytes per second

    @property
    def _owns(self) -> bool:
        return self._writes and self._far is not None and self._far.ownership.held

    @property
    def _has_ended(self) -> bool:
        return self._phase in (_Phase.FINISHED, _Phase.STOPPED)

    # ---- from the mirror to the run

    def newer_steps(self) -> list[int]:
        return self._processes.decide("the newest step of the mirror", self._newer_steps)

    def _newer_steps(self) -> list[int]:
        newest = max(self._run.steps(), default=-1)
        steps = self.steps(required=not self._run.steps_and_damaged())  # a run without steps must read the mirror
        newer = [step for step in reversed(steps) if step > newest]
        far = self._far
        for step in [] if far is None else set(far.steps_and_damaged()).difference(far.steps()):
            if step > max([newest, *newer]):
                _logger.warning("%s: step %d of the mirror is damaged, and not used", self.location, step)
        return newer

    def steps(self, *, required: bool = False) -> list[int]:
        """Return the steps in the mirror, in ascending order; warn and return [] if it cannot be read."""
        try:
            far, tombstones = self._look(), self._run.tombstones
            self._check_same_run(far)
            return [step for step in far.steps() if not tombstones.cover(step, far.known_record(step))]
        except StorageError as error:
            if required:
                error.add_note(
                    f"The mirror {self.location} cannot be read, and {self._run.location} has no checkpoint: whether "
                    "there is one to resume from is unknown, so the run does not start. Try again, or take the option "
                    "mirror away to start from the beginning"
                )
                raise
            self._warn(error, "its steps are not considered")
            return []

    def fetch(self, step: int, overwrite: bool) -> bool:
        self._acquire_run(self)
        fetched = self._processes.decide(f"fetch step {step}", self._copy_here, step, overwrite, work_timeout=_FETCH)
        if fetched and not self._processes.is_primary:
            self._run.reload()
        return fetched

    def _copy_here(self, step: int, overwrite: bool) -> bool:
        """Copy a step into the directory, which this run must own; return whether the directory now has the step."""
        run = self._run
        try:
            far = self._look()
            tombstones = run.tombstones  # read first: a tombstone is cleared only after the mirror deletes the step
            record = far.record(step) if step in far else None
            if record is None or tombstones.cover(step, record):
                return False
            overwrite = overwrite or run.is_damaged(step)
            _logger.info("%s: fetching step %d from the mirror %s", run.location, step, self.location)
            began = time.monotonic()
            with run.receiving(step, far.step_location(step), record, overwrite=overwrite):
                if run.branches and step > max(run.steps_and_damaged(), default=-1):
                    run.note_branches(NO_LOCAL_STEPS)  # local steps are invalid because the run continued elsewhere
        except CheckpointExistsError as error:  # another program may have committed the step during the copy
            run.reload()
            if step not in run:
                _logger.warning("%s: step %d cannot be fetched: %s", self.location, step, error)
            return step in run
        except (DamagedCheckpointError, FormatVersionError, CheckpointNotFoundError) as error:
            _logger.warning("%s: step %d cannot be fetched: %s", self.location, step, error)
            return False
        except StorageError as error:
            if not run.steps():
                raise
            self._warn(error, f"step {step} is not fetched")
            return False
        took = round(time.monotonic() - began, 6)
        self._events.write("fetched", step=step, mirror=str(self.location), bytes=record.nbytes, seconds=took)
        if stored_metadata(run.location) is None:
            store_metadata(run.location, stored_metadata(self.location))
        return True

    # ---- from the run to the mirror

    def reached(self, point: Point, step: int) -> None:
        is_primary = self._processes.is_primary
        with self._wake:
            if point in ("changed", "deleted"):
                self._due = True
                if is_primary and self._thread is None and not self._has_ended:
                    self._thread = Helper(self._work, "holdfast-mirror", daemon=True)
                    self._thread.start()
                    _open.add(self)
            elif point in ("saving", "ended"):
                self._saving = point == "saving" and self._run.location.is_local
            self._changed()
            # If a listener deletes steps on the copying thread, that thread must not wait for itself.
            waits = point == "deleted" and is_primary and threading.current_thread() is not self._thread
            if waits:
                self._wake.wait_for(lambda: not self._run.tombstones or self._error is not None, DELETION_WAIT)
        if waits and self._run.tombstones:
            self._warn_left(self._error or "it has not answered yet")

    def _warn_left(self, why: object) -> None:
        if not self._run.tombstones:
            _logger.warning("%s: pins are not copied to this mirror now (%s); the next run does it", self.location, why)
            return
        text = (
            "%s: %s of %s were deleted, and are still in this mirror (%s). The next run in that directory deletes them "
            "here before it resumes; a run in an empty directory would resume from them"
        )
        _logger.warning(text, self.location, self._run.tombstones, self._run.location, why)

    def settle(self) -> bool:
        """Apply pending deletions and pins to the mirror on this thread; return whether this succeeded."""
        stored = stored_options(self.location)
        if stored is not None:
            self._options = replace(stored, read_only=False, step_prefix=self._options.step_prefix)
        try:
            far = self._look()
            if far.steps_and_damaged():
                of = far.identity.directory
                if of not in (None, self._run.location.url):  # this directory may be a copy of the mirrored directory
                    raise OptionError(f"it is the mirror of the run in {of}")
                far = self._acquire()
                self._delete_covered(far)
                self._follow(far)
        except (StorageError, OwnershipError, OptionError) as error:
            self._warn_left(error)
            return False
        finally:
            self._end()
        return True

    def status(self) -> MirrorStatus:
        copying = self._copying
        return MirrorStatus(
            path=str(self.location),
            step=None if self._far is None else max(self._far.steps(), default=None),
            copying=None if copying is None else copying.record.step,
            bytes_left=self._bytes_left(),
            bytes_per_second=self._rate,
            error=self._error,
        )

    def close(self, *, finished: bool) -> None:
        self.finish(None)

    def finish(self, timeout: float | None) -> bool:
        """Copy the newest step, even if not due, within ``timeout`` seconds (None for ``wait_secs``), and then stop."""
        if not self._processes.is_primary:
            return True
        limit = self._limit if timeout is None else timeout
        if self._phase is _Phase.FINISHED:  # witness records may have been added since mirroring ended
            late = Helper(lambda: self._refresh(self._newest()), "holdfast-mirror", daemon=True)
            late.start()
            late.join(limit)
        elif self._thread is None:  # the manager has only read steps
            self._end()
        elif self._phase is not _Phase.STOPPED:
            deadline = time.monotonic() + limit
            self._enter(_Phase.FINISHING)
            while self._thread.is_alive():
                left = deadline - time.monotonic()
                needed = 0.0 if timeout is None or not self._rate else self._bytes_left() / self._rate * _MARGIN
                if left <= 0 or needed > left:
                    break
                self._thread.join(min(left, _LOOK))
            self._end(_Phase.FINISHED if self._owns else _Phase.STOPPED)
            self._warn_of_lacking()
        return self._lacking() is None

    def _enter(self, phase: _Phase) -> None:
        """Continue with a later phase, unless a newer manager has stopped this mirror."""
        with self._wake:
            self._phase = self._phase if self._phase is _Phase.STOPPED else phase
            self._due = True
            self._changed()

    def _stop(self, timeout: float = 60.0, phase: _Phase = _Phase.STOPPED) -> None:
        """Stop the thread and wait for it; no steps are committed afterwards."""
        self._enter(phase)
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def _end(self, phase: _Phase = _Phase.STOPPED) -> None:
        self._stop(1.0, phase)  # short timeout, because the thread may be waiting for a reply from a store
        _open.discard(self)
        if self._far is not None:
            self._far.ownership.release()

    def _warn_of_lacking(self) -> None:
        """Warn if the mirror lacks the newest step, and name the folder that contains the step."""
        if (record := self._lacking()) is None:
            return
        step = _step_of(record)
        there, folder = self.status().step, self._run.step_location(step)
        newest = "there is no step" if there is None else f"the newest is step {there}"
        why = f" ({self._error})" if self._error else ""
        _logger.warning(
            "%s",
            f"step {step} is in {folder}, and not in the mirror {self.location}, where {newest}{why}: "
            f"{self._bytes_left()} of its {record.nbytes} bytes are missing there. Run the same program again in this "
            f"directory, or copy it: holdfast cp {folder} {self.location / folder.name}",
        )

    # ---- the thread

    def _work(self) -> None:
        if sys.platform == "linux" and self.location.is_local:
            # Do not lower the priority for a remote mirror: TensorStore's threads would inherit it and slow down loads.
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        pause: float | None = None  # retry pause after an error; new steps do not shorten it
        while not self._has_ended:
            is_last = self._wait(pause)
            try:
                self._round()
            except _Obsolete:
                self._due = True
                continue
            except Exception as error:  # errors of the mirror must not stop training
                if self._has_ended:
                    return
                pause = min(_LONGEST_PAUSE, 2 * pause if pause else FIRST_PAUSE)
                if isinstance(error, OptionError):  # the mirror belongs to another run
                    self._warn(error, "this run copies nothing there")
                    return
                if self._writes and not self._owns:
                    self._warn(error, "another run writes there, so that this one copies nothing more")
                    return
                self._warn(error, "it is tried again")
            else:
                pause = None
                if self._error is not None:
                    _logger.info("%s: the mirror works again", self.location)
                self._error = None
                self._warned.clear()
            if is_last:
                return
            self._changed()

    def _wait(self, pause: float | None) -> bool:
        """Wait for work, or for the retry pause after an error; return whether the run is ending."""
        with self._wake:
            self._wake.wait_for(lambda: self._phase is not _Phase.FOLLOWING or (self._due and pause is None), pause)
            self._due = False
            return self._phase is not _Phase.FOLLOWING

    def _changed(self) -> None:
        """Wake all waiting threads; slow the current copy down during a save, or cancel it if it is obsolete."""
        with self._wake:
            self._wake.notify_all()
            if (copying := self._copying) is not None:
                copying.transfer.give_way(self._saving and self._phase is _Phase.FOLLOWING)
                if not self._is_wanted(copying.record):
                    copying.transfer.end(_Obsolete())

    def _is_wanted(self, record: CheckpointRecord) -> bool:
        newest = self._newest()
        is_superseded = self._phase is _Phase.FINISHING and newest is not None and newest.step != record.step
        return self._run.has_copy(record) and not (self._has_ended or is_superseded)

    def _round(self) -> None:
        far = self._acquire()
        while True:
            self._delete_covered(far)  # before any copy, because a deleted step may have been saved again
            self._follow(far)
            if (record := self._next(far)) is None:
                break
            before = max((step for step in far.steps() if step < _step_of(record)), default=-1)
            self._copy(far, record)
            self._refresh(self._run.known_record(before))
        if self._phase is _Phase.FINISHING:
            self._refresh(self._newest())

    def _delete_covered(self, far: RunDirectory) -> None:
        """Delete steps with tombstones from the mirror, last step first, except steps that the run has saved again."""
        tombstones = self._run.settled_tombstones()
        for step in reversed(far.steps_and_damaged()) if tombstones else ():
            record = far.record(step) if step in far else None
            if tombstones.cover(step, record) and (record is None or not self._run.has_copy(record)):
                far.delete(step, everywhere=False)
        self._run.clear_tombstones(tombstones)
        self._changed()

    def _next(self, far: RunDirectory) -> CheckpointRecord | None:
        """Return the record of the newest step if the step is due and missing from the mirror."""
        record = self._lacking()
        if record is None or record.fingerprint in self._refused:
            return None
        step = _step_of(record)
        before = max((earlier for earlier in far.steps() if earlier < step), default=None)
        if self._phase is _Phase.FINISHING or before is None or step in far.steps_and_damaged():
            return record
        moment = Moment(step=step, previous=before, now=record.time, last=far.record(before).time)
        return record if decide(self._triggers, moment) else None

    def _copy(self, far: RunDirectory, record: CheckpointRecord) -> None:
        step = _step_of(record)
        far.sweep_partial(besides=step)
        began = time.monotonic()
        transfer = Transfer(self._bandwidth)
        with self._wake:
            self._copying = _Copying(record, transfer)
            self._changed()
        try:
            with (
                self._run.holding(step),
                far.receiving(step, self._run.step_location(step), record, transfer=transfer, copied=self._copied),
            ):
                if not self._is_wanted(record):
                    raise _Obsolete
        except DamagedCheckpointError as error:
            if not self._run.has_copy(record):
                raise _Obsolete from error
            self._refused.add(record.fingerprint)
            _logger.warning(
                "%s: step %d is damaged, and is not copied to %s: %s", self._run.location, step, self.location, error
            )
            return
        except BaseException:
            far.partial.add(step)
            raise
        finally:
            self._copying = None
        far.last_saved = step
        took = round(time.monotonic() - began, 6)
        self._rate = transfer.rate or self._rate
        self._events.write("mirrored", step=step, mirror=str(self.location), bytes=transfer.sent, seconds=took)
        _logger.info("%s: copied step %d to the mirror", far.step_location(step), step)
        far.collect()
        far.sweep_partial()

    def _follow(self, far: RunDirectory) -> None:
        """Update the metrics and pins of the mirror's steps to match the run's directory."""
        here = {info.step: info for info in self._run.infos()}
        for info in far.infos():
            if info.step in here and info != here[info.step]:
                original, copy = self._run.record(info.step), far.record(info.step)
                if original.fingerprint == copy.fingerprint:
                    far.ownership.check()
                    far.add(info.step, follow(far.step_location(info.step), copy, original))

    def _refresh(self, record: CheckpointRecord | None) -> None:
        """Copy witness records that were added to a step after the step was copied."""
        if self._far is not None and record is not None and self._far.has_copy(record):
            step = _step_of(record)
            copy_witness(self._run.step_location(step), self._far.step_location(step), again=True)

    def _look(self) -> RunDirectory:
        """Return the index of the mirror, rereading it unless this run writes to the mirror."""
        with self._looking:
            if self._far is None:
                self._far = RunDirectory(self.location, self._options, self._clock, self._stop)
            elif not self._writes:
                self._far.reload()
            return self._far

    def _check_same_run(self, far: RunDirectory) -> None:
        """Raise OptionError if the mirror belongs to another run; an empty directory adopts the mirror's identity."""
        ours, theirs = self._run.identity.run, far.identity
        if ours is not None and theirs.run is not None:
            same = ours == theirs.run or not far.steps_and_damaged()
        else:  # one side has no run identity, so compare the steps that both sides have
            common = [step for step in far.steps() if step in self._run]
            same = any(self._run.has_copy(far.record(step)) for step in common)
            same = same or not (common or (theirs.run is not None and self._run.steps()))
        if not same:
            raise OptionError(
                f"mirror={self.location} belongs to another run"
                f"{f', that in {theirs.directory}' if theirs.directory else ''}, and not to the one in "
                f"{self._run.location}: nothing was taken from it, and nothing is copied there. Give each run a mirror "
                "of its own; to continue the run of this mirror, use an empty directory"
            )
        if ours is None and theirs.run is not None and self.identity.run is None:
            self.identity = replace(self.identity, run=theirs.run)
            if theirs.directory not in (None, self._run.location.url) and not self._run.steps():
                _logger.warning(
                    "%s: this directory is empty and continues the run of its mirror %s, which was saved in %s; if it "
                    "is to be another run, give it another mirror",
                    self._run.location,
                    self.location,
                    theirs.directory,
                )

    def _acquire(self) -> RunDirectory:
        """Acquire ownership of the mirror; keep an interrupted copy of the newest step so that it can be completed."""
        if not self._writes:
            with self._looking:
                far = self._look()
                self._check_same_run(far)
                self._writes = True
            belongs = RunIdentity(run=self._run.identity.run, directory=self._run.location.url)
            try:  # without the lock, because this may take a while and other threads only read
                far.acquire(self._run.stored_metadata(), belongs, partial=self._newest())
            except BaseException:
                self._writes = False
                raise
        far = self._look()
        far.ownership.check()
        return far

    # ---- the steps in both places

    def _newest(self) -> CheckpointRecord | None:
        """Return the record of the step that this run saved last, or else of the newest step in its directory."""
        saved, newest = self._run.last_saved, max(self._run.steps(), default=-1)
        return (None if saved is None else self._run.known_record(saved)) or self._run.known_record(newest)

    def _lacking(self) -> CheckpointRecord | None:
        """Return the record of the run's newest step, or None if the mirror is known to have the step."""
        newest = self._newest()
        return None if newest is not None and self._far is not None and self._far.has_copy(newest) else newest

    def _bytes_left(self) -> int:
        lacking, copying = self._lacking(), self._copying
        if lacking is None:
            return 0
        done = copying.transfer.done if copying is not None and copying.record.step == lacking.step else 0
        return lacking.nbytes - done

    # ---- errors

    def _warn(self, error: Exception, then: str) -> None:
        """Log an error as a warning, but only once for each type until the mirror works again."""
        name, self._error = type(error).__name__, str(error) or type(error).__name__
        self._changed()
        if name in self._warned:
            _logger.debug("%s: the mirror still fails: %s", self.location, error)
            return
        self._warned.add(name)
        self._events.write("mirror_failed", mirror=str(self.location), error=self._error)
        prefix = "" if isinstance(error, (StorageError, OwnershipError, OptionError)) else f"{name}: "
        text = "%s: the mirror failed, and %s; training continues, and its steps are in %s: %s%s"
        _logger.warning(text, self.location, then, self._run.location, prefix, error)


def _step_of(record: CheckpointRecord) -> int:
    assert record.step is not None
    return record.step


_open: weakref.WeakSet[RunMirror] = weakref.WeakSet()
os.register_at_fork(after_in_child=_open.clear)  # a forked child does not own the mirrors


@atexit.register
def _warn_at_exit() -> None:
    """Warn about steps missing from mirrors whose managers were not closed."""
    for mirror in list(_open):
        mirror._warn_of_lacking()
