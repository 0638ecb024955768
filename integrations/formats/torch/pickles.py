"""Read pickles without executing code or importing the classes and functions that they refer to.

A pickle is a program for a small stack machine. This module interprets only the opcodes that build data. A name
(``GLOBAL``) becomes a :class:`Name`. Unless the caller provides a builder for the name, calling the name only creates
an :class:`Inert` object that records the call. At worst, a hostile pickle can therefore produce unexpected data.

:mod:`pickletools` describes the opcodes of protocols 2 to 5 and decodes their arguments, without executing anything.
"""

from __future__ import annotations

import abc
import io
import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ....engine.errors import DamagedCheckpointError


class Name(NamedTuple):
    """A reference to a class or function in a pickle: its module and qualified name."""

    module: str
    attribute: str

    def __str__(self) -> str:
        return f"{self.module}.{self.attribute}"


@dataclass(slots=True, eq=False, repr=False)
class Inert:
    """Records a call in a pickle instead of executing it."""

    name: Name
    arguments: tuple[Any, ...]
    state: Any = None  # state set by the opcode ``BUILD``, usually the attribute dictionary


class Stateful(abc.ABC):
    """Base class for objects that a builder creates and whose state the opcode ``BUILD`` sets later."""

    @abc.abstractmethod
    def set_state(self, state: Any) -> None:
        """Set the state, which is untrusted; may raise ValueError."""


def shown(value: Any) -> str:
    """Format a pickled value for error messages, omitting the contents of containers, which may be huge or cyclic."""
    if type(value) is str or value is None or (type(value) is int and abs(value) < 1 << 63):
        return f"{value!r:.100}"
    return str(value)[:100] if isinstance(value, Name) else f"a {type(value).__name__}"


_LONGEST_INT = 1 << 23  # maximum length in bits; Python would take minutes to convert longer integers to text

Builder = Callable[..., Any]
"""Builds an object from untrusted arguments. Errors such as ValueError are raised as DamagedCheckpointError."""

_MARK = object()  # stack marker at the start of a group of values


def unpickle(
    data: bytes | memoryview, builders: Mapping[Name, Builder], persistent: Callable[[Any], Any] | None = None
) -> Any:
    """Return the object in a pickle; ``persistent`` maps a persistent id to an object outside the pickle."""
    machine = _Machine(builders, persistent)
    content, push = io.BytesIO(data), machine.stack.append
    try:
        for opcode, argument, _ in pickletools.genops(content):
            if opcode.name in _PUSHED:  # fast path for the most frequent opcodes
                push(argument)
            elif (action := _ACTIONS.get(opcode.name)) is not None:
                action(machine, argument)
            else:
                raise ValueError(f"it has the opcode {opcode.name}, which data does not need")
        return machine.pop()
    except DamagedCheckpointError:
        raise
    # Also catch Warning: pickletools warns about backslashes in names, and the program may turn warnings into errors.
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, Warning) as error:
        raise DamagedCheckpointError(f"the pickle is damaged at byte {content.tell()}: {error}") from error


