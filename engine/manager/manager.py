"""Manage the checkpoints of one run: when to save, which steps to keep, and which step to resume from."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

from ..checkpoint import Checkpointer, leave_save
from ..clock import Clock, SystemClock, seconds
from ..distributed import Coordinator, ProcessGroup, missed_a_process
from ..errors import CheckpointNotFoundError, OptionError, SaveFailedError
from ..foreign_arguments import ExplainsNames, explains_arguments
from ..format import CheckpointRecord
from ..observer import Observer, process_observer
from ..steps import list_steps, series_of
from ..storage import Location, Place, as_location
from .decisions import AbandonedSteps, Decision, SaveDecisions, Wanted
from .directory import record_metrics as add_metrics
from .intervals import LearnedInterval
from .items import ItemSet, StepContent
from .metrics import as_given, plain_metrics
from .mirror import MirrorStatus, RunMirror
from .options import CheckpointManagerOptions, LocalStatus, Mirror, mirror_of, save_triggers, shown_call
from .ownership import stored_options
from .resuming import Peek, Restored, StepRestorer
from .retention import best, infos_of, newest_with
from .run import Run
from .saving import SaveQueue

if TYPE_CHECKING:
    from .local_tier import LocalTier

T = TypeVar("T")

_AFTER_ERROR = 10.0  # seconds to wait for the mirror when the program ends with an error


class CheckpointManager(ExplainsNames):
    """Manages the checkpoints of one run in one directory.

    A manager must be used from one thread only. Any number of managers may read a directory, but only one at a time may
    write to it. In a program with several processes, every process creates a manager and calls the same methods at the
    same steps. All processes save together, but only process 0 deletes steps and evaluates time and metrics.

    Args:
        directory: The path or URL of the checkpoint directory, which the first save creates.
        checkpointers: A checkpointer for a single item, or a dictionary that maps item names to checkpointers. None
            saves a single item, which must be a tree, in the background.
        options: When to save and which steps to keep.
        metadata: JSON-serializable information about the run, which is stored with the checkpoints.
        clock: The time source.
        coordinator: Connects the processes. None uses jax.distributed or torch.distributed if one of them is
            initialized; ``hf.processes.Alone()`` ignores other processes.
        observer: The run's observer, such as a rehearsal or a trace (``holdfast.observer.Observer``). None uses the
            process's observer, which is active only under ``holdfast supervise`` and ``holdfast drill``.

    Attributes:
        directory: The checkpoint directory.
        options: When to save and which steps to keep.
        events: The run's events, stored in ``events.jsonl`` in its directory.
        processes: The processes that save together.
        observer: The run's observer.

    Raises:
        CheckpointExistsError: The directory contains checkpoints of another library or another ``step_prefix``, but
            none of this run, so the run would start from step 0. A ``read_only`` manager can open the directory and
            restore Orbax steps.

    >>> import tempfile, numpy as np
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     with CheckpointManager(directory, options=CheckpointManagerOptions(max_to_keep=2)) as manager:
    ...         for step in range(5):
    ...             _ = manager.save(step, {"weights": np.full(3, step)})
    ...         manager.wait_until_finished()
    ...         manager.all_steps(), manager.why_kept(3), manager.restore()
    ([3, 4], ('one of the newest 2',), {'weights': array([4, 4, 4])})
    """

    @explains_arguments
    def __init__(
        self,
        directory: Place,
        checkpointers: Checkpointer | Mapping[str, Checkpointer] | None = None,
        options: CheckpointManagerOptions | None = None,
        *,
        metadata: Mapping[str, Any] | None = None,
        clock: Clock | None = None,
        coordinator: Coordinator | None = None,
        observer: Observer | None = None,
    ) -> None:
        if not isinstance(options, CheckpointManagerOptions | None):
            shown = f"**{options}" if isinstance(options, Mapping) else "..."
            raise OptionError(f"options= must be hf.CheckpointManagerOptions({shown}), not a {type(options).__name__}")
        self.observer = observer or process_observer()
        self.options = self.observer.options(options or CheckpointManagerOptions())
        writes = not self.options.read_only
        self.directory: Location = as_location(directory, writes=writes, observer=self.observer)
        reuse = self.options.reuse_unchanged and self.directory.can_share()
        mirror = mirror_of(self.options)
        uploads = mirror is not None and not as_location(mirror.url).is_local
        self._items = ItemSet(checkpointers, self.options.item_intervals, reuse=reuse, uploads=uploads)
        self._clock = clock or SystemClock()
        barrier = seconds(self.options.barrier_timeout_secs, name="barrier_timeout_secs")
        self.processes = ProcessGroup(self.directory.url, coordinator, barrier)
        self._run = Run(self.directory, self.options, self._clock, self.processes, self.observer, metadata)
        self._steps, self._background, self.events = self._run.steps, self._run.background, self._run.events
        self._mirror: RunMirror | None = None  # None if there is no mirror or the manager is read-only
        if mirror is not None and writes:
            self._mirror = RunMirror(as_location(mirror.url), mirror, self._run)
            self._run.add_place(self._mirror)
        self._local: LocalTier | None = None  # None if there are no host-local steps or the manager is read-only
        if self.options.local is not None and writes:
            from .local_tier import LocalTier  # imported lazily: importing socket takes longer than a small save

            self._run.compare_options()
            self._local = LocalTier(self.options.local, self._run)
            self._run.add_place(self._local)
        self.observer.joins(self.processes.index, self.processes.count)
        triggers = (*save_triggers(self.options), Wanted(self.observer))
        for trigger in triggers:
            if isinstance(trigger, LearnedInterval) and self.processes.is_primary and writes:
                trigger.follow(self.events)
                self._run.learned = trigger
        decisions = SaveDecisions(triggers, self._clock, self.processes, self.latest_step())
        self._abandoned = AbandonedSteps(self.directory, warns=self.processes.is_primary)
        self._restorer = StepRestorer(self._run, self._items, decisions, self._abandoned)
        self._saves = SaveQueue(self._run, self._items, decisions, self._abandoned)

    # ---- other storage tiers

    def fetch(self, step: int) -> bool:
        """Fetch a missing step from the mirror or from host-local storage.

        A new manager fetches the newest step automatically, and :meth:`restore` fetches the requested one.

        Args:
            step: The step to fetch.

        Returns:
            Whether the step can be restored.
        """
        return self._run.fetch_missing(valid_step(step))

    def mirror_status(self) -> MirrorStatus | None:
        """Return the status of the mirror; None if there is no mirror, or if this is not process 0."""
        return self._mirror.status() if self._mirror is not None and self.processes.is_primary else None

    def finish_mirror(self, timeout_secs: float | None = None) -> bool:
        """Copy the newest step to the mirror even if it is not due, and stop mirroring, as :meth:`close` does.

        If the mirror still lacks the newest step afterwards, a warning names the step and says what to do.

        Args:
            timeout_secs: The maximum time to wait, in seconds. The call returns early if the copy would take
                longer at the measured rate. None uses the mirror's ``wait_secs``.

        Returns:
            True if the mirror has the newest step, or if there is no mirror.
        """
        return self._mirror is None or self._mirror.finish(timeout_secs)

    # ---- reading the directory

    def all_steps(self) -> list[int]:
        """Return the committed steps in ascending order."""
        return self._steps.steps()

    def latest_step(self, item: str | None = None) -> int | None:
        """Return the newest committed step, or None. At the start of a run, this may be a host-local step.

        Args:
            item: An item that the step must contain; steps may lack the items of ``item_intervals``.
        """
        if item is not None:
            return newest_with(item, self._steps.infos())
        left = self._steps.left_behind()
        here = (info.step for info in reversed(self._steps.infos()) if info.step not in left)
        return max([*islice(here, 1), *self._steps.borrowed], default=None)

    def item_due(self, item: str, step: int) -> bool:
        """Return whether a save at a step would include an item. Loops need not collect an item that is not due.

        Args:
            item: The name of the item.
            step: The step.
        """
        return self._saves.item_due(item, step)

    def best_step(self) -> int | None:
        """Return the best step according to ``best_fn``, if set, or else the newest step; None if no step qualifies."""
        if self.options.best_fn is None:
            return self.latest_step()
        self._steps.add_late_metrics()
        return best(self._steps.infos(), self.options.best_fn, self.options.ranking_mode)

    def why_kept(self, step: int) -> tuple[str, ...]:
        """Return all reasons why a committed step is kept, or an empty tuple if it is about to be deleted.

        Args:
            step: The step.

        Raises:
            CheckpointNotFoundError: The step does not exist.
        """
        self._steps.stored_record(step)
        return self._steps.why_kept(step)

    def metrics(self, step: int) -> Any:
        """Return a step's metrics in the form in which they were passed, or None if there are none.

        Args:
            step: The step.

        Raises:
            CheckpointNotFoundError: The step does not exist.
        """
        self._steps.listed_record(step)
        self._steps.add_late_metrics()
        stored = self._steps.listed_record(step).metrics
        return None if stored is None else as_given(stored)

    def custom_metadata(self, step: int) -> Mapping[str, Any] | None:
        """Return the ``custom_metadata`` that was saved with a step, or None.

        Args:
            step: The step.

        Raises:
            CheckpointNotFoundError: The step does not exist.
        """
        return self._steps.listed_record(step).custom_metadata

    def metadata(self) -> Mapping[str, Any] | None:
        """Return the metadata of the run that is stored with the checkpoints, or None."""
        return self._steps.stored_metadata() if self._run.metadata is None else self._run.metadata

    def structure(self, step: int | None = None) -> Any:
        """Describe the leaves of a step without reading their data.

        Args:
            step: The step; None for the newest step.

        Returns:
            The step's tree with a description of each leaf, or a dictionary of such trees if there are several items.
        """
        chosen = self.latest_step() if step is None else step
        if chosen is None:
            raise CheckpointNotFoundError(f"{self.directory}: there is no checkpoint")
        return self._restorer.structure(chosen)

    def reload(self) -> None:
        """Wait for a save in progress, and then reread the directory to see changes by other processes."""
        self._background.join()
        self._steps.reload(forget=True)

    def __repr__(self) -> str:
        return shown_call(self, self.directory, self.options)

    # ---- restoring

    @overload
    def restore(
        self, step: int | None = None, items: None = None, *, restore_kwargs: Mapping[str, Any] | None = None
    ) -> Any: ...

    @overload  # for item names without templates
    def restore(
        self,
        step: int | None = None,
        items: Mapping[str, None] = ...,
        *,
        restore_kwargs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]: ...

    @overload
    def restore(
        self, step: int | None = None, items: T = ..., *, restore_kwargs: Mapping[str, Any] | None = None
    ) -> T: ...

    @explains_arguments
    def restore(
        self, step: int | None = None, items: Any = None, *, restore_kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Restore a step.

        Args:
            step: The step; None for the newest intact step.
            items: A template, or if the manager has several items, a dictionary of templates for the items to restore;
                None restores all items. Items in ``item_intervals`` that are missing from the step are skipped with a
                warning; restore them separately: ``restore(manager.latest_step("replay"), {"replay": None})``. Without
                a template, arrays are numpy arrays, or torch tensors if the program has imported torch.
            restore_kwargs: Additional arguments for the handler, or a dictionary of such arguments by item.

        Returns:
            The item, or a dictionary of items if the manager has several.

        Raises:
            CheckpointNotFoundError: The step does not exist, or there are no steps.
            DamagedCheckpointError: The step is damaged.
            TreeMismatchError: A template and the saved item differ.
            NoWholeCheckpointError: No step was given, and all steps are damaged.
        """
        self._background.join()
        if step is None:
            restored = self.restore_latest(items, restore_kwargs=restore_kwargs)
            if restored is None:
                raise CheckpointNotFoundError(f"{self.directory}: there is no checkpoint to restore")
            return restored.items
        return self._restorer.restore_step(valid_step(step), items, restore_kwargs or {})

    def restore_latest(self, items: Any = None, *, restore_kwargs: Mapping[str, Any] | None = None) -> Restored | None:
        """Restore the newest intact step.

        Damaged steps are skipped with a warning, but a template that does not match raises an error immediately.

        Args:
            items: As for :meth:`restore`.
            restore_kwargs: As for :meth:`restore`.

        Returns:
            The step and the restored items, or None if the directory contains no checkpoint.

        Raises:
            NoWholeCheckpointError: There are checkpoints, but all of them are damaged.
            CheckpointNotFoundError: A process cannot find a step that process 0 has found.
            TreeMismatchError: A template and the saved item differ.
        """
        self._background.join()
        self._run.compare_options()
        began = time.perf_counter()
        whole = self._restorer.newest_whole(items, restore_kwargs or {})
        return None if whole is None else self._restorer.resume(*whole, began=began)

    def peek(self, items: Collection[str] = (), *, step: int | None = None) -> Peek | None:
        """Preview the step that a restore would read, for programs whose setup depends on the step they resume from.

        Only the requested items are read, so a restore may still skip this step if its other items are damaged.
        The call does not count as a restore.

        Args:
            items: The names of the items to read, such as ``["extras"]``.
            step: The step; None for the newest step whose requested items are intact.

        Returns:
            The step with the requested items as ``extras``, or None if the directory contains no checkpoint.

        Raises:
            CheckpointNotFoundError: The step does not exist.
            NoWholeCheckpointError: There are checkpoints, but all of them are damaged.
        """
        self._background.join()
        self._run.compare_options()
        taken = self._restorer.peek(items, None if step is None else valid_step(step))
        if taken is None:
            return None
        number, extras = taken
        return Peek(
            step=number,
            extras=extras,
            metrics=self.metrics(number),
            metadata=self._steps.stored_metadata(),
            custom_metadata=self.custom_metadata(number),
        )

    @property
    def resumed_from(self) -> int | None:
        """The step of the last restore, from which the run resumes; None if no step was restored."""
        return self._abandoned.resumed_from

    # ---- saving

    def decide(self, step: int, *, metrics: Any = None) -> Decision:
        """Return whether a save is due, and why.

        The first step passed to this method starts the run. If a save fails, another one is due at the next step.

        Args:
            step: The number of completed optimizer updates.
            metrics: The metrics of this step, for ``save_on_best``.
        """
        return self._saves.decide(step, metrics)

    def should_save(self, step: int, *, metrics: Any = None) -> bool:
        """Return whether a save is due at a step."""
        return not self.options.read_only and self.decide(step, metrics=metrics).save

    @explains_arguments
    def save(
        self,
        step: int,
        items: Any,
        *,
        metrics: Any = None,
        custom_metadata: Mapping[str, Any] | None = None,
        force: bool = False,
        save_kwargs: Mapping[str, Any] | None = None,
        reason: str | None = None,
    ) -> bool:
        """Save a step if it is due.

        Args:
            step: The number of completed optimizer updates, 0 or more.
            items: The item, or a dictionary of items if the manager has several. Items of ``item_intervals`` are saved
                if they are due, and may be omitted.
            metrics: Numbers that are stored with the checkpoint and used to rank it, in a dictionary or another
                container. Containers may be nested: dictionaries, lists, tuples, namedtuples, dataclasses and arrays of
                up to 4096 numbers. Containers are returned and passed to ``best_fn`` as dictionaries and lists.
            custom_metadata: JSON-serializable information about this step; see :meth:`custom_metadata`.
            force: Save even if no save is due, and atomically replace a checkpoint of the same step. After
                a :meth:`restore` of an older step, saves replace later steps even without ``force``.
            save_kwargs: Additional arguments for the handler, or a dictionary of such arguments by item.
            reason: The reason for the save in the log and the commit record; None uses the triggers' reason.

        Returns:
            True if the step was saved, or if its background save has started; False if no save is due, or if
            other files in the step's folder prevent the save.

        Raises:
            SaveFailedError: The previous background save failed. This step is still saved, unless another process did
                not respond.
            UnsupportedLeafError: An item cannot be saved; nothing was written.
            OptionError: The items do not match the manager's items, or ``custom_metadata`` is not JSON-serializable.
            OwnershipError: Another run writes to this directory.
        """
        self._run.check_writable()
        content = StepContent(valid_step(step), items, metrics, custom_metadata, save_kwargs or {})
        try:
            saved = self._saves.save(content, force, reason)
        except BaseException as error:
            # An error of the previous background save does not affect a local save of this step.
            if isinstance(error, SaveFailedError) and not missed_a_process(error.__cause__):
                self._save_locally(content)
            elif self._local is not None:
                self._local.miss(content.step, error)
            raise
        self._save_locally(content)
        return saved

    def _save_locally(self, content: StepContent) -> bool:
        return self._local is not None and self._local.save(content, self._saves.due_items)

    def local_due(self, step: int) -> bool:
        """Return whether a host-local save is due at a step; always False if the option ``local`` is not set.

        Args:
            step: The number of completed optimizer updates.
        """
        return self._local is not None and self._local.due(step)

    def save_locally(
        self,
        step: int,
        items: Any,
        *,
        metrics: Any = None,
        custom_metadata: Mapping[str, Any] | None = None,
        save_kwargs: Mapping[str, Any] | None = None,
    ) -> bool:
        """Save a host-local step if one is due; :meth:`save` also does this.

        Errors that occur while files are written or copied are only logged, so training continues.

        Args:
            step: As for :meth:`save`.
            items: As for :meth:`save`.
            metrics: As for :meth:`save`.
            custom_metadata: As for :meth:`save`.
            save_kwargs: As for :meth:`save`.

        Returns:
            Whether a host-local save was due.

        Raises:
            UnsupportedLeafError: An item cannot be saved; nothing was written.
            BarrierTimeoutError: The previous local save failed because another process did not respond.
            PeerFailedError: The previous local save failed because the processes' coordination store did not respond.
        """
        self._run.check_writable()
        return self._save_locally(StepContent(valid_step(step), items, metrics, custom_metadata, save_kwargs or {}))

    def local_status(self) -> LocalStatus | None:
        """Return the status of this run's host-local steps; None if the option ``local`` is not set."""
        return None if self._local is None else self._local.status()

    def record_metrics(self, step: int, metrics: Any) -> None:
        """Add metrics to a step that has been or is being saved, replacing earlier metrics of the same name.

        A ``read_only`` manager stores the metrics for the active run to read, as ``hf.record_metrics`` does.

        Args:
            step: The step.
            metrics: Numbers, as for :meth:`save`.

        Raises:
            CheckpointNotFoundError: The step does not exist.
        """
        if self.options.read_only:
            add_metrics(self.directory, step, metrics, step_prefix=self.options.step_prefix, clock=self._clock)
            return
        self._saves.record_metrics(step, plain_metrics(metrics))

    def pin(self, step: int) -> None:
        """Keep a step until it is unpinned, even if no retention rule keeps it."""
        self._pin(step, True)

    def unpin(self, step: int) -> None:
        """Unpin a step, so that the retention rules apply to it again."""
        self._pin(step, False)

    def _pin(self, step: int, pinned: bool) -> None:
        with self._saves.apart_from_save_of(step):  # a save that replaces the step would overwrite its record
            self._run.change(f"{'' if pinned else 'un'}pin {step}", partial(self._steps.change, step, pinned=pinned))

    def delete(self, step: int, *, mirror: bool = True) -> None:
        """Delete a step.

        Args:
            step: The step.
            mirror: Whether to delete the step from the mirror as well. If an earlier run had the option ``mirror`` but
                this manager does not, the deletion is recorded for the next run with that option.

        Raises:
            CheckpointNotFoundError: The step does not exist.
        """
        if self._local is not None:
            self._background.join()  # a save in progress would store an outdated history
            self._run.wait_for_places()
        self._delete("delete", self._steps.delete, step, mirror, everywhere=mirror)

    def delete_after(self, step: int) -> list[int]:
        """Delete all steps after a given step, including pinned and damaged ones, to return to this step permanently.

        ::

            state = manager.restore(1200, template)
            manager.delete_after(1200)  # otherwise, retention and the next resume treat later steps as the newest

        Steps are deleted starting with the last one, so that an interrupted call leaves no gaps.

        Args:
            step: The step to return to.

        Returns:
            The deleted steps in ascending order.
        """
        step = valid_step(step)
        self._background.join()
        self._run.wait_for_places()
        self.acquire()
        self.processes.barrier(f"before delete after {step}")  # other processes may still be restoring a later step
        return self._delete("delete after", self._steps.delete_after, step, everywhere=True)

    def _delete(self, action: str, work: Callable[..., T], step: int, *inputs: Any, everywhere: bool) -> T:
        """Delete steps from the directory; ``everywhere`` also notifies the other storage tiers of the deletion."""
        with self._saves.apart_from_save_of(step):
            deleted: T = self._run.change(f"{action} {step}", work, step, *inputs)
        self._saves.decisions.deleted(max(self._steps.steps(), default=0))
        if everywhere:
            self._run.notify("deleted", step)
        return deleted

    # ---- ownership, and the end

    def acquire(self) -> None:
        """Acquire ownership of the directory, and remove leftovers of interrupted runs.

        The first save does this automatically. Call this method earlier to detect at the start of training, rather
        than at the first save, that another run owns the directory.

        Raises:
            OwnershipError: Another run writes to this directory.
        """
        self._run.acquire()

    def is_saving_in_progress(self) -> bool:
        """Return whether a background save is in progress."""
        return self._background.running

    def wait_until_finished(self) -> None:
        """Wait until the current saves, including host-local saves, are durable; do not wait for the mirror.

        Raises:
            SaveFailedError: The save failed.
        """
        self._background.wait()
        self._run.wait_for_places()

    def check_for_errors(self) -> None:
        """Raise SaveFailedError, without waiting, if a save has failed and its error has not been raised yet."""
        self._background.check()

    def close(self) -> None:
        """Wait for the save in progress and, for a limited time, for the mirror, and then release the directory.

        Raises:
            SaveFailedError: The save failed.
        """
        self._close(None)

    def _close(self, error: BaseException | None) -> None:
        """Close the manager; ``error`` is the exception that ended the ``with`` block."""
        if not self._run.close():
            return
        try:
            try:
                self._background.wait()
            finally:
                for place in self._run.places:
                    place.close(finished=error is None)
        except BaseException as failure:
            error = error or failure
            raise
        finally:
            try:
                self.events.end(self.latest_step(), error)
            finally:
                self._steps.ownership.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.finish_mirror(_AFTER_ERROR)
        self._close(error)


