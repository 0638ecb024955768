"""Which objects of the program stand for which nodes of a checkpoint."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .paths import Path, shown
from .saved import SavedGraph
from .tracked import Node

_logger = logging.getLogger("holdfast")


@dataclass(slots=True, eq=False)
class Binding:
    """An object that stands for a node.

    Attributes:
        identity: What tells it from others while it lives; None for what may be another object after every restore.
        path: Its path.
        reference: Returns it as long as it lives; None where it cannot be referred to.
        root: Returns what it stands for in the program, as long as that lives; None where it is a thing of its own.
    """

    identity: int | None
    path: Path
    reference: Callable[[], Any] | None
    root: Callable[[], Any] | None = None

    @property
    def lives(self) -> bool:
        """Whether the object is still there, as far as one can tell."""
        return self.reference is None or self.reference() is not None


class Bindings:
    """The objects that stand for nodes; what a pass over them has added can be taken back.

    Args:
        graph: The graph of the checkpoint.

    Attributes:
        conflicts: Nodes that two different objects stand for, with the paths of both.
        fresh: The nodes that objects have been bound to since the pass began.
    """

    def __init__(self, graph: SavedGraph) -> None:
        self.conflicts: dict[int, tuple[Path, Path]] = {}
        self.fresh: list[int] = []
        self._graph = graph
        self._by_number: dict[int, list[Binding]] = {}
        self._by_identity: dict[int, list[tuple[int, Binding]]] = {}
        self._before: list[tuple[int, list[Binding]]] = []

    def begin(self) -> None:
        """Begins a pass."""
        self.fresh.clear()
        self._before.clear()

    def undo(self) -> None:
        """Takes back what was bound since the pass began."""
        for number, bindings in reversed(self._before):
            for binding in self._by_number[number]:
                if binding not in bindings and binding.identity is not None:
                    self._by_identity[binding.identity].remove((number, binding))
            self._by_number[number] = bindings
        self.begin()

    def numbers(self) -> list[int]:
        """Returns the nodes that objects stand for."""
        return list(self._by_number)

    def at(self, number: int) -> list[Binding]:
        """Returns the objects that stand for a node."""
        return self._by_number.get(number, [])

    def objects(self, number: int) -> list[tuple[Any, Path]]:
        """Returns those of them that live and can be referred to, with their paths."""
        found = [(binding.reference(), binding.path) for binding in self.at(number) if binding.reference is not None]
        return [(thing, path) for thing, path in found if thing is not None]

    def of(self, holder: Any) -> list[tuple[int, Binding]]:
        """Returns the nodes that an object stands for."""
        known = self._by_identity.get(identity_of(holder), ())
        # Another object may be at the place in memory where one was that is gone.
        return [(number, one) for number, one in known if one.lives or (one.root is not None and one.root() is holder)]

    def binds(self, number: int, value: Any) -> bool:
        """Whether an object stands for a node already."""
        identity = identity_of(value)
        return any(binding.identity == identity and binding.lives for binding in self.at(number))

    def bind(self, number: int, value: Any, path: Path, *, fixed: bool) -> bool:
        """Notes that an object stands for a node.

        Args:
            number: The node.
            value: The object.
            path: Its path.
            fixed: Whether it is the same object after every restore.

        Returns:
            Whether it may: a node is one object only.
        """
        bindings = self._by_number.setdefault(number, [])
        identity = identity_of(value) if fixed else None
        if any(one.identity == identity and one.path == path and one.lives for one in bindings):
            return True
        kept = [binding for binding in bindings if binding.path != path]  # something else hangs there by now
        others = [one for one in kept if one.identity not in (None, identity) and one.lives] if fixed else []
        if others:
            if self.conflicts.get(number) != (others[0].path, path):
                _logger.warning(
                    "%s is one object in the checkpoint, but %s and %s are two; only the first of them is restored",
                    shown(self._graph.path(number)),
                    shown(others[0].path),
                    shown(path),
                )
            self.conflicts[number] = others[0].path, path
            return False
        found = _binding(identity, value, path)
        self._before.append((number, bindings))
        self._by_number[number] = [*kept, found]
        self.fresh.append(number)
        if identity is not None:
            self._by_identity.setdefault(identity, []).append((number, found))
        return True


def identity_of(value: Any) -> int:
    """Returns what tells an object from others; a checkpoint is one with the object that it stands for."""
    root = value.__holdfast_root__() if isinstance(value, Node) else None
    return id(value if root is None else root)


def _binding(identity: int | None, value: Any, path: Path) -> Binding:
    if identity is None:
        return Binding(None, path, None)
    root = value.__holdfast_root__() if isinstance(value, Node) else None
    return Binding(identity, path, _reference(value), None if root is None else _reference(root))


def _reference(value: Any) -> Callable[[], Any] | None:
    return weakref.ref(value) if type(value).__weakrefoffset__ != 0 else None
