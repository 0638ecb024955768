"""Reads a file and ``key=value`` arguments into a checked configuration."""

from __future__ import annotations

import importlib.resources
import io
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML

from ..engine.errors import OptionError
from .problems import ConfigError, KeyPath, Problem, SourceLine, did_you_mean, dotted, found
from .registry import RECIPES, Recipe, RecipeError, find_recipe, installed_recipes
from .schema import Config
from .yaml_reader import Document, read_yaml

_PACKAGE = f"{__package__.rpartition('.')[0]}.configs"
_MOST_FILES = 200  # that ``defaults`` lead to
_EXPECTED = {
    "bool_type": "true or false",
    "finite_number": "a finite number",
    "float_type": "a number",
    "greater_than": "a number above {gt}",
    "greater_than_equal": "a number not below {ge}",
    "int_type": "a whole number",
    "less_than": "a number below {lt}",
    "less_than_equal": "a number not above {le}",
    "list_type": "a list",
    "literal_error": "{expected}",
    "model_type": "a section with keys",
    "string_type": "text",
    "too_short": "a list of at least {min_length}",
    "expected": "{expected}",
}


@dataclass(frozen=True, slots=True)
class Configuration:
    """A checked configuration.

    Attributes:
        source: The file that it came from, for messages.
        recipe: The recipe that it is for.
        config: Every key with its value, defaults filled in.
    """

    source: str
    recipe: Recipe
    config: Config

    def resolved(self) -> dict[str, Any]:
        """Return every key with its value as plain data, the keys that identify the run first."""
        values = self.config.model_dump(mode="json")
        order = ["recipe", "name", "run_dir", *self.config.IDENTITY]
        return {key: values[key] for key in [*order, *values] if key in values}

    def yaml(self) -> str:
        """Return every key with its value, as YAML."""
        return to_yaml(self.resolved())


def load_configuration(name: str, arguments: Sequence[str] = ()) -> Configuration:
    """Read and check a configuration: a path or a bundled name, and ``key=value`` texts that override the file.

    Raises:
        ConfigError: Something is wrong; the message has one line for every problem.
    """
    source, document = _read(name)
    if not document.problems and not isinstance(document.values, dict):
        what = f"expected a section with keys, the first of them recipe, found {found(document.values)}"
        raise ConfigError([Problem(document.place(()), "", what)])
    apply_overrides(document, arguments)
    if not isinstance(document.values, dict):
        raise ConfigError(document.problems)
    recipe = _recipe(document)
    try:
        config = recipe.schema.model_validate(document.values)
    except ValidationError as error:
        known = {(problem.place, problem.key) for problem in document.problems}
        explained = _explained(error, recipe.schema, document)
        problems = document.problems + [problem for problem in explained if (problem.place, problem.key) not in known]
        raise ConfigError(sorted(problems, key=_position)) from None
    document.problems += [Problem(document.place(path), dotted(path), text) for path, text in config.conflicts()]
    if document.problems:
        raise ConfigError(sorted(document.problems, key=_position))
    return Configuration(source, recipe, config)


class _TooManyFilesError(ConfigError):
    """Files that ``defaults`` name again and again name each other."""


def _read(name: str, including: tuple[str, ...] = (), numbers: Iterator[int] | None = None) -> tuple[str, Document]:
    """Read a file and those that its ``defaults`` name, whose keys it overrides; return what to call it, too.

    ``including`` are the files around it, and ``numbers`` counts all that are read.
    """
    numbers = itertools.count() if numbers is None else numbers
    if next(numbers) > _MOST_FILES:
        text = f"defaults lead to more than {_MOST_FILES} files, those that are named again included"
        raise _TooManyFilesError([Problem(SourceLine(including[0]), "defaults", text)])
    source, text = read_config(name)
    document = read_yaml(text, source)
    if not isinstance(document.values, dict) or "defaults" not in document.values:
        return source, document
    place = document.place(("defaults",))
    names = document.values.pop("defaults")
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
        text = f"expected the name of a file, or a list of them, found {found(names)}"
        document.problems.append(Problem(place, "defaults", text))
        return source, document
    merged = Document({}, {(): SourceLine(source)})
    for one in names:
        beside = Path(source).parent / one
        path = next((str(path) for path in (beside, Path(f"{beside}.yaml")) if path.is_file()), one)
        if path in (*including, source):
            document.problems.append(Problem(place, "defaults", f"{one} includes itself, by way of {source}"))
            continue
        try:
            inner = _read(path, (*including, source), numbers)[1]
        except _TooManyFilesError:
            raise
        except ConfigError as error:
            document.problems += [Problem(place, "defaults", str(problem)) for problem in error.problems]
            continue
        if not inner.problems and not isinstance(inner.values, dict):
            text = f"{one}: expected a file of a section with keys, found {found(inner.values)}"
            document.problems.append(Problem(place, "defaults", text))
        _merge(merged, inner)
    _merge(merged, document)
    return source, merged


def _merge(base: Document, over: Document) -> None:
    """Put the values of a document over those of another one, section by section, with their places."""
    base.problems += over.problems
    if not isinstance(over.values, dict):
        return

    def merge(into: dict[str, Any], values: dict[str, Any], path: KeyPath) -> None:
        for key, value in values.items():
            inner = (*path, key)
            if isinstance(value, dict) and isinstance(into.get(key), dict):
                merge(into[key], value, inner)
            else:
                for old in [old for old in base.places if old[: len(inner)] == inner]:
                    del base.places[old]
                into[key] = value

    merge(base.values, over.values, ())
    base.places.update({path: place for path, place in over.places.items() if path and path[0] != "defaults"})


def bundled_configs() -> list[str]:
    """Return the names of the configurations that come with the package, sorted."""
    files = importlib.resources.files(_PACKAGE).iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


