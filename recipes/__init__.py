"""Training programs that a YAML file describes and ``holdfast run`` runs.

====================  =============================================================================
``registry``          which recipes there are, and what each of them needs installed
``schema``            what their YAML may say: one pydantic model a recipe, one shared checkpoint section
``configuration``     a file and ``key=value`` arguments in, a checked configuration out
``runner``            a checked configuration in, an outcome out: run directory, resume rules, signals
``flax_digits``, ...  the programs
====================  =============================================================================

Importing this package, reading configurations and listing recipes load neither jax nor torch; only the program that is
run does.
"""
