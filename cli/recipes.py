"""``holdfast recipes``: which recipes there are, and what their YAML may say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..engine.errors import OptionError
from .report import print_json, print_table


def list_recipes(name: str | None, *, as_json: bool) -> int:
    """Prints all recipes, or the keys of one.

    Args:
        name: The recipe to explain, or None for a list of all.
        as_json: Print JSON instead of a table.

    Returns:
        The exit status.
    """
    from ..recipes.problems import did_you_mean
    from ..recipes.registry import RECIPES

    if name is not None:
        if name not in RECIPES:
            hint = did_you_mean(name, RECIPES) or f"; there are {', '.join(RECIPES)}"
            raise OptionError(f"no recipe has the name {name}{hint}")
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
    return 0


def _explain(name: str, as_json: bool) -> int:
    from ..recipes.configuration import load_configuration

    keys = list(_keys(load_configuration(name).config))
    if as_json:
        print_json({"recipe": name, "keys": keys})
    else:
        print_table(["KEY", "VALUE", "MEANING"], [[key["key"], _yaml(key["value"]), key["meaning"]] for key in keys])
    return 0


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
