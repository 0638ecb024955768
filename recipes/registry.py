"""The recipes: bundled ones, installed ones, and functions of your own; and the objects that a run gives them.

The value of the ``recipe`` key is the name of a bundled recipe; a name that an installed package declares in the group
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
from typing import Any, cast, get_type_hints

from pydantic import ConfigDict, Field, create_model

from ..engine.errors import HoldfastError, OptionError
from ..engine.installed import install_command
from . import schema
from .schema import Config

logger = logging.getLogger("holdfast.recipes")


# ---- the interface between the runner and a training program


class Progress:
    """Logs finished steps, one line per interval; only the metrics of these lines are fetched from a device."""

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


# ---- the bundled recipes


class MissingExtraError(HoldfastError, ImportError):
    """A package from one of holdfast's extras is not installed, or too old."""


@dataclass(frozen=True, slots=True)
class Recipe:
    name: str  # the value of the ``recipe`` key of a configuration, and the name of the module
    summary: str  # one line for users
    schema: type[Config]
    extra: str = ""  # the extra of holdfast that it needs
    packages: tuple[str, ...] = ()  # the import names of the packages that it needs in addition
    # The program if it is imported already; None for the modules of this package.
    function: Callable[[Any, RunContext], Outcome] | None = None

    def missing(self) -> list[str]:
        """Return the packages that are not installed, without importing any."""
        return [package for package in self.packages if importlib.util.find_spec(package) is None]

    @property
    def install(self) -> str:
        """The command that installs what it needs."""
        return install_command("recipes", self.extra)

    def program(self) -> Callable[[Any, RunContext], Outcome]:
        """Import the program; MissingExtraError, with the pip command, if a package that it needs is not installed."""
        if self.function is not None:
            return self.function
        if missing := self.missing():
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
    """A function that cannot be imported, or is not a training program."""


def installed_recipes() -> dict[str, EntryPoint]:
    """Return the recipes that installed packages declare, by name; nothing is imported."""
    return {point.name: point for point in entry_points(group=ENTRY_POINTS) if point.name not in RECIPES}


def find_recipe(name: str) -> Recipe | None:
    """Return a bundled recipe, one of an installed package, or ``module:function``; None if there is none."""
    if name in RECIPES:
        return RECIPES[name]
    if (point := installed_recipes().get(name)) is not None:
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
        config_type = get_type_hints(function).get(parameters[0].name, Config)
    except NameError as error:
        raise RecipeError(f"{target}: the annotation of {parameters[0].name} cannot be resolved: {error}") from error
    summary = (inspect.getdoc(function) or "").partition("\n")[0]
    if isinstance(config_type, type) and issubclass(config_type, Config):
        return Recipe(name, summary, config_type, function=function)
    if isinstance(config_type, type) and is_dataclass(config_type):
        names = [key.name for key in fields(config_type) if key.init]

        def program(config: Config, context: RunContext) -> Outcome:
            return function(config_type(**{name: getattr(config, name) for name in names}), context)

        return Recipe(name, summary, _with_fields(config_type), function=program)
    raise RecipeError(
        f"{target}: {parameters[0].name} is annotated with {config_type!r}; expected a subclass of "
        "holdfast.recipes.Config, or a dataclass"
    )


class _NoSource(Config):
    # With use_attribute_docstrings, pydantic would search the source of every running function.
    model_config = ConfigDict(use_attribute_docstrings=False)


def _with_fields(config_type: Any) -> type[Config]:
    """Return a configuration model with the keys that all recipes have, and the fields of a dataclass."""
    keys: dict[str, Any] = {}
    described = schema.fields_of(config_type)
    for key in fields(config_type):
        if key.name in ("recipe", "train", "checkpoint", "logging"):
            raise OptionError(
                f"{config_type.__qualname__} has the field {key.name}, a key that all recipes have; rename it, and "
                f"read the key from the context: context.config.{key.name}"
            )
        if key.init and key.name not in Config.model_fields:
            annotation, meaning = described[key.name]
            default = Field(... if key.default is MISSING else key.default, description=meaning)
            if key.default_factory is not MISSING:
                default = Field(default_factory=key.default_factory, description=meaning)
            keys[key.name] = (annotation, default)
    return create_model(config_type.__name__, __base__=_NoSource, __doc__=config_type.__doc__, **keys)


def _import(target: str) -> Callable[..., Outcome]:
    module_name, _, path = target.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function: Any = importlib.import_module(module_name)
    except Exception as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename][1:]
        lines = "".join(traceback.format_list(frames) + traceback.format_exception_only(error))
        raise RecipeError(f"{module_name} cannot be imported from {os.getcwd()}:\n{lines.rstrip()}") from error
    for part in path.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        raise RecipeError(f"{module_name} has no function {path or '(none is named: write module:function)'}")
    return cast("Callable[..., Outcome]", function)