def note_resume(manager: CheckpointManager, step: int) -> list[int]:
    """Record that the run resumes from a step, warn about later steps immediately, and return them in order."""
    # By contrast, a restore defers the warning to the next save, because the program may only be inspecting the step.
    later = manager._restorer.resumes_from(valid_step(step))
    manager._abandoned.warn(later)
    return later


def restores_of(manager: CheckpointManager) -> int:
    """Return a number that grows with each restore, even if the same step is restored again."""
    return manager._abandoned.restores


def on_commit(manager: CheckpointManager, listener: Callable[[Location, CheckpointRecord], None]) -> None:
    """Register a listener that the committing thread calls after each commit, including commits of local steps."""
    manager._run.committed = listener


def whole_step(manager: CheckpointManager, step: int) -> tuple[Location, CheckpointRecord] | None:
    """Return the folder of a step on this host and its commit record, or None if the step is missing or damaged."""
    borrowed = manager._steps.borrowed.get(step)
    if borrowed is not None and manager._local is not None:
        return manager._local.place_of(step), borrowed[1]
    if step not in manager._steps:
        return None
    return manager._steps.step_location(step), manager._steps.record(step)


def step_location(manager: CheckpointManager, step: int) -> Location:
    return manager._steps.step_location(step)


def elsewhere(manager: CheckpointManager, step: object) -> str:
    """Return a suffix for error messages if other storage tiers have a step that cannot be read; otherwise, ""."""
    return manager._steps.elsewhere(step)


