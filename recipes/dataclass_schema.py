"""Dataclasses as the configuration of a recipe: the keys of YAML that their fields stand for."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, get_type_hints

from pydantic import ConfigDict, Field, create_model
from pydantic_core import PydanticUndefined

from ..engine.errors import OptionError
from .schema import Config, Section

_NO_SOURCE = ConfigDict(use_attribute_docstrings=False)  # or pydantic looks for it in every function that is running
_EXACT = (int, float, bool, str)  # YAML writes these as they are; lists may stand for tuples, and text for paths


class _MadeSection(Section):
    model_config = _NO_SOURCE


class _MadeConfig(Config):
    model_config = _NO_SOURCE


def dataclass_schema(kind: type) -> type[Config]:
    """Return the model of a configuration with the fields of a dataclass beside the keys that all recipes have.

    Fields of the names ``name``, ``run_dir`` and ``seed`` are those keys. A field that is a dataclass is a section. The
    text ``help`` in the metadata of a field is its documentation.

    Raises:
        OptionError: A field has the name of a section that all recipes have.
    """
    for field in dataclasses.fields(kind):
        if field.name in ("recipe", "train", "checkpoint", "logging"):
            raise OptionError(
                f"{kind.__qualname__} has the field {field.name}, a key that all recipes have; rename it, and read the "
                f"key from the context: context.config.{field.name}"
            )
    return create_model(
        kind.__name__, __base__=_MadeConfig, __doc__=kind.__doc__, **_fields(kind, leave_out=set(Config.model_fields))
    )


def dataclass_instance(kind: type, values: Section) -> Any:
    """Return the instance of a dataclass with the values of a checked configuration."""
    kinds = get_type_hints(kind)
    return kind(
        **{
            field.name: dataclass_instance(kinds[field.name], value) if isinstance(value, Section) else value
            for field in dataclasses.fields(kind)
            if field.init and (value := getattr(values, field.name, PydanticUndefined)) is not PydanticUndefined
        }
    )


def _fields(kind: type, leave_out: set[str]) -> dict[str, Any]:
    kinds = get_type_hints(kind, include_extras=True)
    found: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        if field.name in leave_out or not field.init:
            continue
        annotation = kinds[field.name]
        make: Callable[[], Any] | None = None
        if field.default is not dataclasses.MISSING:
            make = partial(copy.deepcopy, field.default)
        elif field.default_factory is not dataclasses.MISSING:
            make = field.default_factory
        if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
            annotation = create_model(annotation.__name__, __base__=_MadeSection, **_fields(annotation, set()))
            make = make and partial(_section, annotation, make)
        elif annotation not in _EXACT:
            annotation = Annotated[annotation, Field(strict=False)]
        described: Any = Field(description=field.metadata.get("help"))
        if make is not None:
            described = Field(default_factory=make, description=field.metadata.get("help"))
        found[field.name] = (annotation, described)
    return found


def _section(section: type[Section], make: Callable[[], Any]) -> Section:
    return section.model_validate(dataclasses.asdict(make()))