def read_config(name: str) -> tuple[str, str]:
    """Return the name of a configuration for error messages, and its text.

    ``name`` is a path, with or without ``.yaml``, or a bundled name such as ``flax_digits``, also written
    ``flax_digits.yaml`` or ``configs/flax_digits.yaml``. A file of that path goes first.

    Raises:
        ConfigError: There is no such configuration, or it is not a readable text file.
    """
    for path in (Path(name), Path(f"{name}.yaml")):
        if path.is_file():
            try:
                return str(path), path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise _no_config(name, f"the file cannot be read: {error}") from error
    if ":" in name and "/" not in name:
        raise _no_config(name, f"a recipe is run by a file that names it: write recipe: {name} into a YAML file")
    bundled = name.removeprefix("configs/").removesuffix(".yaml")
    known = bundled_configs()
    if bundled in known:
        file = importlib.resources.files(_PACKAGE) / f"{bundled}.yaml"
        return f"configs/{bundled}.yaml", file.read_text(encoding="utf-8")
    if name and Path(name).is_dir():
        inside = Path(name, "config.yaml")
        hint = f"; did you mean {inside}?" if inside.is_file() else "; give the path of a YAML file"
        raise _no_config(name, f"this is a directory{hint}")
    hint = did_you_mean(bundled, known) or f"; bundled: {', '.join(known)}"
    raise _no_config(name, f"no such file, and holdfast has no configuration of this name{hint}")


def _no_config(name: str, text: str) -> ConfigError:
    return ConfigError([Problem(SourceLine(name), "", text)])


def expand_sweep(arguments: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return every combination of the values that arguments give, each with a name that its folder can have.

    ``seed=0,1,2`` gives three values; commas within quotes, brackets and braces do not count. Without several values
    anywhere, there is one combination, and its name is empty.
    """
    choices = []
    for argument in arguments:
        key, equals, text = argument.partition("=")
        choices.append([f"{key}{equals}{value}" for value in _split(text)])
    several = [index for index, values in enumerate(choices) if len(values) > 1]
    return [
        (",".join(chosen[index] for index in several).replace("/", "_"), list(chosen))
        for chosen in itertools.product(*choices)
    ]


def _split(text: str) -> list[str]:
    """Split a text at its commas, but not within quotes, brackets and braces."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        else:
            depth += (letter in "[{") - (letter in "]}")
        if letter == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def apply_overrides(document: Document, arguments: Sequence[str]) -> None:
    """Override values of a document with ``key=value`` arguments, in place; add what is wrong to its problems.

    Keys are dotted, as in ``train.steps=400``, numbers are indices into lists, and values are YAML; an empty value is
    null.
    """
    given: dict[KeyPath, str] = {}
    for argument in arguments:
        place = SourceLine(f"argument {argument}")
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


def to_yaml(values: dict[str, Any]) -> str:
    """Return plain values as YAML 1.2, in the order they have."""
    stream = io.StringIO()
    yaml = YAML()
    yaml.width = 120
    yaml.representer.ignore_aliases = lambda _: True
    yaml.dump(values, stream)
    return stream.getvalue()


def section_keys(schema: type[BaseModel], path: KeyPath) -> list[str]:
    """Return the keys of the section at a path; none where the schema has no section."""
    section: type[BaseModel] | None = schema
    for key in path:
        field = section.model_fields.get(str(key)) if section else None
        section = _section(field.annotation) if field else None
    return list(section.model_fields) if section else []


def _recipe(document: Document) -> Recipe:
    known = [*RECIPES, *installed_recipes()]
    names = f"{', '.join(known)}, or module:function"
    name = document.values.get("recipe")
    try:
        recipe = find_recipe(name) if isinstance(name, str) else None
    except (RecipeError, OptionError) as error:
        problem = Problem(document.place(("recipe",)), "recipe", str(error))
        raise ConfigError([*document.problems, problem]) from error
    if recipe is not None:
        return recipe
    if "recipe" not in document.values:
        text = f"the key is missing; expected one of {names}"
    else:
        hint = did_you_mean(name, known) if isinstance(name, str) else ""
        text = f"expected one of {names}, found {found(name)}{hint}"
    raise ConfigError([*document.problems, Problem(document.place(("recipe",)), "recipe", text)])


def _explained(error: ValidationError, schema: type[BaseModel], document: Document) -> Iterator[Problem]:
    for item in error.errors(include_url=False):
        path, kind = item["loc"], item["type"]
        if kind == "extra_forbidden":
            text = _unknown_key(path, schema)
        elif kind == "missing":
            text = "the key is missing"
        elif kind in _EXPECTED:
            text = f"expected {_EXPECTED[kind].format(**item.get('ctx', {}))}, found {found(item['input'])}"
        else:
            text = f"{item['msg']}, found {found(item['input'])}"
        yield Problem(document.place(path), dotted(path), text)


def _unknown_key(path: KeyPath, schema: type[BaseModel]) -> str:
    word = str(path[-1])
    siblings = section_keys(schema, path[:-1])
    hint = did_you_mean(word, siblings)
    if not hint:
        elsewhere = {key: f"{name}.{key}" for name in schema.model_fields for key in section_keys(schema, (name,))}
        same = elsewhere.get(word, word if word in schema.model_fields else None)
        hint = f'; did you mean "{same}"?' if same else f"; expected one of {', '.join(siblings)}"
    return f"unknown key{hint}"


def _section(annotation: Any) -> type[BaseModel] | None:
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _position(problem: Problem) -> tuple[bool, int]:
    return problem.place.line is None, problem.place.line or 0


def _set(document: Document, path: KeyPath, value: Document, place: SourceLine) -> None:
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
