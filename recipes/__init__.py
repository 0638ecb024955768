"""Training programs that are configured by a YAML file and run with ``holdfast run``.

====================  ===================================================================================
``registry``          the available recipes, and the packages that each one needs
``schema``            their YAML keys: one pydantic model per recipe, and a shared checkpoint section
``configuration``     reads a file and ``key=value`` arguments into a checked configuration
``runner``            runs a configuration: sets up directories, applies resume rules, handles signals
``flax_digits``, ...  the training programs
====================  ===================================================================================

Your own recipe is a function that takes its configuration (a subclass of :class:`Config`, or a dataclass) and the
:class:`RunContext`, and returns an :class:`Outcome`; set ``recipe: my_project:train`` to use it (docs/recipes.md).

Importing this package, reading configurations and listing recipes do not import jax or torch; running a recipe does.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)  # __init__.pyi lists the names
