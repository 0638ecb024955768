"""Checkpoints of Orbax: read, and written."""
