"""A manager that keeps numbered checkpoints of a checkpoint object in a directory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Never, Self

from ...engine.arrays import Layout
from ...engine.checkpoint import AsyncCheckpointer, Checkpointer
from ...engine.clock import Clock, SystemClock
from ...engine.distributed import ProcessGroup
from ...engine.errors import CheckpointExistsError, OptionError, SaveFailedError
from ...engine.foreign_arguments import refuse_unknown
from ...engine.manager import CheckpointManager as StepManager
from ...engine.manager import CheckpointManagerOptions, Every, KeepPolicy, Mirror, Peek, StepInfo, infos_of
from ...engine.steps import LEFT_BEHIND, list_steps, series_and_step
from ...engine.storage import Place, as_location
from .checkpoint import Checkpoint, CheckpointTemplate, numbered
from .reader import numbers_of
from .restoration import RestoreStatus
from .stored import GraphCheckpointHandler, StoredGraph
from .walk import check

_TIMEOUT = 600.0  # seconds to wait for all processes to agree on the time stored under `_SINCE`
_SINCE = "holdfast.since"  # step metadata key for the time when the directory's first manager was created


@dataclass(frozen=True, kw_only=True)
class _Options(CheckpointManagerOptions):
    """Options whose hourly retention rule counts from the creation of the first manager, as in TensorFlow."""

    since: float

    def _time_rule(self, secs: float) -> KeepPolicy:
        return _Apart(secs=secs, since=self.since)


@dataclass(frozen=True, kw_only=True)
class _Apart(Every):
    since: float

    def kept(self, steps: Sequence[StepInfo]) -> dict[int, str]:
        start = StepInfo(step=-1, time=self.since)
        return {step: why for step, why in super().kept([start, *steps]).items() if step >= 0}


class CheckpointManager:
    """Keeps numbered checkpoints of a checkpoint object in a directory, as ``<directory>/<name>-<number>``.

    The directory is an ordinary step directory that ``holdfast ls`` can list. Only one run may write to it at a time.

    Args:
        checkpoint: The checkpoint object to save.
        directory: A path or URL.
        max_to_keep: The number of newest checkpoints to keep; None keeps all.
        keep_checkpoint_every_n_hours: Permanently keep each checkpoint saved at least this many hours after the last
            kept one, or after the creation of the directory's first manager, as in TensorFlow. The checkpoint is pinned
            when ``max_to_keep`` would delete it; later managers neither delete nor list it, whatever their options.
        checkpoint_name: The part of each checkpoint's name before the number.
        step_counter: The program's step counter: an object that changes in place, such as a `Value` or a tensor, or a
            function that returns the step.
        checkpoint_interval: Save only if the step counter has advanced by at least this many steps since the last save.
        init_fn: Called by `restore_or_initialize` if there is no checkpoint.
        last_checkpoint_step: The step at which an earlier checkpoint was saved; the first interval starts at this step.
        background: Write in the background; `save` returns as soon as it is safe to modify the objects.
        layout: Sizes of chunks, segments and data files.
        clock: The time source.
        mirror: A second location, such as ``s3://bucket/run``, or a `holdfast.Mirror`. Checkpoints are copied there in
            the background, and `restore_or_initialize` restores the newest checkpoint of both locations.

    There is no ``local=`` option, because host-local steps are numbered by training step, whereas these checkpoints
    are numbered by save. `holdfast.CheckpointCallback` saves the same objects and supports ``local=``.

    Raises:
        OptionError: An option is invalid.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     checkpoint = Checkpoint(step=0)
    ...     with CheckpointManager(checkpoint, directory, max_to_keep=2) as manager:
    ...         for checkpoint.step in (10, 20, 30):
    ...             path = manager.save()
    ...         names = [path.rpartition("/")[2] for path in manager.checkpoints]
    >>> names
    ['ckpt-2', 'ckpt-3']
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: Place,
        max_to_keep: int | None,
        keep_checkpoint_every_n_hours: float | None = None,
        checkpoint_name: str = "ckpt",
        step_counter: Any = None,
        checkpoint_interval: int | None = None,
        init_fn: Callable[[], Any] | None = None,
        last_checkpoint_step: int | None = None,
        *,
        background: bool = False,
        layout: Layout | None = None,
        clock: Clock | None = None,
        mirror: Place | Mirror | None = None,
        **unknown: Never,
    ) -> None:
        refuse_unknown(type(self).__name__, unknown, CheckpointManager.__init__)
        if checkpoint_interval is not None and step_counter is None:
            raise OptionError("checkpoint_interval= counts steps: also pass step_counter=")
        if not isinstance(checkpoint, Checkpoint):
            raise OptionError(f"checkpoint={checkpoint!r:.80} must be a Checkpoint that the objects are attached to")
        if checkpoint_interval is not None and not (isinstance(checkpoint_interval, int) and checkpoint_interval >= 1):
            raise OptionError(f"checkpoint_interval={checkpoint_interval!r} must be at least 1 step, or None")
        hours = keep_checkpoint_every_n_hours
        if hours is not None and not (isinstance(hours, int | float) and hours > 0):
            raise OptionError(f"keep_checkpoint_every_n_hours={hours!r} must be above 0, or None")
        self._checkpoint = checkpoint
        self._directory = as_location(directory, writes=True)
        self._name = checkpoint_name
        self._counter = step_counter
        self._interval = checkpoint_interval
        self._init = init_fn
        self._last = last_checkpoint_step
        self._saving: tuple[int, int | None] | None = None  # number of the last save, and the previous value of `_last`
        self._kwargs = {} if layout is None else {"layout": layout}
        self.status: RestoreStatus | None = None
        self._facts = {} if hours is None else {_SINCE: self._since(clock or SystemClock())}
        handler = GraphCheckpointHandler()
        self._steps = StepManager(
            self._directory,
            AsyncCheckpointer(handler) if background else Checkpointer(handler),
            _Options(
                since=self._facts.get(_SINCE, math.nan),
                step_prefix=f"{checkpoint_name}-",
                max_to_keep=max_to_keep,
                keep_time_interval=None if hours is None else 3600.0 * hours,
                mirror=mirror,
            ),
            clock=clock,
        )
        self._later: set[int] = set()  # steps later than the restored one; these may be overwritten
        self._limit = None if hours is None else max_to_keep
        self._left: set[int] = set()  # steps beyond the `max_to_keep` limit that `_preserved` has already considered
        checkpoint._holdfast.managers.add(self)

    @property
    def directory(self) -> str:
        """The path or URL of the directory."""
        return str(self._directory)

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint object."""
        return self._checkpoint

    @property
    def latest_checkpoint(self) -> str | None:
        """The path of the newest committed checkpoint, or None."""
        step = self._steps.latest_step()
        return None if step is None else self._path(step)

    @property
    def checkpoints(self) -> list[str]:
        """The paths of the checkpoints from oldest to newest, except checkpoints that are kept permanently."""
        why = {step: self._steps.why_kept(step) for step in self._in_order()}
        for_good = [step for step in why if "pinned" in why[step] or (why[step] and all(map(_is_period, why[step])))]
        return [self._path(step) for step in why if step not in for_good]

    def save(self, checkpoint_number: Any = None, check_interval: bool = True) -> str | None:
        """Save a checkpoint if the checkpoint interval has passed.

        Args:
            checkpoint_number: The number to use instead of the next one; may be a counter object from any library.
            check_interval: Whether to respect `checkpoint_interval`. Either way, the last saved step is skipped.

        Returns:
            The checkpoint's path, or None if nothing was saved. A background save may not be committed yet.

        Raises:
            CheckpointExistsError: The number belongs to a checkpoint that is not newer than the last restored one.
            StateError: Saving would lose values that an earlier restore has not yet assigned to objects.
            SaveFailedError: The previous background save failed; the current save is performed anyway.
            OwnershipError: Another run is writing to this directory.
        """
        step, failed = None if self._counter is None else _number(self._counter), None
        self._forget_failed()
        if step is not None and self._last is not None:
            is_early = check_interval and step < self._last + (self._interval or 0)
            if is_early or step == self._last:
                return None
        wanted = None if checkpoint_number is None else _number(checkpoint_number)
        if self._limit is not None:  # a save in progress counts toward the limit, too
            try:
                self._steps.wait_until_finished()
            except SaveFailedError as error:
                failed = error
        # Process 0 decides for all processes, because the others may see an outdated directory listing.
        counter, number, left, preserved = self._steps.processes.decide("number", self._next, wanted)
        for preserved_step in preserved:
            self._steps.pin(preserved_step)
        reason = f"number {number}" if step is None else f"step {step}"
        with numbered(self._checkpoint, counter) as item:
            try:
                facts = {**self._facts, **({LEFT_BEHIND: left} if left else {})}
                self._steps.save(
                    number, item, force=True, custom_metadata=facts or None, save_kwargs=self._kwargs, reason=reason
                )
            except SaveFailedError as error:  # raised for the previous save; the current one is in progress
                failed = error
        self._saving, self._last = (number, self._last), step
        self._later.discard(number)
        if failed is not None:
            raise failed
        return self._path(number)

    def restore_or_initialize(self, **options: Any) -> str | None:
        """Restore the newest undamaged checkpoint, or call `init_fn` if there are no checkpoints.

        Damaged checkpoints are skipped with a warning.

        Args:
            **options: Arguments of `Checkpoint.restore`: ``partial``, ``rename``, ``select`` and ``exclude``.

        Returns:
            The path of the restored checkpoint, or None. The `status` attribute is set to the status of the restore.

        Raises:
            NoWholeCheckpointError: All existing checkpoints are damaged.
            TreeMismatchError: An object and its value differ in shape or dtype; nothing was changed.
            UnsupportedLeafError: An attached object can be neither saved nor restored.
        """
        restored = self._steps.restore_latest(CheckpointTemplate(self._checkpoint, **options))
        if restored is None:
            if self._init is not None:
                self._init()
            check(self._checkpoint)
            return None
        self.status = restored.items()
        return self._path(restored.step)

    def peek(self) -> Peek | None:
        """Return the result of `Checkpoint.peek` for the newest checkpoint, or None if there is none."""
        newest = self.latest_checkpoint
        return None if newest is None else self._checkpoint.peek(newest)

    def _note_restore(self, stored: StoredGraph) -> None:
        """After a restore from this directory, count the interval from the restored step, and record later steps."""
        location = stored.checkpoint
        if str(location) != str(self._directory / location.name):
            return
        _, number = series_and_step(location.name) or ("", 0)
        self._later = {step for step in self._steps.all_steps() if step > number}
        if self._counter is not None:
            self._saving, self._last = None, _number(self._counter)

    def wait_until_finished(self) -> None:
        """Wait for the save in progress, and raise SaveFailedError if it fails."""
        self._steps.wait_until_finished()

    def close(self) -> None:
        """Wait for the save in progress and release the directory; raise SaveFailedError if the save fails."""
        self._steps.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _since(self, clock: Clock) -> float:
        """Return when the directory's first manager was created, or 0 if the newest checkpoint does not record it."""
        steps = list_steps(self._directory, f"{self._name}-")
        facts = [entry.record.custom_metadata or {} for entry in steps if entry.record is not None]
        since = float(facts[-1].get(_SINCE, 0)) if facts else clock.now() - 1
        processes = ProcessGroup(f"managers of {self._directory.url}", None, _TIMEOUT)
        return float(processes.decide("the first manager", lambda: since))

    def _next(self, wanted: int | None) -> list[Any]:
        """Return the save counter, the checkpoint's number, the steps with higher numbers, and the steps to pin."""
        steps = self._steps.all_steps()
        if wanted is not None and wanted in steps and wanted not in self._later:
            raise CheckpointExistsError(
                f"{self._path(wanted)} already exists and is not overwritten. Choose another number"
            )
        taken = [] if wanted is not None else numbers_of(self._directory, self._name)
        following = max([self._checkpoint.save_counter, *taken]) + 1
        number = following if wanted is None else wanted
        left: list[list[float]] = []
        if any(step > number for step in steps):
            entries = infos_of(list_steps(self._directory, f"{self._name}-"))
            left = [[info.step, info.time] for info in entries if info.step > number]
        return [following, number, left, self._preserved(number)]

    def _preserved(self, number: int) -> list[int]:
        """Return the steps that a save would push beyond the limit but that the hourly rule keeps permanently."""
        if self._limit is None:
            return []
        steps = [step for step in self._in_order() if step != number]
        leaving = [step for step in steps[: max(0, len(steps) + 1 - self._limit)] if step not in self._left]
        self._left.update(leaving)
        why = {step: self._steps.why_kept(step) for step in leaving}
        return [step for step in leaving if "pinned" not in why[step] and any(map(_is_period, why[step]))]

    def _in_order(self) -> list[int]:
        """Return all steps in save order. Steps with higher numbers that a restore abandoned come first."""
        newest = self._steps.latest_step() or 0
        return sorted(self._steps.all_steps(), key=lambda step: (step <= newest, step))

    def _forget_failed(self) -> None:
        """In a single-process run, if the last save failed, count the interval from the save before it."""
        if self._saving is None or self._steps.is_saving_in_progress() or not self._steps.processes.alone:
            return
        (number, before), self._saving = self._saving, None
        if number not in self._steps.all_steps():
            self._last = before

    def _path(self, number: int) -> str:
        return str(self._directory / f"{self._name}-{number}")


def _is_period(reason: str) -> bool:
    return reason.startswith("every ")


def _number(counter: Any) -> int:
    value = counter() if callable(counter) and not hasattr(counter, "__int__") else counter
    try:
        return int(value)
    except (TypeError, ValueError) as error:
        raise OptionError(f"{value!r:.80} is not a whole number; a counter must be") from error
