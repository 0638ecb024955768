"""Read a file and ``key=value`` arguments into a checked configuration.

Scalars follow the YAML 1.2 core schema (https://yaml.org/spec/1.2.2/#103-core-schema): ``1e-3`` is a number, ``on``,
``no`` and ``2024-01-01`` are text, and ``010`` is ten. Tags and duplicate keys are rejected.

``${env:NAME}`` is replaced by the value of an environment variable; ``${env:NAME,value}`` provides a default. If an
unquoted scalar consists of a single reference, its value is parsed as YAML and may be a number; otherwise, it is text.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import CollectionEndEvent, CollectionStartEvent
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from ..engine.errors import OptionError
from ..engine.foreign_arguments import foreign_hint
from .bundled import bundled_configs, bundled_text
from .problems import ConfigError, KeyPath, Problem, SourceLine, closest_name, described, dotted
from .registry import RECIPES, Recipe, find_recipe, installed_recipes
from .schema import Config, fields_of, is_section

_DEEPEST = 100  # maximum nesting depth of lists and sections
_MOST = 100_000  # maximum number of values in a document after expanding aliases
_TAG = "tag:yaml.org,2002:"
_ENVIRONMENT = re.compile(r"\$\{env:([A-Za-z_][A-Za-z0-9_]*)(?:,([^}]*))?\}")
_TEXT_TAGS = {f"{_TAG}{name}" for name in ("str", "timestamp", "value", "merge")}
_PLAIN_TAGS = {f"{_TAG}{name}" for name in ("null", "bool", "int", "float")}
_MOST_FILES = 200  # maximum number of files that ``defaults`` may include
_EXPECTED = {
    "bool_type": "true or false",
    "dataclass_type": "a section with keys",
    "expected": "{expected}",
    "finite_number": "a finite number",
    "float_type": "a number",
    "greater_than": "a number above {gt}",
    "greater_than_equal": "a number of at least {ge}",
    "int_type": "a whole number",
    "json_invalid": "valid Unicode text, without half a surrogate pair",
    "less_than": "a number below {lt}",
    "less_than_equal": "a number of at most {le}",
    "list_type": "a list",
    "literal_error": "{expected}",
    "model_type": "a section with keys",
    "string_too_short": "text that is not empty",
    "string_type": "text",
    "too_short": "a list of at least {min_length}",
}


@dataclass(frozen=True, slots=True)
class Configuration:
    source: str  # display name of the file, for messages
    recipe: Recipe
    config: Config  # all keys, including defaults

    def resolved(self) -> dict[str, Any]:
        """Return all keys and values as plain data; keys that identify the run come first."""
        values = self.config.model_dump(mode="json")
        order = ("recipe", "name", "run_dir", *self.config.IDENTITY, *values)
        return {key: values[key] for key in order if key in values}

    def yaml(self) -> str:
        return to_yaml(self.resolved())


def load_configuration(name: str, arguments: Sequence[str] = ()) -> Configuration:
    """Read a configuration, apply ``key=value`` overrides, and check it; raise ConfigError listing all problems."""
    document = _read(name, (), itertools.count())
    problems = document.problems
    if not isinstance(document.root, dict):
        text = f"expected a section with keys, the first of them recipe, found {described(document.root)}"
        raise ConfigError(problems or [Problem(document.origin_of(()), "", text)])
    _override(document, arguments)
    recipe = _recipe(document)
    try:
        # In JSON mode, strict pydantic accepts lists for tuples and text for paths, but converts nothing else.
        config = recipe.schema.model_validate_json(json.dumps(document.root))
        wrong = list(config.conflicts())
    except ValidationError as error:
        reported = {(problem.origin, problem.key) for problem in problems}
        explained = ((item["loc"], _explained(item, recipe)) for item in error.errors(include_url=False))
        wrong = [(path, text) for path, text in explained if (document.origin_of(path), dotted(path)) not in reported]
    problems += [Problem(document.origin_of(path), dotted(path), text) for path, text in wrong]
    if problems:
        raise ConfigError(sorted(problems, key=lambda problem: problem.origin.line or math.inf))
    return Configuration(document.origin_of(()).source, recipe, config)


def _read(name: str, around: tuple[str, ...], numbers: Iterator[int]) -> Document:
    """Read a file and merge it over its ``defaults``. ``around`` lists the files that include it."""
    source, text = read_config(name)
    document = read_yaml(text, source)
    if not isinstance(document.root, dict) or "defaults" not in document.root:
        return document
    names, origin, problems = document.root.pop("defaults"), document.origin_of(("defaults",)), document.problems
    names = [names] if isinstance(names, str) else names
    base: Any = {}
    origins: dict[KeyPath, SourceLine] = {}
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        text = f"expected the name of a file, or a list of them, found {described(names)}"
        problems.append(Problem(origin, "defaults", text))
        return document
    for name in names:
        sibling = Path(source).parent / name
        path = next((str(path) for path in (sibling, Path(f"{sibling}.yaml")) if path.is_file()), name)
        if path in (*around, source):
            problems.append(Problem(origin, "defaults", f"{name} includes itself, by way of {source}"))
            continue
        if (number := next(numbers)) >= _MOST_FILES:
            if number == _MOST_FILES:  # report this once
                text = f"defaults lead to more than {_MOST_FILES} files, counting repeated ones"
                problems.append(Problem(origin, "defaults", text))
            break
        try:
            inner = _read(path, (*around, source), numbers)
        except ConfigError as error:
            problems += [Problem(origin, "defaults", str(problem)) for problem in error.problems]
            continue
        problems += inner.problems
        if isinstance(inner.root, dict):
            base, origins = merged(base, inner.root), origins | inner.origins
        elif not inner.problems:
            text = f"{name}: expected a file with one section with keys, found {described(inner.root)}"
            problems.append(Problem(origin, "defaults", text))
    document.root, document.origins = merged(base, document.root), origins | document.origins
    return document


def read_config(name: str) -> tuple[str, str]:
    """Return the display name and the text of a configuration file or a bundled configuration."""
    for path in (Path(name), Path(f"{name}.yaml")):
        if path.is_file():
            try:
                return str(path), path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                text = f"the file cannot be read: {error}"
                raise ConfigError([Problem(SourceLine(name), "", text)]) from error
    bundled, names = name.removeprefix("configs/").removesuffix(".yaml"), bundled_configs()
    if ":" in name and "/" not in name:
        text = f"to run a recipe, write recipe: {name} in a YAML file"
    elif bundled in names:
        return f"configs/{bundled}.yaml", bundled_text(bundled)
    elif name and Path(name).is_dir():
        inside = Path(name, "config.yaml")
        hint = f"did you mean {inside}?" if inside.is_file() else "give the path of a YAML file"
        text = f"this is a directory; {hint}"
    else:
        hint = closest_name(bundled, names) or f"; bundled: {', '.join(names)}"
        text = f"no such file, and holdfast has no configuration with this name{hint}"
    raise ConfigError([Problem(SourceLine(name), "", text)])


def expand_sweep(arguments: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return (folder name, arguments) for each run of a sweep such as ``seed=0,1,2``; a single run has the name ""."""
    parts = [argument.partition("=") for argument in arguments]
    choices = [[f"{key}{equals}{value}" for value in _items(text)] for key, equals, text in parts]
    several = [index for index, values in enumerate(choices) if len(values) > 1]
    return [
        (",".join(chosen[index] for index in several).replace("/", "_"), list(chosen))
        for chosen in itertools.product(*choices)
    ]


