"""Named tuples and dataclasses in the state of a component: they come back as objects of the program's own classes.

A checkpoint names their classes, and nothing is imported or called because of that. A class has to be one that the
component shows: in its state as it is now, in the module or the class that defines it, or allowed by the program.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from ...engine.pytree import TreeDef, expand, is_leaf
from ...engine.stateful import instance_of
from .permissions import allowed_objects

_logger = logging.getLogger("holdfast")

_KINDS = ("namedtuple", "dataclass", "node")  # the last ones are dataclasses, too, if they are registered with jax
_Record = tuple[str, tuple[str, ...], bool]  # the name of its class, the names of its fields, and whether some may lack


def has_records(structure: TreeDef | None) -> bool:
    """Whether there are named tuples or dataclasses among the containers of a saved tree."""
    return structure is not None and (structure.kind in _KINDS or any(map(has_records, structure.children)))


def with_records(tree: Any, structure: TreeDef | None, component: Any, where: str) -> Any:
    """Return a loaded tree with named tuples and dataclasses in the place of the dictionaries of their fields."""
    every = set(_records(structure))
    classes = {record: _find(record, _named(component)) for record in every}
    if None in classes.values():
        with contextlib.suppress(Exception):  # an object that was just made may have no state to show yet
            shown = list(_within(component.get_state(), 0))
            classes |= {record: kind or _find(record, shown) for record, kind in classes.items()}

    def visit(node: TreeDef | None, value: Any) -> Any:
        if node is None:
            return value
        children = list(value if node.keys is None else value.values())
        values = [visit(child, one) for child, one in zip(node.children, children, strict=True)]
        kind = classes[_record(node)] if node.kind in _KINDS else None
        fields = {} if kind is None else dict(zip(_record(node)[1], values, strict=True))
        return node.build(values) if kind is None else instance_of(kind, fields)

    for label in sorted({label for (label, *_), kind in classes.items() if kind is None}):
        name = type(component).__qualname__
        _logger.warning(
            "%s: the state holds a %s, and %s shows no such class with the same fields, so that set_state gets a "
            "dictionary of its fields; import the class in the module that defines %s, or allow it (components.allow)",
            where,
            label,
            name,
            name,
        )
    return visit(structure, tree)


def _record(node: TreeDef) -> _Record:
    return str(node.label), tuple(map(str, node.keys or ())), node.kind == "dataclass"


def _records(node: TreeDef | None) -> Iterator[_Record]:
    if node is not None:
        if node.kind in _KINDS:
            yield _record(node)
        for child in node.children:
            yield from _records(child)


def _named(component: Any) -> Iterator[type]:
    """Generate the classes that the module and the class of a component name, and those that the program allows."""
    for kind in type(component).__mro__:
        for names in (vars(kind), vars(sys.modules.get(kind.__module__, object))):
            yield from filter(_is_record, list(names.values()))
    yield from filter(_is_record, allowed_objects())


def _within(value: Any, depth: int) -> Iterator[type]:
    contents = None if is_leaf(value) or depth > 20 else expand(value)
    if contents is not None:
        if _is_record(type(value)):
            yield type(value)
        for child in contents.values:
            yield from _within(child, depth + 1)


def _is_record(thing: Any) -> bool:
    return isinstance(thing, type) and (
        dataclasses.is_dataclass(thing) or (issubclass(thing, tuple) and hasattr(thing, "_fields"))
    )


def _find(record: _Record, known: Iterable[type]) -> type | None:
    label, fields, partial = record
    for kind in known:
        whole = partial or issubclass(kind, tuple) or len(dataclasses.fields(kind)) == len(fields)  # type: ignore[arg-type]
        if _is_called(kind, label) and whole and instance_of(kind, dict.fromkeys(fields)) is not None:
            return kind
    return None


def _is_called(kind: type, label: str) -> bool:
    """Whether a class has the name that was saved; a program that is run has the module ``__main__``."""
    module, name = kind.__module__, kind.__qualname__
    return label in (f"{module}.{name}", f"__main__.{name}") or (module == "__main__" and label.endswith(f".{name}"))
