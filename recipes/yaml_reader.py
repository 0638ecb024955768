"""Reads YAML 1.2 with the place of every value, and puts values over others.

Scalars follow the core schema of YAML 1.2 (https://yaml.org/spec/1.2.2/#103-core-schema): ``1e-3`` is a number, ``on``,
``no`` and ``2024-01-01`` are text, and ``010`` is ten. Tags are refused, and so is a key that is given twice.

``${env:NAME}`` stands for a variable of the environment, and ``${env:NAME,value}`` for a value where it is not set. A
scalar without quotes that is nothing else is read as YAML again, so that it may be a number; elsewhere it is text.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import CollectionEndEvent, CollectionStartEvent
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from .problems import ConfigError, KeyPath, Problem, SourceLine, dotted, found

_DEEPEST = 100  # the deepest nesting of lists and sections
_MOST = 100_000  # the most values of a document, with aliases expanded
_TAG = "tag:yaml.org,2002:"
_ENVIRONMENT = re.compile(r"\$\{env:([A-Za-z_][A-Za-z0-9_]*)(?:,([^}]*))?\}")
_TEXT_TAGS = {f"{_TAG}{name}" for name in ("str", "timestamp", "value", "merge")}
_PLAIN_TAGS = {f"{_TAG}{name}" for name in ("null", "bool", "int", "float")}


@dataclass(slots=True)
class Document:
    """The values of a text as plain data, where each key was written, and what is wrong with them."""

    root: Any
    places: dict[KeyPath, SourceLine]
    problems: list[Problem] = field(default_factory=list)

    def place_of(self, path: KeyPath) -> SourceLine:
        """Return where a key was written, or the nearest section around a key that is not in the text."""
        while path not in self.places:
            path = path[:-1]
        return self.places[path]

    def report(self, place: SourceLine, path: KeyPath, text: str) -> None:
        """Add a problem."""
        self.problems.append(Problem(place, dotted(path), text))

    def put(self, path: KeyPath, value: Document) -> None:
        """Set the value at a path, with indices into lists, and add missing sections; refuse a path through a value."""
        place, inside = value.places[()], self.root
        here: KeyPath = ()
        for depth, key in enumerate(path, 1):
            if isinstance(inside, list):
                if not str(key).isdigit() or int(key) >= len(inside):
                    text = f"expected the index of an item, 0 to {len(inside) - 1}, found {key}"
                    raise ConfigError([Problem(place, dotted(path[:depth]), text)])
                key = int(key)
            elif not isinstance(inside, dict):
                text = f"expected a section to set a key in, found {found(inside)}"
                raise ConfigError([Problem(place, dotted(path[: depth - 1]), text)])
            elif key not in inside:
                inside[key] = {}
            here = (*here, key)
            self.places.setdefault(here, place)
            if depth == len(path):
                inside[key] = value.root
            inside = inside[key]
        kept = {one: place for one, place in self.places.items() if one[: len(here)] != here}
        self.places = kept | {(*here, *inner): place for inner, place in value.places.items()}


def merged(base: Any, values: Any) -> Any:
    """Return values put over others section by section."""
    if not isinstance(base, dict) or not isinstance(values, dict):
        return values
    return base | {key: merged(base.get(key), inner) for key, inner in values.items()}


def compose(text: str) -> Any:
    """Return the root node of a YAML document, None of an empty one; raise YAMLError or RecursionError."""
    depth = 0
    for event in YAML(typ="safe", pure=True).parse(text):
        depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
        if depth > _DEEPEST:
            raise RecursionError(event.start_mark.line + 1)
    return YAML(typ="safe", pure=True).compose(text)


def read_yaml(text: str, source: str, *, one_place: bool = False) -> Document:
    """Read one YAML document: its values, and bad syntax, tags and doubled keys as problems.

    ``source`` names the text in error messages; ``one_place`` leaves line numbers out, for a text that is one argument.
    """
    place = SourceLine(source)
    document = Document(None, {(): place})

    def line(number: int) -> SourceLine:
        return place if one_place else SourceLine(source, number)

    try:
        root = compose(text)
        if root is not None:
            document.root = _Reader(document, line).value(root, (), place)
    except RecursionError as error:
        document.report(line(*error.args), (), f"lists and sections lie in each other more than {_DEEPEST} deep")
    except OverflowError:  # most likely because of aliases of aliases
        document.problems.clear()
        document.report(place, (), f"this has more than {_MOST} values, those of aliases included")
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        said = error.problem or error.context
        document.report(place if mark is None else line(mark.line + 1), (), f"this is not YAML: {said}")
    except YAMLError as error:
        document.report(place, (), f"this is not YAML: {' '.join(str(error).split())}")
    return document


class _Reader:
    """Turns nodes into values; each mistake in them becomes a problem of the document."""

    def __init__(self, document: Document, line: Callable[[int], SourceLine]) -> None:
        self._document = document
        self._line = line
        self._constructor = YAML(typ="safe", pure=True).constructor
        self._open: set[int] = set()
        self._count = 0  # values so far

    def value(self, node: Node, path: KeyPath, place: SourceLine) -> Any:
        """Return the value of a node, whose key is at a place; raise OverflowError if there are too many values."""
        self._count += 1
        if self._count > _MOST:
            raise OverflowError
        self._document.places[path] = place
        content: Any = None
        if id(node) in self._open:
            self._document.report(place, path, "an alias that holds itself has no value")
        elif isinstance(node, MappingNode | SequenceNode) and node.tag in (f"{_TAG}map", f"{_TAG}seq"):
            self._open.add(id(node))
            if isinstance(node, MappingNode):
                content = self._section(node, path)
            else:
                items = enumerate(node.value)
                content = [self.value(one, (*path, key), self._line(one.start_mark.line + 1)) for key, one in items]
            self._open.discard(id(node))
        elif isinstance(node, ScalarNode) and node.tag in _TEXT_TAGS:
            content = self._with_environment(node, path, place)
        else:
            content = self._scalar(node, path, place)
        return content

    def _section(self, node: MappingNode, path: KeyPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            place = self._line(key_node.start_mark.line + 1)
            key = str(key_node.value)
            if not isinstance(key_node, ScalarNode):
                self._document.report(place, path, "a key must be text, found a list or a section")
            elif key in values:
                first = self._document.places[*path, key]
                self._document.report(place, (*path, key), f"the key is given twice; the first is at {first}")
            else:
                values[key] = self.value(value_node, (*path, key), place)
        return values

    def _scalar(self, node: Node, path: KeyPath, place: SourceLine) -> Any:
        if isinstance(node, ScalarNode) and node.tag in _PLAIN_TAGS:
            try:
                return self._constructor.construct_object(node)
            except ValueError:
                pass
        self._document.report(place, path, f"the tag {node.tag} is not allowed: write plain YAML")
        return None

    def _with_environment(self, node: ScalarNode, path: KeyPath, place: SourceLine) -> Any:
        def variable(match: re.Match[str]) -> str:
            value = os.environ.get(match[1], match[2])
            if value is None:
                what = f"the environment has no variable {match[1]}; set it, or write ${{env:{match[1]},value}}"
                self._document.report(place, path, what)
            return value or ""

        text = _ENVIRONMENT.sub(variable, node.value)
        if "${env:" in _ENVIRONMENT.sub("", node.value):
            what = (
                f"expected ${{env:NAME}} or ${{env:NAME,value}} with the name of a variable, found {node.value!r:.80}"
            )
            self._document.report(place, path, what)
        if node.style is None and _ENVIRONMENT.fullmatch(node.value):
            try:
                again = compose(text)
            except (YAMLError, RecursionError):
                return text
            if isinstance(again, ScalarNode) and again.tag in _PLAIN_TAGS:
                return self._scalar(again, path, place)
        return text
