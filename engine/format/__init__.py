"""The on-disk formats, as pure functions that encode to bytes and decode from bytes."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
