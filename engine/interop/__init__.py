"""Checkpoints of other libraries: recognised, read as if they were our own, and written for others to read."""

from __future__ import annotations
