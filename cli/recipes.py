"""``holdfast run`` trains a recipe; ``holdfast recipes`` lists the recipes and their configuration keys."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ..engine.errors import DONE, FAILED, PREEMPTED, OptionError
from . import arguments
from .report import print_json, print_table
from .streams import configure_logging, say

if TYPE_CHECKING:
    from ..recipes.configuration import Configuration
    from ..recipes.problems import Problem


def _bundled_names(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the names of bundled configurations that complete a word. The shell itself completes file names."""
    from ..recipes.bundled import bundled_configs

    return [name for name in bundled_configs() if name.startswith(incomplete)]


@click.command()
@click.argument(
    "config", metavar="CONFIG", shell_complete=_bundled_names, help="A YAML file, or a name that 'recipes' lists."
)
@click.argument(
    "overrides",
    metavar="[KEY=VALUE]...",
    nargs=-1,
    help="Values that override the file, such as train.steps=400; seed=0,1,2 makes three runs.",
)
@click.option("--print-config", is_flag=True, help="Print every key and value; run nothing.")
@click.option("--dry-run", is_flag=True, help="Check everything and say what would be done; run nothing.")
@arguments.as_json
def run(config: str, overrides: Sequence[str], print_config: bool, dry_run: bool, as_json: bool) -> int:
    """Train a recipe; the same command again resumes.

    Exit status: 0 done, 75 preempted and saved (run the same command again), 1 failed, 2 bad usage.
    """
    from ..recipes import runner

    runs = _runs(config, overrides)
    if print_config and as_json:
        print_json({"runs": [configuration.resolved() for configuration in runs.values()]})
    elif print_config:
        texts = [configuration.yaml() for configuration in runs.values()]
        print("---\n".join(texts), end="")  # `print` instead of `say`, because the YAML is already escaped
    elif dry_run:
        plans = [*map(_plan, runs.values())]
        if as_json:
            print_json({"runs": plans})
        else:
            say("\n".join(map(_plan_text, plans)))
    if print_config or dry_run:
        return DONE
    ended: list[dict[str, Any]] = []
    for name, configuration in runs.items():
        configure_logging(configuration.config.logging.level)
        facts = {"name": name or configuration.config.name, "directory": str(runner.places_of(configuration)[0])}
        try:
            outcome = runner.run(configuration)
        except Exception as error:
            if len(runs) == 1:
                raise
            logging.getLogger("holdfast").error("%s failed, continuing with the next run: %s", name, error)
            ended.append({**facts, "error": str(error)})
            continue
        ended.append({**facts, **asdict(outcome)})
        if outcome.preempted:
            break
    if as_json:
        print_json({"runs": ended})
    if ended[-1].get("preempted"):
        return PREEMPTED
    if failed := [facts["name"] for facts in ended if "error" in facts]:
        logging.getLogger("holdfast").error("%d of %d runs failed: %s", len(failed), len(runs), ", ".join(failed))
    return FAILED if failed else DONE


def _runs(config: str, overrides: Sequence[str]) -> dict[str, Configuration]:
    """Load, check and return the configurations of all runs, keyed by run name."""
    from ..recipes.configuration import expand_sweep, load_configuration
    from ..recipes.problems import ConfigError
    from ..recipes.runner import places_of

    runs: dict[str, Configuration] = {}
    problems: dict[Problem, None] = {}  # problems in all runs, without duplicates
    for name, given in expand_sweep(overrides):
        try:
            configuration = load_configuration(config, given)
        except ConfigError as error:
            problems |= dict.fromkeys(error.problems)
            continue
        if name:
            directories = {"run_dir": os.path.join(places_of(configuration)[0], name)}
            if (directory := configuration.config.checkpoint.directory) is not None:
                directories["checkpoint.directory"] = f"{directory}/{name}"
            others = [text for text in given if text.partition("=")[0] not in directories]
            added = [f"{key}={json.dumps(value)}" for key, value in directories.items()]
            configuration = load_configuration(config, others + added)
        runs[name] = configuration
    if problems:
        raise ConfigError(list(problems))
    return runs


def _plan(configuration: Configuration) -> dict[str, Any]:
    from ..recipes.runner import first_step, places_of

    run_dir, checkpoints = places_of(configuration)
    return {
        "recipe": configuration.recipe.name,
        "directory": str(run_dir),
        "checkpoints": str(checkpoints),
        "start": first_step(configuration),
        "steps": configuration.config.train.steps,
    }


def _plan_text(plan: dict[str, Any]) -> str:
    step, total = plan["start"], plan["steps"]
    todo = f"would train steps {step + 1} to {total}" if step < total else f"nothing to do: step {step} is saved"
    begin = f"would resume from step {step} and " if 0 < step < total else ""
    return f"{plan['recipe']} in {plan['directory']}: {begin}{todo}; checkpoints go to {plan['checkpoints']}"


@click.command()
@click.argument(
    "name",
    metavar="[NAME]",
    required=False,
    shell_complete=_bundled_names,
    help="Explain every key of this recipe, or module:function.",
)
@arguments.as_json
def recipes(name: str | None, as_json: bool) -> int:
    """List the available recipes."""
    from ..recipes.problems import closest_name
    from ..recipes.registry import RECIPES, find_recipe, installed_recipes

    installed = installed_recipes()
    if name is not None:
        if (recipe := find_recipe(name)) is None:
            names = [*RECIPES, *installed]
            hint = closest_name(name, names) or f"; the recipes are {', '.join(names)}, or write module:function"
            raise OptionError(f"no recipe is called {name}{hint}")
        return _explain(recipe.schema, name, as_json)
    listed: list[dict[str, Any]] = [
        {
            "name": recipe.name,
            "summary": recipe.summary,
            "config": f"{recipe.name}.yaml",
            "missing": recipe.missing(),
            "install": recipe.install,
        }
        for recipe in RECIPES.values()
    ]
    listed += [
        {"name": point.name, "summary": f"{point.value}, of {point.dist.name if point.dist else '?'}", "missing": []}
        for point in installed.values()
    ]
    if as_json:
        print_json({"recipes": listed})
    else:
        rows = [[facts["name"], facts["summary"], facts["install"] if facts["missing"] else "yes"] for facts in listed]
        print_table(["RECIPE", "WHAT IT TRAINS", "INSTALLED"], rows)
        say("\nholdfast run NAME trains one; holdfast recipes NAME explains its keys")
    return DONE


def _explain(schema: Any, name: str, as_json: bool) -> int:
    from ..recipes.bundled import bundled_configs
    from ..recipes.configuration import load_configuration
    from ..recipes.problems import as_yaml

    shown = load_configuration(name).config if name in bundled_configs() else schema.model_construct()
    keys = list(_keys(shown))
    if as_json:
        print_json({"recipe": name, "keys": keys})
    else:
        print_table(["KEY", "VALUE", "MEANING"], [[key["key"], as_yaml(key["value"]), key["meaning"]] for key in keys])
    return DONE


def _keys(section: Any, prefix: str = "") -> Iterator[dict[str, Any]]:
    """Yield the keys in a configuration section, with their values (None if unset) and meanings."""
    from ..recipes.schema import fields_of, is_section

    for name, (_, meaning) in fields_of(type(section)).items():
        value = getattr(section, name, None)
        if is_section(type(value)):
            yield from _keys(value, f"{prefix}{name}.")
        else:
            yield {"key": f"{prefix}{name}", "value": value, "meaning": meaning}