def _items(text: str) -> list[str]:
    """Split a text at commas into the items of a YAML list."""
    try:
        items = compose(f"[{text}]").value
    except (YAMLError, RecursionError):
        return [text]  # `read_yaml` reports the syntax error later
    return [text[item.start_mark.index - 1 : item.end_mark.index - 1] for item in items] if len(items) > 1 else [text]


def to_yaml(values: dict[str, Any]) -> str:
    """Format plain values as YAML 1.2, preserving their order."""
    stream = io.StringIO()
    yaml = YAML()
    yaml.width = 120
    yaml.representer.ignore_aliases = lambda _: True
    yaml.dump(values, stream)
    return stream.getvalue()


def _override(document: Document, arguments: Sequence[str]) -> None:
    """Apply ``key=value`` overrides. Keys are dotted paths, which may contain list indices; values are YAML."""
    given: dict[KeyPath, str] = {}
    for argument in arguments:
        origin = SourceLine(f"argument {argument}")
        key, equals, text = argument.partition("=")
        path: KeyPath = tuple(key.split("."))
        earlier = next((other for other in given if other[: len(path)] == path or path[: len(other)] == other), None)
        if not equals or "" in path:
            document.problems.append(Problem(origin, "", "expected key=value, such as train.steps=400"))
        elif earlier is not None:
            document.problems.append(Problem(origin, key, f"the key is given twice; the first is {given[earlier]}"))
        else:
            given[path] = argument
            value = read_yaml(text, origin.source, one_origin=True)
            document.problems += [Problem(origin, key, problem.text) for problem in value.problems]
            try:
                if not value.problems:
                    document.put(path, value)
            except ConfigError as error:
                document.problems += error.problems


