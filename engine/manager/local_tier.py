"""Save local steps to the memory or disk of each host, with copies on other hosts.

The files of a local step are distributed over the hosts. In the run's folder, ``<url>/<run>``, each host stores the
files of its own processes in ``own/<folder>``, and copies of other hosts' files in ``copies/<folder>``. Process 0
merges the index as in any save, so the index and the commit record are on process 0's host and on the hosts that
keep copies of its files. After all files and copies have been written, process 0 writes the commit record, and older
steps are removed. At the next start, `local_steps` finds the newest step.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

from ..checkpoint import BackgroundSave, ItemToSave, Save, leave_save
from ..clock import seconds
from ..distributed import Rendezvous, missed_a_process
from ..errors import OwnershipError, PeerFailedError, StorageError
from ..forks import Lock
from ..format import PARTIAL, RECORD
from ..storage import Buffer, Location, parallel_map
from .events import described
from .intervals import passes
from .items import PendingSave, StepContent
from .local_steps import COPIES, OWN, LocalHosts, WholeStep, files_in, is_on_line, sequence_of
from .options import Local, LocalStatus
from .ownership import LocalBranch
from .peers import PIECE
from .places import Point, StepPlace
from .run import Run, failing_together

_logger = logging.getLogger("holdfast")

_KEPT = 2  # number of local steps to keep
_BRANCHES = 8  # maximum number of branches in the history; the kept steps span fewer
_SENDERS = 4  # number of files that a host sends concurrently
_SILENCE = 60.0  # minimum time in seconds between two ``saved_locally`` events


class LocalHistory(NamedTuple):
    """A numbered version of a run's history, with its recent branches. Later versions have larger numbers."""

    number: int
    branches: tuple[LocalBranch, ...]


