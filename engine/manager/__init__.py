"""The checkpoints of one run: when to save, what to keep, which one to resume from."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
