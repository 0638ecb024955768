"""Integrations built on the engine; importing this package loads no framework.

``holdfast.integrations.flax`` serves JAX and Flax loops, ``holdfast.integrations.lightning`` Lightning trainers.
"""