def _recipe(document: Document) -> Recipe:
    recipes = [*RECIPES, *installed_recipes()]
    names = f"{', '.join(recipes)}, or module:function"
    name = document.root.get("recipe")
    try:
        recipe = find_recipe(name) if isinstance(name, str) else None
        if recipe is not None:
            return recipe
        text = f"expected one of {names}, found {described(name)}"
        text += closest_name(name, recipes) if isinstance(name, str) else ""
    except OptionError as error:
        text = str(error)
    if "recipe" not in document.root:
        text = f"the key is missing; expected one of {names}"
    raise ConfigError([*document.problems, Problem(document.origin_of(("recipe",)), "recipe", text)])


def _explained(error: ErrorDetails, recipe: Recipe) -> str:
    """Describe a pydantic error in this package's own words."""
    error_type = error["type"]
    if error_type in ("extra_forbidden", "unexpected_keyword_argument"):
        return _unknown_key(error["loc"], recipe.schema)
    if error_type == "missing":
        return "the key is missing"
    expected = _EXPECTED.get(error_type)
    text = error["msg"] if expected is None else f"expected {expected.format(**error.get('ctx', {}))}"
    return f"{text}, found {described(error['input'])}"


def _unknown_key(path: KeyPath, schema: type[Config]) -> str:
    word, siblings = str(path[-1]), _keys(schema, path[:-1])
    hint = foreign_hint(word) if path[0] == "checkpoint" else ""
    hint = hint or closest_name(word, siblings)
    if not hint:
        elsewhere = {key: f"{name}.{key}" for name in schema.model_fields for key in _keys(schema, (name,))}
        same = elsewhere.get(word, word if word in schema.model_fields else None)
        hint = f'; did you mean "{same}"?' if same else f"; expected one of {', '.join(siblings)}"
    return f"unknown key{hint}"


def _keys(section: Any, path: KeyPath) -> list[str]:
    """Return the keys of the section at a path, or an empty list if no section has this path."""
    for key in path:
        annotation, _ = fields_of(section).get(str(key), (None, "")) if section else (None, "")
        section = next(filter(is_section, (annotation, *get_args(annotation))), None)
    return list(fields_of(section)) if section else []


# ---- YAML with line numbers


@dataclass(slots=True)
class Document:
    """A YAML document as plain data, with the origin of each key and the problems found."""

    root: Any
    origins: dict[KeyPath, SourceLine]
    problems: list[Problem] = field(default_factory=list)

    def origin_of(self, path: KeyPath) -> SourceLine:
        """Return the origin of a key or, if the document does not contain it, of the closest enclosing section."""
        while path not in self.origins:
            path = path[:-1]
        return self.origins[path]

    def report(self, origin: SourceLine, path: KeyPath, text: str) -> None:
        self.problems.append(Problem(origin, dotted(path), text))

    def put(self, path: KeyPath, value: Document) -> None:
        """Set the value at a path, creating missing sections. Paths may index lists, but not pass through scalars."""
        origin, inside = value.origins[()], self.root
        here: KeyPath = ()
        for depth, key in enumerate(path, 1):
            if isinstance(inside, list):
                if not str(key).isdigit() or int(key) >= len(inside):
                    text = f"expected the index of an item, 0 to {len(inside) - 1}, found {key}"
                    raise ConfigError([Problem(origin, dotted(path[:depth]), text)])
                key = int(key)
            elif not isinstance(inside, dict):
                text = f"expected a section to set a key in, found {described(inside)}"
                raise ConfigError([Problem(origin, dotted(path[: depth - 1]), text)])
            elif key not in inside:
                inside[key] = {}
            here = (*here, key)
            self.origins.setdefault(here, origin)
            if depth == len(path):
                inside[key] = value.root
            inside = inside[key]
        kept = {other: origin for other, origin in self.origins.items() if other[: len(here)] != here}
        self.origins = kept | {(*here, *inner): origin for inner, origin in value.origins.items()}


def merged(base: Any, values: Any) -> Any:
    """Merge ``values`` over ``base``, section by section."""
    if not isinstance(base, dict) or not isinstance(values, dict):
        return values
    return base | {key: merged(base.get(key), inner) for key, inner in values.items()}


