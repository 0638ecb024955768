"""A manager of the numbered checkpoints of one checkpoint object in one directory."""

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

_TIMEOUT = 600.0  # seconds that a process waits for the others to agree on the time below
_SINCE = "holdfast.since"  # key in the metadata of a step: when the first manager of the directory was made


@dataclass(frozen=True, kw_only=True)
class _Options(CheckpointManagerOptions):
    """Options whose period in time begins before the first step, as TensorFlow's does."""

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
    """Keeps numbered checkpoints of one checkpoint object in one directory: ``<directory>/<name>-<number>``.

    It writes an ordinary directory of steps, which ``holdfast ls`` lists and one run at a time writes to.

    Args:
        checkpoint: The checkpoint object to save.
        directory: A path or URL.
        max_to_keep: How many of the newest checkpoints to keep; None keeps all.
        keep_checkpoint_every_n_hours: Keep one checkpoint every this many hours for good, as TensorFlow does: each that
            was saved so long after the last of them, or after the first manager of the directory was made. It is pinned
            when the limit would delete it: no later manager deletes or lists it, whatever its options are.
        checkpoint_name: The name before the number.
        step_counter: The step of the program: a number that changes in place, such as a `Value` or a tensor, or a
            function that returns it.
        checkpoint_interval: Save only if the step counter has advanced by this much since the last save.
        init_fn: Called by `restore_or_initialize` if there is no checkpoint.
        last_checkpoint_step: The step of a checkpoint that was saved before, to count the interval from.
        background: Return from `save` as soon as the objects may change again, and write then.
        layout: Sizes of chunks, segments and data files.
        clock: The source of the time.
        mirror: A second place, such as ``s3://bucket/run``, or a `holdfast.Mirror`: checkpoints are copied there in the
            background, and `restore_or_initialize` takes the newest of both places.

    Local steps (``local=`` of other managers) count the updates of a loop, and these checkpoints have their own
    numbers: `holdfast.CheckpointCallback` saves the same objects, and takes ``local=``.

    Raises:
        OptionError: An option is not valid.

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
            raise OptionError("checkpoint_interval= counts steps: pass step_counter=, too")
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
        self._saving: tuple[int, int | None] | None = None  # number of the last save, and `_last` before that save
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
        self._later: set[int] = set()  # steps after the one that was restored last, which are saved again
        self._limit = None if hours is None else max_to_keep
        self._left: set[int] = set()  # steps beyond the limit, which are pinned if they stay for good
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
        """The path of the newest checkpoint that is committed, or None."""
        step = self._steps.latest_step()
        return None if step is None else self._path(step)

    @property
    def checkpoints(self) -> list[str]:
        """The paths of the checkpoints from the oldest to the newest, without those that are kept for good."""
        why = {step: self._steps.why_kept(step) for step in self._in_order()}
        for_good = [step for step in why if "pinned" in why[step] or (why[step] and all(map(_is_period, why[step])))]
        return [self._path(step) for step in why if step not in for_good]

    def save(self, checkpoint_number: Any = None, check_interval: bool = True) -> str | None:
        """Save, unless it is too early.

        Args:
            checkpoint_number: The number for the name instead of the next one; a counter of any library.
            check_interval: Whether to wait for `checkpoint_interval`. A step that was just saved is never saved again.

        Returns:
            The path of the checkpoint, or None if it is too early. A background save is not committed yet.

        Raises:
            CheckpointExistsError: The number is taken, by no checkpoint after the one that was restored last.
            StateError: Values of an earlier restore still wait for their objects, or objects for their values.
            SaveFailedError: The background save before this one failed; this one is done nevertheless.
            OwnershipError: Another run writes to this directory.
        """
        step, failed = None if self._counter is None else _number(self._counter), None
        self._forget_failed()
        interval = self._interval if check_interval else None
        if step is not None and self._last is not None and (step == self._last or step < self._last + (interval or 0)):
            return None
        wanted = None if checkpoint_number is None else _number(checkpoint_number)
        if self._limit is not None:  # A save under way pushes others off the list.
            try:
                self._steps.wait_until_finished()
            except SaveFailedError as error:
                failed = error
        # Process 0 decides for all: another process may see an older listing of the directory.
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
            except SaveFailedError as error:  # the save before failed; this one is under way
                failed = error
        self._saving, self._last = (number, self._last), step
        self._later.discard(number)
        if failed is not None:
            raise failed
        return self._path(number)

    def restore_or_initialize(self, **options: Any) -> str | None:
        """Restore the newest checkpoint that is whole, or call `init_fn` if there is none.

        Damaged checkpoints are skipped with a warning.

        Args:
            **options: As for `Checkpoint.restore`: ``partial``, ``rename``, ``select``, ``exclude``.

        Returns:
            The path of the checkpoint, or None. The status of the restore is in `status`.

        Raises:
            NoWholeCheckpointError: There are checkpoints, and all of them are damaged.
            TreeMismatchError: Objects have other shapes or dtypes than their values; nothing was changed.
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
        """Return what `Checkpoint.peek` returns for the newest checkpoint; None if there is none."""
        newest = self.latest_checkpoint
        return None if newest is None else self._checkpoint.peek(newest)

    def _note_restore(self, stored: StoredGraph) -> None:
        """Count the interval from a checkpoint that was restored, if it is one of this directory."""
        location = stored.checkpoint
        if str(location) != str(self._directory / location.name):
            return
        _, number = series_and_step(location.name) or ("", 0)
        self._later = {step for step in self._steps.all_steps() if step > number}
        if self._counter is not None:
            self._saving, self._last = None, _number(self._counter)

    def wait_until_finished(self) -> None:
        """Wait for the save that is under way; raise SaveFailedError if it failed."""
        self._steps.wait_until_finished()

    def close(self) -> None:
        """Wait for the save that is under way and release the directory; raise SaveFailedError if it failed."""
        self._steps.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _since(self, clock: Clock) -> float:
        """Return when the first manager of the directory was made; 0 if its checkpoints do not record it."""
        steps = list_steps(self._directory, f"{self._name}-")
        facts = [entry.record.custom_metadata or {} for entry in steps if entry.record is not None]
        since = float(facts[-1].get(_SINCE, 0)) if facts else clock.now() - 1
        processes = ProcessGroup(f"managers of {self._directory.url}", None, _TIMEOUT)
        return float(processes.decide("the first manager", lambda: since))

    def _next(self, wanted: int | None) -> list[Any]:
        """Return the next counter, the number of the save, the steps that are left behind, and those to preserve."""
        steps = self._steps.all_steps()
        if wanted is not None and wanted in steps and wanted not in self._later:
            raise CheckpointExistsError(
                f"{self._path(wanted)} exists already; nothing is overwritten. Choose another number"
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
        """Return the steps that a save pushes off the list, and that the rule of hours keeps for good."""
        if self._limit is None:
            return []
        steps = [step for step in self._in_order() if step != number]
        leaving = [step for step in steps[: max(0, len(steps) + 1 - self._limit)] if step not in self._left]
        self._left.update(leaving)
        why = {step: self._steps.why_kept(step) for step in leaving}
        return [step for step in leaving if "pinned" not in why[step] and any(map(_is_period, why[step]))]

    def _in_order(self) -> list[int]:
        """Return all steps in the order of their saves: those that a restore left behind come before the newest."""
        newest = self._steps.latest_step() or 0
        return sorted(self._steps.all_steps(), key=lambda step: (step <= newest, step))

    def _forget_failed(self) -> None:
        """Count the interval from an earlier save if the last one failed, which only a single process knows at once."""
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
        raise OptionError(f"{value!r:.80} is not a whole number, as a counter must be") from error
