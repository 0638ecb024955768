"""The recipes: those that come with holdfast, installed ones, and functions of your own; what a run gives them.

The value of the ``recipe`` key is the name of a recipe of ours; a name that an installed package declares in the group
``holdfast.recipes`` of its entry points; or ``module:function``, with the working directory on the path.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import ConfigDict, Field, create_model

from ..engine.errors import HoldfastError, OptionError
from ..engine.installed import install_command
from . import schema
from .schema import Config

logger = logging.getLogger("holdfast.recipes")


# ---- what the runner gives to a training program, and takes back from it


class Progress:
    """Logs finished steps, a line every so many; only for a line are metrics fetched from a device."""

    def __init__(self, start: int, total: int, interval: int) -> None:
        self._last = self._logged = start
        self._total = total
        self._interval = interval
        self._logged_at = time.monotonic()

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Report that a step is finished, with its metrics."""
        previous, self._last = self._last, step
        if step // self._interval == previous // self._interval and step < self._total:
            return
        now = time.monotonic()
        rate = (step - self._logged) / max(now - self._logged_at, 1e-9)
        self._logged, self._logged_at = step, now
        shown = ", ".join(f"{name} {float(value):.4f}" for name, value in metrics.items())
        steps_per_second = f"{rate:.{0 if rate >= 10 else 1}f}"
        logger.info("step %d of %d: %s (%s steps/s)", step, self._total, shown, steps_per_second)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """What a program gets in addition to its configuration.

    Attributes:
        config: The checked configuration, with the keys that all recipes have, such as ``train.steps`` and ``seed``.
        run_dir: Where the run keeps its files.
        checkpoints: Where its checkpoints go: a path or a URL.
        callback_arguments: The keyword arguments for its checkpoint callback.
        log_interval: The number of steps between two reports of the progress.
    """

    config: Config
    run_dir: Path
    checkpoints: str
    callback_arguments: dict[str, Any]
    log_interval: int

    def progress(self, start: int, total: int) -> Progress:
        """Return the report of a run that begins with `start` of `total` steps done."""
        return Progress(start, total, self.log_interval)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended: the steps done when it began, the steps done now, and whether it was preempted.

    A preempted run has saved, and resumes when it is run again.
    """

    start: int
    step: int
    preempted: bool


# ---- the recipes that there are


class MissingExtraError(HoldfastError, ImportError):
    """A package is not installed, or too old, that one of holdfast's extras brings."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A training program."""

    name: str  # the value of the ``recipe`` key of a configuration, and the name of the module
    summary: str  # one line for users
    schema: type[Config]
    extra: str = ""  # the extra of holdfast that it needs
    packages: tuple[str, ...] = ()  # the import names of those that it needs beyond the recipes' own requirements
    # The program, where it is imported already; None for the modules of this package.
    function: Callable[[Any, RunContext], Outcome] | None = None

    def missing(self) -> list[str]:
        """Return which of the packages are not installed, without importing them."""
        return [package for package in self.packages if importlib.util.find_spec(package) is None]

    @property
    def install(self) -> str:
        """The command that installs what it needs."""
        return install_command("recipes", self.extra)

    def program(self) -> Callable[[Any, RunContext], Outcome]:
        """Import the program; MissingExtraError, with the pip command, if a package that it needs is not installed."""
        if self.function is not None:
            return self.function
        missing = self.missing()
        if missing:
            raise MissingExtraError(f"the recipe {self.name} needs {' and '.join(missing)}: {self.install}")
        module = importlib.import_module(f".{self.name}", __package__)
        run: Callable[[Any, RunContext], Outcome] = module.run
        return run


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            "flax_digits",
            "a Flax linen classifier with BatchNorm and dropout on scikit-learn's digits",
            schema.FlaxDigits,
            "flax",
            ("sklearn", "jax", "flax", "optax"),
        ),
        Recipe(
            "flax_text",
            "a Flax nnx character transformer on Python's own help texts",
            schema.FlaxText,
            "flax",
            ("jax", "flax", "optax"),
        ),
        Recipe(
            "lightning_digits",
            "a PyTorch Lightning classifier on scikit-learn's digits",
            schema.LightningDigits,
            "lightning",
            ("sklearn", "torch", "lightning"),
        ),
        Recipe(
            "self_play",
            "two torch policies that learn a game of cards by playing against each other",
            schema.SelfPlay,
            "lightning",
            ("torch",),
        ),
    )
}

