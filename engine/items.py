"""The items of a manager: which there are, what saves them, and how they are called for one item or several."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .checkpointer import ITEM, AsyncCheckpointer, Checkpointer
from .errors import CheckpointNotFoundError, OptionError
from .handlers import PyTreeCheckpointHandler, has_structure, item_structure, restore_item
from .record import CheckpointRecord, ItemRecord
from .saving import ItemToSave
from .storage import Location


class ItemSet:
    """The checkpointers of a manager by item.

    Args:
        checkpointers: One checkpointer for the only item, or a dictionary of them, or None for a tree that is saved in
            the background.
    """

    def __init__(self, checkpointers: Checkpointer | Mapping[str, Checkpointer] | None) -> None:
        self._several = isinstance(checkpointers, Mapping)
        self._checkpointers = _by_item(checkpointers)

    def to_save(self, items: Any, kwargs: Mapping[str, Any]) -> dict[str, ItemToSave]:
        """Pairs items with what saves them.

        Args:
            items: The item, or a dictionary of items if there are several.
            kwargs: Arguments for the handler, or a dictionary of them by item.

        Raises:
            OptionError: The items that are given are not those of this manager.
        """
        values = items if self._several else {ITEM: items}
        arguments = kwargs if self._several else {ITEM: kwargs}
        needed = {name for name, one in self._checkpointers.items() if not one.handler.optional}
        if not isinstance(values, Mapping) or not needed <= values.keys() <= self._checkpointers.keys():
            given = ", ".join(map(str, values)) if isinstance(values, Mapping) else type(values).__name__
            raise OptionError(f"this manager saves the items {', '.join(self._checkpointers)}; given: {given}")
        self._check_arguments("save_kwargs", arguments)
        return {
            name: ItemToSave(checkpointer.handler, values[name], checkpointer.background, arguments.get(name, {}))
            for name, checkpointer in self._checkpointers.items()
            if name in values
        }

    def restore(self, location: Location, record: CheckpointRecord, items: Any, kwargs: Mapping[str, Any]) -> Any:
        """Reads items back.

        Args:
            location: The checkpoint's directory.
            record: Its commit record.
            items: A template, or a dictionary of templates by item; only the items named in it are read, None is all.
            kwargs: Arguments for the handler, or a dictionary of them by item.

        Returns:
            The item, or a dictionary of items if there are several.

        Raises:
            OptionError: There are several items, and the templates or arguments are not given by item.
        """
        templates = items if self._several else {ITEM: items}
        arguments = kwargs if self._several else {ITEM: kwargs}
        if templates is not None and not isinstance(templates, Mapping):
            raise OptionError(
                f"this manager restores the items {', '.join(self._checkpointers)}: give templates by item, as "
                f"{{{next(iter(self._checkpointers))!r}: ...}}; found {type(templates).__name__}"
            )
        self._check_arguments("restore_kwargs", arguments)
        found = {
            name: restore_item(
                self._checkpointers[name].handler,
                location / saved.folder,
                saved,
                (templates or {}).get(name),
                arguments.get(name, {}),
            )
            for name, saved in self._saved(location, record, templates).items()
        }
        return found if self._several else found[ITEM]

    def structure(self, location: Location, record: CheckpointRecord) -> Any:
        """Returns what items look like, without reading their data; in the same arrangement as :meth:`restore`.

        Several items come without those whose handler cannot tell; the only one is None then.
        """
        found = {
            name: item_structure(self._checkpointers[name].handler, location / saved.folder, saved)
            for name, saved in self._saved(location, record, None).items()
            if has_structure(self._checkpointers[name].handler)
        }
        return found if self._several else found.get(ITEM)

    def _check_arguments(self, what: str, arguments: Mapping[str, Any]) -> None:
        unknown = arguments.keys() - self._checkpointers.keys()
        if unknown:
            raise OptionError(
                f"{what} for unknown items: {', '.join(sorted(unknown))}; this manager has the items "
                f"{', '.join(self._checkpointers)}"
            )

    def _saved(
        self, location: Location, record: CheckpointRecord, wanted: Mapping[str, Any] | None
    ) -> dict[str, ItemRecord]:
        names = [
            name
            for name in (self._checkpointers if wanted is None else wanted)
            if name in record.items or not (name in self._checkpointers and self._checkpointers[name].handler.optional)
        ]
        missing = [name for name in names if name not in record.items or name not in self._checkpointers]
        if missing:
            raise CheckpointNotFoundError(
                f"{location}: no item {', '.join(missing)}; the checkpoint has {', '.join(sorted(record.items))}, "
                f"and this manager has checkpointers for {', '.join(sorted(self._checkpointers))}"
            )
        return {name: record.items[name] for name in names}


def _by_item(checkpointers: Checkpointer | Mapping[str, Checkpointer] | None) -> dict[str, Checkpointer]:
    if checkpointers is None:
        return {ITEM: AsyncCheckpointer(PyTreeCheckpointHandler())}
    if isinstance(checkpointers, Checkpointer):
        return {ITEM: checkpointers}
    if not isinstance(checkpointers, Mapping):
        raise OptionError(
            f"checkpointers has to be a Checkpointer, or a dictionary of them by item, not "
            f"{type(checkpointers).__name__}; options go by name: CheckpointManager(directory, options=...)"
        )
    found = dict(checkpointers)
    if not found:
        raise OptionError("checkpointers={} saves nothing; give one for each item, or None for a single tree")
    for name, checkpointer in found.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise OptionError(f"item name {name!r}: items become folders; use letters, digits and underscores")
        if not isinstance(checkpointer, Checkpointer):
            raise OptionError(f"item {name!r}: expected a Checkpointer, found {type(checkpointer).__name__}")
    return found
