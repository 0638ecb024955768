"""Integrations of the engine with frameworks. Importing this package does not import any framework.

``holdfast.integrations.flax`` is for JAX and Flax loops, ``holdfast.integrations.lightning`` for Lightning trainers.
"""