class _Machine:
    """The pickle stack machine: its stack, its memo, and the operations of the opcodes."""

    def __init__(self, builders: Mapping[Name, Builder], persistent: Callable[[Any], Any] | None) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.builders = builders
        self.persistent = persistent

    def top(self) -> Any:
        if not self.stack or self.stack[-1] is _MARK:
            raise ValueError("an opcode finds the stack empty")
        return self.stack[-1]

    def pop(self) -> Any:
        value = self.top()
        del self.stack[-1]
        return value

    def pop_mark(self) -> list[Any]:
        stack = self.stack
        start = len(stack) - 1
        while start >= 0 and stack[start] is not _MARK:
            start -= 1
        if start < 0:
            raise ValueError("an opcode finds no mark on the stack")
        values = stack[start + 1 :]
        del stack[start:]
        return values

    def pop_last(self, count: int) -> list[Any]:
        values = self.stack[-count:]
        if len(values) < count or any(value is _MARK for value in values):
            raise ValueError("an opcode finds the stack empty")
        del self.stack[-count:]
        return values

    def recall(self, key: int) -> None:
        if key not in self.memo:
            raise ValueError(f"it refers to object {key}, which does not exist")
        self.stack.append(self.memo[key])

    def memoize(self, key: int | None) -> None:
        self.memo[len(self.memo) if key is None else key] = self.top()

    def integer(self, value: int) -> None:
        if value.bit_length() > _LONGEST_INT:
            raise ValueError(f"it holds an integer of {value.bit_length()} bits")
        self.stack.append(value)

    def name(self, module: Any, attribute: Any) -> None:
        if type(module) is not str or type(attribute) is not str:
            raise ValueError("a name in it is not text")
        # Protocol 2, which torch writes, refers to ``builtins`` by its Python 2 name.
        self.stack.append(Name("builtins" if module == "__builtin__" else module, attribute))

    def call(self, function: Any, arguments: Any, keywords: Any = None) -> None:
        if type(arguments) is not tuple or not isinstance(function, Name | Inert):
            raise ValueError("it calls something that is not a name")
        if keywords:
            arguments = (*arguments, keywords)
        if isinstance(function, Inert):  # the callee is itself the result of a recorded call
            self.stack.append(Inert(function.name, arguments))
        else:
            builder = self.builders.get(function)
            self.stack.append(Inert(function, arguments) if builder is None else builder(*arguments))

    def persist(self, identity: Any) -> None:
        if self.persistent is None:
            raise ValueError("it refers to an external object")
        self.stack.append(self.persistent(identity))

    def append(self, items: list[Any]) -> None:
        target = self.top()
        if isinstance(target, list):
            target.extend(items)
        elif not isinstance(target, Inert):
            raise ValueError(f"it appends to a {type(target).__name__}")

    def add(self, items: list[Any]) -> None:
        target = self.top()
        if isinstance(target, set):
            target.update(map(self.key, items))
        elif not isinstance(target, Inert):
            raise ValueError(f"it adds to a {type(target).__name__}")

    def update(self, items: list[Any]) -> None:
        target = self.top()
        if len(items) % 2:
            raise ValueError("a key has no value")
        if isinstance(target, dict):
            for index in range(0, len(items), 2):
                target[self.key(items[index])] = items[index + 1]
        elif not isinstance(target, Inert):
            raise ValueError(f"it sets a key of a {type(target).__name__}")

    def key(self, value: Any) -> Any:
        # Hashing nested shared tuples takes exponential time, and deep nesting would overflow the interpreter's stack.
        inner = value if type(value) is tuple else (value,)
        if any(isinstance(item, tuple | frozenset) and type(item) is not Name for item in inner):
            raise ValueError("it has a key, or an element of a set, that is a container of containers")
        return value

    def build(self, state: Any) -> None:
        target = self.top()
        if isinstance(target, Stateful):
            target.set_state(state)
        elif isinstance(target, Inert):
            target.state = state
        elif not isinstance(target, dict):  # the attributes of dictionary subclasses are ignored
            raise ValueError(f"it sets the state of a {type(target).__name__}")


# Opcodes that only push their argument.
_PUSHED = frozenset({"BININT", "BININT1", "BININT2", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}) | {
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8")
}
# Maps other opcodes to actions, which are called with the opcode's argument. STOP leaves the result on the stack.
_ACTIONS: dict[str, Callable[[_Machine, Any], object]] = {
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda *_: None),
    **dict.fromkeys(("LONG1", "LONG4"), _Machine.integer),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Machine.recall),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT", "MEMOIZE"), _Machine.memoize),
    "NONE": lambda m, _: m.stack.append(None),
    "NEWTRUE": lambda m, _: m.stack.append(True),
    "NEWFALSE": lambda m, _: m.stack.append(False),
    "BYTEARRAY8": lambda m, data: m.stack.append(bytes(data)),
    "MARK": lambda m, _: m.stack.append(_MARK),
    "POP": lambda m, _: m.stack.pop(),
    "POP_MARK": lambda m, _: m.pop_mark(),
    "EMPTY_LIST": lambda m, _: m.stack.append([]),
    "APPEND": lambda m, _: m.append(m.pop_last(1)),
    "APPENDS": lambda m, _: m.append(m.pop_mark()),
    "EMPTY_TUPLE": lambda m, _: m.stack.append(()),
    "TUPLE": lambda m, _: m.stack.append(tuple(m.pop_mark())),
    "TUPLE1": lambda m, _: m.stack.append(tuple(m.pop_last(1))),
    "TUPLE2": lambda m, _: m.stack.append(tuple(m.pop_last(2))),
    "TUPLE3": lambda m, _: m.stack.append(tuple(m.pop_last(3))),
    "EMPTY_DICT": lambda m, _: m.stack.append({}),
    "SETITEM": lambda m, _: m.update(m.pop_last(2)),
    "SETITEMS": lambda m, _: m.update(m.pop_mark()),
    "EMPTY_SET": lambda m, _: m.stack.append(set()),
    "ADDITEMS": lambda m, _: m.add(m.pop_mark()),
    "FROZENSET": lambda m, _: m.stack.append(frozenset(map(m.key, m.pop_mark()))),
    "GLOBAL": lambda m, names: m.name(*names.split(" ", 1)),
    "STACK_GLOBAL": lambda m, _: m.name(*m.pop_last(2)),
    "REDUCE": lambda m, _: m.call(*m.pop_last(2)),
    "NEWOBJ": lambda m, _: m.call(*m.pop_last(2)),
    "NEWOBJ_EX": lambda m, _: m.call(*m.pop_last(3)),
    "BUILD": lambda m, _: m.build(m.pop()),
    "BINPERSID": lambda m, _: m.persist(m.pop()),
}
