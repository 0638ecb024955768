"""The interface through which checkpoints of all libraries are read, with defaults for unsupported operations."""

from __future__ import annotations

import abc
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import CheckpointNotFoundError, OptionError
from ..forks import cached_property
from ..format import ITEM, FileRecord
from ..pytree import Patterns, collection_paused
from ..storage import Location

if TYPE_CHECKING:
    from ..arrays import TreeSource

_logger = logging.getLogger("holdfast")

TREE = "pytree"  # kind of items that are trees of arrays
JSON = "json"  # kind of items that are JSON documents
METRICS = "metrics"  # kind of items that duplicate the checkpoint's metrics and are read only if the caller names them


class CheckpointSource(Protocol):
    """A single checkpoint, written by any library.

    A subclass for a format sets ``format``, ``location``, ``items`` and ``nbytes``, and defines :meth:`tree`. All other
    attributes and methods have defaults for formats that do not support them.
    """

    format: str  # name of the library that wrote the checkpoint, such as ``"Orbax"``
    location: Location  # location of the checkpoint's directory or file
    # The kind of each item: ``TREE``, ``JSON`` or ``METRICS``. Items of other kinds are listed but not read.
    items: Mapping[str, str]
    nbytes: int  # total size of all files in bytes
    step: int | None = None  # step number, if the checkpoint records it
    reason: str = ""  # reason why the checkpoint was saved, if recorded
    time: float | None = None  # commit time in seconds since 1970-01-01 UTC, if recorded
    metrics: Mapping[str, Any] | None = None  # metrics stored with the checkpoint
    custom_metadata: Mapping[str, Any] | None = None  # JSON that the program stored with the checkpoint
    unnamed: str = ""  # name that the format gives to an unnamed item

    @abc.abstractmethod
    def tree(self, item: str) -> TreeSource:
        """Open an item of kind ``TREE``; if its structure is unreadable, raise an error that names the file."""

    def selected_tree(self, item: str, select: Patterns | None) -> TreeSource:
        """Open an item of kind ``TREE`` with only the leaves that match the patterns."""
        from .stored import selected

        return selected(self.tree(item), select)

    def value(self, item: str) -> Any:
        """Read an item that is not a tree; if it is unreadable, raise an error that names the file."""
        raise OptionError(f"{self.location}: item {item!r} cannot be read as a value")

    def files(self, item: str) -> Mapping[str, FileRecord] | None:
        """Return the files of an item, keyed by path in its folder, or None if the format does not record them."""
        return None

    def check_item(self, item: str | None) -> None:
        """Raise CheckpointNotFoundError if there is no such item."""
        if item is not None and item not in self.items:
            raise CheckpointNotFoundError(f"{self.location}: no item {item!r}; it has {', '.join(sorted(self.items))}")

    def only_tree(self, item: str | None = None, *, how: str = "name one with item=") -> str:
        """Return the name of the requested or only tree; if there are several, raise an error ending with ``how``."""
        trees = sorted(name for name, kind in self.items.items() if kind == TREE)
        if item is not None and item not in trees:
            raise CheckpointNotFoundError(f"{self.location}: no tree {item!r}; it has {', '.join(trees) or 'none'}")
        if item is None and len(trees) != 1:
            raise OptionError(
                f"{self.location} has the trees {', '.join(trees)}: {how}"
                if trees
                else f"{self.location} has no tree of arrays; its items are {', '.join(sorted(self.items)) or 'none'}"
            )
        return trees[0] if item is None else item

    def has_changed(self) -> bool:
        """Return whether another process is known to have replaced or deleted the checkpoint since it was opened."""
        return False

    def load(
        self, item: str, like: Any = None, select: Patterns | None = None, *, cast: bool = False, subset: bool = False
    ) -> Any:
        """Load an item. The options are the same as in :func:`~holdfast.load`, and apply only to trees."""
        kind = self.items[item]
        if kind != TREE:
            if kind in (JSON, METRICS) and (like is not None or select is not None):
                raise OptionError(
                    f"{self.location}: item {item!r} is JSON, not a tree of arrays: like= and select= do not apply"
                )
            return self.value(item)
        from ..handlers import PyTreeCheckpointHandler  # imported lazily, because only loading needs it

        folder, source = self._source_of(item)
        return PyTreeCheckpointHandler().restore(folder, like, select=select, cast=cast, subset=subset, **source)

    def _source_of(self, item: str) -> tuple[Location, Mapping[str, Any]]:
        """Return the folder of a tree, and the keyword arguments with which its handler restores the tree."""
        return self.location, {"source": self.tree(item)}

    def load_transformed(self, item: str, transformations: Any, new_tree: Any, *, default_to_original: bool) -> Any:
        """Load a tree into a different structure; see :func:`~holdfast.load_transformed`."""
        from ..arrays import load_transformed_tree

        source = self.tree(item)
        with collection_paused():
            tree = load_transformed_tree(source, transformations, new_tree, default_to_original=default_to_original)
        return self.complete(item, source, tree)

    def complete(self, item: str, source: TreeSource, tree: Any) -> Any:
        """Add to a loaded tree the leaves that only type handlers can read; by default, there are no such leaves."""
        return tree

    def items_to_load(self) -> list[str]:
        """Return the items to load if the caller names none; by default, all trees and JSON documents."""
        wanted = [name for name, kind in self.items.items() if kind in (TREE, JSON)]
        if not wanted:
            raise OptionError(
                f"{self.location}: none of the items of this {self.format} checkpoint is a tree or JSON: "
                + ", ".join(f"{name} ({kind})" for name, kind in sorted(self.items.items()))
            )
        skipped = [f"{name} ({kind})" for name, kind in self.items.items() if kind not in (TREE, JSON, METRICS)]
        if skipped:
            _logger.warning("%s: skipped items that holdfast does not read: %s", self.location, ", ".join(skipped))
        return wanted


class SingleTree(CheckpointSource):
    """A checkpoint that consists of a single tree. Properties given as functions are computed on demand."""

    def __init__(
        self,
        format_name: str,
        location: Location,
        source: TreeSource | Callable[[], TreeSource],
        nbytes: int | Callable[[], int],
        step: int | None = None,
        time: Callable[[], float | None] = lambda: None,
    ) -> None:
        self.format = format_name
        self.location = location
        self.items = {ITEM: TREE}
        self.step = step
        self._source, self._nbytes, self._time = source, nbytes, time

    @cached_property
    def source(self) -> TreeSource:
        return self._source() if callable(self._source) else self._source

    @cached_property
    def nbytes(self) -> int:
        return self._nbytes() if callable(self._nbytes) else self._nbytes

    @cached_property
    def time(self) -> float | None:
        return self._time()

    def tree(self, item: str) -> TreeSource:
        return self.source
