"""The seam to checkpoints that other libraries wrote: what a format has to offer, and which formats there are.

A format is a module of this package with the functions of :class:`Format`. It is imported when a file name says that
it may be the right one, and only then; what it needs itself (tensorstore, msgpack, a framework) it imports when it
reads. To add one, write the module and a line of the table below.
"""

from __future__ import annotations

import fnmatch
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, cast

from numpy.typing import NDArray

from ..checkpointer import ITEM
from ..errors import OptionError
from ..item import Problem, SavedLeaf, TreeReader
from ..storage import Entry, Location
from ..tree import Skeleton

TREE = "pytree"
"""Kind of the items that are trees of arrays."""
JSON = "json"
"""Kind of the items that are JSON."""
METRICS = "metrics"
"""Kind of an item that only repeats the checkpoint's metrics: read when it is asked for by name."""


class TreeSource(Protocol):
    """One tree, opened for reading: its structure is known, no data has been read.

    :class:`~holdfast.engine.item.TreeReader` is one; `load_tree` and `tree_metadata` take any.
    """

    @property
    def location(self) -> Location:
        """Where it lies, for messages."""
        ...

    @property
    def skeleton(self) -> Skeleton:
        """The containers; ``from_document`` and ``nested_skeleton`` make one."""
        ...

    @property
    def leaves(self) -> Sequence[SavedLeaf]:
        """The leaves in the order of the skeleton, each with its storage name (``tree.join`` of its keys)."""
        ...

    def read(self, leaves: Sequence[SavedLeaf]) -> list[NDArray[Any] | None]:
        """Reads some of :attr:`leaves`.

        Returns:
            For every one its array, with the dtype and shape that its ``saved`` says, writable and the caller's own;
            None for a leaf whose value stands in ``saved.details``.

        Raises:
            DamagedCheckpointError: Something is missing or does not verify; names the leaf and the file.
        """
        ...

    def verify(self) -> list[Problem]:
        """Reads everything and keeps nothing; returns what is wrong, with leaves as ``tree.display`` writes them."""
        ...


def as_reader(source: TreeSource) -> TreeReader:
    """Says to the type checker that what takes a :class:`~holdfast.engine.item.TreeReader` takes any tree."""
    return cast("TreeReader", source)


class CheckpointSource(Protocol):
    """One checkpoint, whatever wrote it."""

    @property
    def format(self) -> str:
        """What wrote it, as people call it: ``"Orbax"``."""
        ...

    @property
    def location(self) -> Location:
        """The directory or file."""
        ...

    @property
    def step(self) -> int | None:
        """Its step, as far as the checkpoint itself knows it."""
        ...

    @property
    def time(self) -> float | None:
        """When it was committed, in seconds since 1970-01-01 UTC; None where nobody noted it."""
        ...

    @property
    def metrics(self) -> Mapping[str, Any] | None:
        """The metrics stored with it, or None."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of all its files."""
        ...

    @property
    def items(self) -> Mapping[str, str]:
        """The kind of every item: ``TREE``, ``JSON``, ``METRICS``; whatever else is listed, and cannot be read."""
        ...

    def tree(self, item: str) -> TreeSource:
        """Opens an item of the kind ``TREE``.

        Raises:
            DamagedCheckpointError: Its structure cannot be read; names the file.
        """
        ...

    def value(self, item: str) -> Any:
        """Reads an item that is no tree.

        Raises:
            DamagedCheckpointError: It cannot be read; names the file.
            OptionError: It is of a kind that holdfast does not read.
        """
        ...


class StepDirectories(NamedTuple):
    """The checkpoints of another library's run.

    Attributes:
        format: What wrote them, as people call it.
        steps: Where every finished step lies, in ascending order of steps.
        newest: The step that counts as the newest, where the writer noted one; None is the highest.
    """

    format: str
    steps: Mapping[int, Location]
    newest: int | None = None