ENTRY_POINTS = "holdfast.recipes"  # group of the entry points with which packages declare recipes


class RecipeError(HoldfastError):
    """A recipe of one's own that cannot be imported, or is no training program."""


def installed_recipes() -> dict[str, EntryPoint]:
    """Return the recipes that installed packages declare, by name; nothing is imported."""
    return {point.name: point for point in entry_points(group=ENTRY_POINTS) if point.name not in RECIPES}


def find_recipe(name: str) -> Recipe | None:
    """Return the recipe of ours, of an installed package, or of ``module:function``; None if there is none."""
    if name in RECIPES:
        return RECIPES[name]
    point = installed_recipes().get(name)
    if point is not None:
        return _recipe(name, point.value)
    return _recipe(name, name) if ":" in name else None


def _recipe(name: str, target: str) -> Recipe:
    function = _import(target)
    parameters = list(inspect.signature(function).parameters.values())
    if len(parameters) != 2:
        raise RecipeError(
            f"{target} takes {len(parameters)} arguments; a recipe takes two: its config, and the context"
        )
    try:
        kind = get_type_hints(function).get(parameters[0].name, Config)
    except NameError as error:
        raise RecipeError(f"{target}: the annotation of {parameters[0].name} cannot be resolved: {error}") from error
    summary = (inspect.getdoc(function) or "").partition("\n")[0]
    if isinstance(kind, type) and issubclass(kind, Config):
        return Recipe(name, summary, kind, function=function)
    if isinstance(kind, type) and is_dataclass(kind):
        names = [one.name for one in fields(kind) if one.init]

        def program(config: Config, context: RunContext) -> Outcome:
            return function(kind(**{name: getattr(config, name) for name in names}), context)

        return Recipe(name, summary, _with_fields(kind), function=program)
    raise RecipeError(
        f"{target}: {parameters[0].name} is annotated with {kind!r}; expected a subclass of holdfast.recipes.Config, "
        "or a dataclass"
    )


class _NoSource(Config):
    # With use_attribute_docstrings, pydantic would search the source of every running function.
    model_config = ConfigDict(use_attribute_docstrings=False)


def _with_fields(kind: Any) -> type[Config]:
    """Return the model of a configuration: the keys that all recipes have, and the fields of a dataclass."""
    found: dict[str, Any] = {}
    described = schema.fields_of(kind)
    for one in fields(kind):
        if one.name in ("recipe", "train", "checkpoint", "logging"):
            raise OptionError(
                f"{kind.__qualname__} has the field {one.name}, a key that all recipes have; rename it, and read the "
                f"key from the context: context.config.{one.name}"
            )
        if one.init and one.name not in Config.model_fields:
            annotation, meaning = described[one.name]
            default = Field(... if one.default is MISSING else one.default, description=meaning)
            if one.default_factory is not MISSING:
                default = Field(default_factory=one.default_factory, description=meaning)
            found[one.name] = (annotation, default)
    return create_model(kind.__name__, __base__=_NoSource, __doc__=kind.__doc__, **found)


def _import(target: str) -> Callable[..., Outcome]:
    module_name, _, path = target.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename][1:]
        lines = "".join(traceback.format_list(frames) + traceback.format_exception_only(error))
        raise RecipeError(f"{module_name} cannot be imported from {os.getcwd()}:\n{lines.rstrip()}") from error
    for part in path.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise RecipeError(f"{module_name} has no function {path or '(none is named: write module:function)'}")
    function: Callable[..., Outcome] = found
    return function
