"""Integrations of the engine with frameworks. This package itself does not import any of them.

``holdfast.integrations.flax`` is for JAX and Flax loops, ``holdfast.integrations.lightning`` for Lightning trainers.
"""
