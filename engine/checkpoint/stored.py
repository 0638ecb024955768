"""The items of a checkpoint as handlers read them: of one of our own, or of one that another library wrote."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ..arrays import check_files
from ..errors import OptionError, UnknownArgumentError
from ..format import ITEM, CheckpointRecord
from ..handlers import CheckpointHandler, JsonCheckpointHandler, PyTreeCheckpointHandler, has_structure
from ..sources import JSON, TREE, CheckpointSource
from ..storage import Location


class OwnItems:
    """The items that a commit record names."""

    def __init__(self, location: Location, record: CheckpointRecord) -> None:
        self.location = location
        self.record = record
        self._items = record.items

    @property
    def names(self) -> Collection[str]:
        return self._items.keys()

    def only_name(self, handler: CheckpointHandler) -> str:
        """Return the name of the item that a checkpointer without names restores."""
        return ITEM

    def restore(
        self,
        name: str,
        handler: CheckpointHandler,
        template: Any,
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Read an item back; raise OptionError if it is not one that the handler reads."""
        saved = self._items[name]
        folder = self.location / saved.folder
        if handler.kind != saved.kind:
            raise OptionError(
                f"{folder} was written by a handler of kind {saved.kind!r:.80}; {type(handler).__name__} is of kind "
                f"{handler.kind!r}. Restore it with the handler that it was saved with"
            )
        try:
            if handler.verifies:
                return handler.restore(folder, template, files=saved.files, **kwargs)
            check_files(folder, saved.files)
            return handler.restore(folder, template, **kwargs)
        except UnknownArgumentError as error:
            raise UnknownArgumentError(f"{folder} was not restored: {error}") from None

    def structure(self, name: str, handler: CheckpointHandler) -> Any:
        """Describe an item without reading its data; return None if its handler cannot."""
        saved = self._items[name]
        known = {"files": saved.files} if handler.verifies else {}
        return handler.structure(self.location / saved.folder, **known) if has_structure(handler) else None


class OtherItems:
    """The items of a checkpoint of another library, with the methods of :class:`OwnItems`: trees and JSON."""

    def __init__(self, source: CheckpointSource) -> None:
        self.location = source.location
        self._source = source

    @property
    def names(self) -> Collection[str]:
        return self._source.items.keys()

    def only_name(self, handler: CheckpointHandler) -> str:
        items = self._source.items
        if not isinstance(handler, JsonCheckpointHandler):
            how = "restore it with a CheckpointManager of these items, or with hf.load(path, item=...)"
            return self._source.only_tree(how=how)
        found = [name for name, kind in items.items() if kind == JSON]
        if len(found) != 1:
            raise OptionError(f"{self.location} has the items {', '.join(sorted(items))}; not one of JSON")
        return found[0]

    def restore(
        self,
        name: str,
        handler: CheckpointHandler,
        template: Any,
        kwargs: Mapping[str, Any],
    ) -> Any:
        kind = self._source.items[name]
        if isinstance(handler, PyTreeCheckpointHandler) and kind == TREE:
            return handler.restore(self.location, template, source=self._source.tree(name), **kwargs)
        if isinstance(handler, JsonCheckpointHandler) and kind != TREE and not kwargs:
            return self._source.value(name)
        raise OptionError(
            f"{self.location}: {type(handler).__name__} cannot restore item {name!r} ({kind}) of this "
            f"{self._source.format} checkpoint; hf.load(path, item={name!r}) reads trees and JSON"
        )

    def structure(self, name: str, handler: CheckpointHandler) -> Any:
        if isinstance(handler, PyTreeCheckpointHandler) and self._source.items[name] == TREE:
            return handler.structure(self.location, source=self._source.tree(name))
        return self.restore(name, handler, None, {}) if isinstance(handler, JsonCheckpointHandler) else None


StoredItems = OwnItems | OtherItems
