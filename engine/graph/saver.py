"""How a checkpoint object saves outside of a manager."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..checkpointer import ITEM, AsyncCheckpointer, Place
from ..errors import CheckpointExistsError
from ..record import RECORD, CheckpointRecord, ItemRecord
from ..saving import ItemToSave, Save
from ..storage import Location, as_location
from .capture import CapturedGraph
from .latest import numbers_of
from .stored import GraphCheckpointHandler


class GraphSaver(AsyncCheckpointer):
    """Saves graphs, numbered or not, at once or in the background.

    Attributes:
        began: Whether the last save got as far as to take its snapshot.
    """

    def __init__(self) -> None:
        super().__init__(GraphCheckpointHandler())
        self.background = False
        self.began = False
        self._number: int | None = None

    def put(
        self,
        location: Location,
        item: CapturedGraph,
        number: int | None,
        *,
        overwrite: bool,
        background: bool,
        kwargs: dict[str, Any],
    ) -> None:
        """Saves a graph.

        Args:
            location: Where.
            item: The graph.
            number: Its number, or None.
            overwrite: Whether a checkpoint that is there may be replaced.
            background: Whether to return as soon as the objects may change again.
            kwargs: Further arguments for the handler.

        Raises:
            CheckpointExistsError: A checkpoint is there and may not be replaced.
            SaveFailedError: The background save before this one failed; this one is done nevertheless.
        """
        self.join()
        self.began = False
        self.background, self._number = background, number
        try:
            if background:
                self.save(location, item, force=overwrite, **kwargs)
                return
            self._begin(location, item, overwrite, kwargs).complete()
        except CheckpointExistsError as error:
            if overwrite or not (location / RECORD).exists():
                raise
            what = "choose another path, or replace it with write(path, overwrite=True)"
            if number is not None:
                what = "somebody else has saved under this number since; save again"
            raise CheckpointExistsError(f"{location}: a checkpoint is there already; {what}") from error
        earlier = self._save.take_error()
        if earlier is not None:
            raise earlier

    def next_number(self, prefix: Location, counter: int) -> int:
        """Returns the next number that is free, the same on all processes.

        Args:
            prefix: What numbers are added to.
            counter: The number of the last save of the same object.
        """

        def find() -> int:
            return max([counter, *numbers_of(prefix.parent, prefix.name)]) + 1

        return int(self._together.decide(f"number {prefix.url}", find))

    def join(self) -> None:
        """Waits for the save that is under way; its error stays to be told."""
        self._save.join()

    def _begin(self, path: Place, item: Any, force: bool, kwargs: Mapping[str, Any]) -> Save:
        location, number = as_location(path), self._number

        def record(items: Mapping[str, ItemRecord]) -> CheckpointRecord:
            found = CheckpointRecord(items=items, time=self._clock.now(), step=number)
            # Retention is for those that a manager saved; these stay until a person removes them.
            return found if number is None else replace(found, pinned=True, reason="saved by Checkpoint.save")

        save = Save(
            location,
            {ITEM: ItemToSave(self.handler, item, self.background, kwargs)},
            overwrite=force,
            record=record,
            group=self._together.group(location.url),
            timeout=self._timeout,
        )
        self.began = True
        return save
