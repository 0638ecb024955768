"""Pickles read without running anything: the classes and functions that they name stay names.

A pickle is a program for a small stack machine. This one interprets the opcodes that build data, and imports nothing:
a name (``GLOBAL``) is a :class:`Name`, and calling one makes an :class:`Inert` object that only records the call,
unless the caller gives a function for that name. So a hostile pickle can, at worst, describe odd data.

The opcodes are those of protocols 2 to 5 in https://docs.python.org/3/library/pickletools.html.
"""

from __future__ import annotations

import abc
import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

from ....engine.errors import DamagedCheckpointError


class Name(NamedTuple):
    """A class or function to which a pickle refers: its module and qualified name."""

    module: str
    attribute: str

    def __str__(self) -> str:
        return f"{self.module}.{self.attribute}"


class Inert:
    """A call that a pickle asks for and that is not made."""

    __slots__ = ("arguments", "name", "state")

    def __init__(self, name: Name, arguments: tuple[Any, ...]) -> None:
        self.name = name
        self.arguments = arguments
        self.state: Any = None  # what ``BUILD`` adds: usually the dictionary of attributes


class Stateful(abc.ABC):
    """Base of objects of builders that take the state of ``BUILD``."""

    __slots__ = ()

    @abc.abstractmethod
    def set_state(self, state: Any) -> None:
        """Take the state, which must not be trusted; may raise ValueError."""


def shown(value: Any) -> str:
    """Format a value of a pickle for people; never the content of a container, which may be endless."""
    if type(value) is str or value is None or (type(value) is int and abs(value) < 1 << 63):
        return f"{value!r:.100}"
    return str(value)[:100] if isinstance(value, Name) else f"a {type(value).__name__}"


_LONGEST_INT = 1 << 20  # bytes; Python turns longer ones into text for minutes
_U16 = struct.Struct("<H")
_I32 = struct.Struct("<i")
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_F64 = struct.Struct(">d")


Builder = Callable[..., Any]
"""Makes the object for one name from the arguments in the pickle, which must not be trusted. ValueError, TypeError and
the like become DamagedCheckpointError."""


_MARK = object()  # the start of a group of values on the stack
_Refusals = (ValueError, TypeError, KeyError, IndexError, OverflowError, AttributeError, ArithmeticError)