def compose(text: str) -> Any:
    """Return the root node of a YAML document, or None for an empty one; may raise YAMLError or RecursionError."""
    depth = 0
    for event in YAML(typ="safe", pure=True).parse(text):
        depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
        if depth > _DEEPEST:
            raise RecursionError(event.start_mark.line + 1)
    return YAML(typ="safe", pure=True).compose(text)


def read_yaml(text: str, source: str, *, one_origin: bool = False) -> Document:
    """Parse a YAML document, collecting its problems. If ``one_origin`` is true, origins have no line numbers."""
    origin = SourceLine(source)
    document = Document(None, {(): origin})

    def line(number: int) -> SourceLine:
        return origin if one_origin else SourceLine(source, number)

    try:
        if (root := compose(text)) is not None:
            document.root = _Reader(document, line).value(root, (), origin)
    except RecursionError as error:
        document.report(line(*error.args), (), f"lists and sections are nested more than {_DEEPEST} levels deep")
    except OverflowError:  # probably caused by nested aliases
        document.problems.clear()
        document.report(origin, (), f"this has more than {_MOST} values, including those of aliases")
    except MarkedYAMLError as error:
        mark, problem = error.problem_mark or error.context_mark, error.problem or error.context
        document.report(origin if mark is None else line(mark.line + 1), (), f"this is not YAML: {problem}")
    except YAMLError as error:
        document.report(origin, (), f"this is not YAML: {' '.join(str(error).split())}")
    return document


class _Reader:
    """Converts YAML nodes to values, and adds each mistake to the problems of the document."""

    def __init__(self, document: Document, line: Callable[[int], SourceLine]) -> None:
        self._document = document
        self._line = line
        self._constructor = YAML(typ="safe", pure=True).constructor
        self._open: set[int] = set()
        self._count = 0  # number of values read so far

    def value(self, node: Node, path: KeyPath, origin: SourceLine) -> Any:
        """Return the value of a node whose key is at ``origin``; raise OverflowError if there are too many values."""
        self._count += 1
        if self._count > _MOST:
            raise OverflowError
        self._document.origins[path] = origin
        content: Any = None
        if id(node) in self._open:
            self._document.report(origin, path, "an alias that contains itself has no value")
        elif isinstance(node, MappingNode | SequenceNode) and node.tag in (f"{_TAG}map", f"{_TAG}seq"):
            self._open.add(id(node))
            if isinstance(node, MappingNode):
                content = self._section(node, path)
            else:
                items = enumerate(node.value)
                content = [self.value(item, (*path, i), self._line(item.start_mark.line + 1)) for i, item in items]
            self._open.discard(id(node))
        elif isinstance(node, ScalarNode) and node.tag in _TEXT_TAGS:
            content = self._with_environment(node, path, origin)
        else:
            content = self._scalar(node, path, origin)
        return content

    def _section(self, node: MappingNode, path: KeyPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            origin = self._line(key_node.start_mark.line + 1)
            key = str(key_node.value)
            if not isinstance(key_node, ScalarNode):
                self._document.report(origin, path, "a key must be text, found a list or a section")
            elif key in values:
                first = self._document.origins[*path, key]
                self._document.report(origin, (*path, key), f"the key is given twice; the first is at {first}")
            else:
                values[key] = self.value(value_node, (*path, key), origin)
        return values

    def _scalar(self, node: Node, path: KeyPath, origin: SourceLine) -> Any:
        if isinstance(node, ScalarNode) and node.tag in _PLAIN_TAGS:
            try:
                return self._constructor.construct_object(node)
            except ValueError:
                pass
        self._document.report(origin, path, f"the tag {node.tag} is not allowed: write plain YAML")
        return None

    def _with_environment(self, node: ScalarNode, path: KeyPath, origin: SourceLine) -> Any:
        def variable(match: re.Match[str]) -> str:
            value = os.environ.get(match[1], match[2])
            if value is None:
                text = f"the environment has no variable {match[1]}; set it, or write ${{env:{match[1]},value}}"
                self._document.report(origin, path, text)
            return value or ""

        text = _ENVIRONMENT.sub(variable, node.value)
        if "${env:" in _ENVIRONMENT.sub("", node.value):
            expected = "${env:NAME} or ${env:NAME,value} with the name of a variable"
            self._document.report(origin, path, f"expected {expected}, found {node.value!r:.80}")
        if node.style is None and _ENVIRONMENT.fullmatch(node.value):
            try:
                again = compose(text)
            except (YAMLError, RecursionError):
                return text
            if isinstance(again, ScalarNode) and again.tag in _PLAIN_TAGS:
                return self._scalar(again, path, origin)
        return text