class Format(Protocol):
    """The functions of a module that reads a format."""

    def recognise(self, location: Location, names: frozenset[str]) -> CheckpointSource | None:
        """Opens a checkpoint, or says that it is none of this format.

        Args:
            location: A directory or file one of whose names matches the format's patterns.
            names: What lies directly inside the directory; empty for a file.

        Raises:
            DamagedCheckpointError: It is one, and damaged.
        """
        ...

    def recognise_steps(self, location: Location, names: frozenset[str]) -> StepDirectories | None:
        """Finds the steps of a run, or says that this is no directory of such a run.

        Args:
            location: A directory.
            names: What lies directly inside.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Entry:
    """A line of the table of formats.

    Attributes:
        module: The module in this package.
        inside: Patterns of names; a directory that holds one of them may be a checkpoint.
        files: Patterns of names; a file that is called so may be a checkpoint.
        steps: Patterns of names; a directory that holds one of them may be a run with steps.
    """

    module: str
    inside: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()


_FORMATS: tuple[_Entry, ...] = (
    _Entry("tensorflow", inside=("*.index", "saved_model.pb"), files=("*",), steps=("*-[0-9]*.index",)),
    _Entry(
        "orbax",
        inside=("*",),
        steps=("*[0-9]",),
    ),
    _Entry("flax_files", files=("checkpoint", "checkpoint_[0-9]*", "*.msgpack"), steps=("checkpoint_[0-9]*",)),
    _Entry("dcp", inside=(".metadata",)),
    _Entry("safetensors", inside=("*.safetensors", "*.safetensors.index.json"), files=("*",)),
    _Entry("torch_files", files=("*",)),
    _Entry("tensorflow_v1", inside=("checkpoint",), files=("*",)),  # it is only refused, by its name
)


def recognise(location: Location) -> CheckpointSource | None:
    """Opens a checkpoint of another library.

    Args:
        location: A directory or file.

    Returns:
        The checkpoint, or None where there is none of a format that is known.

    Raises:
        DamagedCheckpointError: There is one, and it is damaged.
    """
    names = frozenset(entry.name for entry in _entries(location))
    for entry in _FORMATS:
        if _any_matches(names, entry.inside) if names else _any_matches((location.name,), entry.files):
            found = _load(entry).recognise(location, names)
            if found is not None:
                return found
    return None


def recognise_steps(location: Location) -> StepDirectories | None:
    """Finds the steps in a directory of another library's run.

    Args:
        location: A directory.

    Returns:
        The steps, at least one; or None where there is none of a format that is known.
    """
    names = frozenset(entry.name for entry in _entries(location))
    for entry in _FORMATS:
        if _any_matches(names, entry.steps):
            found = _load(entry).recognise_steps(location, names)
            if found is not None and found.steps:
                return found
    return None


def _entries(location: Location) -> Sequence[Entry]:
    return location.entries() if location.is_directory() else ()


def _any_matches(names: frozenset[str] | tuple[str, ...], patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns for name in names)


def _load(entry: _Entry) -> Format:
    return cast("Format", importlib.import_module(f".{entry.module}", __package__))


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleTree:
    """A checkpoint that is one tree and nothing else; the `CheckpointSource` of formats that know no items.

    Attributes:
        format: What wrote it, as people call it.
        location: The directory or file.
        source: The tree.
        nbytes: Bytes of all its files.
        step: Its step, or None.
        time: When it was written, in seconds since 1970-01-01 UTC, or None.
        metrics: The metrics stored with it, or None.
        items: The one item.
    """

    format: str
    location: Location
    source: TreeSource
    nbytes: int
    step: int | None = None
    time: float | None = None
    metrics: Mapping[str, Any] | None = None
    items: Mapping[str, str] = field(default_factory=lambda: {ITEM: TREE})

    def tree(self, item: str) -> TreeSource:
        """Returns the tree."""
        if item not in self.items:
            raise OptionError(f"{self.location}: no item {item!r}; it has {', '.join(self.items)}")
        return self.source

    def value(self, item: str) -> Any:
        """There is no item that is no tree."""
        raise OptionError(f"{self.location}: item {item!r} is not one that can be read as a value")