def unpickle(
    data: bytes | memoryview,
    builders: Mapping[Name, Builder],
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    machine = _Machine(memoryview(data), builders, persistent)
    try:
        return machine.run()
    except DamagedCheckpointError:
        raise
    except (*_Refusals, struct.error, UnicodeDecodeError, RecursionError) as error:
        raise DamagedCheckpointError(f"the pickle is damaged at byte {machine.position}: {error}") from error


class _Machine:
    """The stack, the memo, and one method for every opcode."""

    def __init__(
        self, data: memoryview, builders: Mapping[Name, Builder], persistent: Callable[[Any], Any] | None
    ) -> None:
        self.data = data
        self.position = 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.builders = builders
        self.persistent = persistent

    def run(self) -> Any:
        data, opcodes = self.data, _OPCODES
        while True:
            if self.position >= len(data):
                raise DamagedCheckpointError("the pickle is cut off")
            code = data[self.position]
            self.position += 1
            if code == 0x2E:  # STOP
                return self.pop()
            action = opcodes.get(code)
            if action is None:
                raise DamagedCheckpointError(
                    f"the pickle has the opcode {code:#04x} at byte {self.position - 1}, which data does not need"
                )
            action(self)

    # ---- reading

    def take(self, count: int) -> memoryview:
        start = self.position
        if count > len(self.data) - start:
            raise DamagedCheckpointError("the pickle is cut off")
        self.position = start + count
        return self.data[start : start + count]

    def line(self) -> str:
        end = self.position
        while end < len(self.data) and self.data[end] != 0x0A:
            end += 1
        text = bytes(self.take(end - self.position)).decode()
        self.take(1)
        return text

    def number(self, form: struct.Struct) -> int:
        value: int = form.unpack(self.take(form.size))[0]
        return value

    # ---- the stack

    def pop(self) -> Any:
        if not self.stack or self.stack[-1] is _MARK:
            self.fail("an opcode finds the stack empty")
        return self.stack.pop()

    def top(self) -> Any:
        if not self.stack or self.stack[-1] is _MARK:
            self.fail("an opcode finds the stack empty")
        return self.stack[-1]

    def pop_mark(self) -> list[Any]:
        stack = self.stack
        start = len(stack) - 1
        while start >= 0 and stack[start] is not _MARK:
            start -= 1
        if start < 0:
            self.fail("an opcode finds no mark on the stack")
        found = stack[start + 1 :]
        del stack[start:]
        return found

    def fail(self, what: str) -> NoReturn:
        raise DamagedCheckpointError(f"the pickle is damaged at byte {self.position}: {what}")

    # ---- objects

    def call(self, function: Any, arguments: Any) -> Any:
        if isinstance(function, Inert) and type(arguments) is tuple:  # a class or function that is pickled as code
            return Inert(function.name, arguments)
        if not isinstance(function, Name) or type(arguments) is not tuple:
            self.fail("it calls something that is not a name")
        builder = self.builders.get(function)
        return Inert(function, arguments) if builder is None else builder(*arguments)

    def recall(self, key: int) -> None:
        if key not in self.memo:
            self.fail(f"it refers to object {key}, which does not exist")
        self.stack.append(self.memo[key])

    def extend(self, items: list[Any]) -> None:
        target = self.top()
        if isinstance(target, list):
            target.extend(items)
        elif not isinstance(target, Inert):
            self.fail(f"it appends to a {type(target).__name__}")

    def update(self, items: list[Any]) -> None:
        target = self.top()
        if len(items) % 2:
            self.fail("a key has no value")
        if isinstance(target, dict):
            for index in range(0, len(items), 2):
                target[self.key(items[index])] = items[index + 1]
        elif not isinstance(target, Inert):
            self.fail(f"it sets a key of a {type(target).__name__}")

    def key(self, value: Any) -> Any:
        # Hashing tuples of shared tuples would take for ever, and deep ones would overflow the interpreter's stack.
        inner = value if type(value) is tuple else (value,)
        if any(isinstance(item, tuple | frozenset) and type(item) is not Name for item in inner):
            self.fail("it has a key, or an element of a set, that is a container of containers")
        return value

    def build(self) -> None:
        state = self.pop()
        target = self.top()
        if isinstance(target, Stateful):
            target.set_state(state)
        elif isinstance(target, Inert):
            target.state = state
        elif not isinstance(target, dict):  # of dictionaries, the entries are all that counts
            self.fail(f"it sets the state of a {type(target).__name__}")

    def integer(self, size: int) -> None:
        if size < 0 or size > _LONGEST_INT:
            self.fail(f"it holds an integer of {size} bytes")
        self.stack.append(int.from_bytes(self.take(size), "little", signed=True))

    def text(self, size: int) -> None:
        self.stack.append(bytes(self.take(size)).decode("utf-8", "surrogatepass"))

    def bytes_(self, size: int) -> None:
        self.stack.append(bytes(self.take(size)))

    def add_to_set(self) -> None:
        items = self.pop_mark()
        target = self.top()
        if isinstance(target, set):
            target.update(map(self.key, items))
        elif not isinstance(target, Inert):
            self.fail(f"it adds to a {type(target).__name__}")

    def name_on_stack(self) -> None:
        attribute, module = self.pop(), self.pop()
        if type(module) is not str or type(attribute) is not str:
            self.fail("a name in it is not text")
        self.stack.append(_name(module, attribute))

    def new(self, with_keywords: bool) -> None:
        keywords = self.pop() if with_keywords else {}
        arguments, function = self.pop(), self.pop()
        if keywords:
            arguments = (*arguments, keywords)
        self.stack.append(self.call(function, arguments))

    def reduce(self) -> None:
        arguments, function = self.pop(), self.pop()
        self.stack.append(self.call(function, arguments))

    def dictionary(self) -> None:
        items = self.pop_mark()
        self.stack.append({})
        self.update(items)

    def tuple_of(self, count: int) -> None:
        items = [self.pop() for _ in range(count)]
        self.stack.append(tuple(reversed(items)))

    def persist(self) -> None:
        identity = self.pop()
        if self.persistent is None:
            self.fail("it refers to an object outside")
        self.stack.append(self.persistent(identity))

    def memoize(self, key: int) -> None:
        self.memo[key] = self.top()

    def append(self) -> None:
        item = self.pop()
        self.extend([item])

    def set_item(self) -> None:
        value, key = self.pop(), self.pop()
        self.update([key, value])


def _name(module: str, attribute: str) -> Name:
    # Protocol 2, which torch writes, calls this one as Python 2 did.
    return Name("builtins" if module == "__builtin__" else module, attribute)


_OPCODES: dict[int, Callable[[_Machine], Any]] = {
    0x80: lambda m: m.take(1),  # PROTO
    0x95: lambda m: m.take(8),  # FRAME: its length does not matter here
    ord("("): lambda m: m.stack.append(_MARK),
    ord("0"): lambda m: m.stack.pop(),
    ord("1"): lambda m: m.pop_mark(),
    ord("2"): lambda m: m.stack.append(m.top()),
    ord("N"): lambda m: m.stack.append(None),
    0x88: lambda m: m.stack.append(True),
    0x89: lambda m: m.stack.append(False),
    ord("J"): lambda m: m.stack.append(m.number(_I32)),
    ord("K"): lambda m: m.stack.append(m.take(1)[0]),
    ord("M"): lambda m: m.stack.append(m.number(_U16)),
    0x8A: lambda m: m.integer(m.take(1)[0]),  # LONG1
    0x8B: lambda m: m.integer(m.number(_I32)),  # LONG4
    ord("G"): lambda m: m.stack.append(_F64.unpack(m.take(8))[0]),
    ord("X"): lambda m: m.text(m.number(_U32)),
    0x8C: lambda m: m.text(m.take(1)[0]),
    0x8D: lambda m: m.text(m.number(_U64)),
    ord("B"): lambda m: m.bytes_(m.number(_U32)),
    ord("C"): lambda m: m.bytes_(m.take(1)[0]),
    0x8E: lambda m: m.bytes_(m.number(_U64)),
    0x96: lambda m: m.bytes_(m.number(_U64)),
    ord("]"): lambda m: m.stack.append([]),
    ord("}"): lambda m: m.stack.append({}),
    ord(")"): lambda m: m.stack.append(()),
    0x8F: lambda m: m.stack.append(set()),
    ord("a"): _Machine.append,
    ord("e"): lambda m: m.extend(m.pop_mark()),
    ord("s"): _Machine.set_item,
    ord("u"): lambda m: m.update(m.pop_mark()),
    0x90: _Machine.add_to_set,
    0x91: lambda m: m.stack.append(frozenset(map(m.key, m.pop_mark()))),
    ord("t"): lambda m: m.stack.append(tuple(m.pop_mark())),
    0x85: lambda m: m.tuple_of(1),
    0x86: lambda m: m.tuple_of(2),
    0x87: lambda m: m.tuple_of(3),
    ord("l"): lambda m: m.stack.append(m.pop_mark()),
    ord("d"): _Machine.dictionary,
    ord("h"): lambda m: m.recall(m.take(1)[0]),
    ord("j"): lambda m: m.recall(m.number(_U32)),
    ord("q"): lambda m: m.memoize(m.take(1)[0]),
    ord("r"): lambda m: m.memoize(m.number(_U32)),
    0x94: lambda m: m.memoize(len(m.memo)),
    ord("c"): lambda m: m.stack.append(_name(m.line(), m.line())),
    0x93: _Machine.name_on_stack,
    ord("R"): _Machine.reduce,
    0x81: lambda m: m.new(False),
    0x92: lambda m: m.new(True),
    ord("b"): _Machine.build,
    ord("Q"): _Machine.persist,
}
