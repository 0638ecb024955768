"""The checkpoints of one run: when to save, what to keep, and which one to go on from."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar, overload

from ..checkpoint import BackgroundSave, Checkpointer, Save, SaveReport
from ..clock import Clock, SystemClock, seconds
from ..distributed import Alone, Coordinator, ProcessGroup
from ..errors import (
    CheckpointNotFoundError,
    DamagedCheckpointError,
    NoWholeCheckpointError,
    OptionError,
    SaveFailedError,
    StateError,
    itemized,
)
from ..format import CheckpointRecord, ItemRecord
from ..observer import Observer, process_observer
from ..storage import Location, Place, as_location
from .decisions import Decision, EverySteps, Rollback, SaveDecisions, Wanted
from .directory import RunDirectory, check_json
from .directory import record_metrics as add_metrics
from .events import RunEvents, described, few, guarded
from .identity import stored_options
from .items import ItemSet
from .metrics import MetricWatch, as_given, named, plain_containers, plain_metrics
from .mirror import MirrorStatus, RunMirror
from .options import CheckpointManagerOptions
from .retention import StepInfo, best, newest_with

_logger = logging.getLogger("holdfast")

T = TypeVar("T")

_AFTER_ERROR = 10.0  # seconds that a program which ends with an error waits for the mirror
_FETCH = 86400.0  # seconds that the other processes wait while process 0 fetches a step


@dataclass(frozen=True, slots=True)
class Restored:
    """A checkpoint that was restored.

    Attributes:
        step: Its step.
        items: The restored item, or a dictionary of items if the manager has several.
        skipped: Newer steps that are damaged, each with what is wrong.
    """

    step: int
    items: Any
    skipped: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Peek:
    """What a restore would take, without the state.

    Attributes:
        step: The step; None for a checkpoint without a number.
        extras: What was saved beside the state by name, as it is loaded without a template; for a checkpoint of
            ``holdfast.graph``, its numbers and texts by their paths.
        metrics: The metrics that are stored with it, or None.
        metadata: The facts about the run that are stored beside the checkpoints, or None.
        custom_metadata: What was passed as ``custom_metadata`` when it was saved, or None.
    """

    step: int | None
    extras: Mapping[str, Any]
    metrics: Any = None
    metadata: Mapping[str, Any] | None = None
    custom_metadata: Mapping[str, Any] | None = None


class CheckpointManager:
    """Keeps the checkpoints of one run in one directory.

    A manager is used from one thread. Any number may read a directory; one at a time writes to it. In a program of
    several processes, each of them makes a manager and calls the same methods at the same steps: they save together,
    process 0 decides what depends on time or metrics, and only it deletes.

    Args:
        directory: Where the checkpoints are: a path or a URL. It is made when something is saved.
        checkpointers: A checkpointer for the one item, or a dictionary of them for several. None is one item: a tree,
            saved in the background.
        options: When to save and what to keep.
        metadata: Facts about the run, as JSON can hold them; stored beside the checkpoints.
        clock: Where the time comes from.
        coordinator: How processes find each other. None takes jax.distributed or torch.distributed where one of them is
            initialized; ``hf.Alone()`` is this process alone.
        observer: What observes the run, such as a rehearsal or a trace (``holdfast.engine.observer.Observer``). None is
            the observer of the process, which does nothing unless ``holdfast supervise`` or ``holdfast drill`` has
            started the program.

    Attributes:
        directory: Where the checkpoints are.
        options: When to save and what to keep.
        events: The events of the run, which go into ``events.jsonl`` in its directory.
        processes: The processes that save together.
        observer: What observes the run.

    Raises:
        CheckpointExistsError: The directory holds checkpoints of another library, or of another ``step_prefix``, and
            none of this run, which would start from 0 beside them. A manager that is ``read_only`` opens it, and
            restores the steps of Orbax.

    >>> import tempfile, numpy as np
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     with CheckpointManager(directory, options=CheckpointManagerOptions(max_to_keep=2)) as manager:
    ...         for step in range(5):
    ...             _ = manager.save(step, {"weights": np.full(3, step)})
    ...         manager.wait_until_finished()
    ...         manager.all_steps(), manager.why_kept(3), manager.restore()
    ([3, 4], ('one of the newest 2',), {'weights': array([4, 4, 4])})
    """

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
        self.observer = observer or process_observer()
        self.options = self.observer.options(options or CheckpointManagerOptions())
        writes = not self.options.read_only
        self.directory: Location = as_location(directory, writes=writes, observer=self.observer)
        reuse = self.options.reuse_unchanged and self.directory.can_share()
        mirror = self.options.mirror_options()
        mirrored = None if mirror is None else as_location(mirror.url)
        uploads = mirrored is not None and not mirrored.is_local
        self._items = ItemSet(checkpointers, self.options.item_intervals, reuse=reuse, uploads=uploads)
        self._metadata = None if metadata is None else dict(metadata)
        self._clock = clock or SystemClock()
        self._background = BackgroundSave(seconds(self.options.save_timeout_secs))
        self.processes = ProcessGroup(
            self.directory.url, coordinator, seconds(self.options.barrier_timeout_secs, name="barrier_timeout_secs")
        )
        self._run = RunDirectory(
            self.directory, self.options, self._clock, self._drain, writes=self.processes.is_primary
        )
        self.events = RunEvents(self.directory, self._clock, self.processes.index, self.observer)
        self._listeners: list[Callable[[SaveReport], None]] = []
        self._went_on_from: int | None = None  # the step of the last event about a restore, if nothing was saved since
        self._pending: _PendingSave | None = None  # the save that is under way
        self._compared = False  # whether all processes have the same options
        self._acquired = False
        self._closed = False
        self._changing = threading.RLock()  # held by the thread that begins a save, or takes the right to write
        self._mirror: RunMirror | None = None
        if mirrored is not None and not self.options.read_only:
            self._open_mirror(mirrored)
        self.observer.joins(self.processes.index, self.processes.count)
        triggers = (*self.options.triggers(), Wanted(self.observer))
        self._decisions = SaveDecisions(triggers, self._clock, self.processes, self.latest_step())
        self._rollback = Rollback(self._run, warns=self.processes.is_primary)
        self._watch: MetricWatch | None = None  # until the metric that ranks checkpoints has come
        if self.options.best_fn is not None and self.processes.is_primary:
            self._watch = MetricWatch(self.options.best_fn, str(self.directory))

    # ---- the mirror

    def _open_mirror(self, location: Location) -> None:
        """Fetch the newest step of the mirror, if it is newer than all that are here."""
        self._mirror = RunMirror(location, self._run, self.options, self._clock, self.metadata, self.events.write)
        self._mirror.fetches = True
        self._compare_options()
        for step in self.processes.decide("the newest step of the mirror", self._mirror.newer_steps):
            if self._fetch(step):
                break
        self._mirror.fetches = False
        if self._acquired and self.processes.is_primary:
            self._mirror.start()

    def _fetch(self, step: int, *, overwrite: bool = False) -> bool:
        """Copy a step from the mirror into the directory, on process 0; return whether it is there now."""
        mirror = self._mirror
        if mirror is None:
            return False
        self.acquire()
        work = lambda: mirror.fetch(step, overwrite=overwrite)  # noqa: E731
        found: bool = self.processes.decide(f"fetch step {step}", work, work_timeout=_FETCH)
        if found and not self.processes.is_primary:
            self._run.reload()
        return found

    def fetch(self, step: int) -> bool:
        """Copy a step from the mirror into the directory, if it is not there.

        A new manager fetches the newest step by itself, and :meth:`restore` those that it is asked for.

        Args:
            step: The step.

        Returns:
            Whether the directory has the step now.
        """
        step = valid_step(step)
        here: bool = self.processes.decide(f"look for step {step}", lambda: step in self._run)
        return here or self._fetch(step)

    def mirror_status(self) -> MirrorStatus | None:
        """Return what the mirror has and what it is doing; None without a mirror, and on processes other than 0."""
        return self._mirror.status() if self._mirror is not None and self.processes.is_primary else None

    def finish_mirror(self, timeout_secs: float | None = None) -> bool:
        """Copy the newest step to the mirror, due or not, and end the mirror; :meth:`close` does it otherwise.

        What the mirror does not have in the end is logged, with what to do.

        Args:
            timeout_secs: How long to wait at most, in seconds. Where the measured rate says that the step does not
                arrive in that time, this returns at once. None waits for ``wait_secs`` of the mirror.

        Returns:
            Whether the mirror has the newest step; True without a mirror.
        """
        if self._mirror is None or not self.processes.is_primary:
            return True
        if timeout_secs is None:
            return self._mirror.finish(self._mirror.limit)
        return self._mirror.finish(timeout_secs, must_fit=True)

    # ---- what is in the directory

    @property
    def alone(self) -> bool:
        """Whether this process saves alone; otherwise others save with it."""
        return self.processes.alone

    @property
    def process_index(self) -> int:
        """The number of this process among those that save together."""
        return self.processes.index

    @property
    def process_count(self) -> int:
        """How many processes save together."""
        return self.processes.count

    def all_steps(self) -> list[int]:
        """Return the committed steps in ascending order."""
        return self._run.steps()

    def latest_step(self, item: str | None = None) -> int | None:
        """Return the newest committed step, or None.

        Args:
            item: An item that the step must have; not every step has those of ``item_intervals``.
        """
        if item is not None:
            return newest_with(item, self._run.infos())
        infos = self._run.infos()
        return infos[-1].step if infos else None

    def item_due(self, item: str, step: int) -> bool:
        """Return whether a save at a step has an item, so that a loop need not collect a large one in vain.

        Args:
            item: The item.
            step: The step.
        """
        interval = self.options.item_intervals.get(item)
        previous = newest_with(item, self._run.infos(), step)
        return interval is None or previous is None or EverySteps(interval).due(step, previous)

    def best_step(self) -> int | None:
        """Return the step that ``best_fn`` ranks first, or None if none has its metric; without it, the newest step."""
        if self.options.best_fn is None:
            return self.latest_step()
        self._run.add_late_metrics()
        return best(self._run.infos(), self.options.best_fn, self.options.ranking_mode)

    def why_kept(self, step: int) -> tuple[str, ...]:
        """Return every reason for which a committed step is kept; empty if it is about to be deleted.

        Args:
            step: The step.

        Raises:
            CheckpointNotFoundError: There is no such step.
        """
        self._run.record(step)
        return self._run.kept().get(step, ())

    def metrics(self, step: int) -> Any:
        """Return the metrics stored with a step, a dictionary if they were given as one; None without any.

        Args:
            step: The step.

        Raises:
            CheckpointNotFoundError: There is no such step.
        """
        self._run.record(step)
        self._run.add_late_metrics()
        found = self._run.record(step).metrics
        return None if found is None else as_given(found)

    def custom_metadata(self, step: int) -> Mapping[str, Any] | None:
        """Return what was passed as ``custom_metadata`` when a step was saved, or None.

        Args:
            step: The step.

        Raises:
            CheckpointNotFoundError: There is no such step.
        """
        return self._run.record(step).custom_metadata

    def metadata(self) -> Mapping[str, Any] | None:
        """Return the facts about the run that are stored beside the checkpoints, or None."""
        return self._metadata if self._metadata is not None else self._run.stored_metadata()

    def structure(self, step: int | None = None) -> Any:
        """Return the tree of a step with a description of every leaf, without reading its data.

        Args:
            step: The step; None is the newest.

        Returns:
            The tree with a description of every leaf, or a dictionary of those by item if the manager has several.
        """
        found = self.latest_step() if step is None else step
        if found is None:
            raise CheckpointNotFoundError(f"{self.directory}: there is no checkpoint")
        location = self._run.step_location(found)
        if self._run.other(found) is not None:
            return self._items.describe_other(location)
        return self._run.read(found, lambda record: self._items.structure(location, record))

    def reload(self) -> None:
        """Read the directory again, to see what another process has done; waits for a save that is under way."""
        self._background.join()
        self._run.reload(forget=True)

    # ---- restoring

    @overload
    def restore(
        self, step: int | None = None, items: None = None, *, restore_kwargs: Mapping[str, Any] | None = None
    ) -> Any: ...

    @overload  # items that are named without a template
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

    def restore(
        self, step: int | None = None, items: Any = None, *, restore_kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Read a step back.

        Args:
            step: The step; None is the newest that is whole.
            items: A template, or a dictionary of templates if the manager has several items. Only the items that are
                named in it are restored; None restores all. All of them are of the one step: an item of
                ``item_intervals`` that the step does not have is left out, with a warning that names the step that has
                it. Read that one with ``restore(manager.latest_step("replay"), {"replay": None})``. Without a template,
                arrays are those of numpy, and tensors of torch where the program has imported it.
            restore_kwargs: Further arguments for the handler, or a dictionary of them by item.

        Returns:
            The item, or a dictionary of items if the manager has several.

        Raises:
            CheckpointNotFoundError: There is no such step, or none at all.
            DamagedCheckpointError: The step is damaged.
            TreeMismatchError: A template and the saved item differ.
            NoWholeCheckpointError: No step was given, and all of them are damaged.
        """
        self._background.join()
        if step is None:
            restored = self.restore_latest(items, restore_kwargs=restore_kwargs)
            if restored is None:
                raise CheckpointNotFoundError(f"{self.directory}: there is no checkpoint to restore")
            return restored.items
        step = valid_step(step)
        began = time.perf_counter()
        if self._mirror is not None:
            self.fetch(step)
        found = self._restore(step, items, restore_kwargs or {})
        self._goes_on_from(step, began=began)
        return found

    def restore_latest(self, items: Any = None, *, restore_kwargs: Mapping[str, Any] | None = None) -> Restored | None:
        """Read the newest step that is whole.

        Damaged steps are passed over, with a warning for each; a template that does not fit is an error at once.

        Args:
            items: As for :meth:`restore`.
            restore_kwargs: As for :meth:`restore`.

        Returns:
            The step and the restored items, or None if the directory holds no checkpoint.

        Raises:
            NoWholeCheckpointError: There are checkpoints, and all of them are damaged.
            CheckpointNotFoundError: A process does not see a step that process 0 sees.
            TreeMismatchError: A template and the saved item differ.
        """
        self._background.join()
        began = time.perf_counter()
        self._compare_options()
        skipped: list[tuple[int, _Damage]] = []
        missing: set[int] = set()
        steps = self.processes.decide("steps", self._steps_of_both_places)[::-1]
        while steps:
            step, is_here = steps.pop(0)
            if not is_here and not self._fetch(step):
                continue
            found, damage = self._restore_everywhere(step, items, restore_kwargs or {})
            if damage is not None and not damage.deleted and is_here and self._fetch(step, overwrite=True):
                _logger.warning(
                    "%s: step %d was damaged, and is that of the mirror now: %s", self.directory, step, damage.what
                )
                found, damage = self._restore_everywhere(step, items, restore_kwargs or {})
            if damage is not None and damage.deleted:  # by the run that writes here, which has newer steps by now
                if step in missing:
                    raise CheckpointNotFoundError(
                        f"{self.directory}: process 0 sees step {step}, and process {damage.process} does not, also "
                        "when it looks again; all processes have to see the same directory: is it a disk that they "
                        "share, mounted at the same path?"
                    )
                missing.add(step)
                skipped.clear()
                self._run.reload()
                steps = self.processes.decide("steps", self._steps_of_both_places)[::-1]
                continue
            if damage is not None:
                _logger.warning("%s: step %d is damaged and passed over: %s", self.directory, step, damage.what)
                skipped.append((step, damage))
                continue
            if skipped:
                _logger.warning("%s: going back to step %d, the newest whole checkpoint", self.directory, step)
            for damaged, one in skipped:
                self._run.condemn(damaged, one.what, unreadable=one.unreadable)
            self._goes_on_from(step, skipped={damaged: one.what for damaged, one in skipped}, began=began)
            return Restored(step, found, tuple((damaged, one.what) for damaged, one in skipped))
        if skipped:
            raise NoWholeCheckpointError(
                itemized(
                    f"{self.directory}: every checkpoint is damaged. Look with `holdfast verify`; "
                    "to start over, use another directory",
                    [f"step {step}: {one.what}" for step, one in skipped],
                )
            )
        return None

    def peek(self, items: Collection[str] = (), *, step: int | None = None) -> Peek | None:
        """Look at what a restore would take, before it: a program may have to be built for the step it resumes from.

        Only the items that are named are read. So a step whose other items turn out to be damaged is passed over by the
        restore alone. Nothing is noted of it: the run has resumed from nothing.

        Args:
            items: The items to read, such as ``["extras"]``.
            step: The step; None is the newest that is whole as far as it is read.

        Returns:
            The step with these items as ``extras``, or None if the directory holds no checkpoint.

        Raises:
            CheckpointNotFoundError: There is no such step.
            NoWholeCheckpointError: There are checkpoints, and all of them are damaged.
        """
        self._background.join()
        self._compare_options()
        if step is None:
            steps = self.processes.decide("steps", self._steps_of_both_places)
        else:
            steps = [(valid_step(step), True)]
            if self._mirror is not None:
                self.fetch(step)
        damaged = []
        for number, is_here in reversed(steps):
            if not is_here and not self._fetch(number):
                continue
            found, damage = self._restore_everywhere(number, dict.fromkeys(items), {}) if items else ({}, None)
            if damage is None:
                custom = self.custom_metadata(number)
                run = self._run.stored_metadata()
                return Peek(
                    step=number, extras=found, metrics=self.metrics(number), metadata=run, custom_metadata=custom
                )
            damaged.append(f"step {number}: {damage.what}")
        if damaged:
            raise NoWholeCheckpointError(itemized(f"{self.directory}: nothing can be read:", damaged))
        return None

    def _steps_of_both_places(self) -> list[tuple[int, bool]]:
        """Return the steps in ascending order, damaged ones among them, and whether they are in the directory."""
        here = self._run.steps_and_damaged()
        there = [] if self._mirror is None else self._mirror.steps()
        return sorted([(step, True) for step in here] + [(step, False) for step in set(there).difference(here)])

    @property
    def resumed_from(self) -> int | None:
        """The step that the run goes on from since the last restore; None if nothing was restored."""
        return self._went_on_from

    def note_resume(self, step: int) -> list[int]:
        """Note that the run goes on from a step, and warn at once if there are later ones.

        :meth:`restore` notes that by itself, and leaves the warning to the next save, as the caller may only look at
        the step. A training loop calls this where it takes the state of the step from elsewhere.

        Args:
            step: The step.

        Returns:
            The later steps, in ascending order. Each is replaced when the run saves it again.
        """
        later = self._goes_on_from(valid_step(step))
        self._rollback.warn(later)
        return later

    def _goes_on_from(
        self, step: int, *, skipped: Mapping[int, str] | None = None, began: float | None = None
    ) -> list[int]:
        if began is not None or step != self._went_on_from:
            self.events.write(
                "restored",
                step=step,
                seconds=None if began is None else round(time.perf_counter() - began, 6),
                skipped=[{"step": n, "damage": what} for n, what in (skipped or {}).items()],
            )
        self._went_on_from = step
        self.observer.reached("restored", step)
        self._decisions.restored(step)
        return self._rollback.restored(step)

    def _restore(self, step: int, items: Any, kwargs: Mapping[str, Any]) -> Any:
        location = self._run.step_location(step)
        if self._run.other(step) is not None:
            self._run.record(step)  # raises if it is damaged
            return self._items.restore_other(location, items, kwargs)

        def read(record: CheckpointRecord) -> Any:
            for item in self._items.left_out(record, items):
                before = newest_with(item, self._run.infos(), step)
                where = "nor was a step before it" if before is None else f"step {before} has it, of an earlier moment"
                _logger.warning("%s: step %d was saved without %s; %s", self.directory, step, item, where)
            return self._items.restore(location, record, items, kwargs)

        try:
            return self._run.read(step, read)
        except DamagedCheckpointError:
            self._items.damage_found()
            raise

    def _restore_everywhere(self, step: int, items: Any, kwargs: Mapping[str, Any]) -> tuple[Any, _Damage | None]:
        """Restore a step on all processes; return it, and what is wrong with it for any of them."""
        found = damage = None
        try:
            found = self._restore(step, items, kwargs)
        except DamagedCheckpointError as error:
            damage = _Damage(str(error), unreadable=error.unreadable)
        except BaseException as error:
            if not isinstance(error, CheckpointNotFoundError) or step in self._run.steps_and_damaged():
                self.processes.fail("restored", error)
                raise
            damage = _Damage("it was deleted meanwhile", deleted=True)
        shared = self.processes.share("restored", damage)
        first = next((_Damage(*what)._replace(process=i) for i, what in enumerate(shared) if what is not None), None)
        if first is not None:
            self._items.damage_found()
        return found, first

    # ---- saving

    def decide(self, step: int, *, metrics: Any = None) -> Decision:
        """Return whether a save is due, and the reason.

        The run begins with the first step that is asked about. After a save that failed, the next step is due.

        Args:
            step: The number of optimizer updates done.
            metrics: The metrics of this step, for ``save_on_best``.
        """
        self.observer.reached("step", step)
        if metrics is not None:
            metrics = named(metrics)
            if self.options.save_on_best and callable(self.options.best_fn):
                metrics = plain_containers(metrics)
        pending = self._pending
        in_flight = pending is not None and pending.step == step
        saved = in_flight or (step in self._run and not self._rollback.replaces(step))
        # A function of the metrics fetches them from the device, so that it is called only where a trigger calls it.
        if self._watch is not None and (isinstance(self.options.best_fn, str) or self.options.save_on_best):
            self._note_metrics(step, metrics)
        return self._decisions.decide(step, metrics, saved=saved, earlier=self._earlier)

    def _note_metrics(self, step: int, metrics: Mapping[str, Any] | None) -> None:
        """Warn, once, of metrics without the one that ranks checkpoints."""
        if self._watch is not None:
            self._watch.note(step, metrics, known=lambda metric: best(self._run.infos(), metric) is not None)
            self._watch = None if self._watch.ended else self._watch

    def should_save(self, step: int, *, metrics: Any = None) -> bool:
        """Return whether a save is due at a step."""
        return not self.options.read_only and self.decide(step, metrics=metrics).save

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
        """Save a step if that is due.

        Args:
            step: The number of optimizer updates in the items, 0 or more.
            items: The item, or a dictionary of items if the manager has several; those of ``item_intervals`` are saved
                if they are due, and may be left out.
            metrics: Numbers to store with the checkpoint and to rank it by: a dictionary, or any other container. It
                may hold dictionaries, lists, tuples, namedtuples, dataclasses and arrays of up to 4096 numbers. They
                come back, and are given to ``best_fn``, as dictionaries and lists.
            custom_metadata: Facts about this step, as JSON can hold them; see :meth:`custom_metadata`.
            force: Save although nothing is due; a checkpoint of the same step is replaced, atomically. After
                :meth:`restore` of an older step, the steps after it are replaced in this way without being forced.
            save_kwargs: Further arguments for the handler, or a dictionary of them by item.
            reason: Why it is saved, for the log and the record, instead of the reason that the triggers give.

        Returns:
            Whether it was saved. A save in the background is not committed yet.

        Raises:
            SaveFailedError: The save before this one failed in the background; this one is done nevertheless, unless
                it failed because another process did not answer.
            UnsupportedLeafError: An item cannot be saved; nothing was written.
            OptionError: The items are not those of the manager, or JSON cannot hold ``custom_metadata``.
            OwnershipError: Another run writes to this directory.
        """
        began = time.perf_counter()
        self._check_writable()
        step = valid_step(step)
        decision = Decision(True, "forced") if force else self.decide(step, metrics=metrics)
        replaces = force or self._run.is_damaged(step) or self._rollback.replaces(step)
        if not decision.save:
            return False
        self.acquire()
        if force:
            self.observer.reached("step", step)  # as far as nothing was asked of this step before
        self._background.join()
        with self._changing:
            self._background.join()  # of another thread that has saved meanwhile
            self._check_writable()
            if self._background.has_missed_a_process and (lost := self._background.take_error()) is not None:
                self.processes.fail("save", lost)  # this one would wait as long again
                raise lost
            not_due = [] if force else self._not_due(step)
            rendezvous = self.processes.rendezvous("save")
            try:
                self._run.ownership.check(at_once=True)
                self._run.make_room(step, replaces=replaces)
                facts = check_json("custom_metadata", custom_metadata)
                numbers = None if metrics is None else plain_metrics(metrics)
                pending = _PendingSave(step, reason or decision.reason, numbers, facts)
                if reason is None or not isinstance(self.options.best_fn, str):  # a callback has asked decide() before
                    self._note_metrics(step, pending.metrics)
                values = self._items.to_save(items, save_kwargs or {}, not_due)
                self._items.save_begins(step, self._run)
            except BaseException as error:
                if rendezvous is not None:
                    rendezvous.fail(error)
                raise
            if self._mirror is not None:
                self._mirror.save_begins()
            try:
                save = Save(
                    self._run.step_location(step),
                    values,
                    overwrite=True,  # what is there without having been due was committed by a run that is superseded
                    owned=True,
                    began=began,
                    rendezvous=rendezvous,
                    timeout=self.processes.timeout,
                )
            except BaseException:
                if self._mirror is not None:
                    self._mirror.save_ended()
                raise
            if save.replaces and not replaces:
                _logger.warning(
                    "%s: step %d was committed by another run since this one has looked, and is replaced",
                    self.directory,
                    step,
                )
            earlier: SaveFailedError | None = None
            try:
                self._went_on_from = None
                self._rollback.saving(step)
                self._decisions.save_begins(step)
                self._pending = pending
                if not save.in_background:
                    self._complete(pending, save)
                earlier = self._background.take_error()
                if save.in_background:
                    what = f"step {step} of {self.directory}"
                    self._background.start(lambda: self._complete(pending, save), what=what, step=step)
            except BaseException as error:  # such as an interrupt, or the system has no more threads
                if save.give_up(error):
                    self._ended(pending, failed=True)
                if earlier is not None:
                    error.add_note(str(earlier))
                raise
            if earlier is not None:
                raise earlier
            return True

    def _not_due(self, step: int) -> list[str]:
        """Return the items that a save at a step leaves out; process 0 knows."""
        names = list(self.options.item_intervals)
        work = lambda: [name for name in names if not self.item_due(name, step)]  # noqa: E731
        found: list[str] = self.processes.decide(f"items of step {step}", work) if names else []
        return found

    def _complete(self, pending: _PendingSave, save: Save) -> None:
        """Write and commit a save, then delete what no rule keeps and call the listeners."""
        step = pending.step
        self.observer.reached("saving", step)
        try:
            with save.completing() as claimed:
                if not claimed:  # an interrupt came before this thread, and has ended the save
                    return
                items = save.write()
                record, report = save.commit(None if items is None else self._record(pending, items))
        except BaseException as error:
            self._ended(pending, failed=True)
            self.observer.reached("save_failed", step)
            self.events.write("save_failed", step=step, error=described(error))
            raise
        self._run.add(step, record)
        self._run.last_saved = step
        self._rollback.saved(step)
        self._ended(pending, failed=False)
        _logger.info("%s", report)
        self.events.write(
            "saved",
            step=step,
            reason=report.reason,
            bytes=report.bytes,
            shared_bytes=report.shared_bytes,
            blocked_seconds=round(report.blocked_seconds, 6),
            total_seconds=round(report.total_seconds, 6),
            metrics=few(record.metrics),
        )
        self.observer.reached("committed", step)
        try:
            with self._items.steps_deleted():
                self._run.collect()
            self._notify_mirror()
        except Exception as error:
            raise SaveFailedError(
                f"step {step} of {self.directory} is saved, but best_fn failed then: {error!r}",
                step,
            ) from error
        for listener in self._listeners:
            listener(report)

    def _ended(self, pending: _PendingSave, *, failed: bool) -> None:
        if self._mirror is not None:
            self._mirror.save_ended()
        self._decisions.save_ended(failed=failed)
        self._pending = None
        pending.close()

    def _record(self, pending: _PendingSave, items: Mapping[str, ItemRecord]) -> CheckpointRecord:
        """Make the commit record, at the last moment: the right to write is checked here."""
        self._run.ownership.check()
        self.observer.reached("commit", pending.step)
        return CheckpointRecord(
            items=items,
            time=self._clock.now(),
            step=pending.step,
            reason=pending.reason,
            metrics=pending.close(),
            custom_metadata=pending.facts,
        )

    def _earlier(self) -> Sequence[StepInfo]:
        """Return the steps that a new best has to beat, the one that is being saved among them."""
        pending = self._pending
        if pending is None:
            return self._run.infos()
        return *self._run.infos(), StepInfo(step=pending.step, time=self._clock.now(), metrics=pending.metrics)

    def add_listener(self, listener: Callable[[SaveReport], None]) -> None:
        """Call a function after every commit, on the thread that committed; ``events.add_listener`` passes all events.

        An error of the listener is logged, the first one as a warning, and stops nothing.

        Args:
            listener: Receives the report.
        """
        self._listeners.append(guarded(listener))

    # ---- changing what was saved

    def record_metrics(self, step: int, metrics: Any) -> None:
        """Store metrics with a step that was saved or is being saved; new values replace old ones.

        A manager that is ``read_only`` leaves them to the run beside it, as ``hf.record_metrics`` does.

        Args:
            step: The step.
            metrics: Numbers, as for :meth:`save`.

        Raises:
            CheckpointNotFoundError: There is no such step.
        """
        if self.options.read_only:
            add_metrics(self.directory, step, metrics, step_prefix=self.options.step_prefix, clock=self._clock)
            return
        self._check_writable()
        found = plain_metrics(metrics)
        self._note_metrics(step, found)

        def record() -> dict[str, Any] | None:
            pending = self._pending
            if pending is not None and pending.step == step and pending.add(found):
                return None  # its record will hold them
            self._change(step, found)
            return found

        self.acquire()
        recorded = self.processes.decide(f"metrics of step {step}", record)
        if recorded is None:
            return
        if not self.processes.is_primary:
            self._change(step, recorded)
        if self._changing.acquire(blocking=False):  # a save that is under way, or begins, collects at its end
            try:
                if not self._background.running:
                    self._background.start(self._run.collect, what=f"{self.directory}: deleting old steps")
            finally:
                self._changing.release()

    def _change(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._join_save_of(step)
        self._run.change(step, lambda record: record.with_metrics(metrics))
        self.events.write("metrics", step=step, metrics=few(metrics))
        self._notify_mirror()

    def pin(self, step: int) -> None:
        """Keep a step until it is unpinned, also if no rule keeps it."""
        self._everywhere(f"pin {step}", lambda: self._run.change(step, lambda record: replace(record, pinned=True)))

    def unpin(self, step: int) -> None:
        """Leave a step to the rules again."""
        self._everywhere(f"unpin {step}", lambda: self._run.change(step, lambda record: replace(record, pinned=False)))

    def delete(self, step: int, *, mirror: bool = True) -> None:
        """Delete a step.

        Args:
            step: The step.
            mirror: Whether to delete it in the mirror, too. A manager without the option ``mirror``, in the directory
                of a run that had one, notes the step for the next run with it, or for :meth:`settle_mirror`.

        Raises:
            CheckpointNotFoundError: There is no such step.
        """
        self._check_writable()
        self._join_save_of(step)
        self._everywhere(f"delete {step}", lambda: self._run.delete(step, mirror=mirror))
        if mirror and self._mirror is not None and self.processes.is_primary:
            self._mirror.delete()

    def delete_after(self, step: int) -> list[int]:
        """Delete all steps later than one, pinned and damaged ones, too: the way to go back to a step for good.

        ::

            state = manager.restore(1200, template)
            manager.delete_after(1200)  # or they would count as the newest, for retention and for the next resume

        The latest goes first, so that what is left at any moment is the beginning of what was there.

        Args:
            step: The step to go back to.

        Returns:
            The steps that were deleted, in ascending order.
        """
        self._check_writable()
        step = valid_step(step)
        self._background.join()
        self.acquire()
        deleted: list[int] = self.processes.decide(f"delete after {step}", lambda: self._run.delete_after(step))
        if not self.processes.is_primary:
            for one in deleted:
                self._run.add(one, None)
        elif self._mirror is not None:
            self._mirror.delete()
        return deleted

    def settle_mirror(self) -> bool:
        """Bring deletions and pins to the mirror of the run, for a manager that was made without the option ``mirror``.

        Nothing else is copied. What cannot be done is logged, and the next run with that mirror does it.

        Returns:
            Whether the mirror has them; True where the run has no mirror.
        """
        self.acquire()
        url = self._run.identity.mirror
        if self._mirror is not None or url is None or not self.processes.is_primary:
            return True
        options = replace(self.options, mirror=url)
        return RunMirror(as_location(url), self._run, options, self._clock, self.metadata, self.events.write).settle()

    def _join_save_of(self, step: int) -> None:
        pending = self._pending
        if pending is not None and pending.step == step:
            self._background.join()

    def _everywhere(self, what: str, work: Callable[[], None]) -> None:
        """Change the directory on process 0, and then, if that went well, what the others know of it."""
        self.acquire()
        self.processes.decide(what, work)
        if not self.processes.is_primary:
            work()
        self._notify_mirror()

    def _notify_mirror(self) -> None:
        if self._mirror is not None:
            self._mirror.notify()

    # ---- the right to write, and the end

    def acquire(self) -> None:
        """Take the right to write to the directory, and remove what interrupted runs have left in it.

        Saving does this by itself. If it is done early, a second run learns at once that the directory is taken, not
        after an hour of training.

        Raises:
            OwnershipError: Another run writes to this directory.
        """
        self._check_writable()
        with self._changing:
            if self._acquired:
                self._run.ownership.check_not_lost()
                return
            belongs = None if self._mirror is None else self._mirror.identity
            work = lambda: self._run.acquire(self._metadata, belongs=belongs)  # noqa: E731
            self._compare_options()
            self.processes.decide("acquire", work)
            if not self.processes.is_primary:
                self._run.reload()
            self._acquired = True
            self.events.begin(self.latest_step())
            if self._mirror is not None and self.processes.is_primary:
                self._mirror.start()

    def _drain(self) -> None:
        """Wait until no thread begins a save, and none is under way: a newer manager takes over."""
        with self._changing:
            self._background.join()

    def _compare_options(self) -> None:
        """Compare, once, what decides which calls the processes make together."""
        if self._compared:
            return
        options = self.options
        mirror = options.mirror_options()
        self.processes.compare(
            "the options of the managers",
            {
                "directory": self.directory.url,
                "save_interval_steps": options.save_interval_steps,
                "save_interval_secs": str(options.save_interval_secs),
                "save_on_best": options.save_on_best,
                "item_intervals": dict(options.item_intervals),
                "step_prefix": options.step_prefix,
                "mirror": None if mirror is None else str(mirror.url),
            },
        )
        self._compared = True

    def _check_writable(self) -> None:
        if self._closed:
            raise StateError(f"{self.directory}: this manager is closed; make a new one")
        if self.options.read_only:
            raise StateError(f"{self.directory}: this manager was made with read_only=True")

    def is_saving_in_progress(self) -> bool:
        """Return whether a save is under way in the background."""
        return self._background.running

    def wait_until_finished(self) -> None:
        """Wait for the save that is under way, until it is durable in the directory; the mirror follows on its own.

        Raises:
            SaveFailedError: It failed.
        """
        self._background.wait()

    def check_for_errors(self) -> None:
        """Raise the SaveFailedError of a save that has failed, if it was not raised before; does not wait."""
        self._background.check()

    def close(self) -> None:
        """Wait for the save that is under way, for a limited time for the mirror, and give the directory back.

        Raises:
            SaveFailedError: The save failed.
        """
        self._close(None)

    def _close(self, error: BaseException | None) -> None:
        """Close the manager; ``error`` is the exception with which the program leaves its ``with`` statement."""
        with self._changing:  # a save that another thread begins comes before, or is refused
            if self._closed:
                return
            self._closed = True
        try:
            try:
                self._background.wait()
            finally:
                self.finish_mirror()
        except BaseException as failure:
            error = error or failure
            raise
        finally:
            try:
                self.events.end(self.latest_step(), error)
            finally:
                self._run.ownership.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.finish_mirror(_AFTER_ERROR)
        self._close(error)


class _Damage(NamedTuple):
    """Why a step was not restored."""

    what: str
    unreadable: bool = False
    deleted: bool = False
    process: int = 0


class _PendingSave:
    """The step that is being saved, and its metrics: more may come until the commit record is made."""

    def __init__(self, step: int, reason: str, metrics: dict[str, Any] | None, facts: dict[str, Any] | None) -> None:
        self.step = step
        self.reason = reason
        self.facts = facts
        self.metrics = metrics
        self._lock = threading.Lock()
        self._open = True

    def add(self, metrics: Mapping[str, Any]) -> bool:
        """Add metrics; return False if the commit record was made before."""
        with self._lock:
            if self._open:
                self.metrics = {**(self.metrics or {}), **metrics}
            return self._open

    def close(self) -> dict[str, Any] | None:
        """Return all metrics, and take no more."""
        with self._lock:
            self._open = False
            return self.metrics


def best_step_in(directory: Location) -> int:
    """Return the step of a run that its ``best_fn`` ranks first.

    Raises:
        OptionError: The run ranks its checkpoints by no metric.
        CheckpointNotFoundError: No checkpoint has the metric.
    """
    options = stored_options(directory)
    if options is None or options.best_fn is None:
        raise OptionError(
            f"step='best', but the run in {directory} does not rank its checkpoints by the name of a metric "
            "(best_fn=); give the number of the step"
        )
    only_read = replace(options, read_only=True)
    with CheckpointManager(directory, options=only_read, coordinator=Alone()) as manager:
        best_step = manager.best_step()
    if best_step is None:
        raise CheckpointNotFoundError(f"step='best', but no checkpoint in {directory} has the metric {options.best_fn}")
    return best_step


def valid_step(step: Any) -> int:
    """Return a step as a plain int."""
    try:
        number = int(step.__index__())
    except AttributeError:
        raise OptionError(
            f"step={step!r:.60} must be a whole number; a template comes after it: restore(step, template)"
        ) from None
    if number < 0:
        raise OptionError(f"step={number} must not be negative")
    return number
