"""Checkpoints of other libraries, where a program restores them by the same calls as its own."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from ..errors import OptionError
from ..handlers import CheckpointHandler, JsonCheckpointHandler, PyTreeCheckpointHandler
from ..storage import Location


def formats() -> Any:
    """Return the room that knows all formats. It lies above this one, so that it is imported by its name, only here."""
    return importlib.import_module("..sources", __package__)


def open_other(location: Location) -> Any:
    """Open a checkpoint of another library as a ``CheckpointSource``; return None where there is none."""
    return None if formats().is_ours(location) else formats().recognise(location.snapshot())


def restore_other(handler: CheckpointHandler, source: Any, name: str, template: Any, kwargs: Mapping[str, Any]) -> Any:
    """Read an item of a checkpoint of another library as a handler reads its own."""
    if isinstance(handler, PyTreeCheckpointHandler) and source.items[name] == formats().TREE:
        return handler.restore(source.location, template, source=source.tree(name), **kwargs)
    if isinstance(handler, JsonCheckpointHandler) and source.items[name] != formats().TREE and not kwargs:
        return source.value(name)
    raise OptionError(
        f"{source.location}: {type(handler).__name__} cannot restore item {name!r} ({source.items[name]}) of this "
        f"{source.format} checkpoint; hf.load(path, item={name!r}) reads trees and JSON"
    )


def describe_other(handler: CheckpointHandler, source: Any, name: str) -> Any:
    """Return the structure of an item of a checkpoint of another library without reading data; None if it has none."""
    if isinstance(handler, PyTreeCheckpointHandler) and source.items[name] == formats().TREE:
        return handler.structure(source.location, source=source.tree(name))
    return restore_other(handler, source, name, None, {}) if isinstance(handler, JsonCheckpointHandler) else None


def only_item(handler: CheckpointHandler, source: Any) -> str:
    """Return the name of the one item that a handler of one item reads; the error about several names them."""
    if not isinstance(handler, JsonCheckpointHandler):
        how = "restore it with a CheckpointManager of these items, or with hf.load(path, item=...)"
        return str(source.only_tree(how=how))
    names = [name for name, kind in source.items.items() if kind == formats().JSON]
    if len(names) != 1:
        raise OptionError(f"{source.location} has the items {', '.join(sorted(source.items))}; not one of JSON")
    return str(names[0])
