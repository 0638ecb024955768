"""Reads YAML 1.2 into plain values, with the place of every key.

Scalars follow the core schema of YAML 1.2 (https://yaml.org/spec/1.2.2/#103-core-schema): ``1e-3`` is a number, ``on``,
``no`` and ``2024-01-01`` are text, and ``010`` is ten. Tags are refused, and so is a key that is given twice.

``${env:NAME}`` stands for a variable of the environment, and ``${env:NAME,value}`` for a value where it is not set. A
scalar without quotes that is nothing else is read as YAML again, so that it may be a number; elsewhere it is text.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import CollectionEndEvent, CollectionStartEvent
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from .problems import KeyPath, Problem, SourceLine, dotted

_DEEPEST = 100  # lists and sections in each other
_MOST = 100_000  # values of a document, an alias counted as what it stands for
_TAG = "tag:yaml.org,2002:"
_ENVIRONMENT = re.compile(r"\$\{env:([A-Za-z_][A-Za-z0-9_]*)(?:,([^}]*))?\}")
_TEXT_TAGS = {f"{_TAG}str", f"{_TAG}timestamp", f"{_TAG}value", f"{_TAG}merge"}


@dataclass(slots=True)
class Document:
    """Plain values (dict, list, str, int, float, bool, None) and where each of them was written."""

    values: Any = None
    places: dict[KeyPath, SourceLine] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def place(self, path: KeyPath) -> SourceLine:
        """Return where a key was written, or the nearest section around a key that is not in the text."""
        while path not in self.places and path:
            path = path[:-1]
        return self.places[path]


def read_yaml(text: str, source: str, *, one_place: bool = False) -> Document:
    """Read one YAML document: the values, their places, and bad syntax, tags and doubled keys as problems.

    ``source`` names the text in error messages; ``one_place`` leaves line numbers out, for a text that is one argument.
    """
    return _Reader(source, one_place).read(text)


class _Reader:
    def __init__(self, source: str, one_place: bool) -> None:
        self._source = source
        self._one_place = one_place
        self._document = Document()
        self._open: set[int] = set()
        self._count = 0  # values so far

    def read(self, text: str) -> Document:
        self._document.places[()] = SourceLine(self._source)
        try:
            line = _too_deep(text)
            if line is not None:
                place = SourceLine(self._source, None if self._one_place else line)
                self._report(place, (), f"lists and sections lie in each other more than {_DEEPEST} deep")
                return self._document
            root: Node | None = YAML(typ="safe", pure=True).compose(text)
        except MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            place = SourceLine(self._source, None if mark is None or self._one_place else mark.line + 1)
            self._report(place, (), f"this is not YAML: {error.problem or error.context}")
            return self._document
        except YAMLError as error:
            self._report(SourceLine(self._source), (), f"this is not YAML: {' '.join(str(error).split())}")
            return self._document
        self._document.values = None if root is None else self._value(root, ())
        if self._count > _MOST:  # of aliases of aliases, most likely
            self._document = Document(None, {(): SourceLine(self._source)})
            self._report(SourceLine(self._source), (), f"this has more than {_MOST} values, those of aliases included")
        return self._document

    def _value(self, node: Node, path: KeyPath) -> Any:
        self._count += 1
        if self._count > _MOST:
            return None
        if id(node) in self._open:
            self._report(self._place(node), path, "an alias that holds itself has no value")
            return None
        self._open.add(id(node))
        try:
            if isinstance(node, MappingNode) and str(node.tag) == f"{_TAG}map":
                return self._mapping(node, path)
            if isinstance(node, SequenceNode) and str(node.tag) == f"{_TAG}seq":
                items = itertools.takewhile(lambda _: self._count <= _MOST, enumerate(node.value))
                return [self._item(item, (*path, index)) for index, item in items]
            if isinstance(node, ScalarNode):
                return self._scalar(node, path)
        finally:
            self._open.discard(id(node))
        self._report(self._place(node), path, f"the tag {node.tag} is not allowed: write plain YAML")
        return None

    def _mapping(self, node: MappingNode, path: KeyPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if self._count > _MOST:
                break
            place = self._place(key_node)
            if not isinstance(key_node, ScalarNode):
                self._report(place, path, "a key must be text, found a list or a section")
                continue
            key = str(key_node.value)
            inner = (*path, key)
            if key in values:
                self._report(place, inner, f"the key is given twice; the first is at {self._document.places[inner]}")
                continue
            self._document.places[inner] = place
            values[key] = self._value(value_node, inner)
        return values

    def _item(self, node: Node, path: KeyPath) -> Any:
        self._document.places[path] = self._place(node)
        return self._value(node, path)

    def _scalar(self, node: ScalarNode, path: KeyPath) -> Any:
        tag, text = str(node.tag), str(node.value)
        if tag in _TEXT_TAGS:
            return self._with_environment(node, text, path)
        try:
            match tag.removeprefix(_TAG):
                case "null":
                    return None
                case "bool":
                    return text.lower() == "true"
                case "int":
                    return _integer(text)
                case "float":
                    return _number(text)
        except ValueError:
            pass
        self._report(self._place(node), path, f"the tag {tag} is not allowed: write plain YAML")
        return None

    def _with_environment(self, node: ScalarNode, text: str, path: KeyPath) -> Any:
        def value(match: re.Match[str]) -> str:
            found = os.environ.get(match[1], match[2])
            if found is None:
                what = f"the environment has no variable {match[1]}; set it, or write ${{env:{match[1]},value}}"
                self._report(self._place(node), path, what)
            return found or ""

        if "${env:" in _ENVIRONMENT.sub("", text):
            what = f"expected ${{env:NAME}} or ${{env:NAME,value}} with the name of a variable, found {text!r:.80}"
            self._report(self._place(node), path, what)
        plain = node.style is None and _ENVIRONMENT.fullmatch(text)
        text = _ENVIRONMENT.sub(value, text)
        if not plain:
            return text
        again = None if _too_deep(text) else YAML(typ="safe", pure=True).compose(text)
        if isinstance(again, ScalarNode) and again.tag not in _TEXT_TAGS:
            return self._scalar(again, path)
        return text

    def _place(self, node: Node) -> SourceLine:
        return SourceLine(self._source, None if self._one_place else node.start_mark.line + 1)

    def _report(self, place: SourceLine, path: KeyPath, text: str) -> None:
        self._document.problems.append(Problem(place, dotted(path), text))


def _too_deep(text: str) -> int | None:
    """Return the line at which lists and sections lie in each other too deep to be read; None where they do not."""
    depth = 0
    for event in YAML(typ="safe", pure=True).parse(text):
        if isinstance(event, CollectionStartEvent):
            depth += 1
            if depth > _DEEPEST:
                return int(event.start_mark.line) + 1
        elif isinstance(event, CollectionEndEvent):
            depth -= 1
    return None


def _integer(text: str) -> int:
    digits = text.replace("_", "").lower()
    bases = {"0x": 16, "0o": 8, "0b": 2}
    return int(digits, bases.get(digits.lstrip("+-")[:2], 10))


def _number(text: str) -> float:
    digits = text.replace("_", "").lower()
    if digits.endswith(".inf"):
        return -math.inf if digits.startswith("-") else math.inf
    return math.nan if digits.endswith(".nan") else float(digits)
