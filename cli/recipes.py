"""``holdfast run`` trains a configuration; ``holdfast recipes`` lists the recipes and the keys of their YAML."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..engine.errors import OptionError
from .log import configure_logging
from .report import print_json, print_table
from .status import DONE, PREEMPTED


def run_recipe(config: str, overrides: Sequence[str], *, print_config: bool) -> int:
    """Run a configuration, a path or a bundled name, and return the exit status."""
    from ..recipes.configuration import load_configuration
    from ..recipes.runner import run

    configuration = load_configuration(config, overrides)
    if print_config:
        print(configuration.yaml(), end="")
        return DONE
    configure_logging(configuration.config.logging.level)
    outcome = run(configuration)
    return PREEMPTED if outcome.preempted else DONE


def list_recipes(name: str | None, *, as_json: bool) -> int:
    """Print all recipes, or the keys of one, and return the exit status."""
    from ..recipes.problems import did_you_mean
    from ..recipes.registry import RECIPES

    if name is not None:
        if name not in RECIPES:
            hint = did_you_mean(name, RECIPES) or f"; the recipes are {', '.join(RECIPES)}"
            raise OptionError(f"no recipe is called {name}{hint}")
        return _explain(name, as_json)
    found = [
        {
            "name": recipe.name,
            "summary": recipe.summary,
            "config": f"{recipe.name}.yaml",
            "missing": recipe.missing(),
            "install": f"pip install 'holdfast[recipes,{recipe.extra}]'",
        }
        for recipe in RECIPES.values()
    ]
    if as_json:
        print_json({"recipes": found})
    else:
        rows = [[str(r["name"]), str(r["summary"]), str(r["install"]) if r["missing"] else "yes"] for r in found]
        print_table(["RECIPE", "WHAT IT TRAINS", "INSTALLED"], rows)
        print("\nholdfast run NAME trains one; holdfast recipes NAME explains its keys")
    return DONE


def _explain(name: str, as_json: bool) -> int:
    from ..recipes.configuration import load_configuration

    keys = list(_keys(load_configuration(name).config))
    if as_json:
        print_json({"recipe": name, "keys": keys})
    else:
        print_table(["KEY", "VALUE", "MEANING"], [[key["key"], _yaml(key["value"]), key["meaning"]] for key in keys])
    return DONE


def _keys(section: Any, prefix: str = "") -> Iterator[dict[str, Any]]:
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if hasattr(type(value), "model_fields"):
            yield from _keys(value, f"{prefix}{name}.")
        else:
            yield {"key": f"{prefix}{name}", "value": value, "meaning": field.description or ""}


def _yaml(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case _:
            return str(value)
