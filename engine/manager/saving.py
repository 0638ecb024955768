"""Save the steps of a run: decide whether a save is due, take a snapshot, commit it, and update the run afterwards."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..checkpoint import ItemToSave, Save
from ..errors import SaveFailedError
from ..format import CheckpointRecord, ItemRecord
from ..steps import LEFT_BEHIND
from .decisions import AbandonedSteps, Decision, SaveDecisions
from .events import described, few
from .intervals import passes
from .items import ItemSet, PendingSave, StepContent
from .metrics import MetricWatch, named, plain_containers
from .ownership import NO_LOCAL_STEPS
from .retention import StepInfo, newest_with
from .run import Run, failing_together

_logger = logging.getLogger("holdfast")


@dataclass(slots=True)
class SaveQueue:
    """Saves steps one at a time, on the caller's thread or in the background."""

    run: Run
    items: ItemSet
    decisions: SaveDecisions
    abandoned: AbandonedSteps
    _pending: PendingSave | None = None  # the save in progress
    _warned_of_repeated: bool = False
    _watch: MetricWatch | None = None  # None once the ranking metric has been reported

    def __post_init__(self) -> None:
        best_fn = self.run.options.best_fn
        if best_fn is not None and self.run.processes.is_primary:
            self._watch = MetricWatch(best_fn, str(self.run.steps.location))

    def decide(self, step: int, metrics: Any) -> Decision:
        self.run.observer.reached("step", step)
        if metrics is not None:
            metrics = named(metrics)
            if self.run.options.save_on_best and callable(self.run.options.best_fn):
                metrics = plain_containers(metrics)
        # A best_fn function fetches metrics from the device, so call it only if a trigger also calls it.
        if isinstance(self.run.options.best_fn, str) or self.run.options.save_on_best:
            self.note_metrics(step, metrics)
        decision = self.decisions.decide(step, metrics, saved=self._is_saved(step), earlier=self._earlier())
        if decision.save and self.run.steps.is_stray(step):
            return Decision(False, f"{self.run.steps.step_location(step)} is no checkpoint, and is left alone")
        return decision

    def _is_saved(self, step: int) -> bool:
        """Return whether a step has been or is being saved, and must not be replaced."""
        is_pending = self._pending is not None and self._pending.step == step
        return is_pending or (step in self.run.steps and not self.abandoned.replaces(step))

    def note_metrics(self, step: int, metrics: Mapping[str, Any] | None) -> None:
        """Warn once if the metrics do not include the metric that ranks checkpoints."""
        watch, infos = self._watch, self.run.steps.infos()
        if watch is not None and watch.note(step, metrics, (info.value(watch.metric) for info in infos)):
            self._watch = None

    def item_due(self, item: str, step: int) -> bool:
        interval = self.run.options.item_intervals.get(item)
        previous = newest_with(item, self.run.steps.infos(), step)
        return interval is None or previous is None or passes(interval, step, previous)

    def _items_left_out(self, step: int) -> list[str]:
        """Return the items that are not due at a step, as decided by process 0."""
        intervals = self.run.options.item_intervals
        if not intervals:
            return []
        label = f"items of step {step}"
        return self.run.processes.decide(label, lambda: [item for item in intervals if not self.item_due(item, step)])

    def due_items(self, content: StepContent) -> dict[str, ItemToSave]:
        return self.items.to_save(content, self._items_left_out(content.step))

    def _earlier(self) -> Sequence[StepInfo]:
        """Return the steps that a new best step must beat, including the step that is being saved."""
        pending = self._pending
        if pending is None or not self.run.options.save_on_best:
            return self.run.steps.infos()
        return *self.run.steps.infos(), StepInfo(step=pending.step, time=self.run.clock.now(), metrics=pending.metrics)

    # ---- one save

    def save(self, content: StepContent, force: bool, reason: str | None) -> bool:
        began = time.perf_counter()
        step = content.step
        decision = Decision(True, "forced") if force else self.decide(step, content.metrics)
        replaces = force or self.run.steps.is_damaged(step) or self.abandoned.replaces(step)
        if not decision.save:
            if not self._warned_of_repeated and self._is_saved(step) and self.run.processes.is_primary:
                self._warned_of_repeated = True
                text = "save(%d) returned False, and what it was given is not saved: %s. force=True replaces it"
                _logger.warning(text, step, decision.reason)
            return False
        self.run.acquire()
        if self.run.steps.is_stray(step) and (reason is not None or not force):  # a forced save raises an error later
            return False
        if force:
            self.run.observer.reached("step", step)  # decide() may not have been called for this step
        with self.run.idle(self.run.background):
            self.run.check_writable()
            if self.run.background.has_missed_a_process and (lost := self.run.background.take_error()) is not None:
                self.run.processes.fail("save", lost)  # otherwise, this save would run into the same timeout
                raise lost
            left_out = [] if force else self._items_left_out(step)
            rendezvous = self.run.processes.rendezvous("save")
            try:
                with failing_together(rendezvous):
                    # Notify first: later calls may fail on a single process, but all processes must see the same steps.
                    self.run.notify("saving", step)
                    self.run.steps.ownership.check(at_once=True)
                    self.run.steps.make_room(step, replaces=replaces)
                    pending = PendingSave(content, reason or decision.reason)
                    # Only callbacks pass a reason, and they have already called decide().
                    if reason is None or not isinstance(self.run.options.best_fn, str):
                        self.note_metrics(step, pending.metrics)
                    values = self.items.to_save(content, left_out)
                save = Save(
                    self.run.steps.step_location(step),
                    values,
                    overwrite=True,  # unless ``replaces`` is set, an existing step is from a superseded run
                    owned=True,
                    began=began,
                    rendezvous=rendezvous,
                    timeout=self.run.processes.timeout,
                )
            except BaseException:
                self.run.notify("ended", step)
                raise
            if save.replaces and not replaces:
                text = "%s: step %d was committed by another run since this one has looked, and is replaced"
                _logger.warning(text, self.run.steps.location, step)
            earlier: SaveFailedError | None = None
            try:
                self.run.observer.reached("saving", step)  # first, because the saving thread reports the later points
                later = self.run.steps.steps_after(step)
                self.abandoned.saving(step, later, leaves=LEFT_BEHIND in (content.custom_metadata or {}))
                self.decisions.save_begins(step)
                self._pending = pending
                if not save.in_background:
                    self._complete(pending, save)
                earlier = self.run.background.take_error()
                if save.in_background:
                    label = f"step {step} of {self.run.steps.location}"
                    self.run.background.start(functools.partial(self._complete, pending, save), what=label, step=step)
            except BaseException as error:  # an interrupt, or a failure to start a thread
                if save.give_up(error):
                    self._ended(pending, failed=True)
                if earlier is not None:
                    error.add_note(str(earlier))
                raise
            if earlier is not None:
                raise earlier
            return True

    def _complete(self, pending: PendingSave, save: Save, awaited: threading.Event | None = None) -> None:
        step = pending.step
        try:
            with save.completing() as claimed:
                if not claimed:  # an interrupt ended the save before this thread started
                    return
                self.items.save_begins(step, self.run.steps)
                items = save.write(awaited)
                record, report = save.commit(None if items is None else self._record(pending, items))
        except BaseException as error:
            self._ended(pending, failed=True)
            self.run.events.write("save_failed", step=step, error=described(error))
            raise
        slowed = self.decisions.pace.slowed(report.total_seconds - report.blocked_seconds)
        self.run.steps.add(step, record)
        self.run.steps.last_saved = step
        self.run.notify("committed", step)
        self.abandoned.saved(step)
        self._ended(pending, failed=False)
        _logger.info("%s", report)
        self.run.events.write(
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
        self.run.report_interval()
        if self.run.committed is not None:
            self.run.committed(self.run.steps.step_location(step), record)
        self.run.observer.reached("committed", step)
        try:
            with self.items.steps_deleted():
                self.run.steps.collect()
            self.run.notify("changed", step)
        except Exception as error:
            raise SaveFailedError(
                f"step {step} of {self.run.steps.location} is saved, but best_fn failed then: {error!r}",
                step,
            ) from error

    def _record(self, pending: PendingSave, items: Mapping[str, ItemRecord]) -> CheckpointRecord:
        """Check the ownership again, and create the commit record."""
        self.run.steps.ownership.check()
        if self.run.options.local is None:
            self.run.steps.note_branches(NO_LOCAL_STEPS)
        self.run.notify("commit", pending.step)
        self.run.observer.reached("commit", pending.step)
        return pending.record(items, self.run.clock.now())

    def _ended(self, pending: PendingSave, *, failed: bool) -> None:
        self.run.notify("ended", pending.step)
        self.decisions.save_ended(failed=failed)
        self._pending = None
        pending.close()
        if failed:
            self.run.observer.reached("save_failed", pending.step)

    # ---- changes to saved steps

    def record_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.run.acquire()
        self.note_metrics(step, metrics)
        recorded = self.run.processes.decide(f"metrics of step {step}", self._add_metrics, step, metrics)
        if recorded is None:
            return
        if not self.run.processes.is_primary:
            self._change_metrics(step, recorded)
        changing = self.run.changing
        if changing.acquire(blocking=False):  # otherwise, the save that holds the lock will delete old steps
            try:
                if not self.run.background.running:
                    self.run.background.start(
                        lambda _: self.run.steps.collect(), what=f"{self.run.steps.location}: deleting old steps"
                    )
            finally:
                changing.release()

    def _add_metrics(self, step: int, metrics: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Add metrics to a step and return them; return None if the save in progress will store them."""
        pending = self._pending
        if pending is not None and pending.step == step and pending.add(metrics):
            return None
        self._change_metrics(step, metrics)
        return metrics

    @contextlib.contextmanager
    def apart_from_save_of(self, step: int) -> Iterator[None]:
        """Wait until no save of the step is in progress, and prevent a new one while the block changes the step."""
        while True:
            with self.run.changing:
                pending = self._pending
                if pending is None or pending.step != step or not self.run.background.running:
                    yield
                    return
            self.run.background.join()  # without holding the lock, which listeners may need

    def _change_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        with self.apart_from_save_of(step):
            self.run.steps.add_late_metrics()
            self.run.steps.change(step, metrics=metrics)
        self.run.events.write("metrics", step=step, metrics=few(metrics))
        self.run.notify("changed", step)
