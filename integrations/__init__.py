"""Integrations of the engine with frameworks, none of which is imported by this package itself.

``holdfast.integrations.flax`` is for JAX and Flax loops, ``holdfast.integrations.lightning`` for Lightning trainers.
"""
