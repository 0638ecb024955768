"""Training programs that a YAML file describes and ``holdfast run`` runs.

====================  =============================================================================
``registry``          the available recipes, and the packages that each needs
``schema``            the keys of their YAML: one pydantic model a recipe, one shared checkpoint section
``configuration``     reads a file and ``key=value`` arguments into a checked configuration
``runner``            runs a configuration: run directory, rules of resume, signals
``flax_digits``, ...  the programs
====================  =============================================================================

Importing this package, reading configurations and listing recipes load neither jax nor torch; only running a program
does.
"""
