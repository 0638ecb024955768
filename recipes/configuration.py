"""A file and ``key=value`` arguments in, a checked configuration out."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML

from .config_files import read_config
from .overrides import apply_overrides
from .problems import ConfigError, KeyPath, Problem, did_you_mean, dotted, found
from .registry import RECIPES, Recipe
from .schema import Config
from .yaml_reader import Document, read_yaml

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
        """Returns every key with its value, as plain JSON-able data: what the run is first, how it is run last."""
        values = self.config.model_dump(mode="json")
        order = ["recipe", "name", "run_dir", *self.config.IDENTITY]
        return {key: values[key] for key in [*order, *values] if key in values}

    def yaml(self) -> str:
        """Returns every key with its value, as YAML."""
        return to_yaml(self.resolved())


def load_configuration(name: str, arguments: Sequence[str] = ()) -> Configuration:
    """Reads and checks a configuration.

    Args:
        name: A path or a bundled name.
        arguments: ``key=value`` texts that go over the file.

    Returns:
        The checked configuration.

    Raises:
        ConfigError: Something is wrong; the message has one line for every problem.
    """
    source, text = read_config(name)
    document = read_yaml(text, source)
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


def to_yaml(values: dict[str, Any]) -> str:
    """Returns plain values as YAML 1.2, in the order they have."""
    stream = io.StringIO()
    yaml = YAML()
    yaml.width = 120
    yaml.representer.ignore_aliases = lambda _: True
    yaml.dump(values, stream)
    return stream.getvalue()


def section_keys(schema: type[BaseModel], path: KeyPath) -> list[str]:
    """Returns the keys that the section at a path may have; none where the schema has no section."""
    section: type[BaseModel] | None = schema
    for key in path:
        field = section.model_fields.get(str(key)) if section else None
        section = _section(field.annotation) if field else None
    return list(section.model_fields) if section else []


def _recipe(document: Document) -> Recipe:
    names = ", ".join(RECIPES)
    name = document.values.get("recipe")
    if isinstance(name, str) and name in RECIPES:
        return RECIPES[name]
    if "recipe" not in document.values:
        text = f"the key is missing; expected one of {names}"
    else:
        hint = did_you_mean(name, RECIPES) if isinstance(name, str) else ""
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
