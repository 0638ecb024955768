"""What stands for the classes, functions and objects of a pickle, as none of them is ever run."""

from __future__ import annotations

import abc
from typing import Any, NamedTuple


class Name(NamedTuple):
    """A class or function that a pickle refers to.

    Attributes:
        module: Its module.
        attribute: Its qualified name in there.
    """

    module: str
    attribute: str

    def __str__(self) -> str:
        return f"{self.module}.{self.attribute}"


class Inert:
    """An object that a pickle wants made, with what is to go into it; it does nothing.

    Attributes:
        name: Its class, or the function that would return it.
        arguments: What would be passed.
        state: What ``BUILD`` adds: usually the dictionary of its attributes; None if there is none.
    """

    __slots__ = ("arguments", "name", "state")

    def __init__(self, name: Name, arguments: tuple[Any, ...]) -> None:
        self.name = name
        self.arguments = arguments
        self.state: Any = None


class Stateful(abc.ABC):
    """Base of what a builder may return to be told the state that ``BUILD`` has for it."""

    __slots__ = ()

    @abc.abstractmethod
    def set_state(self, state: Any) -> None:
        """Takes the state, which is not trusted in any way; may raise ValueError."""


def shown(value: Any) -> str:
    """Writes a value of a pickle for people; never what is in a container, which may be endless."""
    if type(value) is str or value is None or (type(value) is int and abs(value) < 1 << 63):
        return f"{value!r:.100}"
    return str(value)[:100] if isinstance(value, Name) else f"a {type(value).__name__}"
