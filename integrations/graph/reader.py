"""Read checkpoints without the program that wrote them, and find the newest numbered checkpoint in a directory.

No file records the newest checkpoint. Each call lists the directory, which can therefore be moved, copied or pruned.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ...engine.errors import DamagedCheckpointError, ObjectNotFoundError, OptionError, shortened
from ...engine.manager import Peek
from ...engine.pytree import escape_key
from ...engine.sources import find_steps, recognise
from ...engine.steps import has_record, read_record
from ...engine.storage import Location, Place, as_location
from ..formats.tensorflow.tree import ATTRIBUTES, VALUE, object_path
from .frameworks import GROUPS, OPTIMIZER_SLOTS
from .saved import SavedGraph
from .slots import Path, format_node_path, parse_path
from .stored import StoredGraph, open_graph
from .values import PLAIN_KINDS
from .views import COUNTER

_logger = logging.getLogger("holdfast")


class GraphView:
    """The objects in a checkpoint and the edges between them.

    Args:
        graph: The saved graph.
    """

    def __init__(self, graph: SavedGraph) -> None:
        self._graph = graph

    def children(self, path: str = "") -> dict[str, str]:
        """Return the shortest path to each child of an object, keyed by edge name.

        Args:
            path: Any path to the object; ``""`` stands for the root.
        """
        edges = self._graph.nodes[self._find(path)].edges
        return {format_node_path((name,)): format_node_path(self._graph.path(child)) for name, child in edges.items()}

    def slots(self, path: str) -> dict[str, dict[str, str]]:
        """Return the paths of an optimizer's values, keyed by parameter path, then by value name.

        Args:
            path: Any path to the optimizer.
        """
        slots: dict[str, dict[str, str]] = {}
        for parameter, name, value in self._graph.nodes[self._find(path)].optimizer_slots:
            of_parameter = slots.setdefault(format_node_path(self._graph.path(parameter)), {})
            of_parameter[format_node_path((name,))] = format_node_path(self._graph.path(value))
        return slots

    def type_of(self, path: str) -> str:
        """Return an object's type name, which is ``""`` for most values."""
        return self._graph.nodes[self._find(path)].type

    def same(self, one: str, other: str) -> bool:
        """Return True if two paths lead to the same object."""
        return self._find(one) == self._find(other)

    def _find(self, path: str) -> int:
        number = self._graph.find(parse_path(path) if path else ())
        if number is None:
            raise ObjectNotFoundError(f"the checkpoint has nothing at {path!r}")
        return number


class CheckpointReader:
    """A checkpoint that is open for reading.

    Values are named by their paths or, in a TensorFlow checkpoint, by their TensorFlow names, such as
    ``net/l1/kernel/.ATTRIBUTES/VARIABLE_VALUE``. Either name can be used to read a value from any checkpoint.

    Args:
        stored: The checkpoint's graph, opened for reading.

    Attributes:
        path: The path of the checkpoint.
        graph: The objects and the edges between them.
    """

    def __init__(self, stored: StoredGraph) -> None:
        self._stored = stored
        self.path = str(stored.checkpoint)
        self.graph = GraphView(stored.graph)
        self._values = dict(self._leaves())
        self._named = frozenset(() if stored.variables is None else stored.variables.shapes())

    def get_variable_to_shape_map(self) -> dict[str, list[int]]:
        """Return the shapes of all values, keyed by path, such as ``net/l1/weight``, or by TensorFlow name."""
        if self._stored.variables is not None:
            return self._stored.variables.shapes()
        return {path: list(self._stored.leaves[name].saved.shape or ()) for path, name in self._values.items()}

    def get_variable_to_dtype_map(self) -> dict[str, np.dtype[Any] | None]:
        """Return the dtypes of all values, or None for values that are not arrays, such as strings.

        TensorFlow strings have the object dtype, because they are read as object arrays.
        """
        if self._stored.variables is not None:
            return self._stored.variables.dtypes()
        return {path: self._stored.leaves[name].saved.dtype for path, name in self._values.items()}

    def has_tensor(self, path: str) -> bool:
        """Return True if a path or TensorFlow name leads to a value."""
        return path in self._named or self._name(path) is not None

    def get_tensor(self, path: str) -> Any:
        """Read a value.

        Args:
            path: A TensorFlow name, or any path to a value or to the complete state of an object, such as an iterator.

        Returns:
            A numpy array or a Python value; for a state, a tree of arrays and Python values.

        Raises:
            ObjectNotFoundError: There is no value at the path.
            DamagedCheckpointError: The checkpoint fails verification.
        """
        if self._stored.variables is not None and path in self._named:
            return self._stored.variables.read_value(path)
        name = self._name(path)
        if name is None:
            some = shortened(self._named or self._values)
            raise ObjectNotFoundError(f"{self.path} has no value at {path!r}; it has {some}")
        return self._stored.load([name])[0]

    def _name(self, path: str) -> str | None:
        """Return the storage name of the value at a path or TensorFlow name, or None if there is no value."""
        if path in self._values or path == "":
            return self._values.get(path)
        tensorflow = path.endswith(f"/{ATTRIBUTES}/{VALUE}")
        number = self._stored.graph.find(tuple(map(escape_key, object_path(path))) if tensorflow else parse_path(path))
        return None if number is None else self._stored.graph.nodes[number].value

    def _leaves(self) -> Iterator[tuple[str, str]]:
        """Yield the path and storage name of each leaf."""
        for number, node in self._stored.graph.values():
            path = self._stored.graph.path(number)
            value = str(node.value)
            for name in self._stored.leaves_of(value):
                below: Path = () if name == value else tuple(name.removeprefix(f"{value}.").split("."))
                yield format_node_path((*path, *below)), name


