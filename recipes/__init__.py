"""Training programs that a YAML file describes and ``holdfast run`` runs.

====================  =============================================================================
``registry``          the available recipes, and the packages that each needs
``schema``            the keys of their YAML: one pydantic model a recipe, one shared checkpoint section
``configuration``     reads a file and ``key=value`` arguments into a checked configuration
``runner``            runs a configuration: run directory, rules of resume, signals
``flax_digits``, ...  the programs
====================  =============================================================================

A recipe of your own is a function of two arguments, its configuration (a subclass of :class:`Config`, or a dataclass)
and the :class:`RunContext`, that returns an :class:`Outcome`; ``recipe: my_project:train`` names it (docs/recipes.md).

Importing this package, reading configurations and listing recipes load neither jax nor torch; only running a program
does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .context import Outcome, RunContext
    from .schema import Config, Section

__all__ = ["Config", "Outcome", "RunContext", "Section"]

_MODULES = {"Config": "schema", "Outcome": "context", "RunContext": "context", "Section": "schema"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
