"""A checkpoint of our own, seen through the same seam as those of other libraries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..commit import read_record
from ..errors import OptionError
from ..handlers import CheckpointHandler, JsonCheckpointHandler
from ..item import TreeReader
from ..record import CheckpointRecord
from ..storage import Location
from .source import JSON, TreeSource

_VALUES: Mapping[str, type[CheckpointHandler]] = {JSON: JsonCheckpointHandler}


class NativeCheckpoint:
    """A committed checkpoint.

    Args:
        location: Its directory.

    Raises:
        CheckpointNotFoundError: Nothing was committed there.
        DamagedCheckpointError: The commit record does not verify.
        FormatVersionError: A newer version of holdfast wrote it.

    Attributes:
        location: Its directory.
        record: Its commit record.
        parts: Its items; those of which every process has its own are taken apart.
    """

    format = "holdfast"

    def __init__(self, location: Location) -> None:
        self.location = location
        self.record: CheckpointRecord = read_record(location)
        self.parts = self.record.parts()

    @property
    def step(self) -> int | None:
        """Its step, or None for a checkpoint outside a manager."""
        return self.record.step

    @property
    def time(self) -> float | None:
        """When it was committed, in seconds since 1970-01-01 UTC."""
        return self.record.time

    @property
    def metrics(self) -> Mapping[str, Any] | None:
        """The metrics stored with it, or None."""
        return self.record.metrics

    @property
    def nbytes(self) -> int:
        """Bytes of all its files."""
        return self.record.nbytes

    @property
    def items(self) -> Mapping[str, str]:
        """The kind of every item."""
        return {name: item.kind for name, item in self.parts.items()}

    def tree(self, item: str) -> TreeSource:
        """Opens an item that is a tree."""
        saved = self.parts[item]
        return TreeReader(self.location / saved.folder, saved.files)

    def value(self, item: str) -> Any:
        """Reads an item that is no tree."""
        saved = self.parts[item]
        handler = _VALUES.get(saved.kind)
        if handler is None:
            raise OptionError(
                f"{self.location}: item {item!r} was written by a handler of your own; restore it with that handler "
                "(Checkpointer(handler).restore, or a CheckpointManager)"
            )
        return handler().restore(self.location / saved.folder, files=saved.files)