def load_checkpoint(path: Place) -> CheckpointReader:
    """Open a checkpoint for reading.

    Args:
        path: The path of a checkpoint, or of a directory whose newest checkpoint is opened.

    Raises:
        CheckpointNotFoundError: There is no checkpoint at the path.
        DamagedCheckpointError: The checkpoint fails verification.
    """
    return CheckpointReader(open_graph(locate(path)))


def plain_values(stored: StoredGraph) -> Peek:
    """Read a checkpoint's numbers and strings, except for optimizer values and object states."""
    graph = stored.graph
    options = [graph.path(node.edges[GROUPS]) for node in graph.nodes if node.groups and GROUPS in node.edges]
    names: dict[str, str] = {}
    for number, node in graph.values():
        leaf, path = stored.leaves.get(str(node.value)), graph.path(number)
        inside = OPTIMIZER_SLOTS in path or any(path[: len(groups)] == groups for groups in options)
        if leaf is not None and leaf.saved.kind in PLAIN_KINDS and path != (COUNTER,) and not inside:
            names[format_node_path(path)] = leaf.name
    values = stored.load(list(names.values()))
    step = read_record(stored.checkpoint).step if has_record(stored.checkpoint) else None
    return Peek(step=step, extras=dict(zip(names, values, strict=True)))


def saved_counter(stored: StoredGraph) -> int | None:
    """Read the number of a numbered checkpoint, or return None for any other checkpoint."""
    node = stored.graph.find((COUNTER,))
    leaf = None if node is None else stored.leaves.get(str(stored.graph.nodes[node].value))
    if leaf is None or leaf.saved.shape not in (None, ()):
        return None
    (value,) = stored.load([leaf.name])
    return int(value) if isinstance(value, int) or np.issubdtype(getattr(value, "dtype", object), np.integer) else None


def numbers_of(directory: Location, name: str) -> list[int]:
    """Return the numbers of all entries named ``<name>-<number>``, including entries that are not checkpoints."""
    pattern = re.compile(re.escape(name) + r"-(0|[1-9][0-9]*)")
    return [int(match[1]) for entry in directory.entries() if (match := pattern.fullmatch(entry.name))]


def latest_checkpoint(directory: Place) -> str | None:
    """Return the path of the newest numbered checkpoint in a directory, or None.

    Among checkpoints with the same name, the newest has the highest number. If there are several names, the one with
    the most recently committed checkpoint is used. Damaged checkpoints are skipped with a warning.

    Args:
        directory: A directory of numbered checkpoints from ``Checkpoint.save``, a `CheckpointManager` or another
            library.
    """
    location = as_location(directory)
    if not location.is_directory():
        return None
    try:
        steps = find_steps(location)
        for entry in steps.entries:
            if entry.error is not None:
                _logger.warning("%s is damaged and passed over: %s", entry.location, entry.error)
        newest = steps.newest(whole=True)
        if newest is not None or steps.entries:
            return None if newest is None else str(newest.location)
        named = recognise(location)  # a TensorFlow directory may record its newest checkpoint
    except DamagedCheckpointError as error:
        _logger.warning("%s is damaged and passed over: %s", location, error)
        return None
    return str(named.location) if named is not None and named.location != location else None


def locate(path: Place) -> Location:
    """Return the location of a checkpoint, or of the newest checkpoint in a directory of numbered checkpoints."""
    if isinstance(path, int):
        raise OptionError(
            f"{path}: a number alone does not name a checkpoint; give its path, such as "
            f"'directory/ckpt-{path}', or its directory for the newest"
        )
    location = as_location(path)
    if has_record(location) or (location.exists() and not location.is_directory()):
        return location
    newest = latest_checkpoint(location)
    return location if newest is None else as_location(newest)


def checkpoints_iterator(
    directory: Place,
    *,
    min_interval_secs: float = 0.0,
    timeout: float | None = None,
    timeout_fn: Callable[[], bool] | None = None,
    poll_secs: float = 1.0,
) -> Iterator[str]:
    """Yield new checkpoints as they appear in a directory, for example to evaluate a model while it is being trained.

    Args:
        directory: The directory of the numbered checkpoints; it need not exist yet.
        min_interval_secs: The minimum time between two yielded checkpoints, in seconds.
        timeout: How long to wait for a new checkpoint, in seconds; None waits forever.
        timeout_fn: Called on timeout; a true result ends the iteration. If None, the first timeout ends the iteration.
        poll_secs: The polling interval, in seconds.

    Yields:
        The path of the newest checkpoint. Checkpoints that are superseded before they are seen are skipped.
    """
    seen: str | None = None
    while True:
        began = time.monotonic()
        while (newest := latest_checkpoint(directory)) is None or newest == seen:
            left = float("inf") if timeout is None else began + timeout - time.monotonic()
            if left <= 0:
                if timeout_fn is None or timeout_fn():
                    return
                began = time.monotonic()
                continue
            time.sleep(min(poll_secs, left))
        seen = newest
        offered = time.monotonic()
        yield newest
        time.sleep(max(0.0, offered + min_interval_secs - time.monotonic()))
