"""Storage, retention and resume; handles arrays and files, but no training loops."""

__version__ = "0.1.0"
