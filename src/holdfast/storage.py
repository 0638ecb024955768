"""Checkpoint locations: :func:`as_location` converts a path or URL to a :class:`Location`."""

from .engine.storage import Location, as_location

__all__ = ["Location", "as_location"]
