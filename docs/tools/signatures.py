"""The public surface of holdfast as text: one line for each name, method, attribute and argument of the public modules.

``python -m docs.tools.signatures`` writes it to ``docs/reference/signatures.txt``. A test compares the file with the
code, so that no change to the surface goes unseen (docs/stability.md).
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
from collections.abc import Iterable, Iterator
from typing import Any

from .prepare import ROOT, public_modules, public_names

FILE = ROOT / "docs" / "reference" / "signatures.txt"
COMMAND = "python -m docs.tools.signatures"

# Special methods that a program calls without writing their names.
CALLED_BY_SYNTAX = ("__bool__", "__call__", "__contains__", "__enter__", "__getitem__", "__iter__", "__len__")
NO_PROMISE = ("object", "Generic", "Protocol", "ABC")


def signatures(modules: Iterable[str]) -> list[str]:
    """Return the lines of modules; a second name of an object is one line that says what its first name is."""
    named = [
        (f"{module}.{name}", getattr(importlib.import_module(module), name))
        for module in modules
        for name in public_names(module)
    ]
    first: dict[Any, str] = {}
    for name, value in named:
        first.setdefault(value, name)
    lines: list[str] = []
    for name, value in named:
        if first[value] != name:
            lines.append(f"{name} = {first[value]}")
        elif inspect.isclass(value):
            lines += _of_class(name, value, public={one for one in first if inspect.isclass(one)})
        elif inspect.isfunction(value):
            lines += _of_function(name, inspect.signature(value))
        elif not inspect.ismodule(value):
            lines.append(f"{name}: {type(value).__name__}")
    return lines


def difference(recorded: str, present: str) -> str:
    """Return the lines that are gone, with "-" before each, and the new ones, with "+"; empty if there are none.

    >>> print(difference("f(a: int)\\nf(b: int)\\n", "f(a: int)\\nf(b: int = 0)\\n"))
    - f(b: int)
    + f(b: int = 0)
    """
    compared = difflib.ndiff(recorded.splitlines(), present.splitlines())
    return "\n".join(line for line in compared if line.startswith(("- ", "+ ")))


def _of_class(name: str, kind: type[Any], public: set[type[Any]]) -> Iterator[str]:
    """Yield the lines of a class: what it takes over from a public base class is among the lines of that class."""
    package = kind.__module__.partition(".")[0]
    foreign = [base for base in kind.__mro__ if base.__module__.partition(".")[0] != package]
    own = [base for base in kind.__mro__ if base not in foreign and (base is kind or base not in public)]
    direct = {base for one in own for base in one.__bases__ if base.__name__ not in NO_PROMISE}
    bases = [one.__name__ for one in kind.__mro__[1:] if one in direct and (one in public or one in foreign)]
    yield f"class {name}({', '.join(dict.fromkeys(bases))})" if bases else f"class {name}"

    members = {member: value for base in reversed(own) for member, value in vars(base).items()}
    constructor = inspect.signature(kind) if {"__init__", "_fields"} & members.keys() else inspect.Signature()
    yield from _of_arguments(name, constructor)
    attributes = _attributes(own)
    for member in sorted({*members, *attributes} - {*constructor.parameters}):
        full, value = f"{name}.{member}", members.get(member)
        if member in CALLED_BY_SYNTAX:
            yield full
        elif member.startswith("_") or any(member in vars(base) for base in foreign):
            continue  # the documentation of a framework says what the methods of its classes promise
        elif isinstance(value, property):
            yield f"{full}: {_type(inspect.signature(value.fget).return_annotation)}" if value.fget else full
        elif isinstance(value, staticmethod | classmethod):
            yield from _of_function(full, inspect.signature(getattr(kind, member)))
        elif inspect.isfunction(value):
            signature = inspect.signature(value)
            yield from _of_function(full, signature.replace(parameters=[*signature.parameters.values()][1:]))
        else:
            annotation = attributes.get(member) or (type(value).__name__ if member in members else "Any")
            yield f"{full}: {annotation}{_default(kind, member)}"


def _of_function(name: str, signature: inspect.Signature) -> Iterator[str]:
    yield f"{name}() -> {_type(signature.return_annotation)}"
    yield from _of_arguments(name, signature)


def _of_arguments(name: str, signature: inspect.Signature) -> Iterator[str]:
    for one in signature.parameters.values():
        before = {"KEYWORD_ONLY": "*, ", "VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}.get(one.kind.name, "")
        after = ", /" if one.kind is one.POSITIONAL_ONLY else ""
        default = "" if one.default is one.empty else f" = {_shown(one.default)}"
        yield f"{name}({before}{one.name}: {_type(one.annotation)}{default}{after})"


def _attributes(classes: Iterable[type[Any]]) -> dict[str, str]:
    """Return the attributes that classes declare, with their types, and those that their docstrings describe."""
    found: dict[str, str] = {}
    for one in classes:
        text = re.search(r"^Attributes:\n((?: +.*\n?|\n)+)", inspect.cleandoc(one.__doc__ or ""), re.MULTILINE)
        found |= dict.fromkeys(re.findall(r"^    (\w+):", text[1] if text else "", re.MULTILINE), "")
    for one in classes:
        found |= {name: _type(value) for name, value in inspect.get_annotations(one).items()}
    return found


def _default(kind: Any, member: str) -> str:
    """Return the default of a key of a recipe's YAML."""
    field = getattr(kind, "model_fields", {}).get(member)
    if field is None or field.is_required():
        return ""
    default = field.get_default(call_default_factory=True)
    return " = ..." if hasattr(type(default), "model_fields") else f" = {_shown(default)}"


def _type(annotation: Any) -> str:
    if annotation is inspect.Parameter.empty:
        return "Any"
    text = getattr(annotation, "__forward_arg__", annotation)
    return text if isinstance(text, str) else inspect.formatannotation(annotation)


def _shown(value: object) -> str:
    text = repr(value)
    return "..." if " at 0x" in text else text


if __name__ == "__main__":
    FILE.write_text("\n".join([*signatures(public_modules()), ""]), encoding="utf-8")
