"""``key=value`` arguments, laid over the values of a file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .problems import KeyPath, Place, Problem, dotted, found
from .yaml_reader import Document, read_yaml


def apply_overrides(document: Document, arguments: Sequence[str]) -> None:
    """Lays ``key=value`` arguments over a document, in place; what is wrong is added to its problems.

    Args:
        document: The values of the file.
        arguments: Such as ``train.steps=400`` or ``model.hidden=[64, 64]``. Keys are dotted, numbers are indices into
            lists, and values are YAML; an empty value is null.
    """
    given: dict[KeyPath, str] = {}
    for argument in arguments:
        place = Place(f"argument {argument}")
        key, equals, text = argument.partition("=")
        path: KeyPath = tuple(key.split("."))
        if not equals or "" in path:
            document.problems.append(Problem(place, "", "expected key=value, such as train.steps=400"))
            continue
        earlier = next((other for other in given if other[: len(path)] == path or path[: len(other)] == other), None)
        if earlier is not None:
            document.problems.append(Problem(place, key, f"the key is given twice; the first is {given[earlier]}"))
            continue
        given[path] = argument
        value = read_yaml(text, place.source, one_place=True)
        document.problems.extend(Problem(item.place, key, item.text) for item in value.problems)
        if not value.problems:
            _set(document, path, value, place)


def _set(document: Document, path: KeyPath, value: Document, place: Place) -> None:
    if not isinstance(document.values, dict):
        return  # the file holds no section at all, which is reported already
    container: Any = document.values
    full: KeyPath = ()
    for depth, key in enumerate(path):
        index: str | int = key
        if isinstance(container, list):
            if not str(key).isdigit() or int(key) >= len(container):
                text = f"expected the index of an item, 0 to {len(container) - 1}, found {key}"
                document.problems.append(Problem(place, dotted(path[: depth + 1]), text))
                return
            index = int(key)
        elif not isinstance(container, dict):
            text = f"expected a section to set a key in, found {found(container)}"
            document.problems.append(Problem(place, dotted(path[:depth]), text))
            return
        full = (*full, index)
        if depth < len(path) - 1:
            if isinstance(container, dict) and index not in container:
                container[index] = {}
                document.places[full] = place
            container = container[index]
            continue
        container[index] = value.values
        for old in [old for old in document.places if old[: len(full)] == full]:
            del document.places[old]
        document.places.update({(*full, *inner): place for inner in value.places})
