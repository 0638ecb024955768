"""Checkpoints looked at without the program that wrote them: values by path, and the graph of objects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..checkpointer import Place
from ..errors import ObjectNotFoundError
from .latest import locate
from .paths import Path, parse_path, shown
from .saved import SavedGraph
from .stored import StoredGraph, open_graph


class GraphView:
    """The objects of a checkpoint and how they hang together.

    Args:
        graph: The nodes and edges.
    """

    def __init__(self, graph: SavedGraph) -> None:
        self._graph = graph

    def children(self, path: str = "") -> dict[str, str]:
        """Returns the edges of an object, each with the shortest path to where it leads.

        Args:
            path: Any path to the object; ``""`` is the root.
        """
        edges = self._graph.nodes[self._find(path)].edges
        return {shown((segment,)): shown(self._graph.path(child)) for segment, child in edges.items()}

    def slots(self, path: str) -> dict[str, dict[str, str]]:
        """Returns what an optimizer kept: by the parameter's path, by name, the path of the value.

        Args:
            path: Any path to the optimizer.
        """
        found: dict[str, dict[str, str]] = {}
        for parameter, slot, value in self._graph.nodes[self._find(path)].slots:
            of_parameter = found.setdefault(shown(self._graph.path(parameter)), {})
            of_parameter[shown((slot,))] = shown(self._graph.path(value))
        return found

    def type_of(self, path: str) -> str:
        """Returns the name of an object's type, for people; ``""`` for most values."""
        return self._graph.nodes[self._find(path)].type

    def same(self, one: str, other: str) -> bool:
        """Tells whether two paths lead to one object."""
        return self._find(one) == self._find(other)

    def _find(self, path: str) -> int:
        number = self._graph.find(parse_path(path) if path else ())
        if number is None:
            raise ObjectNotFoundError(f"the checkpoint has nothing at {path!r}")
        return number


class CheckpointReader:
    """One checkpoint, opened for reading.

    Values are called by their paths; those that TensorFlow wrote by TensorFlow's names, such as
    ``net/l1/kernel/.ATTRIBUTES/VARIABLE_VALUE``, and can be read by their paths as well.

    Args:
        stored: The graph that it holds.

    Attributes:
        path: Where it is.
        graph: The objects and how they hang together.
    """

    def __init__(self, stored: StoredGraph) -> None:
        self._stored = stored
        self.path = str(stored.checkpoint)
        self.graph = GraphView(stored.graph)
        self._values = dict(self._leaves())
        self._named = frozenset(() if stored.variables is None else stored.variables.shapes())

    def get_variable_to_shape_map(self) -> dict[str, list[int]]:
        """Returns the shapes of all values by their paths, such as ``net/l1/weight``, or TensorFlow's names."""
        if self._stored.variables is not None:
            return self._stored.variables.shapes()
        return {path: list(self._stored.leaves[name].saved.shape or ()) for path, name in self._values.items()}

    def get_variable_to_dtype_map(self) -> dict[str, np.dtype[Any] | None]:
        """Returns the dtypes of all values; None for text and other values that are no arrays.

        Text of TensorFlow has the dtype of objects, as it is read into arrays of those.
        """
        if self._stored.variables is not None:
            return self._stored.variables.dtypes()
        return {path: self._stored.leaves[name].saved.dtype for path, name in self._values.items()}

    def has_tensor(self, path: str) -> bool:
        """Tells whether a path, any of those that lead there, leads to a value; or a name of TensorFlow's."""
        return path in self._named or path in self._values or (path != "" and self._name(path) is not None)

    def get_tensor(self, path: str) -> Any:
        """Reads a value.

        Args:
            path: Any path that leads to it; of the state of an iterator and the like also the path of the whole. Or the
                name that TensorFlow has for it.

        Returns:
            A numpy array or a Python value; a tree of those for a state.

        Raises:
            ObjectNotFoundError: Nothing is there.
            DamagedCheckpointError: It does not verify.
        """
        if self._stored.variables is not None and path in self._named:
            return self._stored.variables.read(path)
        name = self._values.get(path) or self._name(path)
        if name is None:
            some = ", ".join(list(self._named or self._values)[:8])
            raise ObjectNotFoundError(f"{self.path} has no value at {path!r}; it has {some}, ...")
        return self._stored.load([name])[0]

    def _name(self, path: str) -> str | None:
        number = self._stored.graph.find(parse_path(path))
        return None if number is None else self._stored.graph.nodes[number].value

    def _leaves(self) -> Iterator[tuple[str, str]]:
        """Generates the paths and storage names of all leaves."""
        for number, node in self._stored.graph.values():
            path = self._stored.graph.path(number)
            value = str(node.value)
            for name in self._stored.leaves_of(value):
                below: Path = () if name == value else tuple(name.removeprefix(f"{value}.").split("."))
                yield shown((*path, *below)), name


def load_checkpoint(path: Place) -> CheckpointReader:
    """Opens a checkpoint for reading.

    Args:
        path: A checkpoint, or a directory of numbered ones, of which the newest is opened.

    Raises:
        CheckpointNotFoundError: There is none.
        DamagedCheckpointError: It does not verify.
    """
    return CheckpointReader(open_graph(locate(path)))
