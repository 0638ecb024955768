"""Checkpoints that TensorFlow wrote: which files and directories are, and what is in them.

A checkpoint is named by its prefix, ``dir/ckpt-5``, as TensorFlow itself names it, or by one of its files. Of a
directory of numbered checkpoints the newest is the one that TensorFlow noted as such. TensorFlow is not needed.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

from ..checkpointer import ITEM
from ..errors import CheckpointNotFoundError, OptionError, StorageError
from ..storage import Location
from .source import TREE, StepDirectories, TreeSource
from .tensorflow_bundle import INDEX
from .tensorflow_places import STATE, CheckpointState, number_of, numbered, prefixes, read_state
from .tensorflow_table import MAGIC, looks_like_table
from .tensorflow_tree import BundleTree

FORMAT = "TensorFlow"
_DATA = re.compile(r"(.+)\.data-[0-9]{5,}-of-[0-9]{5,}", re.DOTALL)
_SAVED_MODEL = "saved_model.pb"


def recognise(location: Location, names: frozenset[str]) -> BundleCheckpoint | None:
    """Opens a checkpoint; see :class:`~holdfast.engine.interop.source.Format`.

    Raises:
        CheckpointNotFoundError: There are several here, and nothing says which one is meant.
    """
    if not names:
        return _recognise_prefix(location)
    if _SAVED_MODEL in names:
        return _recognise_prefix(location / "variables" / "variables")
    found = _prefixes(location, names)
    newest = _newest(location, names, found)
    if newest is not None and number_of(newest) is None:
        return BundleCheckpoint(location / newest)
    if not found or numbered(found, newest):
        return None
    if len(found) > 1:
        raise CheckpointNotFoundError(
            f"{location}: there are the TensorFlow checkpoints {', '.join(found[:8])} here: give the path of one, such "
            f"as {location / found[0]}"
        )
    return BundleCheckpoint(location / found[0])


def recognise_steps(location: Location, names: frozenset[str]) -> StepDirectories | None:
    """Finds the numbered checkpoints of a directory; see :class:`~holdfast.engine.interop.source.Format`."""
    found = _prefixes(location, names)
    newest = _newest(location, names, found)
    if newest is not None and number_of(newest) is None:
        return None
    steps = {number: location / name for number, name in numbered(found, newest).items()}
    return StepDirectories(FORMAT, steps, None if newest is None else number_of(newest)) if steps else None


class BundleCheckpoint:
    """One checkpoint.

    Args:
        prefix: The place of its files without what their names end in.

    Attributes:
        location: The same.
        items: Its one item, a tree.
    """

    format = FORMAT
    metrics: Mapping[str, Any] | None = None

    def __init__(self, prefix: Location) -> None:
        self.location = prefix
        self.items: Mapping[str, str] = {ITEM: TREE}

    @property
    def step(self) -> int | None:
        """The number at the end of its name."""
        return number_of(self.location.name)

    @functools.cached_property
    def time(self) -> float | None:
        """When it was saved, in seconds since 1970-01-01 UTC, if TensorFlow noted that."""
        return self._state.times.get(self.location.name)

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of all its files."""
        return sum(
            entry.size or 0
            for entry in self.location.parent.entries()
            if entry.name == f"{self.location.name}{INDEX}"
            or ((match := _DATA.fullmatch(entry.name)) and match[1] == self.location.name)
        )

    def tree(self, item: str) -> TreeSource:
        """Opens the tree."""
        if item not in self.items:
            raise OptionError(f"{self.location}: no item {item!r}; it has {', '.join(self.items)}")
        return self._tree

    def value(self, item: str) -> Any:
        """There is no item that is no tree."""
        raise OptionError(f"{self.location}: item {item!r} is not one that can be read as a value")

    @functools.cached_property
    def _tree(self) -> BundleTree:
        return BundleTree.open(self.location)

    @functools.cached_property
    def _state(self) -> CheckpointState:
        return read_state(self.location.parent) if (self.location.parent / STATE).exists() else CheckpointState()


def _recognise_prefix(location: Location) -> BundleCheckpoint | None:
    """Opens a checkpoint by its prefix or by the path of one of its files."""
    name, folder = location.name, location.parent
    match = _DATA.fullmatch(name)
    if name.endswith(INDEX) and name != INDEX:
        prefix = name.removesuffix(INDEX)
    elif match is not None:
        prefix = match[1]
    elif name and not location.exists():
        prefix = name
    else:
        return None
    index = folder / f"{prefix}{INDEX}"
    if not index.exists() or index.is_directory():
        return None
    names = [entry.name for entry in folder.entries()]
    return BundleCheckpoint(folder / prefix) if _prefixes(folder, names, prefix) else None


def _newest(location: Location, names: frozenset[str], found: list[str]) -> str | None:
    """Returns the checkpoint that TensorFlow noted as the newest, if it is there."""
    newest = read_state(location).newest if found and STATE in names else None
    return newest if newest in found else None


def _prefixes(folder: Location, names: Iterable[str], only: str | None = None) -> list[str]:
    """Returns the names of the checkpoints in a directory: damaged ones, too, as far as data files tell that they are.

    Args:
        folder: The directory.
        names: What lies inside.
        only: The one name that counts; None for all.
    """
    names = list(names)
    with_data = {match[1] for name in names if (match := _DATA.fullmatch(name))}
    wanted = prefixes(names) if only is None else [only]
    return [name for name in wanted if name in with_data or _is_index(folder / f"{name}{INDEX}")]


def _is_index(place: Location) -> bool:
    """Whether a file ends as the index of a checkpoint does."""
    try:
        with place.open_data() as reader:
            size = reader.size
            return size >= len(MAGIC) and looks_like_table(reader.read(size - len(MAGIC), len(MAGIC)).tobytes())
    except StorageError:
        return False
