"""Locations of checkpoints: a path or URL as a :class:`Location`, with the options of an object store."""

from .engine.storage import Location, as_location

__all__ = ["Location", "as_location"]
