"""The directory of one run: its committed steps, who may write to it, and what is deleted from it."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from .clock import Clock
from .commit import delete_checkpoint, remove_temporary, sweep, write_record
from .errors import HoldfastError, ObjectNotFoundError, OptionError, OwnershipError, StorageConflictError, StorageError
from .format import decode_document, encode_document
from .marks import Mark
from .options import CheckpointManagerOptions
from .ownership import OWNER, Ownership
from .policy import KeepBest, Rule, metric_name, reasons
from .record import PARTIAL, RECORD, CheckpointRecord
from .steps import StepIndex
from .storage import Location, at_once, several

_logger = logging.getLogger("holdfast")

_METADATA = "metadata"
_METADATA_FILE = "data.json"
_METADATA_LIMIT = 64 << 20  # bytes
OPTIONS = "options.json"
"""Name of the file that says what the last run on a directory keeps."""


def stored_options(location: Location) -> CheckpointManagerOptions | None:
    """Returns what the last run on a directory keeps, or None where that is not known.

    Args:
        location: The manager's directory.
    """
    place = location / OPTIONS
    try:
        document = decode_document(place.read_bytes(limit=1 << 20), "options", source=str(place))
        return CheckpointManagerOptions.from_document(document["options"])
    except (HoldfastError, KeyError, AttributeError):
        return None


class RunDirectory:
    """A directory of steps that is read by anybody and written by one.

    Args:
        location: The directory.
        prefix: Prefix of the steps' names, or None.
        rules: What keeps a step.
        clock: Where the time comes from.
        drain: Ends the save that is under way; called before a newer manager of this process takes over.
        writes: Whether this process changes what is on disk; otherwise another one does the same at the same time, and
            this one keeps the books alike.

    Attributes:
        last_saved: The step that this run has saved last, or None.
    """

    def __init__(
        self,
        location: Location,
        prefix: str | None,
        rules: Sequence[Rule],
        clock: Clock,
        drain: Callable[[], None],
        *,
        writes: bool = True,
    ) -> None:
        self.location = location
        self.steps = StepIndex(location, prefix)
        self.ownership = Ownership(location, clock, drain)
        self._rules = rules
        self._writes = writes
        self._swept = False
        self._warned = False  # that no checkpoint can be the best
        self.last_saved: int | None = None
        self._changing = threading.Lock()  # records are rewritten and steps deleted one after the other

    def acquire(self, metadata: Mapping[str, Any] | None, options: CheckpointManagerOptions) -> None:
        """Takes the right to write, sweeps what interrupted runs left, and stores facts about the run.

        Args:
            metadata: The facts, or None to leave them as they are.
            options: What this run keeps; stored for those who list the directory.

        Raises:
            OptionError: JSON cannot hold the facts.
            OwnershipError: Another run writes to this directory.
        """
        if self._swept:
            self.ownership.check_not_lost()
            return
        facts = None if metadata is None else _encoded(metadata)
        self.ownership.take()
        remove_temporary(self.location, [entry.name for entry in self.location.entries()])
        several(self._sweep, [location for _, location in self.steps.directories()], at_once(self.location))
        self.steps.reload()
        if facts is not None:
            (self.location / _METADATA).make_directory()
            (self.location / _METADATA / _METADATA_FILE).write_bytes(facts)
        (self.location / OPTIONS).write_bytes(encode_document("options", {"options": options.to_document()}))
        self._swept = True

    def _sweep(self, location: Location) -> None:
        mark = Mark(location / PARTIAL)
        try:
            mark.take_over()
        except StorageConflictError as error:  # one that is not made by a manager: those are alone here
            _logger.warning("%s: what is there is left alone: %s", location, error)
            return
        try:
            if not sweep(location) and location.is_local:
                self._remove_empty(location)
        finally:
            mark.release()

    def _remove_empty(self, location: Location) -> None:
        """Removes the folder of a step that an earlier run has made and was killed before it could mark it."""
        with contextlib.suppress(OSError):  # above all where it is not empty
            # One clock, that of the file system; a folder that is newer may be one that somebody is about to fill.
            if os.lstat(location).st_mtime_ns <= os.stat(self.location / OWNER).st_mtime_ns:
                os.rmdir(location)

    def metadata(self) -> Mapping[str, Any] | None:
        """Returns the facts about the run, or None."""
        place = self.location / _METADATA / _METADATA_FILE
        try:
            content = place.read_bytes(limit=_METADATA_LIMIT)
        except ObjectNotFoundError:
            return None
        found: Mapping[str, Any] | None = decode_document(content, "json", source=str(place)).get("data")
        return found

    def change(self, step: int, change: Callable[[CheckpointRecord], CheckpointRecord]) -> None:
        """Replaces the commit record of a step, atomically.

        Args:
            step: The step.
            change: Makes the new record from the one that is there.

        Raises:
            CheckpointNotFoundError: There is no such step.
        """
        with self._changing:
            record = change(self.steps.record(step))
            if self._writes:
                self.ownership.check()
                write_record(self.steps.location(step), record)
            self.steps.add(step, record)

    def pin(self, step: int, pinned: bool) -> None:
        """Keeps a step whatever the rules say, or leaves it to them again."""
        self.change(step, lambda record: replace(record, pinned=pinned))

    def delete(self, step: int) -> None:
        """Deletes a step, whole or damaged.

        Args:
            step: The step.

        Raises:
            CheckpointNotFoundError: There is no such step.
        """
        with self._changing:
            if step not in self.steps.damage:
                self.steps.record(step)
            self._delete(step)

    def delete_after(self, step: int) -> list[int]:
        """Deletes the steps after one, whole or damaged, the latest first; returns them in ascending order."""
        with self._changing:
            later = sorted(one for one in {*self.steps.steps(), *self.steps.damage} if one > step)
            for one in reversed(later):
                self._delete(one)
        return later

    def _delete(self, step: int) -> None:
        if not self._writes:
            self.steps.remove(step)
            return
        self.ownership.check()
        location = self.steps.location(step)
        try:
            delete_checkpoint(location)
        except StorageError:
            if not (location / RECORD).is_there():  # it is gone; what is left of it goes with the next sweep
                self.steps.remove(step)
            raise
        self.steps.remove(step)

    def kept(self) -> dict[int, tuple[str, ...]]:
        """Returns the steps that some rule keeps, each with every reason, and the one that was saved last."""
        found = reasons(self.steps.infos(), self._rules)
        last = self.last_saved
        if last is not None and last not in found and last in self.steps:  # later steps are of another branch
            found[last] = ("saved last",)
        return found

    def collect(self) -> None:
        """Deletes the steps that no rule keeps. A failure is logged; the next call tries again."""
        records = self.steps.records()
        kept = self.kept()
        doomed = {step: record for step, record in records.items() if step not in kept}
        if doomed:
            self._warn_without_best()
        for step, record in doomed.items():
            try:
                with self._changing:
                    # Pinned, given metrics or deleted in the meantime: the next call decides anew.
                    if self.steps.find(step) is record:
                        self._delete(step)
            except (StorageError, OwnershipError) as error:
                _logger.warning("%s: step %d could not be deleted: %s", self.location, step, error)

    def _warn_without_best(self) -> None:
        """Says once that steps are deleted none of which could be the best, most likely for a misspelt metric."""
        rule = next((rule for rule in self._rules if isinstance(rule, KeepBest)), None)
        infos = self.steps.infos()
        if rule is None or self._warned or not infos or rule.keep(infos):
            return
        self._warned = True
        metrics = infos[-1].metrics
        _logger.warning(
            "%s: no checkpoint has the metric %s, by which best_fn finds the best (the newest has %s); those that no "
            "other rule keeps are deleted",
            self.location,
            metric_name(rule.metric),
            ", ".join(metrics) if metrics else "no metrics",
        )


def _encoded(metadata: Mapping[str, Any]) -> bytes:
    try:
        return encode_document("json", {"data": metadata})
    except (TypeError, ValueError) as error:
        raise OptionError(f"metadata= cannot be stored as JSON: {error}") from error
