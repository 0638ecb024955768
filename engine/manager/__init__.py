"""Manage the checkpoints of one run: when to save, which steps to keep, and which step to resume from."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
