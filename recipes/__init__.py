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

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)  # __init__.pyi lists the names
