"""The saves of a run: whether one is due, its snapshot, and the work after its commit."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..checkpoint import Save, leave_save
from ..distributed import Rendezvous
from ..errors import SaveFailedError
from ..format import CheckpointRecord, ItemRecord
from ..steps import LEFT_BEHIND
from ..storage import Location
from .decisions import AbandonedSteps, Decision, SaveDecisions
from .events import described, few
from .intervals import passes
from .items import ItemSet, PendingSave, StepContent
from .metrics import MetricWatch, named, plain_containers
from .ownership import NO_LOCAL_STEPS
from .retention import StepInfo, newest_with
from .run import Run

if TYPE_CHECKING:
    from .local_tier import LocalTier

_logger = logging.getLogger("holdfast")


class Saves:
    """Saves steps one after the other, in the caller's thread or in the background."""

    def __init__(
        self,
        run: Run,
        items: ItemSet,
        decisions: SaveDecisions,
        abandoned: AbandonedSteps,
        local: LocalTier | None,
    ) -> None:
        self._run = run
        self._steps = run.steps
        self._options = run.options
        self._processes = run.processes
        self._background = run.background
        self._events = run.events
        self._observer = run.observer
        self._local = local
        self._items = items
        self._decisions = decisions
        self._abandoned = abandoned
        self.committed: Callable[[Location, CheckpointRecord], None] | None = None  # called after each commit
        self._pending: PendingSave | None = None  # the save that is under way
        self._has_told_of_repeated = False
        self._watch: MetricWatch | None = None  # None once the metric that ranks checkpoints has come
        if self._options.best_fn is not None and self._processes.is_primary:
            self._watch = MetricWatch(self._options.best_fn, str(self._steps.location))

    def decide(self, step: int, metrics: Any) -> Decision:
        """Return whether a save is due, and the reason."""
        self._observer.reached("step", step)
        if metrics is not None:
            metrics = named(metrics)
            if self._options.save_on_best and callable(self._options.best_fn):
                metrics = plain_containers(metrics)
        # A function of the metrics fetches them from the device: it is called only where a trigger calls it as well.
        if self._watch is not None and (isinstance(self._options.best_fn, str) or self._options.save_on_best):
            self.note_metrics(step, metrics)
        decision = self._decisions.decide(step, metrics, saved=self._is_saved(step), earlier=self._earlier())
        if decision.save and self._steps.is_stray(step):
            return Decision(False, f"{self._steps.step_location(step)} is no checkpoint, and is left alone")
        return decision

    def _is_saved(self, step: int) -> bool:
        """Return whether a step is saved, or being saved, and not one to replace."""
        is_pending = self._pending is not None and self._pending.step == step
        return is_pending or (step in self._steps and not self._abandoned.replaces(step))

    def note_metrics(self, step: int, metrics: Mapping[str, Any] | None) -> None:
        """Warn, once, of metrics without the one that ranks checkpoints."""
        best_fn = self._options.best_fn
        if self._watch is not None and best_fn is not None:
            self._watch.note(step, metrics, (info.value(best_fn) for info in self._steps.infos()))
            self._watch = None if self._watch.ended else self._watch

    def item_due(self, item: str, step: int) -> bool:
        """Return whether a save at a step has an item."""
        interval = self._options.item_intervals.get(item)
        previous = newest_with(item, self._steps.infos(), step)
        return interval is None or previous is None or passes(interval, step, previous)

    def _items_left_out(self, step: int) -> list[str]:
        """Return the items that a save at a step leaves out; process 0 knows."""
        if not self._options.item_intervals:
            return []

        left_out: list[str] = self._processes.decide(
            f"items of step {step}",
            lambda: [name for name in self._options.item_intervals if not self.item_due(name, step)],
        )
        return left_out

    def _earlier(self) -> Sequence[StepInfo]:
        """Return the steps that a new best must beat, the one that is being saved among them."""
        pending = self._pending
        if pending is None or not self._options.save_on_best:
            return self._steps.infos()
        return *self._steps.infos(), StepInfo(step=pending.step, time=self._run.clock.now(), metrics=pending.metrics)

    # ---- one save

    def save(self, content: StepContent, force: bool, reason: str | None) -> bool:
        """Save a step if that is due; return whether it was."""
        began = time.perf_counter()
        step = content.step
        decision = Decision(True, "forced") if force else self.decide(step, content.metrics)
        replaces = force or self._steps.is_damaged(step) or self._abandoned.replaces(step)
        if not decision.save:
            if not self._has_told_of_repeated and self._is_saved(step) and self._processes.is_primary:
                self._has_told_of_repeated = True
                text = "save(%d) returned False, and what it was given is not saved: %s. force=True replaces it"
                _logger.warning(text, step, decision.reason)
            return False
        self._run.acquire()
        if self._steps.is_stray(step) and (reason is not None or not force):  # An explicit save is refused.
            return False
        if force:
            self._observer.reached("step", step)  # decide() was perhaps not called for this step
        self._background.join()
        with self._run.changing:
            self._background.join()  # another thread may have saved meanwhile
            self._run.check_writable()
            if self._background.has_missed_a_process and (lost := self._background.take_error()) is not None:
                self._processes.fail("save", lost)  # this save would wait as long again
                raise lost
            left_out = [] if force else self._items_left_out(step)
            rendezvous = self._processes.rendezvous("save")
            try:
                with _told(rendezvous):
                    # What fails on one process only comes after this, so that all have the same local steps to read.
                    self._run.tell("saving", step)
                    self._steps.ownership.check(at_once=True)
                    self._steps.make_room(step, replaces=replaces)
                    pending = PendingSave(content, reason or decision.reason)
                    # A callback, which gives the reason, has called decide() before.
                    if reason is None or not isinstance(self._options.best_fn, str):
                        self.note_metrics(step, pending.metrics)
                    values = self._items.to_save(content, left_out)
                save = Save(
                    self._steps.step_location(step),
                    values,
                    overwrite=True,  # a superseded run has committed a step that is there and was not due
                    owned=True,
                    began=began,
                    rendezvous=rendezvous,
                    timeout=self._processes.timeout,
                )
            except BaseException:
                self._run.tell("ended", step)
                raise
            if save.replaces and not replaces:
                _logger.warning(
                    "%s: step %d was committed by another run since this one has looked, and is replaced",
                    self._steps.location,
                    step,
                )
            earlier: SaveFailedError | None = None
            try:
                self._observer.reached("saving", step)  # here, so that a drill knows of a thread that has not begun
                later = self._steps.steps_after(step)
                self._abandoned.saving(step, later, leaves=LEFT_BEHIND in (content.custom_metadata or {}))
                self._decisions.save_begins(step)
                self._pending = pending
                if not save.in_background:
                    self._complete(pending, save)
                earlier = self._background.take_error()
                if save.in_background:
                    what = f"step {step} of {self._steps.location}"
                    self._background.start(functools.partial(self._complete, pending, save), what=what, step=step)
            except BaseException as error:  # an interrupt, or the system has no more threads
                if save.give_up(error):
                    self._ended(pending, failed=True)
                    self._observer.reached("save_failed", step)
                if earlier is not None:
                    error.add_note(str(earlier))
                raise
            if earlier is not None:
                raise earlier
            return True

    def save_locally(self, content: StepContent) -> bool:
        """Save a step in the local places of the hosts, if that is due; return whether it was."""
        began, step = time.perf_counter(), content.step
        local = self._local
        if local is None or not local.due(step):
            return False
        rendezvous = local.begin(step)
        with self._run.changing:
            with _told(rendezvous):
                self._run.acquire()
                if not local.ready(step, rendezvous):
                    return True
                left_out = self._items_left_out(step)
                pending = PendingSave(content, local.reason)
                values = self._items.to_save(content, left_out)
            local.save(pending, values, rendezvous, began, self.committed)
        return True

    def miss(self, error: BaseException) -> None:
        """Tell the other processes at once that this one, which has failed before, takes no part in a save."""
        leave_save(self._processes.rendezvous("save"), error)

    def miss_locally(self, step: int, error: BaseException) -> None:
        """As `miss`, where a local save is due at a step."""
        if self._local is not None and self._local.due(step):
            leave_save(self._local.begin(step), error)

    def _complete(self, pending: PendingSave, save: Save, awaited: threading.Event | None = None) -> None:
        """Write and commit a save, then delete what no rule keeps."""
        step = pending.step
        try:
            with save.completing() as claimed:
                if not claimed:  # an interrupt has ended the save before this thread began
                    return
                self._items.save_begins(step, self._steps)
                items = save.write(awaited)
                record, report = save.commit(None if items is None else self._record(pending, items))
        except BaseException as error:
            self._ended(pending, failed=True)
            self._observer.reached("save_failed", step)
            self._events.write("save_failed", step=step, error=described(error))
            raise
        slowed = self._decisions.slowed(report.total_seconds - report.blocked_seconds)
        self._steps.add(step, record)
        self._steps.last_saved = step
        self._run.tell("committed", step)
        self._abandoned.saved(step)
        self._ended(pending, failed=False)
        _logger.info("%s", report)
        self._events.write(
            "saved",
            step=step,
            reason=report.reason,
            bytes=report.bytes,
            shared_bytes=report.shared_bytes,
            blocked_seconds=round(report.blocked_seconds, 6),
            total_seconds=round(report.total_seconds, 6),
            **({} if slowed is None else {"slowed_seconds": round(slowed, 6)}),
            metrics=few(record.metrics),
        )
        self._run.report_interval()
        if self.committed is not None:
            self.committed(self._steps.step_location(step), record)
        self._observer.reached("committed", step)
        try:
            with self._items.steps_deleted():
                self._steps.collect()
            self._run.tell("changed", step)
        except Exception as error:
            raise SaveFailedError(
                f"step {step} of {self._steps.location} is saved, but best_fn failed then: {error!r}",
                step,
            ) from error

    def _record(self, pending: PendingSave, items: Mapping[str, ItemRecord]) -> CheckpointRecord:
        """Make the commit record right before the commit, after a last check of the ownership."""
        self._steps.ownership.check()
        if self._local is None:
            self._steps.note_branches(NO_LOCAL_STEPS)
        self._run.tell("commit", pending.step)
        self._observer.reached("commit", pending.step)
        return pending.record(items, self._run.clock.now())

    def _ended(self, pending: PendingSave, *, failed: bool) -> None:
        self._run.tell("ended", pending.step)
        self._decisions.save_ended(failed=failed)
        self._pending = None
        pending.close()

    # ---- changes of what was saved

    def record_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Store metrics with a step that was saved or is being saved."""
        self.note_metrics(step, metrics)
        self._run.acquire()
        recorded = self._processes.decide(f"metrics of step {step}", self._add_metrics, step, metrics)
        if recorded is None:
            return
        if not self._processes.is_primary:
            self._change_metrics(step, recorded)
        changing = self._run.changing
        if changing.acquire(blocking=False):  # a save that is under way, or begins, deletes old steps at its end
            try:
                if not self._background.running:
                    self._background.start(
                        lambda _: self._steps.collect(), what=f"{self._steps.location}: deleting old steps"
                    )
            finally:
                changing.release()

    def _add_metrics(self, step: int, metrics: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Add metrics to a step; return None where the save that is under way will store them."""
        pending = self._pending
        if pending is not None and pending.step == step and pending.add(metrics):
            return None
        self._change_metrics(step, metrics)
        return metrics

    def deleted(self) -> None:
        """Count the next save from the newest step that is left."""
        self._decisions.deleted(max(self._steps.steps(), default=0))

    def join_save_of(self, step: int) -> None:
        """Wait for the save of a step, if it is under way."""
        pending = self._pending
        if pending is not None and pending.step == step:
            self._background.join()

    def _change_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.join_save_of(step)
        self._steps.add_late_metrics()
        self._steps.change(step, metrics=metrics)
        self._events.write("metrics", step=step, metrics=few(metrics))
        self._run.tell("changed", step)


@contextlib.contextmanager
def _told(rendezvous: Rendezvous | None) -> Iterator[None]:
    """Tell the other processes at once if a block fails, after which this one takes no part in the save."""
    try:
        yield
    except BaseException as error:
        leave_save(rendezvous, error)
        raise
