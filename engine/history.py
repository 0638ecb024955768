"""The checkpoints of a directory, looked at: which there are, why they are kept, and how to get them back."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .background import BackgroundSave
from .checkpointer import Checkpointer, Place
from .clock import Clock, SystemClock
from .coordination import Coordinator
from .directory import RunDirectory
from .durations import seconds
from .errors import CheckpointNotFoundError, DamagedCheckpointError, NoWholeCheckpointError, OptionError
from .items import ItemSet
from .options import CheckpointManagerOptions
from .policy import best
from .storage import Location, as_location
from .together import Together

_logger = logging.getLogger("holdfast")


@dataclass(frozen=True, slots=True)
class Restored:
    """A checkpoint that was restored.

    Attributes:
        step: Its step.
        items: What was restored: the item, or a dictionary of items if the manager has several.
        skipped: Newer steps that are damaged, each with what is wrong.
    """

    step: int
    items: Any
    skipped: tuple[tuple[int, str], ...] = ()


class CheckpointHistory:
    """The part of a :class:`~holdfast.CheckpointManager` that does not write.

    Args:
        directory: Where the checkpoints are: a path or a URL.
        checkpointers: A checkpointer for the one item, or a dictionary of them for several, or None for one tree.
        options: What to save and keep.
        metadata: Facts about the run.
        clock: Where the time comes from.
        coordinator: How the processes of a program find each other.

    Attributes:
        directory: Where the checkpoints are.
        options: What to save and keep.
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
    ) -> None:
        self.directory: Location = as_location(directory)
        self.options = options or CheckpointManagerOptions()
        self._items = ItemSet(checkpointers)
        self._metadata = None if metadata is None else dict(metadata)
        self._clock = clock or SystemClock()
        self._background = BackgroundSave(seconds(self.options.save_timeout_secs))
        self._together = Together(
            self.directory.url, coordinator, seconds(self.options.barrier_timeout_secs, name="barrier_timeout_secs")
        )
        self._run = RunDirectory(
            self.directory,
            self.options.step_prefix,
            self.options.rules(),
            self._clock,
            self._background.join,
            writes=self._together.leads,
        )
        self._steps = self._run.steps

    @property
    def alone(self) -> bool:
        """Tells whether this process saves alone; otherwise others save with it."""
        return self._together.alone

    def all_steps(self) -> list[int]:
        """Returns the committed steps in ascending order."""
        return self._steps.steps()

    def latest_step(self) -> int | None:
        """Returns the newest committed step, or None."""
        steps = self.all_steps()
        return steps[-1] if steps else None

    def best_step(self) -> int | None:
        """Returns the step that ``best_fn`` ranks first; the newest if there is no ``best_fn`` or no metric."""
        if self.options.best_fn is None:
            return self.latest_step()
        found = best(self._steps.infos(), self.options.best_fn, self.options.best_mode)
        return self.latest_step() if found is None else found

    def why_kept(self, step: int) -> tuple[str, ...]:
        """Returns every reason for which a committed step is kept; empty if it is about to be deleted.

        Args:
            step: The step.

        Raises:
            CheckpointNotFoundError: There is no such step.
        """
        self._steps.record(step)
        return self._run.kept().get(step, ())

    def metrics(self, step: int) -> Mapping[str, Any] | None:
        """Returns the metrics stored with a step, or None.

        Args:
            step: The step.

        Raises:
            CheckpointNotFoundError: There is no such step.
        """
        return self._steps.record(step).metrics

    def metadata(self) -> Mapping[str, Any] | None:
        """Returns the facts about the run that are stored beside the checkpoints, or None."""
        return self._metadata if self._metadata is not None else self._run.metadata()

    def structure(self, step: int | None = None) -> Any:
        """Returns what a step looks like, without reading its data.

        Args:
            step: The step; None is the newest.

        Returns:
            The tree with a description of every leaf, or a dictionary of those by item if the manager has several.
        """
        found = self.latest_step() if step is None else step
        if found is None:
            raise CheckpointNotFoundError(f"{self.directory}: there is no checkpoint")
        return self._items.structure(self._steps.location(found), self._steps.record(found))

    def reload(self) -> None:
        """Reads the directory anew, to see what another process has done; waits for a save that is under way."""
        self._background.join()
        self._steps.reload(forget=True)

    def restore(
        self, step: int | None = None, items: Any = None, *, restore_kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Reads a step back.

        Args:
            step: The step; None is the newest that is whole.
            items: A template, or a dictionary of templates if the manager has several items. Only the items that are
                named in it are restored; None restores all.
            restore_kwargs: Further arguments for the handler, or a dictionary of them by item.

        Returns:
            The item, or a dictionary of items if the manager has several.

        Raises:
            CheckpointNotFoundError: There is no such step, or none at all.
            DamagedCheckpointError: The step is damaged.
            TreeMismatchError: A template and what was saved differ.
            NoWholeCheckpointError: No step was given, and all of them are damaged.
        """
        self._background.join()
        if step is None:
            restored = self.restore_latest(items, restore_kwargs=restore_kwargs)
            if restored is None:
                raise CheckpointNotFoundError(f"{self.directory}: there is no checkpoint to restore")
            return restored.items
        found = self._restore(valid_step(step), items, restore_kwargs or {})
        self._reached(step)
        return found

    def restore_latest(self, items: Any = None, *, restore_kwargs: Mapping[str, Any] | None = None) -> Restored | None:
        """Reads the newest step that is whole.

        Damaged steps are passed over, with a warning for each; that a template does not fit is an error at once.

        Args:
            items: As for :meth:`restore`.
            restore_kwargs: As for :meth:`restore`.

        Returns:
            The step and what was restored, or None if the directory holds no checkpoint.

        Raises:
            NoWholeCheckpointError: There are checkpoints, and all of them are damaged.
            TreeMismatchError: A template and what was saved differ.
        """
        self._background.join()
        skipped: list[tuple[int, str]] = []
        steps = self._together.decide("steps", lambda: sorted({*self.all_steps(), *self._steps.damage}, reverse=True))
        for step in steps:
            found, damage = self._attempt(step, items, restore_kwargs or {})
            if damage is not None:
                _logger.warning("%s: step %d is damaged and passed over: %s", self.directory, step, damage)
                skipped.append((step, damage))
                continue
            if skipped:
                _logger.warning("%s: going back to step %d, the newest whole checkpoint", self.directory, step)
            for damaged, what in skipped:
                self._steps.condemn(damaged, what)
            self._reached(step)
            return Restored(step, found, tuple(skipped))
        if skipped:
            raise NoWholeCheckpointError(
                "\n".join(
                    [
                        f"{self.directory}: every checkpoint is damaged. Look with `holdfast verify`; "
                        "to start over, use another directory",
                        *(f"  step {step}: {what}" for step, what in skipped),
                    ]
                )
            )
        return None

    def _reached(self, step: int) -> None:
        """Notes the step that the run is at now; it matters to those who save."""

    def _attempt(self, step: int, items: Any, kwargs: Mapping[str, Any]) -> tuple[Any, str | None]:
        """Restores a step; returns it, or what is wrong with it, for this process or for any other."""
        found = damage = None
        try:
            found = self._restore(step, items, kwargs)
        except DamagedCheckpointError as error:
            damage = str(error)
        except BaseException as error:
            self._together.fail("restored", error)
            raise
        return found, next((what for what in self._together.share("restored", damage) if what is not None), None)

    def _restore(self, step: int, items: Any, kwargs: Mapping[str, Any]) -> Any:
        return self._items.restore(self._steps.location(step), self._steps.record(step), items, kwargs)


def valid_step(step: Any) -> int:
    """Returns a step as a plain int.

    Args:
        step: A whole number of any library.

    Raises:
        OptionError: It is no whole number, or negative.
    """
    try:
        number = int(step.__index__())
    except AttributeError:
        raise OptionError(
            f"step={step!r:.60} must be a whole number; a template comes after it: restore(step, template)"
        ) from None
    if number < 0:
        raise OptionError(f"step={number} must not be negative")
    return number