class LocalTier(StepPlace):
    """The local steps of a run. All processes must call the methods in the same order."""

    shown = "the local places of the hosts"

    # The history changes on the program's thread: when a step is restored before any step has been reported, and when a
    # reported step shows that the program went back. A save uses the history as of its start. Process 0 stores this
    # history just before the commit; until then, steps of an abandoned branch remain valid.

    def __init__(self, options: Local, run: Run) -> None:
        self.url, self._options = options.url, options
        self._run, self._steps = run, run.steps
        self._processes, self._clock, self._events = run.processes, run.clock, run.events
        self._previous: int | None = None  # the step from which the interval to the next local save is measured
        self._seen: int | None = None  # the last step that the program reported
        self._before: int | None = None  # the step reported before ``_seen``; None if the run has gone back since
        self._newest = -1  # the highest local step in the history
        # A step restored since the last reported step, perhaps only for inspection, and whether it is a local step.
        self._restored: tuple[int, bool] | None = None
        self.background = BackgroundSave(seconds(run.options.save_timeout_secs))
        self._lost: Exception | None = None  # error of a save in which a process was lost; the next save raises it
        self._error: str | None = None
        self._warned: set[type[Exception]] = set()
        self._saves = 0  # number of saves since the last ``saved_locally`` event
        self._last_event: float | None = None  # monotonic time of the last ``saved_locally`` event
        self._kept: dict[str, int] = {}  # valid local steps by folder name, in ascending order
        self._hosts = LocalHosts(options, run.steps, run.processes)
        self._sequence = self._hosts.sequence
        self._history = LocalHistory(0, ())
        self._continue_after(-1, ())
        self._saving = self._history, self._history  # histories before and after the commit of a save to the directory
        self._noted = 0  # number of the last stored history
        self._noting = Lock()  # guards the history and the kept steps against concurrent local and directory saves
        self._saved: frozenset[int] = frozenset()  # local steps that this run has saved and the next launch can read
        if self._hosts.newest is not None:
            self._read(self._hosts.newest)

    @property
    def unused(self) -> Mapping[int, str]:
        return self._hosts.unused

    def steps(self) -> Collection[int]:
        return self._hosts.further

    def fetch(self, step: int, overwrite: bool) -> bool:
        whole = self._hosts.take(step) if step in self._hosts.further else None
        if whole is not None:
            self._read(whole)
        return whole is not None

    # ---- saving

    def due(self, step: int) -> bool:
        self._see(step)
        if self._previous is None:
            self._previous = step - 1
        return passes(self._options.every, step, self._previous)

    def restored(self, step: int) -> dict[str, Any]:
        is_local = step in self._steps.borrowed
        if self._seen is None:
            self._previous = step
            self._continue_after(step, self._hosts.program.branches if is_local else ())
        else:
            self._restored = step, is_local
        received = sum(peer.bytes_read for peer in self._hosts.peers.values())
        return {"local": True, "peer_bytes": received} if is_local else {}

    def _see(self, step: int, *, again: bool = False) -> None:
        """Note a step reported by the program; start a branch if the run went back or saves the step ``again``."""
        # Decide on local saves from reported steps only, because restores may differ between processes.
        last, self._seen = self._seen, step
        restored, self._restored = self._restored, None
        if last is None or step > last:
            self._before = last
            return
        is_same = step == last
        if is_same and restored is not None and self._before is not None and restored[0] < self._before:
            restored = None  # only inspected: after resuming from it, the run would have reported an earlier step
        if is_same and restored is None and not again:
            return
        if not is_same:
            self._before = None
            self._previous = None if self._previous is None else min(self._previous, step - 1)
        if restored is not None:
            number, is_local = restored
            # A step restored from the directory is complete, so no earlier local step is needed.
            self._continue_after(min(number, step - 1), self._history.branches if is_local else ())
        elif step <= self._newest:
            self._continue_after(step - 1, self._history.branches)

    def _continue_after(self, step: int, before: tuple[LocalBranch, ...]) -> None:
        """Start a branch after a step that was reached through the branches ``before``."""
        branch = LocalBranch(self._hosts.program.attempt, self._sequence, step)
        branches = (*(earlier for earlier in before if earlier.after < step), branch)[-_BRANCHES:]
        self._history = LocalHistory(self._history.number + 1, branches)
        self._newest = step

    def _read(self, whole: WholeStep) -> None:
        """Keep a local step, and make it available for restores."""
        self._kept = dict(sorted({**self._kept, whole.folder: whole.step}.items(), key=itemgetter(1)))
        self._steps.borrowed = {**self._steps.borrowed, whole.step: self._hosts.opened(whole)}

    def place_of(self, step: int) -> Location:
        """Return the folder of a kept step on this host."""
        (*_, folder) = (folder for folder, kept in self._kept.items() if kept == step)
        return self._hosts.step_folder(folder)

    def drop(self, step: int, damage: str) -> None:
        self._steps.borrowed = {other: stored for other, stored in self._steps.borrowed.items() if other != step}
        self._hosts.unused[step] = damage

    def elsewhere(self, step: object) -> str:
        where = f"; the hosts have step {step} in {self._options.url}"
        if step in self._saved:
            return f"{where}, where only a new start of the program reads it, since this one has saved local steps"
        if step not in self._hosts.left:
            return ""
        newest = max([*self._steps.borrowed, *self._steps.steps()], default=None)
        way = "" if newest is None else f"; without a number, the run resumes from step {newest}"
        return (
            f"{where}, but it does not count: since it was saved, the run has continued from an earlier step or "
            f"without local steps, or steps of it were deleted{way}"
        )

    def reached(self, point: Point, step: int) -> None:
        if point == "saving":
            self._steps.borrowed = {other: stored for other, stored in self._steps.borrowed.items() if other < step}
            before, last = self._history, self._seen
            self._see(step, again=True)
            # If a step is saved again, the local step remains valid until its replacement is committed.
            self._saving = before if step == last else self._history, self._history
        elif point == "commit":
            self.note(self._saving[0])
        elif point == "committed":
            history = self._saving[1]
            if self._processes.is_primary:
                try:
                    self.note(history)
                except (StorageError, OwnershipError) as error:  # not fatal, because the commit has succeeded
                    _logger.debug("%s: the history after step %d is not noted: %s", self._steps.location, step, error)
            with self._noting:
                self._keep(_on_line(self._kept, history))
        elif point == "deleted":
            self._continue_after(-1, ())
            self._keep({})
            self._forget_found()

    def note(self, history: LocalHistory) -> None:
        """Store a history, which invalidates all local steps outside of it; called on process 0 before each commit."""
        with self._noting:
            if history.number >= self._noted:  # if equal, store it again: a fetch from the mirror may have replaced it
                self._steps.note_branches(history.branches)
                self._noted = history.number

    def _keep(self, kept: dict[str, int]) -> None:
        self._kept, self._saved = kept, frozenset(kept.values())

    def _forget_found(self) -> None:
        self._steps.borrowed = {}
        self._hosts.forget()

    def save(
        self,
        content: StepContent,
        due_items: Callable[[StepContent], Mapping[str, ItemToSave]],
    ) -> bool:
        """Save a step locally if it is due, writing and copying files in the background; return whether it was due."""
        began, step = time.perf_counter(), content.step
        if not self.due(step):
            return False
        rendezvous = self._begin(step)
        with contextlib.ExitStack() as stack:
            with failing_together(rendezvous):
                stack.enter_context(self._run.idle(self.background))
                self._run.acquire()
                if not self._has_folder(step, rendezvous):
                    return True
                values = due_items(content)
                pending = PendingSave(content, f"every {self._options.every} steps")
            folder = f"{self._sequence:08d}.{step}.{self._hosts.program.attempt}"
            if self._hosts.leads:
                try:
                    self._remove_uncounted(folder)  # before the save, because invalid steps may fill the disk
                except StorageError as error:
                    _logger.debug("%s: local steps that do not count are not removed: %s", self._hosts.space, error)
            save = Save(
                self._hosts.step_folder(folder),
                {name: item._replace(reuse=None) for name, item in values.items()},
                overwrite=True,
                owned=True,
                began=began,
                rendezvous=rendezvous,
                timeout=self._processes.timeout,
                shared=False,
            )
            complete = partial(self._complete, save, pending, folder, self._history, rendezvous)
            try:
                if save.in_background:
                    self.background.start(complete, what=f"the local step {step}", step=step)
                else:
                    complete()
            except BaseException as error:  # an interrupt, or a failure to start a thread
                save.give_up(error)
                raise
        return True

    def miss(self, step: int, error: BaseException) -> None:
        """Report to the other processes immediately that this one has failed and cannot take part in a local save."""
        if self.due(step):
            leave_save(self._begin(step), error)

    def _begin(self, step: int) -> Rendezvous | None:
        """Count a save, before any operation that may fail, so that the count is the same on all processes."""
        self._previous = self._newest = step
        self._sequence += 1
        self._forget_found()  # this save removes older local steps
        return self._processes.rendezvous("local save")

    def _has_folder(self, step: int, rendezvous: Rendezvous | None) -> bool:
        """Create the run's folder on all hosts at the first save; return False if a process cannot create it."""
        lost, self._lost = self._lost, None
        if lost is not None:
            raise lost  # otherwise, this save would run into the same timeout again
        if self._hosts.space is None:
            try:
                self._hosts.make_folder(rendezvous)
            except (StorageError, PeerFailedError) as error:
                if missed_a_process(error):  # the coordination store may be unreachable
                    raise
                self._failed(step, error)
                leave_save(rendezvous, error)
        return self._hosts.space is not None

    def _complete(
        self,
        save: Save,
        pending: PendingSave,
        folder: str,
        history: LocalHistory,
        rendezvous: Rendezvous | None,
        awaited: threading.Event | None = None,
    ) -> None:
        step, timeout = pending.step, self._processes.timeout
        try:
            with save.completing() as claimed:
                if not claimed:
                    return
                items = save.write(awaited)
                if rendezvous is not None:
                    rendezvous.broadcast("merged", b"", timeout, gathered=True)  # wait for all processes' files
                sent = self._send_copies(folder) if self._hosts.leads else 0
                if rendezvous is not None:
                    rendezvous.gather("copied", b"", timeout)
                record = None
                if items is not None:
                    record = pending.record(items, self._clock.now())
                    content = record.encode()
                    self._check_owner()
                    self.note(history)
                    for number in self._hosts.copies:
                        path = f"{COPIES}/{folder}/{RECORD}"
                        self._hosts.send(number, path, len(content), lambda: [memoryview(content)])
                record, report = save.commit(record)
            with self._noting:
                before = list(_on_line(self._kept, history).items())
                self._keep(dict([*before[-(_KEPT - 1) :], (folder, step)]))
            if self._run.committed is not None:
                self._run.committed(self.place_of(step), record)
            if self._hosts.leads:
                self._remove_uncounted(folder)
        except Exception as error:  # training continues, because the directory still has its steps
            self._failed(step, error)
            return
        self._error = None
        self._warned.clear()
        _logger.debug("local %s", report)
        self._saves += 1
        now = self._clock.monotonic()
        if self._last_event is None or now - self._last_event >= _SILENCE:
            self._events.write(
                "saved_locally",
                step=step,
                saves=self._saves,
                bytes=report.bytes,
                copied_bytes=sent,
                blocked_seconds=round(report.blocked_seconds, 6),
                total_seconds=round(report.total_seconds, 6),
            )
            self._last_event, self._saves = now, 0

    def _check_owner(self) -> None:
        """Raise OwnershipError on process 0 if another run has taken over the directory and this local folder."""
        try:
            self._steps.ownership.check()
        except StorageError as error:  # local saves must also work while the storage is unavailable
            _logger.debug("%s: whether this run still owns it is not known: %s", self._steps.location, error)

    def _failed(self, step: int, error: Exception) -> None:
        self._error = described(error)
        if missed_a_process(error):
            self._lost = error
        self._events.write("local_failed", step=step, error=self._error)
        level = logging.DEBUG if type(error) in self._warned else logging.WARNING
        text = "%s: the local save of step %d failed; training continues, and its steps are in %s: %s"
        _logger.log(level, text, self._hosts.root, step, self._steps.location, error)
        self._warned.add(type(error))

    def _send_copies(self, name: str) -> int:
        """Send a step's files to the hosts that keep copies; return the number of bytes sent."""
        folder = self._hosts.step_folder(name)
        files = [(path, size) for path, size in files_in(folder) if path != PARTIAL]
        work = [(number, path, size) for number in self._hosts.copies for path, size in files]

        def send(copy: tuple[int, str, int]) -> None:
            number, path, size = copy
            self._hosts.send(number, f"{COPIES}/{name}/{path}", size, lambda: _pieces(folder / path, size))

        parallel_map(send, work, _SENDERS, name="holdfast-copies")
        return sum(size for _, _, size in work)

    def _remove_uncounted(self, newest: str) -> None:
        """Remove local steps left on this host by failed saves or by previous launches of the program."""
        for where in (OWN, COPIES):
            for entry in self._hosts.step_folder(newest, where).parent.entries():
                if entry.name not in self._kept and sequence_of(entry.name) < sequence_of(newest):
                    _remove(self._hosts.step_folder(entry.name, where))

    # ---- the end

    def status(self) -> LocalStatus:
        names = [host.name for host in self._hosts.program.hosts]
        return LocalStatus(
            path=self._hosts.root.url,
            step=max(self._kept.values(), default=None),
            hosts=len(names),
            copies_on=tuple(names[number] for number in self._hosts.copies),
            error=self._error,
        )

    def close(self, *, finished: bool) -> None:
        """Stop serving files. Remove local steps if the run finished and its directory has a step at least as new."""
        try:
            self.background.join()
        finally:
            self._hosts.disconnect()
        last = max(self._kept.values(), default=None)
        saved = max(self._steps.steps(), default=-1)
        space = self._hosts.space
        if finished and self._hosts.leads and space is not None and last is not None and saved >= last:
            _remove(space)


def _pieces(file: Location, size: int) -> Iterator[memoryview]:
    buffer = Buffer()
    with file.open_data(cached=True) as reader:
        for start in range(0, size, PIECE):
            yield reader.read(start, min(PIECE, size - start), buffer).data


def _on_line(kept: Mapping[str, int], history: LocalHistory) -> dict[str, int]:
    return {folder: step for folder, step in kept.items() if is_on_line(folder, history.branches)}


def _remove(folder: Location) -> None:
    """Remove a local step, starting with its commit record so that a partly removed step is never valid."""
    try:
        (folder / RECORD).remove()
        folder.remove_tree()
    except StorageError as error:
        _logger.warning("%s: this local step could not be removed, the next one will try again: %s", folder, error)