@contextlib.contextmanager
def part_of_save(manager: CheckpointManager, step: int, *, locally: bool = False) -> Iterator[None]:
    """Run code that precedes a save; if it fails, report this to the other processes immediately."""
    try:
        yield
    except BaseException as error:
        if not locally:
            leave_save(manager.processes.rendezvous("save"), error)
        if manager._local is not None:
            manager._local.miss(step, error)
        raise


def settle_mirror(manager: CheckpointManager) -> bool:
    """Apply pending deletions and pins to the run's former mirror, but copy no steps; return whether this succeeded."""
    manager.acquire()
    url = manager._steps.identity.mirror
    if manager._mirror is not None or url is None or not manager.processes.is_primary:
        return True
    return RunMirror(as_location(url, writes=True), Mirror(url), manager._run).settle()


def best_step_in(directory: Location) -> int:
    """Return the best step of a run according to its ``best_fn``; raise an error if no step can be ranked."""
    options = stored_options(directory)
    if options is None or options.best_fn is None:
        raise OptionError(
            f"step='best', but the run in {directory} does not rank its checkpoints by the name of a metric "
            "(best_fn=); give the number of the step"
        )
    best_step = best(infos_of(list_steps(directory, series_of(None))), options.best_fn, options.ranking_mode)
    if best_step is None:
        raise CheckpointNotFoundError(f"step='best', but no checkpoint in {directory} has the metric {options.best_fn}")
    return best_step


def valid_step(step: Any) -> int:
    try:
        number = int(step.__index__())
    except AttributeError:
        raise OptionError(
            f"step={step!r:.60} must be a whole number; a template comes after it: restore(step, template)"
        ) from None
    if number < 0:
        raise OptionError(f"step={number} must not be negative")
    return number
