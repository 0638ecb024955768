"""The available recipes."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..engine.errors import HoldfastError
from . import schema

if TYPE_CHECKING:
    from .context import Outcome, RunContext


class MissingExtraError(HoldfastError, ImportError):
    """A package is not installed, or too old, that one of holdfast's extras brings."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A training program.

    Attributes:
        name: The value of the ``recipe`` key of a configuration; also the module's name.
        summary: One line for people.
        schema: The model of its configuration.
        extra: The extra of holdfast that it needs, as in ``pip install 'holdfast[flax]'``.
        packages: The import names of the packages that it needs beyond the recipes' own requirements.
    """

    name: str
    summary: str
    schema: type[schema.Config]
    extra: str
    packages: tuple[str, ...]

    def missing(self) -> list[str]:
        """Return which of the packages are not installed, without importing them."""
        return [package for package in self.packages if importlib.util.find_spec(package) is None]

    def program(self) -> Callable[[Any, RunContext], Outcome]:
        """Import the program.

        Raises:
            MissingExtraError: A package that it needs is not installed; the message has the pip command.
        """
        missing = self.missing()
        if missing:
            raise MissingExtraError(
                f"the recipe {self.name} needs {' and '.join(missing)}: pip install 'holdfast[recipes,{self.extra}]'"
            )
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
            ("sklearn", "tqdm", "jax", "flax", "optax"),
        ),
        Recipe(
            "flax_text",
            "a Flax nnx character transformer on Python's own help texts",
            schema.FlaxText,
            "flax",
            ("tqdm", "jax", "flax", "optax"),
        ),
        Recipe(
            "lightning_digits",
            "a PyTorch Lightning classifier on scikit-learn's digits",
            schema.LightningDigits,
            "lightning",
            ("sklearn", "tqdm", "torch", "lightning"),
        ),
        Recipe(
            "self_play",
            "two torch policies that learn a board game by playing against each other",
            schema.SelfPlay,
            "lightning",
            ("tqdm", "torch"),
        ),
    )
}
