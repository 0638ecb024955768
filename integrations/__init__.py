"""Callbacks for training loops, and what they share; importing this package loads no framework.

``holdfast.integrations.flax`` serves JAX and Flax loops, ``holdfast.integrations.lightning`` Lightning trainers.
"""
