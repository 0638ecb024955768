"""Storage, retention and resume; knows arrays and files, never a training loop."""

__version__ = "0.1.0"
