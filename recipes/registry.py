"""Find bundled recipes, installed recipes and your own functions, and define the objects that a run passes to a recipe.

The ``recipe`` key names a bundled recipe, an entry point that an installed package declares in the group
``holdfast.recipes``, or a ``module:function``, which is imported with the working directory on ``sys.path``.
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
    """Logs one line every ``interval`` steps. Only the metrics in these lines are fetched from the device."""

    def __init__(self, start: int, total: int, interval: int) -> None:
        self._last = self._logged = start
        self._total = total
        self._interval = interval
        self._logged_at = time.monotonic()

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record a finished step with its metrics."""
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
    """The context that a training program receives in addition to its configuration.

    Attributes:
        config: The checked configuration, with the keys common to all recipes, such as ``train.steps`` and ``seed``.
        run_dir: The directory for the files of the run.
        checkpoints: The path or URL of the checkpoint directory.
        callback_arguments: The keyword arguments for the checkpoint callback.
        log_interval: The number of steps between two progress reports.
    """

    config: Config
    run_dir: Path
    checkpoints: str
    callback_arguments: dict[str, Any]
    log_interval: int

    def progress(self, start: int, total: int) -> Progress:
        """Return a progress logger for a run that begins after step `start` and ends at step `total`."""
        return Progress(start, total, self.log_interval)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a run: the step at its start, the step at its end, and whether it was preempted.

    A preempted run has saved a checkpoint, from which it resumes when the recipe is run again.
    """

    start: int
    step: int
    preempted: bool


# ---- the bundled recipes


class MissingExtraError(HoldfastError, ImportError):
    """Raised if a package from one of holdfast's extras is missing or too old."""


@dataclass(frozen=True, slots=True)
class Recipe:
    name: str  # value of the ``recipe`` key; for bundled recipes also the module name
    schema: type[Config]
    extra: str = ""  # name of the holdfast extra that the recipe requires
    packages: tuple[str, ...] = ()  # import names of further required packages
    # The program, if it has already been imported; None for bundled recipes, which are imported on demand.
    function: Callable[[Any, RunContext], Outcome] | None = None

    @property
    def summary(self) -> str:
        """What a bundled recipe trains."""
        return (self.schema.__doc__ or "").removeprefix("The keys of ").removesuffix(".")

    def missing(self) -> list[str]:
        """Return the required packages that are not installed, without importing any package."""
        return [package for package in self.packages if importlib.util.find_spec(package) is None]

    @property
    def install(self) -> str:
        """The pip command that installs the required packages."""
        return install_command("recipes", self.extra)

    def program(self) -> Callable[[Any, RunContext], Outcome]:
        """Import and return the program; raise MissingExtraError with the pip command if a package is missing."""
        if self.function is not None:
            return self.function
        if missing := self.missing():
            raise MissingExtraError(f"the recipe {self.name} needs {' and '.join(missing)}: {self.install}")
        run: Callable[[Any, RunContext], Outcome] = importlib.import_module(f".{self.name}", __package__).run
        return run


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("flax_digits", schema.FlaxDigits, "flax", ("sklearn", "jax", "flax", "optax")),
        Recipe("flax_text", schema.FlaxText, "flax", ("jax", "flax", "optax")),
        Recipe("lightning_digits", schema.LightningDigits, "lightning", ("sklearn", "torch", "lightning")),
        Recipe("self_play", schema.SelfPlay, "lightning", ("torch",)),
    )
}

ENTRY_POINTS = "holdfast.recipes"  # entry point group in which packages declare recipes


class RecipeError(OptionError):
    """Raised for a function that cannot be imported or is not a training program."""


def installed_recipes() -> dict[str, EntryPoint]:
    """Return the entry points of recipes in installed packages, keyed by recipe name, without importing them."""
    return {point.name: point for point in entry_points(group=ENTRY_POINTS) if point.name not in RECIPES}


def find_recipe(name: str) -> Recipe | None:
    """Return a bundled or installed recipe by name, or import ``module:function`` as a recipe; None if not found."""
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
    if isinstance(config_type, type) and issubclass(config_type, Config):
        return Recipe(name, config_type, function=function)
    if isinstance(config_type, type) and is_dataclass(config_type):
        names = [key.name for key in fields(config_type) if key.init]

        def program(config: Config, context: RunContext) -> Outcome:
            return function(config_type(**{name: getattr(config, name) for name in names}), context)

        return Recipe(name, _with_fields(config_type), function=program)
    raise RecipeError(
        f"{target}: {parameters[0].name} is annotated with {config_type!r}; expected a subclass of "
        "holdfast.recipes.Config, or a dataclass"
    )


class _NoSource(Config):
    # ``use_attribute_docstrings`` would make pydantic parse the source of every function on the call stack.
    model_config = ConfigDict(use_attribute_docstrings=False)


def _with_fields(config_type: Any) -> type[Config]:
    """Create a configuration model from the keys common to all recipes and the fields of a dataclass."""
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
