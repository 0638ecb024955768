"""The engine, which saves, retains and restores arrays and files independently of any training loop."""

__version__ = "0.1.0"
