"""Checkpoint locations: a path or URL as a :class:`Location`, with object store options."""

from .engine.storage import Location, as_location

__all__ = ["Location", "as_location"]
