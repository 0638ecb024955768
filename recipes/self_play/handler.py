"""Trees of components as items of a manager's checkpoints."""

from __future__ import annotations

from typing import Any

from ...engine.components import Checkpointable
from ...engine.handlers import AsyncCheckpointHandler, SaveFuture
from ...engine.storage import Location


class ComponentCheckpointHandler(AsyncCheckpointHandler):
    """Saves a component and all below it, and restores a running one in place.

    The item's folder is a tree of components as ``save_to_path`` makes it: it can be given to ``restore_from_path``
    and ``from_checkpoint``, and so can every directory of a component in it.
    """

    kind = "components"

    async def async_save(self, directory: Location, item: Checkpointable, **kwargs: Any) -> list[SaveFuture]:
        """Takes the state of the component and of all below it; it is written when the future is asked."""
        return [_Writing(directory, item, item.get_state())]

    def restore(self, directory: Location, item: Checkpointable | None = None, **kwargs: Any) -> Checkpointable:
        """Restores a running component, or makes a new one if there is none."""
        if item is None:
            return Checkpointable.from_checkpoint(directory)
        item.restore_from_path(directory, strict=True)
        return item


class _Writing:
    """A snapshot that is yet to be written."""

    def __init__(self, directory: Location, item: Checkpointable, state: dict[str, Any]) -> None:
        self._directory = directory
        self._item = item
        self._state = state

    def result(self, timeout: float | None = None) -> None:
        """Writes it; whoever commits the checkpoint makes a list of the files."""
        self._item.save_to_path(self._directory, state=self._state)
