"""The directory of one run: its committed steps, who may write to it, and what is deleted from it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from .clock import Clock
from .commit import delete_checkpoint, sweep, write_record
from .errors import HoldfastError, StorageError
from .format import decode_document, encode_document
from .handlers import JsonCheckpointHandler
from .options import CheckpointManagerOptions
from .ownership import Ownership
from .policy import Rule, reasons
from .record import CheckpointRecord
from .steps import StepIndex
from .storage import Location

_logger = logging.getLogger("holdfast")

_METADATA = "metadata"
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
    """

    def __init__(
        self, location: Location, prefix: str | None, rules: Sequence[Rule], clock: Clock, drain: Callable[[], None]
    ) -> None:
        self.location = location
        self.steps = StepIndex(location, prefix)
        self.ownership = Ownership(location, clock, drain)
        self._rules = rules
        self._changing = threading.Lock()  # records are rewritten and steps deleted one after the other

    def acquire(self, metadata: Mapping[str, Any] | None, options: CheckpointManagerOptions) -> None:
        """Takes the right to write, sweeps what interrupted runs left, and stores facts about the run.

        Args:
            metadata: The facts, or None to leave them as they are.
            options: What this run keeps; stored for those who list the directory.

        Raises:
            OwnershipError: Another run writes to this directory.
        """
        if not self.ownership.take():
            return
        for _, location in list(self.steps.directories()):
            sweep(location)
        self.steps.reload()
        if metadata is not None and metadata != self.metadata():
            write = JsonCheckpointHandler().prepare(metadata, snapshot=False)
            folder = self.location / _METADATA
            folder.make_directory()
            write(folder)
        (self.location / OPTIONS).write_bytes(encode_document("options", {"options": options.to_document()}))

    def metadata(self) -> Mapping[str, Any] | None:
        """Returns the facts about the run, or None."""
        folder = self.location / _METADATA
        if not folder.exists():
            return None
        found: Mapping[str, Any] | None = JsonCheckpointHandler().restore(folder)
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
            self.ownership.check()
            delete_checkpoint(self.steps.location(step))
            self.steps.remove(step)

    def kept(self) -> dict[int, tuple[str, ...]]:
        """Returns the steps that some rule keeps, each with every reason."""
        return reasons(self.steps.infos(), self._rules)

    def collect(self) -> None:
        """Deletes the steps that no rule keeps. A failure is logged; the next call tries again."""
        kept = self.kept()
        for info in self.steps.infos():
            if info.step in kept:
                continue
            try:
                self.delete(info.step)
            except StorageError as error:
                _logger.warning("%s: step %d could not be deleted: %s", self.location, info.step, error)
