"""Leaves of types that holdfast does not know, or that are to lie in a storage of their own."""

from __future__ import annotations

import abc
import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import OptionError
from ..storage import Location
from .args import RestoreArgs, SaveArgs


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamInfo:
    """What a :class:`TypeHandler` is told, and tells, about one leaf.

    Attributes:
        name: The leaf's storage name, such as ``params.vocabulary``.
        facts: What the handler wants to know again when it reads the leaf, as JSON can hold it; kept in ``tree.json``.
            When it comes back from there, it is not to be trusted.
        folder: The leaf's own folder, for as many files as the handler likes; it is there when ``serialize`` is called,
            and is part of the checkpoint. None before anything is written.
    """

    name: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    folder: Location | None = None


class TypeHandler(abc.ABC):
    """Saves and restores leaves of a type of the user's own, or leaves of any type in a storage of the user's own.

    Attributes:
        name: How ``tree.json`` calls this handler; to restore what it has saved, one of this name must be registered.
    """

    name: str

    def param_infos(self, values: Sequence[Any], names: Sequence[str]) -> Sequence[ParamInfo]:
        """Makes what is needed to save leaves, and looks whether they can be saved; nothing is written yet.

        Args:
            values: The leaves.
            names: Their storage names.

        Returns:
            One info for each, without a folder.
        """
        return [ParamInfo(name=name) for name in names]

    def snapshot(self, value: Any) -> Any:
        """Returns a value that stays as it is now; the leaf itself may change once a save in the background has begun.

        Args:
            value: A leaf.
        """
        return copy.deepcopy(value)

    @abc.abstractmethod
    def serialize(self, values: Sequence[Any], infos: Sequence[ParamInfo], args: Sequence[SaveArgs]) -> Any:
        """Writes leaves to where they are stored; perhaps on another thread, and on process 0 only.

        It may be a coroutine.

        Args:
            values: The leaves, or snapshots of them.
            infos: What :meth:`param_infos` returned for them, with their folders. Files in these are made durable, and
                digested, by the caller.
            args: What the caller of ``save`` asks for.

        Returns:
            None, or futures whose ``result()`` completes the writing.
        """

    @abc.abstractmethod
    def deserialize(self, infos: Sequence[ParamInfo], args: Sequence[RestoreArgs]) -> Any:
        """Reads leaves back. It may be a coroutine.

        Args:
            infos: One for each leaf, with its folder and facts. The files in it have been compared with their digests.
            args: What the caller of ``restore`` asks for.

        Returns:
            The leaves.
        """


class TypeHandlerRegistry:
    """Which :class:`TypeHandler` is there for which type.

    Args:
        handlers: The handlers by type.
    """

    def __init__(self, handlers: Mapping[type, TypeHandler] | None = None) -> None:
        self._handlers: dict[type, TypeHandler] = {}
        for leaf_type, handler in (handlers or {}).items():
            self.register(leaf_type, handler)

    def register(self, leaf_type: type, handler: TypeHandler, *, override: bool = False) -> None:
        """Adds a handler.

        Args:
            leaf_type: Leaves that are instances of it go to the handler, also if they are containers or arrays.
            handler: What saves and restores them.
            override: Replace the handler that the type has already.

        Raises:
            OptionError: The type has a handler already, or another handler is called the same.
        """
        name = getattr(handler, "name", None)
        if not isinstance(name, str) or not name:
            raise OptionError(f"{type(handler).__name__} needs a name: text by which a checkpoint knows it again")
        if leaf_type in self._handlers and not override:
            raise OptionError(f"{leaf_type.__name__} has the handler {self._handlers[leaf_type].name!r} already")
        others = (other for known, other in self._handlers.items() if known is not leaf_type)
        if any(other.name == name and other is not handler for other in others):
            raise OptionError(f"another handler is called {name!r}; a checkpoint could not tell them apart")
        self._handlers[leaf_type] = handler

    def unregister(self, leaf_type: type) -> None:
        """Removes the handler of a type; none is fine."""
        self._handlers.pop(leaf_type, None)

    @property
    def leaf_types(self) -> tuple[type, ...]:
        """Returns the types that have a handler."""
        return tuple(self._handlers)

    def find(self, value: Any) -> TypeHandler | None:
        """Returns the handler of a leaf, that of the nearest base class first; None if there is none."""
        if not self._handlers:
            return None
        for base in type(value).__mro__:
            if base in self._handlers:
                return self._handlers[base]
        return next((found for known, found in self._handlers.items() if isinstance(value, known)), None)

    def named(self, name: str) -> TypeHandler | None:
        """Returns the handler of a name, or None."""
        return next((handler for handler in self._handlers.values() if handler.name == name), None)


DEFAULT_REGISTRY = TypeHandlerRegistry()
"""The registry of all handlers of trees that are given no other one, and of ``holdfast.load``."""


def register_type_handler(leaf_type: type, handler: TypeHandler, *, override: bool = False) -> None:
    """Adds a handler to the default registry, for the rest of the program.

    Args:
        leaf_type: Leaves that are instances of it go to the handler.
        handler: What saves and restores them.
        override: Replace the handler that the type has already.

    Raises:
        OptionError: The type has a handler already, or another handler is called the same.
    """
    DEFAULT_REGISTRY.register(leaf_type, handler, override=override)
